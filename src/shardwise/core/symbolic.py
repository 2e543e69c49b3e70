"""Symbolic integers: the sizes with which a compiler traces a program for many sizes at once.

Their names in keys, and their values for the current inputs. Comparing symbolic integers makes the compiler record the
result (a guard), so this module compares none.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.core.tracing import proxy_mode
from shardwise.torch_private import dispatch_mode_count, without_dispatch_modes

__all__ = [
    "has_symbols",
    "hinted",
    "introduce_sizes",
    "known_value",
    "named",
    "specialized",
    "unrecorded",
]


def has_symbols(sizes: Iterable[Any]) -> bool:
    """Whether some of these integers are symbolic.

    Example:
        >>> has_symbols((8, 4))
        False
    """
    return any(isinstance(size, torch.SymInt) for size in sizes)


def known_value(size: Any) -> Any:
    """The value of a symbolic integer that the compiler knows to have only one; others unchanged.

    Example:
        >>> known_value(8)
        8
    """
    if not isinstance(size, torch.SymInt):
        return size
    known = size.node.maybe_as_int()
    return size if known is None else known


def named(value: Any) -> Any:
    """The form of a value in keys: symbolic integers as their expressions; sequences item by item.

    Example:
        >>> named((8, "x"))
        (8, 'x')
    """
    if isinstance(value, torch.SymInt):
        return "symbolic", id(value.node.shape_env), _stage(), value.node.expr
    return tuple(map(named, value)) if isinstance(value, tuple | list) else value


_seen: list[Any] = [0, lambda: None]  # the number of graphs recorded so far, and the recorder of the last


def _stage() -> int:
    """The number of the graph that is recorded now, or was recorded last.

    A compiler runs a program several times before it records it, and identifies sizes by their objects: one of an
    earlier run may be the size of a gradient now, on which no forward may depend. So sizes of one graph are never
    used for another.
    """
    mode = proxy_mode()
    if mode is not None and _seen[1]() is not mode.tracer:
        _seen[:] = _seen[0] + 1, weakref.ref(mode.tracer)
    return _seen[0]


def hinted(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The integers for the inputs of the trace. No guard is made: fit for costs, not for layouts.

    Example:
        >>> hinted((8, 4))
        (8, 4)
    """
    return tuple([_hint(size) if isinstance(size, torch.SymInt) else size for size in sizes])


def _hint(size: torch.SymInt) -> int:
    node = size.node
    if node.has_hint():
        return int(node.hint)
    return 4096  # a size that depends on data has no hint


def specialized(sizes: Iterable[Any]) -> tuple[int, ...]:
    """The integers of the current inputs; the compiler traces again for others.

    Example:
        >>> specialized((8, 4))
        (8, 4)
    """
    return tuple([int(size) for size in sizes])


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators (to find the metadata of a result) are not recorded by a tracer.

    Example:
        >>> with unrecorded():
        ...     torch.empty(2, device="meta").shape
        torch.Size([2])
    """
    return without_dispatch_modes() if dispatch_mode_count() else contextlib.nullcontext()


def introduce_sizes() -> None:
    """Make the current tracer find symbolic integers by their expressions.

    A size that was computed outside of the graph can only be found by its expression.

    Example:
        >>> introduce_sizes()
    """
    mode = proxy_mode()
    if mode is not None and mode.tracer.sympy_expr_tracker.__class__ is not _KnownSizes:
        mode.tracer.sympy_expr_tracker = _KnownSizes(mode.tracer)


class _KnownSizes(dict[Any, Any]):
    """The symbolic integers of a tracer: from an expression to its node in the graph.

    A symbol keeps its first node, the input. torch would take the latest integer of the same value (`2 * s - s`), which
    may be computed from the symbol itself: a cycle. Powers, maxima and minima, which torch does not decompose, are
    computed from their parts.
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
