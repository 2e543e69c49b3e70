"""Numbers that differ between virtual ranks: the sizes of uneven locals, and numbers computed from them.

They are torch's symbolic integers with our node class, so that autograd's formulas compute with every rank's own
number. Where a plain number is needed, all ranks must agree, or it is an error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.symbolic import hinted, specialized
from shardwise.errors import AgreementError

__all__ = ["RankNumber", "count_of", "of_rank", "rank_sizes", "traced_sizes"]


class RankNumber:
    """The node of a symbolic number: one plain number for each virtual rank, with the methods that torch calls."""

    __slots__ = ("general", "is_stride", "values")

    shape_env = None
    constant = None

    def __init__(self, values: Sequence[Any], general: bool | None = None, is_stride: bool = False) -> None:
        self.values = tuple(values)
        self.is_stride = is_stride
        self.general = general  # the answer for torch's own code if ranks differ: a size is not 0 or 1

    def agreed(self) -> Any:
        """The number, if it is the same on all ranks; otherwise an error."""
        first = self.values[0]
        if any(value != first for value in self.values[1:]):
            what = "a condition on the sizes" if self.is_bool() else "a size"
            raise AgreementError(
                f"{what} of uneven locals is {self} on the virtual ranks: one plain value cannot hold it",
                hint="pad the locals to one shape, compute on the DTensor, or take one rank's with local.tensors[rank]",
            )
        return first

    def maybe_as_int(self) -> int | None:
        first = self.values[0]
        return first if self.is_int() and all(value == first for value in self.values) else None

    def is_int(self) -> bool:
        return type(self.values[0]) is int

    def is_float(self) -> bool:
        return type(self.values[0]) is float

    def is_bool(self) -> bool:
        return type(self.values[0]) is bool

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def require_hint(self, fallback: Any = None) -> Any:
        return self.values[0]

    @property
    def hint(self) -> Any:
        return self.values[0]

    def clone(self) -> RankNumber:
        return self

    def wrap_int(self, number: int) -> RankNumber:
        return RankNumber([number] * len(self.values))

    wrap_float = wrap_bool = wrap_int

    def __str__(self) -> str:
        return "/".join(map(str, self.values))

    __repr__ = str = _graph_repr = __str__

    # where torch needs a plain number

    def int_(self) -> int:
        return self.agreed()

    bool_ = float_ = int_

    def guard_int(self, file: Any = None, line: Any = None) -> Any:
        return self.agreed()

    guard_float = guard_int

    def guard_bool(self, file: Any = None, line: Any = None) -> bool:
        return self.agreed() if self.general is None else self.general

    def expect_true(self, file: Any = None, line: Any = None) -> bool:
        return all(self.values)  # torch raises where it is not

    def guard_or_false(self, file: Any = None, line: Any = None) -> bool:
        return all(self.values)

    statically_known_true = guard_or_false

    def guard_or_true(self, file: Any = None, line: Any = None) -> bool:
        return any(self.values)

    def guard_size_oblivious(self, file: Any = None, line: Any = None) -> bool:
        return self.agreed()

    def sym_ite(self, then: Any, other: Any) -> RankNumber:
        return RankNumber([a if c else b for c, a, b in zip(self.values, *self._values(then, other), strict=True)])

    def sym_sum(self, numbers: Sequence[Any]) -> RankNumber:
        return RankNumber([sum(row) for row in zip(*self._values(*numbers), strict=True)])

    def is_non_overlapping_and_dense(self, sizes: Sequence[Any], strides: Sequence[Any]) -> RankNumber:
        rows = zip(zip(*self._values(*sizes), strict=True), zip(*self._values(*strides), strict=True), strict=True)
        return RankNumber([_is_dense(*row) for row in rows])

    def _general(self, compute: Callable[[Any, Any], Any], other: Any, others: Sequence[Any]) -> bool | None:
        """The answer for torch's own code to a comparison, or a combination of them, if the ranks differ.

        torch's code tests whether a size is 1 to broadcast, whether it is 0 to save work, and compares strides to
        choose a memory order. A number that differs between ranks is treated as neither 0 nor 1, as torch treats
        unknown sizes. User programs get an error instead, from `bool_`.
        """
        if compute in (operator.eq, operator.ne):
            strides = self.is_stride or (isinstance(other, RankNumber) and other.is_stride)
            return compute is operator.ne if strides or set(others) in ({0}, {1}) else None
        if compute in (_or, _and):
            both = self._assumed(), other._assumed() if isinstance(other, RankNumber) else other
            return None if None in both else compute(*both)
        return None

    def _assumed(self) -> bool | None:
        return self.values[0] if len(set(self.values)) == 1 else self.general

    def _values(self, *numbers: Any) -> list[tuple[Any, ...]]:
        count = len(self.values)
        return [
            number.values if isinstance(number, RankNumber) else (number,) * count for number in map(_node, numbers)
        ]


def _node(number: Any) -> Any:
    return number.node if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _binary(compute: Callable[[Any, Any], Any]) -> Callable[[RankNumber, Any], RankNumber]:
    def binary_by_rank(self: RankNumber, other: Any) -> RankNumber:
        (others,) = self._values(other)
        values = [compute(a, b) for a, b in zip(self.values, others, strict=True)]
        return RankNumber(values, self._general(compute, other, others) if len(set(values)) > 1 else None)

    return binary_by_rank


def _or(a: bool, b: bool) -> bool:
    return a or b


def _and(a: bool, b: bool) -> bool:
    return a and b


def _divide(a: float, b: float) -> float:
    """As C++ divides."""
    return a / b if b else math.copysign(math.inf, a) if a else math.nan


def _unary(compute: Callable[[Any], Any]) -> Callable[[RankNumber], RankNumber]:
    def unary_by_rank(self: RankNumber) -> RankNumber:
        general = not self.general if compute is operator.not_ and self.general is not None else None
        return RankNumber([compute(value) for value in self.values], general)

    return unary_by_rank


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod, "pow": operator.pow,
    "floordiv": operator.floordiv, "int_floordiv": operator.floordiv, "truediv": _divide,
    "int_truediv": _divide, "float_truediv": _divide, "float_pow": operator.pow,
    "pow_by_natural": operator.pow, "sym_max": max, "sym_min": min, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "sym_or": _or,
    "or_": _or, "sym_and": _and, "and_": _and,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "sym_float": float, "sym_int": int, "trunc": math.trunc,
    "floor": math.floor, "ceil": math.ceil, "sym_not": operator.not_,
}  # fmt: skip
for _name, _compute in _BINARY.items():
    setattr(RankNumber, _name, _binary(_compute))
for _name, _compute in _UNARY.items():
    setattr(RankNumber, _name, _unary(_compute))


def rank_sizes(sizes: Sequence[Sequence[int]], strides: bool = False) -> list[Any]:
    """The sizes or strides of all ranks as one list: plain where they agree, symbolic where they differ.

    Example:
        >>> rank_sizes([(2, 3), (1, 3)])
        [2/1, 3]
    """
    return [column[0] if len(set(column)) == 1 else _symbol(column, strides) for column in zip(*sizes, strict=True)]


def traced_sizes(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """The sizes and strides of traced tensors. If ranks differ in a size, all its symbols are specialized.

    Example:
        >>> traced_sizes([torch.empty(2, 3), torch.empty(1, 3)])
        ([2/1, 3], [3, 1])
    """
    first = tensors[0]
    shape = hinted(first.shape)
    if all(hinted(tensor.shape) == shape for tensor in tensors):
        return first.shape, first.stride()
    sizes, strides = [specialized(t.shape) for t in tensors], [specialized(t.stride()) for t in tensors]
    return rank_sizes(sizes), rank_sizes(strides, strides=True)


def _symbol(values: Sequence[int], is_stride: bool) -> Any:
    return torch.SymInt(RankNumber(values, is_stride=is_stride))  # pyright: ignore[reportArgumentType]


def of_rank(value: Any, rank: int) -> Any:
    """The value of a number on one rank."""
    node = _node(value)
    return node.values[rank] if isinstance(node, RankNumber) else value


def count_of(numbers: Sequence[Any]) -> int | None:
    """The number of ranks of rank-dependent numbers; None if all numbers are plain.

    Example:
        >>> count_of(rank_sizes([(2, 3), (1, 3)])), count_of((2, 3))
        (2, None)
    """
    counts = [len(node.values) for node in map(_node, numbers) if isinstance(node, RankNumber)]
    return counts[0] if counts else None
