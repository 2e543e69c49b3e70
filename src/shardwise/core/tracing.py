"""Whether the program is traced; only this module asks torch.

`is_tracing`: any tracer records operators in a graph instead of running them. `is_dynamo_compiling`: Dynamo reads this
Python code, where wrappers and the dicts of modules are not available. It is torch's own function, because Dynamo knows
it by its identity and replaces the call by a constant. `proxy_mode`: the tracer that makes the graph.
"""

from __future__ import annotations

from typing import Any

from torch.compiler import is_dynamo_compiling

from shardwise.torch_private import DispatchModeKey, dispatch_mode_count, dispatch_mode_of

__all__ = ["is_dynamo_compiling", "is_tracing", "proxy_mode"]

_TRACERS = (DispatchModeKey.FAKE, DispatchModeKey.FUNCTIONAL, DispatchModeKey.PROXY)


def is_tracing() -> bool:
    """Whether operators are recorded in a graph now instead of being run.

    Example:
        >>> is_tracing()
        False
    """
    if not dispatch_mode_count():
        return False
    return any(dispatch_mode_of(mode) is not None for mode in _TRACERS)


def proxy_mode() -> Any:
    """The mode whose tracer records operators as nodes of a graph; None outside of one.

    Example:
        >>> proxy_mode() is None
        True
    """
    return dispatch_mode_of(DispatchModeKey.PROXY)
