"""Telling rounding from wrong values: how far a result may lie from the exact one, given its dtype and the operator.

The exact value is the operator in float64. A sum of n numbers in another order is off by about eps * sqrt(n) of the
root of the sum of their squares; a sharded sum adds a rounding in the result's own dtype for each doubling of the
ranks. Where an operator magnifies errors of its operands, how much it does is tried out. Knows nothing of DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Call", "Gap", "exact_results", "gap_between", "same", "tolerances"]

SAFETY = 8.0  # roundings add up at random; this many times their usual size does not happen
_aten = torch.ops.aten
# Sums of products of the operands: their rounding is in proportion to the root of the sum of squares of the addends.
_SUMS = {
    _aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.dot, _aten.sum, _aten.mean, _aten.convolution,
    _aten.embedding_dense_backward, _aten.cumsum, _aten.index_add, _aten.scatter_add, _aten.nansum, _aten.linear,
}  # fmt: skip


class Call(NamedTuple):
    """An operator and its arguments, with plain tensors that it may write to."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """Its results, and then what it wrote to."""
        return self.op(*self.args, **self.kwargs)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The call with every tensor changed; one that stands twice is changed once."""
        known: dict[int, torch.Tensor] = {}

        def once(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = change(leaf)
            return known[id(leaf)]

        return Call(self.op, tree_map(once, self.args), tree_map(once, dict(self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]


Outputs = Callable[[Call, Any], list[torch.Tensor]]  # of a call and what it returned: all that it gave


class Gap(NamedTuple):
    """The worst place of a result: how far it is from the exact value there, and how far it might be."""

    error: float
    allowed: float
    at: tuple[int, ...]

    @property
    def excess(self) -> float:
        """How many times what is allowed; above one is wrong."""
        if self.error == 0:
            return 0.0
        return math.inf if not self.allowed or math.isnan(self.error) else self.error / self.allowed


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether its numbers are rounded at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in double precision; integers as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def exact_results(call: Call, outputs: Outputs) -> list[torch.Tensor] | None:
    """The results in double precision, None where the operator does not exist in it."""
    return _results(call.mapped(widened), outputs)


def _results(call: Call, outputs: Outputs) -> list[torch.Tensor] | None:
    try:
        return [widened(result) for result in outputs(call, call.run())]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def tolerances(
    call: Call,
    exact: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    ranks: int,
    outputs: Outputs,
    rtol: float | None,
    addends: float = 0.0,
) -> list[torch.Tensor]:
    """For each result how far each of its elements may lie from the exact value.

    `addends` is the largest number that ranks add up on the way to it, which the sum may be small against.
    """
    scales = _scales(call, exact, outputs)
    found = []
    for value, scale, dtype in zip(exact, scales, dtypes, strict=True):
        factor = rtol if rtol is not None else _factor(call, value, dtype, ranks)
        found.append(factor * scale + SAFETY * _eps(dtype) * ranks * addends + _smallest(dtype))
    return found


def _factor(call: Call, result: torch.Tensor, dtype: torch.dtype, ranks: int) -> float:
    eps = _eps(dtype)
    adding = min(eps, _eps(torch.float32))  # sums of half precision are kept in float32 by every kernel
    return SAFETY * (eps * (1 + math.log2(max(ranks, 1))) + adding * math.sqrt(_length(call, result)))


def _length(call: Call, result: torch.Tensor) -> float:
    """About how many numbers each element of the result is a sum of, rather too many than too few."""
    lengths = [max([1, *t.shape, t.numel() // max(1, result.numel())]) for t in call.tensors if is_inexact(t)]
    return float(max(lengths, default=1))


def _scales(call: Call, exact: Sequence[torch.Tensor], outputs: Outputs) -> list[torch.Tensor]:
    """What roundings are in proportion to: the size of the result, and of what was added up for it."""
    largest = [value.abs().amax() if value.numel() else value.abs() for value in map(_finite, exact)]
    packet = getattr(call.op, "overloadpacket", None)
    if packet not in _SUMS:
        return [torch.broadcast_to(size, value.shape) for size, value in zip(largest, exact, strict=True)]
    squared = exact_results(call.mapped(lambda t: widened(t).abs().square() if is_inexact(t) else t.clone()), outputs)
    if squared is None:
        return [torch.broadcast_to(size, value.shape) for size, value in zip(largest, exact, strict=True)]
    return [value.abs() + square.abs().sqrt() for value, square in zip(exact, squared, strict=True)]


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))


def magnified(
    call: Call, exact: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], outputs: Outputs
) -> list[torch.Tensor]:
    """What an operator makes of roundings on its way, tried out: operands moved a little, and all of it in float32."""
    found = [torch.zeros_like(value.abs()) for value in exact]
    kinds = [*dtypes, *(tensor.dtype for tensor in call.tensors)]
    eps = max([_eps(dtype) for dtype in kinds], default=0.0)
    tried = [
        (_results(call.mapped(_shaken(eps)), outputs), 1.0),
        (_results(call.mapped(_narrowed), outputs), eps / _eps(torch.float32)),
    ]
    for near, share in tried:
        if near is None or [a.shape for a in near] != [b.shape for b in exact]:
            continue
        for number, (a, b) in enumerate(zip(near, exact, strict=True)):
            moves = _finite(a - b).abs()
            found[number] = found[number] + (SAFETY * share * moves.amax() if moves.numel() else 0.0)
    return found


def _shaken(eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every number a little larger or smaller, at random but always the same."""
    generator = torch.Generator().manual_seed(0)

    def shake(tensor: torch.Tensor) -> torch.Tensor:
        if not is_inexact(tensor):
            return tensor.clone()
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return widened(tensor) * (1 + eps * signs)

    return shake


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex64, copy=True)
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor.clone()


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny if dtype.is_floating_point or dtype.is_complex else 0.0


def gap_between(value: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> Gap:
    """The worst element of `value`, by how many times more than allowed it is off."""
    if value.numel() == 0:
        return Gap(0.0, 0.0, ())
    wide = widened(value)
    if not is_inexact(value):
        apart = (value != exact).double()
        allowed = torch.zeros_like(apart)
    else:
        alike = (wide == exact) | ((wide != wide) & (exact != exact))
        apart = torch.where(alike, torch.zeros_like(wide.abs()), (wide - exact).abs().nan_to_num(nan=math.inf))
    excess = torch.where(apart > 0, apart / allowed.clamp_min(1e-300), torch.zeros_like(apart))
    worst = int(excess.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), value.shape)) if value.dim() else ()
    return Gap(float(apart.reshape(-1)[worst]), float(allowed.reshape(-1)[worst]), at)
