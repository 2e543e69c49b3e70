"""Results of experts times their weights, back to the tokens: one node of autograd and one exchange.

With one choice a token has one result, which is weighted where the token is. With several, rows are weighted where the
experts are, and those of one token on a rank come back as one. Derivatives of higher order are taken of the same maps
one by one (`token_maps`), which the node computes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.moe.routing_plan import RoutingPlan
from shardwise.moe.token_maps import TokenMap, mapped, summed, weighted
from shardwise.rules.owner_programs import Exchanging, Items
from shardwise.tensor import apply_function, dtensor_of, moved
from shardwise.tensor.autograd_functions import laid_out_gradient
from shardwise.tensor.ranks import is_forward_or_transformed

__all__ = ["weighted_return"]


def weighted_return(outputs: Any, weights: Any, plan: RoutingPlan) -> Any:
    """For each token the sum of the rows of its choices, each times its weight.

    Args:
        outputs: the rows of the experts.
        weights: with one choice those of the tokens, `[T, 1]`; with several one for each row.
        plan: of the dispatch.
    """
    tokens, here = plan.tokens, plan.choices == 1
    before, after = tokens.layouts(outputs._spec, True)
    given = plan.of_choices(weights._spec) if here else plan.of_rows(weights._spec)
    if plan.padded or is_forward_or_transformed() or not (_alone(before, tokens.over) and _alone(given, tokens.over)):
        if here:
            return weighted(mapped(outputs, tokens, transposed=True), weights)
        return mapped(weighted(outputs, weights), tokens, transposed=True)
    outputs = outputs if outputs._spec is before else moved(outputs, before)
    weights = weights if weights._spec is given else moved(weights, given)
    return apply_function(WeightedReturn, outputs, weights, tokens, after, here)


def _alone(spec: DTensorSpec, over: Sequence[int]) -> bool:
    """Whether the other axes split nothing: then a rank has its rows in full."""
    if len(spec.placements) == len(over):
        return True
    return all(axis in over or isinstance(placement, Replicate) for axis, placement in enumerate(spec.placements))


class WeightedReturn(torch.autograd.Function):
    """See above. `kept` are the results where the tokens are, if they are weighted there (`here`)."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, weights: Any, tokens: TokenMap, after: DTensorSpec, here: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        program = _weighted_here if here else _weighted_there
        locals_ = outputs._local_tensor, weights._local_tensor
        y, *kept = _run(program, tokens, (outputs._spec, after), locals_, transposed=True)
        ctx.tokens, ctx.after, ctx.here = tokens, after, here
        ctx.save_for_backward(outputs, weights, *kept)
        ctx.set_materialize_grads(False)
        return dtensor_of(after, y)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, None, None
        outputs, weights, *kept = ctx.saved_tensors
        tokens: TokenMap = ctx.tokens
        grad = moved(laid_out_gradient(grad, ctx.after), ctx.after)
        grad = grad if grad.dtype is outputs.dtype else grad.to(outputs.dtype)
        if torch.is_grad_enabled():
            return (*_by_maps_backward(outputs, weights, grad, tokens, ctx.here), None, None, None)
        wanted = ctx.needs_input_grad[1]
        if ctx.here:
            program, factors = _weights_here if wanted else _rows_here, [weights._local_tensor, *kept]
        else:
            program, factors = _weights_there if wanted else _rows_there, [weights._local_tensor, outputs._local_tensor]
        found = _run(program, tokens, (ctx.after, outputs._spec), [grad._local_tensor, *factors], transposed=False)
        of_weights = dtensor_of(weights._spec, found[1]) if wanted else None
        return dtensor_of(outputs._spec, found[0]), of_weights, None, None, None


def _by_maps_backward(outputs: Any, weights: Any, grad: Any, tokens: TokenMap, here: bool) -> tuple[Any, Any]:
    """The gradients, with derivatives of their own."""
    if here:
        results = mapped(outputs, tokens, transposed=True)
        of_weights = _dot(grad, results, weights.dtype).view(weights.shape)
        return mapped(weighted(grad, weights.conj()), tokens), of_weights
    there = mapped(grad, tokens)
    return weighted(there, weights.conj()), _dot(there, outputs, weights.dtype)


def _dot(grad: Any, rows: Any, dtype: torch.dtype) -> Any:
    """The gradients of weights in this dtype: the product of each row of a gradient with the conjugate of its row."""
    product = grad * rows.conj()
    found = product.flatten(1).sum(1) if product.dim() > 1 else product
    return (found.real if found.is_complex() and not dtype.is_complex else found).to(dtype)


def _run(
    program: Any,
    tokens: TokenMap,
    between: tuple[DTensorSpec, DTensorSpec],
    locals_: Sequence[torch.Tensor],
    transposed: bool,
) -> list[torch.Tensor]:
    """A program on all ranks here: rows are exchanged between two layouts."""
    step = tokens.step(*between, transposed)
    of_tokens = between[1] if transposed else between[0]

    def start(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return program(tokens, at, own, of_tokens)

    maps = [tokens.line, tokens.send, tokens.gather, *tokens.inverse]
    return fabric_of(tokens.mesh).exchange_by_owner(step, start, [*maps, *locals_])


# ---------------------------------------------------------------- on the locals of one rank


def _column(factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return factors.view(-1, *[1] * (rows.dim() - 1))


def _times(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    product = rows * _column(factors, rows)
    return product if product.dtype is rows.dtype else product.to(rows.dtype)


def _weighted_there(tokens: TokenMap, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    line, send, gather, rows, factors = own
    sent, arriving = tokens.between(line, at)
    sums: list[torch.Tensor] = []
    returned = summed(_times(rows, factors), gather, sum(arriving))
    got = yield Items((returned,), arriving, sent, lambda: sums.append(rows.new_zeros(spec.local_shape(at))))
    return (sums[0].index_add_(0, send, got.tensors[0]),)


def _weighted_here(tokens: TokenMap, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    line, _, _, placed, sent_at, rows, weights = own
    sent, arriving = tokens.between(line, at)
    got = yield Items((rows.index_select(0, placed),), arriving, sent)
    here = got.tensors[0].index_select(0, sent_at)
    return _times(here, weights.reshape(-1)), here


def _rows_there(tokens: TokenMap, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    line, send, gather, grad, factors, _ = own
    got = yield Items((grad.index_select(0, send),), *tokens.between(line, at))
    there = got.tensors[0].index_select(0, gather)
    return (there.mul_(_column(factors.conj(), there)),)


def _weights_there(tokens: TokenMap, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    line, send, gather, grad, factors, rows = own
    got = yield Items((grad.index_select(0, send),), *tokens.between(line, at))
    there = got.tensors[0].index_select(0, gather)
    of_factors = _dot(there, rows, factors.dtype)
    return there.mul_(_column(factors.conj(), there)), of_factors


def _rows_here(
    tokens: TokenMap,
    at: Coordinate,
    own: list[torch.Tensor],
    spec: DTensorSpec,
    meanwhile: Callable[[], object] | None = None,
) -> Exchanging:
    line, send, gather, _, _, grad, weights, _ = own
    rows = grad.index_select(0, send)
    rows.mul_(_column(weights.conj().reshape(-1).index_select(0, send), rows))
    got = yield Items((rows,), *tokens.between(line, at), meanwhile)
    return (got.tensors[0].index_select(0, gather),)


def _weights_here(tokens: TokenMap, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    grad, weights, here = own[-3:]
    found: list[torch.Tensor] = []

    def meanwhile() -> None:
        found.append(_dot(grad, here, weights.dtype).view(weights.shape))

    (rows,) = yield from _rows_here(tokens, at, own, spec, meanwhile)
    return rows, *found


never_traced(WeightedReturn.forward, WeightedReturn.backward)
