"""`back(outputs, weights)` as one node of autograd: the weights go to the experts, and the weighted rows come back.

One program of each rank does both, on plain tensors, and its gradient is one program too. Derivatives of higher order
are taken of the same maps one by one (`token_maps`), which the node computes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.moe.routing_plan import RoutingPlan
from shardwise.moe.token_maps import is_listened_to, mapped, summed, weighted
from shardwise.rules.owner_programs import Exchanging, Items
from shardwise.tensor import apply_function, dtensor_of, moved
from shardwise.tensor.autograd_functions import laid_out_gradient
from shardwise.tensor.ranks import is_forward_or_transformed

__all__ = ["weighted_return"]


def weighted_return(outputs: Any, weights: Any, plan: RoutingPlan) -> Any:
    """For each token the sum of the rows of its choices, each times its weight."""
    tokens = plan.tokens
    before, _ = tokens.layouts(outputs._spec, True)
    given = plan.of_choices(weights._spec)
    if tokens.padded or is_forward_or_transformed() or not (_alone(before, tokens.over) and _alone(given, tokens.over)):
        return by_maps(outputs, weights, plan)
    if not fabric_of(before.mesh).has_values:  # records are those of the maps
        return by_maps(outputs, weights, plan)
    outputs = outputs if outputs._spec is before else moved(outputs, before)
    weights = weights if weights._spec is given else moved(weights, given)
    return apply_function(WeightedReturn, outputs, weights, plan)


def by_maps(outputs: Any, weights: Any, plan: RoutingPlan) -> Any:
    """The same as maps and a product."""
    if plan.choices == 1:  # a token has one result: it is weighted where the token is
        return weighted(mapped(outputs, plan.tokens, transposed=True), weights)
    return mapped(weighted(outputs, mapped(weights, plan.slots)), plan.tokens, transposed=True)


def _alone(spec: DTensorSpec, over: Sequence[int]) -> bool:
    """Whether the other axes split nothing: then a rank has its rows in full."""
    return all(axis in over or isinstance(placement, Replicate) for axis, placement in enumerate(spec.placements))


class WeightedReturn(torch.autograd.Function):
    """See above. `kept` is what the product took beside the inputs: rows, where they are weighted, or weights there."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, weights: Any, plan: RoutingPlan) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (_, after), choices = plan.tokens.layouts(outputs._spec, True), plan.choices
        program = _weighted_there if choices > 1 else _weighted_here
        if choices > 1:
            _announce_weights(plan, weights._spec, transposed=False)
        locals_ = outputs._local_tensor, weights._local_tensor
        y, kept = _run(program, plan, outputs._spec, locals_, after, transposed=True)
        ctx.plan, ctx.after = plan, after
        ctx.save_for_backward(outputs, weights, kept)
        ctx.set_materialize_grads(False)
        return dtensor_of(after, y)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        outputs, weights, kept = ctx.saved_tensors
        plan: RoutingPlan = ctx.plan
        grad = moved(laid_out_gradient(grad, ctx.after), ctx.after)
        grad = grad if grad.dtype is outputs.dtype else grad.to(outputs.dtype)
        if torch.is_grad_enabled():
            return (*_by_maps_backward(outputs, weights, grad, plan), None)
        wanted = ctx.needs_input_grad[1]
        if plan.choices > 1:
            program, factor = _weights_there if wanted else _rows_there, outputs
            if wanted:
                _announce_weights(plan, weights._spec, transposed=True)
        else:
            program, factor = _weights_here if wanted else _rows_here, weights
        locals_ = grad._local_tensor, factor._local_tensor, kept
        found = _run(program, plan, grad._spec, locals_, ctx.after, transposed=False)
        of_weights = dtensor_of(weights._spec, found[1]) if wanted else None
        return dtensor_of(outputs._spec, found[0]), of_weights, None


def _by_maps_backward(outputs: Any, weights: Any, grad: Any, plan: RoutingPlan) -> tuple[Any, Any]:
    """The gradients, with derivatives of their own."""
    if plan.choices == 1:
        here = mapped(outputs, plan.tokens, transposed=True)
        of_weights = _dot(grad, here).view(weights.shape).to(weights.dtype)
        return mapped(weighted(grad, weights), plan.tokens), of_weights
    there = mapped(grad, plan.tokens)
    of_rows = _dot(there, outputs).to(weights.dtype)
    return weighted(there, mapped(weights, plan.slots)), mapped(of_rows, plan.slots, transposed=True)


def _dot(one: Any, other: Any) -> Any:
    """The product of each row with the other one."""
    return (one * other).flatten(1).sum(1) if one.dim() > 1 else one * other


def _announce_weights(plan: RoutingPlan, spec: DTensorSpec, transposed: bool) -> None:
    """Tell listeners of the exchange of weights of this layout, or of their gradients, which the next one includes."""
    if is_listened_to(spec.mesh):
        plan.slots.step(plan.slots.layouts(spec, False)[1] if transposed else spec, transposed)


def _run(
    program: Any,
    plan: RoutingPlan,
    given: DTensorSpec,
    locals_: Sequence[torch.Tensor],
    spec: DTensorSpec,
    transposed: bool,
) -> list[torch.Tensor]:
    """A program on all ranks here: rows of the layout `given` are exchanged. `spec` is the layout of tokens."""
    step = plan.tokens.step(given, transposed)

    def start(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return program(plan, at, own, spec)

    return fabric_of(spec.mesh).exchange_by_owner(step, start, [*locals_, plan.line, *plan.arrays])


# ---------------------------------------------------------------- on the locals of one rank


def _times(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    product = rows * (factors.unsqueeze(1) if rows.dim() == 2 else factors.view(-1, *[1] * (rows.dim() - 1)))
    return product if product.dtype is rows.dtype else product.to(rows.dtype)


def _weighted_there(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    rows, weights, line, send, gather, order, of_row, *_ = own
    got = yield Items((weights.reshape(-1).index_select(0, order),), *plan.slots.between(line, at))
    factors = got.tensors[0].index_select(0, of_row)
    sent, arriving = plan.tokens.between(line, at)
    got = yield Items((summed(_times(rows, factors), gather, sum(arriving)),), arriving, sent)
    return summed(got.tensors[0], send, spec.local_shape(at)[0]), factors


def _weighted_here(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    rows, weights, line, *_, placed, sent_at = own
    sent, arriving = plan.tokens.between(line, at)
    got = yield Items((rows.index_select(0, placed),), arriving, sent)
    here = got.tensors[0].index_select(0, sent_at)
    return _times(here, weights.reshape(-1)), here


def _rows_there(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    grad, _, factors, line, send, gather, *_ = own
    got = yield Items((grad.index_select(0, send),), *plan.tokens.between(line, at))
    return (_times(got.tensors[0].index_select(0, gather), factors),)


def _weights_there(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    grad, rows, factors, line, send, gather, *_, placed, sent_at = own
    got = yield Items((grad.index_select(0, send),), *plan.tokens.between(line, at))
    there = got.tensors[0].index_select(0, gather)
    sent, arriving = plan.slots.between(line, at)
    of_rows = _dot(there, rows).to(factors.dtype).index_select(0, placed)
    got = yield Items((of_rows,), arriving, sent)
    return _times(there, factors), got.tensors[0].index_select(0, sent_at).view(-1, plan.choices)


def _rows_here(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    grad, weights, _, line, send, gather, *_ = own
    counts = plan.tokens.between(line, at)
    got = yield Items((_times(grad, weights.reshape(-1)).index_select(0, send),), *counts)
    return (got.tensors[0].index_select(0, gather),)


def _weights_here(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], spec: DTensorSpec) -> Exchanging:
    (rows,) = yield from _rows_here(plan, at, own, spec)
    grad, weights, here = own[:3]
    return rows, _dot(grad, here).to(weights.dtype).view(weights.shape)


never_traced(WeightedReturn.forward, WeightedReturn.backward)
