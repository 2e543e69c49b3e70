"""Tokens of several choices to their experts, as one node of autograd and one exchange.

A row that is sent is a token, the numbers of its experts, and the weights of its choices if they are known: packed, so
that all of it is one collective. Where rows arrive, those numbers are sorted, and each row of an expert is a choice of
an arriving row. Gradients of tokens and weights go back together too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.compilers import never_traced
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.moe.packed_rows import packed_rows
from shardwise.moe.routing_plan import RoutingPlan, SlotArrays, TokenArrays
from shardwise.moe.token_maps import announce, mapped, number_of, summed
from shardwise.plan.step import TokenExchange
from shardwise.rules.owner_programs import Exchanging, Items
from shardwise.tensor import apply_function, dtensor_of, moved, wants_derivatives
from shardwise.tensor.autograd_functions import laid_out_gradient
from shardwise.tensor.ranks import is_forward_or_transformed

__all__ = ["sent_tokens"]

PACKED_BYTES = 2**22  # of the gradients of a rank's rows: packing larger ones costs more than a collective


def sent_tokens(x: Any, weights: Any, plan: RoutingPlan) -> tuple[Any, Any]:
    """The rows of the experts, and the weight of each row, if weights are given and there are several choices."""
    weights = None if plan.choices == 1 else weights  # with one choice results are weighted where the tokens are
    if plan.padded or is_forward_or_transformed():  # these need each map by itself
        if plan.choices > 1:
            _exchange(plan, ())
        return mapped(x, plan.tokens), None if weights is None else mapped(weights, plan.slots)
    x = moved(x, plan.ranks.source(x._spec))
    if weights is not None:
        weights = moved(weights, plan.of_choices(weights._spec))
    if wants_derivatives(x) or (weights is not None and wants_derivatives(weights)):
        return apply_function(SendTokens, x, weights, plan)
    return _sent(plan, x, weights)


class SendTokens(torch.autograd.Function):
    """See above. Linear in both; derivatives of its gradient are those of the maps, one by one."""

    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, plan: RoutingPlan) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, of_rows = _sent(plan, x, weights)
        ctx.plan, ctx.sides = plan, [(x._spec, rows._spec)]
        constant = [] if ctx.needs_input_grad[0] else [rows]
        if of_rows is not None:
            ctx.sides.append((weights._spec, of_rows._spec))
            constant += [] if ctx.needs_input_grad[1] else [of_rows]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return rows, of_rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan: RoutingPlan = ctx.plan
        found: list[Any] = [None, None]
        for index, (spec, made) in enumerate(ctx.sides):
            if grads[index] is not None and ctx.needs_input_grad[index]:
                grad, dtype = laid_out_gradient(grads[index], made), spec.tensor_meta.dtype
                found[index] = grad if grad.dtype is dtype else grad.to(dtype)
        rows, weights = found
        if rows is not None and weights is not None and _is_packed(plan, rows, weights, ctx.sides):
            return (*_returned(plan, rows, weights, ctx.sides), None)
        of_x = None if rows is None else mapped(rows, plan.tokens, transposed=True)
        return of_x, None if weights is None else mapped(weights, plan.slots, transposed=True), None


def _is_packed(plan: RoutingPlan, rows: Any, weights: Any, sides: Any) -> bool:
    """Whether gradients of tokens and weights go in one exchange. All ranks decide alike: by the rows of all."""
    made = rows._spec is sides[0][1] and weights._spec is sides[1][1]
    if torch.is_grad_enabled() or not made:
        return False
    elements = math.prod(rows._spec.largest_local_shape[1:])
    return plan.shape[0] * plan.choices // plan.ranks.members * elements * rows.dtype.itemsize <= PACKED_BYTES


# ---------------------------------------------------------------- on the mesh


def _sent(plan: RoutingPlan, x: Any, weights: Any) -> tuple[Any, Any]:
    """Tokens, and weights if given, in the layouts that they are sent from: the rows and numbers of the experts."""
    found = _exchange(plan, (x,) if weights is None else (x, weights))
    rows = dtensor_of(plan.target.of(x._spec), found[0])
    return rows, None if weights is None else dtensor_of(plan.of_rows(weights._spec), found[1])


def _exchange(plan: RoutingPlan, given: Sequence[Any]) -> list[torch.Tensor]:
    """Send rows of these tensors; the plan then knows the arrays of its maps.

    With several choices they have the numbers of their experts with them.
    """
    specs, several = [tensor._spec for tensor in given], plan.choices > 1
    step, program = _step(plan, specs, plan.choices if several else 0), _sending if several else _sending_sorted

    def start(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return program(plan, at, own, specs)

    locals_ = [plan.line, *plan.counted, *[tensor._local_tensor for tensor in given]]
    found = fabric_of(plan.ranks.mesh).exchange_by_owner(step, start, locals_)
    if not several:
        plan.slot_arrays = SlotArrays(*found[:4])
        return found[4:]
    plan.received = TokenArrays(*found[:3])
    del plan.counted[1:]  # the rest is not needed again
    return found[3:]


def _returned(plan: RoutingPlan, rows: Any, weights: Any, sides: Any) -> tuple[Any, Any]:
    """The gradients of tokens and of weights, of those of rows and of their weights: one exchange."""
    of_x, of_weights = sides[0][0], sides[1][0]
    step = _step(plan, [of_x, of_weights], 0)

    def start(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _returning(plan, at, own, of_x.local_shape(at))

    assert plan.received is not None, "the tokens were sent"
    locals_ = [plan.line, *plan.received, rows._local_tensor, weights._local_tensor]
    found = fabric_of(plan.ranks.mesh).exchange_by_owner(step, start, locals_)
    return dtensor_of(of_x, found[0]), dtensor_of(of_weights, found[1])


def _step(plan: RoutingPlan, specs: Sequence[DTensorSpec], numbers: int) -> TokenExchange:
    """The step of an exchange of packed rows of these layouts, with so many numbers of experts: listeners are told."""
    first = specs[0] if specs else plan.ranks.ends_spec

    def row_bytes() -> int:
        parts = [(spec.largest_local_shape[1:], spec.tensor_meta.dtype) for spec in specs]
        return packed_rows([*parts, ((numbers,), plan.ranks.number_dtype)] if numbers else parts).size

    what = ("numbers of tokens", "tokens", "tokens and weights")[len(specs)]
    after = plan.target.of if specs else lambda spec: spec
    return announce(first, lambda: after(first), plan.ranks.over, what, plan.crossing, row_bytes)


# ---------------------------------------------------------------- on the locals of one rank


def _sending_sorted(
    plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], specs: Sequence[DTensorSpec]
) -> Exchanging:
    """With one choice: a rank's rows are sent in the order of their experts. Gives `SlotArrays` and the rows."""
    line, order, x = own
    arrays: list[torch.Tensor] = []

    def meanwhile() -> None:
        arrays.extend(plan.slots_of_rank(at, line, order))
        _make_specs(plan, specs)

    sent, arriving = plan.lines[number_of(line)].between(plan.ranks.member(at))
    got = yield Items((x.index_select(0, order),), sent, arriving, meanwhile)
    return *arrays, got.tensors[0].index_select(0, arrays[1])


def _sending(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], specs: Sequence[DTensorSpec]) -> Exchanging:
    """Gives `TokenArrays`, the rows of the experts if there are tokens, and their weights if there are some."""
    line, _, ids, to, goes, *given = own
    me, sizes = plan.ranks.member(at), plan.lines[number_of(line)]
    sent, arriving = sizes.tokens.between(me)
    pairs = _pairs(goes, sum(sent))
    send = pairs[:, 1].contiguous()
    parts = [(tensor.shape[1:], tensor.dtype) for tensor in given]  # columns may be split unequally over another axis
    packing = packed_rows([*parts, (ids.shape[1:], ids.dtype)])
    packed = packing.empty(send.shape[0], ids.device)
    views = packing.views(packed)
    for tensor, part in zip((*given, ids), views, strict=True):
        torch.index_select(tensor.reshape(tensor.shape[0], part.shape[1]), 0, send, out=part)
    if plan.ranks.minors:  # an expert may be on several ranks
        views[-1].masked_fill_(to.index_select(0, send) != pairs[:, :1], -1)
    got = yield Items((packed,), sent, arriving, lambda: _make_specs(plan, specs))
    *rows, numbers = packing.views(got.tensors[0])
    chosen = _by_expert(plan, at, numbers, sum(sizes.between(me)[1]))
    gather = chosen.div(plan.choices, rounding_mode="floor")
    found = [send, gather, chosen]
    if rows:
        found.append(rows[0].index_select(0, gather).view(gather.shape[0], *given[0].shape[1:]))
    if rows[1:]:
        found.append(rows[1].reshape(-1).index_select(0, chosen))
    return found


def _make_specs(plan: RoutingPlan, specs: Sequence[DTensorSpec]) -> None:
    """Make the layouts of what arrives, which the plan keeps."""
    for index, spec in enumerate(specs):
        plan.of_rows(spec) if index else plan.target.of(spec)


def _pairs(goes: torch.Tensor, count: int) -> torch.Tensor:
    """The member and the token of each row that is sent, by member, then by token."""
    if goes.is_meta:
        return goes.new_empty((count, 2), dtype=torch.int64)
    return torch.nonzero_static(goes, size=count)


def _by_expert(plan: RoutingPlan, at: Coordinate, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Of the numbers of experts that arrive, `[rows, k]`, those of this rank's experts, sorted by expert."""
    keys = numbers.reshape(-1).sub_(plan.ranks.owned(at).start)
    keys.bitwise_and_(torch.iinfo(keys.dtype).max)  # those of ranks before, and -1, are larger than all
    chosen = torch.sort(keys, stable=True)[1][:count]
    empty = plan.ranks.length(plan.per_rank, at) - count
    return F.pad(chosen, (0, empty), value=numbers.numel()) if empty else chosen


def _returning(plan: RoutingPlan, at: Coordinate, own: list[torch.Tensor], shape: Sequence[int]) -> Exchanging:
    """Gives the gradients of this rank's tokens, of this shape, and of their weights."""
    line, send, gather, chosen, rows, weights = own
    sent, arriving = plan.lines[number_of(line)].tokens.between(plan.ranks.member(at))
    count, choices = sum(arriving), plan.choices
    packing = packed_rows([(rows.shape[1:], rows.dtype), ((choices,), weights.dtype)])
    packed = packing.empty(count, rows.device)
    tokens, numbers = packing.views(packed)
    tokens.copy_(summed(rows.reshape(rows.shape[0], tokens.shape[1]), gather, count))
    numbers.copy_(weights.new_zeros(count * choices).index_copy_(0, chosen, weights).view(count, choices))
    if packed.dtype is rows.dtype is weights.dtype:  # one sum of both
        total: list[torch.Tensor] = []
        got = yield Items(
            (packed,), arriving, sent, lambda: total.append(packed.new_zeros((shape[0], packed.shape[1])))
        )
        tokens, numbers = packing.views(total[0].index_add_(0, send, got.tensors[0]))
        return tokens.contiguous().view(shape), numbers.contiguous()
    sums: list[torch.Tensor] = []
    got = yield Items((packed,), arriving, sent, lambda: sums.extend(_zeros(shape, rows, (shape[0], choices), weights)))
    tokens, numbers = packing.views(got.tensors[0])
    of_x = sums[0].view(shape[0], tokens.shape[1]).index_add_(0, send, tokens.contiguous())  # with gaps it is slow
    return of_x.view(shape), sums[1].index_add_(0, send, numbers.contiguous())


def _zeros(shape: Sequence[int], like: torch.Tensor, other: Sequence[int], beside: torch.Tensor) -> list[torch.Tensor]:
    return [like.new_zeros(shape), beside.new_zeros(other)]


never_traced(SendTokens.forward, SendTokens.backward)
