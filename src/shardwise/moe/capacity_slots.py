"""dispatch with a capacity: every rank has as many slots for each expert, so all sizes are fixed.

Each rank fills slots `[experts, capacity]` with rows of its tokens. The slots of all ranks are one tensor `[experts,
ranks, capacity, ...]` with flattened rows, of which each rank has its part (`StridedShard`). The rows of experts are
this tensor in another layout (`Ragged`). So the exchange is a redistribution, and what works with these (compilers,
captured programs, derivatives of any order) works with a capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.compilers import traceable
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.base import device_of, fabric_of
from shardwise.moe.expert_ranks import ExpertRanks, expert_ranks
from shardwise.moe.token_maps import RowLayout, RowMap, as_dtensor, mapped, sorted_rows, summed, taken, weighted
from shardwise.tensor import dtensor_of, moved

__all__ = ["returned_rows", "slot_weights", "slotted_rows"]


@traceable
def slotted_rows(
    x: Any, ids: Any, experts: int, over: tuple[int, ...], axis: int, capacity: int
) -> tuple[Any, Any, Any, Any]:
    """Rows sorted by expert, the choice in each slot of each rank, and the ends and numbers of rows of each expert.

    Args:
        x: tokens, in any layout.
        ids: the experts of each token.
        experts: how many there are.
        over: the mesh axes that split the tokens.
        axis: the one of the experts.
        capacity: the slots of each rank and expert.
    """
    mesh, choices, capacity = x._spec.mesh, int(ids.shape[1]), int(capacity)  # in a compiled program maybe symbols
    ranks = expert_ranks(mesh, over, axis, int(experts))
    slots, counts = _filled(ranks, moved(ids, ranks.by_token(ids.shape[0], (choices,)).of(ids._spec)), capacity)
    own = mapped(x, Pick(ranks, slots, x.shape[0], choices))
    return _to_experts(ranks, own), slots, _ends(ranks, capacity), counts


@traceable
def returned_rows(outputs: Any, slots: Any, weights: Any, experts: int, axis: int, shape: tuple[int, int]) -> Any:
    """For each token the sum of what its experts made, times the weights of its choices; `shape` is that of these."""
    ranks, tokens, choices = _ranks_of(slots, experts, axis), shape[0], int(shape[1])
    own = _from_experts(ranks, outputs)
    if weights is not None and choices > 1:
        given = as_dtensor(weights, ranks.mesh)
        own = weighted(own, mapped(given, Pick(ranks, slots, tokens, choices, by_choice=True)))
    y = mapped(own, Pick(ranks, slots, tokens, choices), transposed=True)
    return y if weights is None or choices > 1 else weighted(y, as_dtensor(weights, ranks.mesh))


@traceable
def slot_weights(weights: Any, slots: Any, experts: int, axis: int) -> Any:
    """A number for each row of the experts, of one for each choice."""
    ranks = _ranks_of(slots, experts, axis)
    given = as_dtensor(weights, ranks.mesh)
    pick = Pick(ranks, slots, given.shape[0], int(given.shape[1]), by_choice=True)
    return _to_experts(ranks, mapped(given, pick))


def _ranks_of(slots: Any, experts: int, axis: int) -> ExpertRanks:
    spec: DTensorSpec = slots._spec
    return expert_ranks(spec.mesh, spec.dim_axes[0], axis, int(experts))


def _filled(ranks: ExpertRanks, ids: Any, capacity: int) -> tuple[Any, Any]:
    """For each rank and expert the first choices, and how many there were. The number of all marks an empty slot."""
    fabric, mesh, size = fabric_of(ranks.mesh), ranks.mesh, ranks.experts * capacity

    def fill(_: Coordinate, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        wrong = ((flat < 0) | (flat >= ranks.experts)).any()
        torch.ops.aten._assert_async.msg(~wrong, f"expert_ids: experts are 0 to {ranks.experts - 1}")
        expert, order, bounds = sorted_rows(flat.clamp(0, ranks.experts - 1), ranks.experts)
        turn = torch.arange(len(order), device=order.device) - bounds[expert]
        slot = torch.where(turn < capacity, expert * capacity + turn, size)
        rows = torch.full((size + 1,), len(order), device=order.device).scatter_(0, slot, order)[:size]
        return torch.cat([rows, bounds.diff()])

    found = fabric.map(mesh, fill, ids._local_tensor)
    slots = fabric.map(mesh, lambda _, both: both[:size], found)
    counts = fabric.map(mesh, lambda _, both: both[size:], found)
    whole = DTensorSpec(mesh, [Replicate()] * mesh.ndim, TensorMeta((size * ranks.members,), dtype=torch.int64))
    return dtensor_of(_by_slot(ranks, size).of(whole), slots), dtensor_of(ranks.counts_specs[True], counts)


def _by_slot(ranks: ExpertRanks, size: int, rest: tuple[int, ...] | None = None) -> RowLayout:
    """How the slots of all ranks lie, `size` on each: in the order of the experts, then of the ranks."""
    split = StridedShard(0, ranks.experts) if ranks.experts > 1 else Shard(0)
    return RowLayout(size * ranks.members, ranks.over, tuple([split for _ in ranks.over]), rest)


def _ends(ranks: ExpertRanks, capacity: int) -> Any:
    """The ends of the experts' rows."""
    mesh, each = ranks.mesh, ranks.members * capacity
    fabric = fabric_of(mesh)
    device = device_of(mesh) if fabric.has_values else "meta"

    def ends(at: Coordinate) -> torch.Tensor:
        own = ranks.owned(at)
        return torch.arange(own.start + 1, own.stop + 1, dtype=torch.int32, device=device) * each

    return dtensor_of(ranks.ends_spec, fabric.build(mesh, ends))


def _to_experts(ranks: ExpertRanks, own: Any) -> Any:
    """Rows in the order of the experts, each rank's own in its slots: those of experts on their ranks."""
    each = own.shape[0] // ranks.experts
    return moved(own, ranks.layout([size * each for size in ranks.sizes]).of(own._spec))


def _from_experts(ranks: ExpertRanks, rows: Any) -> Any:
    """The inverse."""
    return moved(rows, _by_slot(ranks, rows.shape[0] // ranks.members).of(rows._spec))


# ---------------------------------------------------------------- from tokens to slots, on each rank


@dataclass(eq=False)
class Pick(RowMap):
    """Tokens to the slots of each rank.

    Args:
        ranks: who has which experts.
        slots: the choice in each slot.
        tokens: the number of tokens.
        choices: the number of experts of each.
        by_choice: of numbers for each choice, `[T, k]`; otherwise of tokens.
    """

    ranks: ExpertRanks
    slots: Any
    tokens: int
    choices: int
    by_choice: bool = False

    def layouts(self, spec: DTensorSpec, transposed: bool) -> tuple[DTensorSpec, DTensorSpec]:
        """The layout that a tensor is moved to first, and the one of the result."""
        of_token, of_slot = ((self.choices,), ()) if self.by_choice else (None, None)
        size = self.slots.shape[0] // self.ranks.members
        ends = [self.ranks.by_token(self.tokens, of_token), _by_slot(self.ranks, size, of_slot)]
        start, end = reversed(ends) if transposed else ends
        before = start.of(spec)
        return before, end.of(before)

    def run(self, tensor: Any, after: DTensorSpec, transposed: bool) -> Any:
        """Tokens to slots; transposed, the sums of slots for each token. Each rank does it alone."""
        mesh, choices = after.mesh, 1 if self.by_choice else self.choices

        def pick(at: Coordinate, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            index = slots if choices == 1 else slots.div(choices, rounding_mode="floor")
            shape = after.local_shape(at)
            if transposed:
                count = math.prod(shape) if self.by_choice else shape[0]
                return summed(rows, index, count, padded=True).view(shape)
            return taken(rows.reshape(-1) if self.by_choice else rows, index, padded=True)

        return dtensor_of(after, fabric_of(mesh).map(mesh, pick, tensor._local_tensor, self.slots._local_tensor))
