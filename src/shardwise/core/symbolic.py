"""Sizes that are not known yet: the symbolic integers with which a compiler traces a program for many sizes at once.

Knows how to name them in a key and what they are for the inputs at hand; nothing of tensors, layouts or compilers.
Comparing symbolic integers makes the compiler remember how the comparison came out (a guard). Here none are compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["has_symbols", "hinted", "is_tracing", "named", "settled", "specialized", "unrecorded"]


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
        return "symbolic", id(value.node.shape_env), value.node.expr
    return tuple(map(named, value)) if isinstance(value, tuple | list) else value


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
