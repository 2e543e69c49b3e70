"""Who has which experts: the mesh axis of the experts, the axes that split the tokens, and layouts that follow.

Kept from call to call: nothing here depends on which experts were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Partial, Placement, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.moe.token_maps import RowLayout, member_of

__all__ = ["ExpertRanks", "expert_ranks", "expert_sizes"]

MAX_MESHES = 64
FEW_EXPERTS = 2**14  # differences of such numbers, and their sign, fit in 16 bits


def expert_sizes(experts: int, ranks: int) -> tuple[int, ...]:
    """How many experts each rank has, as `torch.chunk` divides them.

    Example:
        >>> expert_sizes(6, 4)
        (2, 2, 2, 0)
    """
    chunk = -(-experts // ranks)
    return tuple([max(0, min(chunk, experts - rank * chunk)) for rank in range(ranks)])


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Who has which experts: the axis that they are sharded over, and the axes along which ranks exchange tokens.

    `over` are the axes that split the tokens, in their order; the axis of the experts is one of them. The rows of a
    rank's experts are split again over the others.
    """

    mesh: DeviceMesh
    over: tuple[int, ...]
    axis: int
    experts: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of experts of each rank along the axis."""
        return expert_sizes(self.experts, self.mesh.shape[self.axis])

    @cached_property
    def minors(self) -> tuple[int, ...]:
        """The other axes that split rows."""
        return tuple([axis for axis in self.over if axis != self.axis])

    @cached_property
    def members(self) -> int:
        """The number of ranks that exchange."""
        return math.prod(self.mesh.shape[axis] for axis in self.over)

    @cached_property
    def chunk(self) -> int:
        """The number of experts of a rank that has all it can have."""
        return -(-self.experts // self.mesh.shape[self.axis])

    @cached_property
    def number_dtype(self) -> torch.dtype:
        """Of the numbers of experts that go with tokens."""
        return torch.int16 if self.experts <= FEW_EXPERTS else torch.int32

    def by_token(self, tokens: int, rest: tuple[int, ...] | None = None) -> RowLayout:
        """How tokens lie before they are sent, or numbers for each of them."""
        kept = tokens.__class__ is int  # a symbol belongs to one graph
        found = self._by_token.get((tokens, rest)) if kept else None
        if found is None:
            found = RowLayout(tokens, self.over, tuple([Shard(0) for _ in self.over]), rest)
            if kept:
                self._by_token.keep_recent((tokens, rest), found)
        return found

    @cached_property
    def _by_token(self) -> BoundedCache[tuple[Any, ...], RowLayout]:
        return BoundedCache(MAX_MESHES)

    def source(self, spec: DTensorSpec, rest: tuple[int, ...] | None = None) -> DTensorSpec:
        """The layout that tokens of this one are exchanged from, or numbers for each token."""
        return self.by_token(spec.shape[0], rest).of(spec)

    def layout(self, per_rank: Sequence[int]) -> RowLayout:
        """How rows lie that are sorted by expert, so many for the experts of each rank along the axis."""
        splits = (Ragged(0, per_rank), *[Shard(0) for _ in self.minors])
        return RowLayout(sum(per_rank), (self.axis, *self.minors), splits)

    def member(self, at: Coordinate) -> int:
        """The number of the rank at a coordinate among those that exchange."""
        return member_of(self.mesh, self.over, at)

    @cached_property
    def first_experts(self) -> np.ndarray:
        """The first expert of each rank along the axis, and their number."""
        return np.cumsum((0, *self.sizes))

    def owned(self, at: Coordinate) -> slice:
        """The experts of a rank."""
        first, last = self.first_experts[at[self.axis] : at[self.axis] + 2].tolist()
        return slice(first, last)

    def sorted(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The order of rows by expert, and where the rows of each expert begin, their end, and the number of all.

        An id below 0 comes before the first expert, one that is too large after the last.
        """
        expert, order = torch.sort(flat, stable=True)
        return order, torch.searchsorted(expert, self._edges(flat), right=True, out_int32=True)

    def _edges(self, flat: torch.Tensor) -> torch.Tensor:
        """The largest id before each expert, the last expert, and the largest number."""
        key = (flat.dtype, flat.device)
        found = self._kept_edges.get(key)
        if found is None or flat.__class__ is not torch.Tensor:
            numbers = [*range(-1, self.experts), torch.iinfo(flat.dtype).max]
            found = torch.tensor(numbers, dtype=flat.dtype, device=flat.device)
            if flat.__class__ is torch.Tensor:
                self._kept_edges[key] = found
        return found

    @cached_property
    def _kept_edges(self) -> dict[Any, torch.Tensor]:
        return {}

    def numbers(self, like: torch.Tensor) -> torch.Tensor:
        """The number of each member, `[members, 1, 1]`, in the dtype of a tensor and beside it."""
        key = (like.dtype, like.device, "members")
        found = self._kept_edges.get(key)
        if found is None or like.__class__ is not torch.Tensor:
            found = torch.arange(self.members, dtype=like.dtype, device=like.device).view(-1, 1, 1)
            if like.__class__ is torch.Tensor:
                self._kept_edges[key] = found
        return found

    @cached_property
    def ends_spec(self) -> DTensorSpec:
        """The layout of the ends of the experts' rows."""
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        placements[self.axis] = Ragged(0, self.sizes)
        return DTensorSpec(self.mesh, placements, TensorMeta((self.experts,), dtype=torch.int32))

    @cached_property
    def counts_specs(self) -> tuple[DTensorSpec, DTensorSpec]:
        """The layouts of the numbers of choices: of all tokens, and of each rank's."""
        meta = TensorMeta((self.experts,), dtype=torch.int64)
        partial: list[Placement] = [Partial() if axis in self.over else Replicate() for axis in range(self.mesh.ndim)]
        return (
            DTensorSpec(self.mesh, [Replicate()] * self.mesh.ndim, meta),
            DTensorSpec(self.mesh, partial, meta),
        )

    def length(self, per_rank: Sequence[int], at: Coordinate) -> int:
        """The rows of one rank."""
        if not self.minors:
            return per_rank[at[self.axis]]
        return int(self.blocks(torch.tensor(per_rank))[1][self.member(at)])

    def blocks(self, per_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of each member begin, and how many they are."""
        shape = [self.mesh.shape[axis] for axis in self.over]
        numbers = torch.arange(self.members, device=per_rank.device)
        at = dict(zip(self.over, torch.unravel_index(numbers, shape), strict=True))
        start, size = (per_rank.cumsum(0) - per_rank)[at[self.axis]], per_rank[at[self.axis]]
        for axis in self.minors:
            parts = self.mesh.shape[axis]
            chunk = (size + (parts - 1)).div(parts, rounding_mode="floor")
            begin = torch.minimum(at[axis] * chunk, size)
            start, size = start + begin, torch.minimum(chunk, size - begin)
        return start, size


_ranks: BoundedCache[tuple[Any, ...], ExpertRanks] = BoundedCache(MAX_MESHES)


def expert_ranks(mesh: DeviceMesh, over: tuple[int, ...], axis: int, experts: int) -> ExpertRanks:
    """Who has which experts, kept for the next call."""
    key = (mesh, over, axis, experts)
    return _ranks.get(key) or _ranks.keep(key, ExpertRanks(*key))
