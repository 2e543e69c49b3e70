"""Sizes that are not known yet: the symbolic integers with which a compiler traces a program for many sizes at once.

Knows how to name them in a key and what they are for the inputs at hand; nothing of tensors, layouts or compilers.
Comparing symbolic integers makes the compiler remember how the comparison came out (a guard). Here none are compared.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["has_symbols", "hinted", "introduce", "is_tracing", "named", "settled", "specialized", "unrecorded"]


def has_symbols(sizes: Iterable[Any]) -> bool:
    """Whether some of these integers are symbolic.

    Example:
        >>> has_symbols((8, 4))
        False
    """
    return any(isinstance(size, torch.SymInt) for size in sizes)


def settled(size: Any) -> Any:
    """A symbolic integer of which the compiler knows that it has one value only is that value; others stay.

    Example:
        >>> settled(8)
        8
    """
    if not isinstance(size, torch.SymInt):
        return size
    known = size.node.maybe_as_int()
    return size if known is None else known


def named(value: Any) -> Any:
    """What stands for a value in a key: symbolic integers by the expression they are; sequences item by item.

    Example:
        >>> named((8, "x"))
        (8, 'x')
    """
    if isinstance(value, torch.SymInt):
        return "symbolic", id(value.node.shape_env), _stage(), value.node.expr
    return tuple(map(named, value)) if isinstance(value, tuple | list) else value


_seen: list[Any] = [0, lambda: None]  # how many graphs have been recorded, and who records the last of them


def _stage() -> int:
    """Which graph is recorded, or was last.

    A compiler runs a program several times before it records it, and knows sizes by the objects they are: one of an
    earlier run may have become the size of a gradient, on which no forward may depend. So sizes of one graph are never
    taken for those of another.
    """
    mode: Any = torch._C._get_dispatch_mode(_MODES.PROXY)
    if mode is not None and _seen[1]() is not mode.tracer:
        _seen[:] = _seen[0] + 1, weakref.ref(mode.tracer)
    return _seen[0]


def hinted(sizes: Sequence[Any]) -> tuple[int, ...]:
    """What the integers are for the inputs that are traced with. Nothing is guarded: good for costs, not for layouts.

    Example:
        >>> hinted((8, 4))
        (8, 4)
    """
    return tuple([_hint(size) if isinstance(size, torch.SymInt) else size for size in sizes])


def _hint(size: torch.SymInt) -> int:
    node = size.node
    if node.has_hint():
        return int(node.hint)
    return 4096  # of a size that only running the program tells, nothing is known


def specialized(sizes: Iterable[Any]) -> tuple[int, ...]:
    """The integers as they are now; the compiler will trace anew for others.

    Example:
        >>> specialized((8, 4))
        (8, 4)
    """
    return tuple([int(size) for size in sizes])


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Inside, what is computed on the side (what a result would look like) is not recorded by a tracer.

    Example:
        >>> with unrecorded():
        ...     torch.empty(2, device="meta").shape
        torch.Size([2])
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def introduce(sizes: Iterable[Any]) -> None:
    """Tell the tracer that records now of symbolic integers that it knows by their name alone.

    A size that was computed on the side may be one symbol again (`4 * s // 4`), as another object. Where torch then
    takes the larger of it and 1, it would look that up by the name, and so in itself.

    Example:
        >>> introduce((8, 4))
    """
    mode: Any = torch._C._get_dispatch_mode(_MODES.PROXY)
    if mode is None:
        return
    proxies = importlib.import_module("torch.fx.experimental.proxy_tensor")
    for size in sizes:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            known = proxies.get_proxy_slot(size, mode.tracer, None)
            if known is not None:
                proxies.set_proxy_slot(size, mode.tracer, known)


_MODES = torch._C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.FUNCTIONAL, _MODES.PROXY)


def is_tracing() -> bool:
    """Whether operators go into a graph now instead of being run.

    Example:
        >>> is_tracing()
        False
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACERS)
