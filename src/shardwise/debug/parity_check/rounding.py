"""Tolerances: how far a correctly rounded result may be from the exact one, given its dtype and the operator.

The exact value is the operator's result in float64. Summing n numbers in another order changes the sum by about
eps * sqrt(n) times the root of the sum of their squares. A sharded sum adds one rounding in the dtype of the result for
each doubling of the ranks. The amplification of operand errors by an operator is measured on perturbed operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.torch_private import tree_leaves, tree_map

__all__ = ["Gap", "PlainCall", "exact_results", "gap_between", "same", "tolerances"]

SAFETY = 8.0  # rounding errors add like random numbers; errors beyond this multiple of the usual size do not occur
_aten = torch.ops.aten
# Sums of products: their rounding error is proportional to the root of the sum of squares of the addends.
_SUMS = {
    _aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.dot, _aten.sum, _aten.mean, _aten.convolution,
    _aten.embedding_dense_backward, _aten.cumsum, _aten.index_add, _aten.scatter_add, _aten.nansum, _aten.linear,
}  # fmt: skip


class PlainCall(NamedTuple):
    """An operator and its arguments, with plain tensors. The operator may write to them."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def execute(self) -> Any:
        """Call the operator; written arguments change."""
        return self.op(*self.args, **self.kwargs)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PlainCall:
        """The call with `change` applied to every tensor, once for each distinct tensor."""
        known: dict[int, torch.Tensor] = {}

        def once(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = change(leaf)
            return known[id(leaf)]

        return PlainCall(self.op, tree_map(once, self.args), tree_map(once, dict(self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]


Outputs = Callable[[PlainCall, Any], list[torch.Tensor]]  # of a call and its result: result tensors and written tensors


class Gap(NamedTuple):
    """The worst element of a result: its error, and the allowed error."""

    error: float
    allowed: float
    at: tuple[int, ...]

    @property
    def excess(self) -> float:
        """The error as a multiple of the allowed error; above one is wrong."""
        if self.error == 0:
            return 0.0
        return math.inf if not self.allowed or math.isnan(self.error) else self.error / self.allowed


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal values, NaN equal to NaN."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether its dtype is subject to rounding."""
    return tensor.is_floating_point() or tensor.is_complex()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in double precision; of integers, in their dtype."""
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def exact_results(call: PlainCall, outputs: Outputs) -> list[torch.Tensor] | None:
    """The results in double precision, None if the operator does not support it."""
    return _results(call.mapped(widened), outputs)


def _results(call: PlainCall, outputs: Outputs) -> list[torch.Tensor] | None:
    try:
        return [widened(result) for result in outputs(call, call.execute())]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def tolerances(
    call: PlainCall,
    exact: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    ranks: int,
    outputs: Outputs,
    rtol: float | None,
    addends: float = 0.0,
) -> list[torch.Tensor]:
    """The allowed error of each element of each result.

    `addends` is the largest magnitude that ranks add up; the sum may be small against it.
    """
    scales = _scales(call, exact, outputs)
    found = []
    for value, scale, dtype in zip(exact, scales, dtypes, strict=True):
        factor = rtol if rtol is not None else _factor(call, value, dtype, ranks)
        found.append(factor * scale + SAFETY * _eps(dtype) * ranks * addends + _smallest(dtype))
    return found


def _factor(call: PlainCall, result: torch.Tensor, dtype: torch.dtype, ranks: int) -> float:
    eps = _eps(dtype)
    adding = min(eps, _eps(torch.float32))  # all kernels accumulate half precision in float32
    return SAFETY * (eps * (1 + math.log2(max(ranks, 1))) + adding * math.sqrt(_length(call, result)))


def _length(call: PlainCall, result: torch.Tensor) -> float:
    """An upper estimate of the number of addends of each element of the result."""
    lengths = [max([1, *t.shape, t.numel() // max(1, result.numel())]) for t in call.tensors if is_inexact(t)]
    return float(max(lengths, default=1))


def _scales(call: PlainCall, exact: Sequence[torch.Tensor], outputs: Outputs) -> list[torch.Tensor]:
    """The scale of rounding errors: the magnitude of the result, and of its addends."""
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
    call: PlainCall, exact: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], outputs: Outputs
) -> list[torch.Tensor]:
    """The measured amplification of rounding errors: with perturbed operands, and computed in float32."""
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
    """Perturb every number by a factor 1 ± eps, with a fixed seed."""
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
    """The worst element of `value`: the largest ratio of its error to the allowed error."""
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
