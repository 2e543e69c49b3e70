"""Sizes that are not known yet: the symbolic integers with which a compiler traces a program for many sizes at once.

Knows how to name them in a key and what they are for the inputs at hand; nothing of tensors, layouts or compilers.
Comparing symbolic integers makes the compiler remember how the comparison came out (a guard). Here none are compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["anew", "has_symbols", "hinted", "is_tracing", "named", "settled", "specialized", "unrecorded"]


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


def anew(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """The sizes, symbolic ones as new objects, which a tracer has not seen and takes for what they are computed of.

    Specs outlive a pass of a compiler. The next pass may have seen their sizes in a gradient, on which forward must not
    depend. Of several sizes with one name it takes the last: here that is made the first, which is an input's.

    Example:
        >>> anew((8, 4))
        (8, 4)
    """
    made = tuple([torch.SymInt(copy.copy(size.node)) if isinstance(size, torch.SymInt) else size for size in sizes])
    mode = torch._C._get_dispatch_mode(_MODES.PROXY)
    if mode is not None:
        known, by_name = mode.tracer.symnode_tracker, mode.tracer.sympy_expr_tracker
        for symbol in {
            symbol for size in made if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
        }:
            first = next((node for node in known.sym_node_dict if node.expr == symbol), None)
            if first is not None and symbol in by_name:
                by_name[symbol].proxy = known.sym_node_dict[first]
        for size in made:
            if isinstance(size, torch.SymInt) and size.node.expr in by_name:
                known[size] = by_name[size.node.expr].proxy
    return made


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
