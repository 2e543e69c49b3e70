"""Sizes that are not known yet: the symbolic integers with which a compiler traces a program for many sizes at once.

Knows how to name them in a key and what they are for the inputs at hand; nothing of tensors, layouts or compilers.
Comparing symbolic integers makes the compiler remember how the comparison came out (a guard). Here none are compared.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.torch_private import DispatchModeKey, dispatch_mode_count, dispatch_mode_of, without_dispatch_modes

__all__ = ["has_symbols", "hinted", "introduce_sizes", "is_tracing", "named", "settled", "specialized", "unrecorded"]


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
    mode: Any = dispatch_mode_of(_MODES.PROXY)
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
    return without_dispatch_modes() if dispatch_mode_count() else contextlib.nullcontext()


def introduce_sizes() -> None:
    """See to it that the tracer that records now finds symbolic integers by their expressions.

    A size that was computed on the side is known to it by that alone.

    Example:
        >>> introduce_sizes()
    """
    mode: Any = dispatch_mode_of(_MODES.PROXY)
    if mode is not None and mode.tracer.sympy_expr_tracker.__class__ is not _KnownSizes:
        mode.tracer.sympy_expr_tracker = _KnownSizes(mode.tracer)


class _KnownSizes(dict[Any, Any]):
    """What a tracer knows of symbolic integers: from an expression to where the graph has it.

    A symbol stays what it was first, an input. torch would take the latest integer that comes to it (`2 * s - s`); its
    parts may be known by the same name alone, so that it would be computed from itself. And powers, maxima and minima,
    which torch does not take apart, are computed from their parts.
    """

    def __init__(self, tracer: Any) -> None:
        super().__init__(tracer.sympy_expr_tracker)
        self.tracer = weakref.ref(tracer)

    def __setitem__(self, expression: Any, where: Any) -> None:
        self.setdefault(expression, where)

    def get(self, expression: Any, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if expression not in self:
            if getattr(expression, "is_Pow", False):
                if expression.exp.is_Integer and expression.exp >= 2:
                    self._compute(expression, operator.mul, [expression.base] * int(expression.exp))
            elif (compute := _EXTREMES.get(type(expression).__name__)) is not None:
                self._compute(expression, compute, expression.args)
        return super().get(expression, default)

    def _compute(self, expression: Any, compute: Any, parts: Sequence[Any]) -> None:
        """Record an expression that is `compute` of its parts, two at a time."""
        proxies, tracer = importlib.import_module("torch.fx.experimental.proxy_tensor"), self.tracer()
        result, *others = [proxies._build_proxy_for_sym_expr(tracer, part) for part in parts]
        if result is None or None in others:
            return
        for other in others:
            operands, result = (result, other), compute(result, other)
            proxies._sym_register(tracer, compute, operands, result)
        self[expression] = proxies._SympyExprTrackerValue(proxies.get_proxy_slot(result, tracer), result)


_EXTREMES = {"Max": torch.sym_max, "Min": torch.sym_min}
_MODES = DispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.FUNCTIONAL, _MODES.PROXY)


def is_tracing() -> bool:
    """Whether operators go into a graph now instead of being run.

    Example:
        >>> is_tracing()
        False
    """
    if not dispatch_mode_count():
        return False
    return any(dispatch_mode_of(mode) is not None for mode in _TRACERS)
