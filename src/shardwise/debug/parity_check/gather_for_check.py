"""Gathers a DTensor without the routes under test: every rank sends its local tensor to all ranks.

Slow, but independent of the planner and the collectives. Also finds replicas that differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.core.placement import Partial
from shardwise.core.spec import DTensorSpec
from shardwise.debug.parity_check.rounding import is_inexact, same, widened
from shardwise.fabric.base import fabric_of
from shardwise.fabric.block_copies import reduce_tensors
from shardwise.fabric.rank_tensor import RankTensor
from shardwise.tensor import DTensor

__all__ = ["GatheredTensor", "gather_for_check", "local_block", "local_parts"]

Coordinate = tuple[int, ...]
Part = tuple[Coordinate, torch.Tensor]


class GatheredTensor(NamedTuple):
    """The global tensor, and facts about its parts."""

    value: torch.Tensor  # of slices of a virtual mesh, each rank's own
    differing: tuple[Coordinate, ...]  # ranks whose replica of a block differs from the first rank's
    largest: float  # the largest magnitude on any rank: a Partial may be a small sum of large addends


def local_parts(tensor: DTensor) -> list[Part]:
    """The local tensors of the ranks in this process, with their coordinates."""
    mesh = tensor._spec.mesh
    return fabric_of(mesh).parts(mesh, tensor._local_tensor)


def gather_for_check(tensor: DTensor) -> GatheredTensor:
    """The global tensor, assembled from all local tensors. On a slice of a virtual mesh, one for each slice."""
    spec, parts = tensor._spec, local_parts(tensor)
    mesh = spec.mesh
    if fabric_of(mesh).many_ranks:
        rows = mesh.groups(tuple(range(mesh.ndim))).tolist()
        gathered = [_assembled(spec, [parts[position] for position in row]) for row in rows]
        if len(gathered) == 1:
            return gathered[0]
        by_position = {position: one.value for row, one in zip(rows, gathered, strict=True) for position in row}
        differing = tuple(coordinate for one in gathered for coordinate in one.differing)
        largest = max(one.largest for one in gathered)
        return GatheredTensor(RankTensor([by_position[i] for i in range(mesh.grid_size)]), differing, largest)
    device = tensor._local_tensor.device
    mine = [(coordinate, part.detach().cpu()) for coordinate, part in parts]
    received = fabric_of(mesh).agree(mesh, mine, tensor._local_tensor)
    gathered = _assembled(spec, [part for of_rank in received for part in of_rank])
    return GatheredTensor(gathered.value.to(device), gathered.differing, gathered.largest)


def _assembled(spec: DTensorSpec, parts: Sequence[Part]) -> GatheredTensor:
    blocks: dict[Coordinate, dict[Coordinate, torch.Tensor]] = {}
    differing: list[Coordinate] = []
    split = [axis for axes in spec.dim_axes for axis in axes]
    for coordinate, part in parts:
        place = tuple(coordinate[axis] for axis in split)
        addend = tuple(coordinate[axis] for axis in spec.partial_axes)
        known = blocks.setdefault(place, {}).setdefault(addend, part)
        if not same(known, part):
            differing.append(coordinate)
    first = parts[0][1] if parts else torch.empty(0, dtype=spec.tensor_meta.dtype)
    value = torch.empty_strided(spec.shape, spec.tensor_meta.dense().stride, dtype=first.dtype, device=first.device)
    for place, addends in blocks.items():
        coordinate = [0] * spec.mesh.ndim
        for axis, index in zip(split, place, strict=True):
            coordinate[axis] = index
        _put(value, _reduced(spec, list(addends.values())), spec, tuple(coordinate))
    largest = max([float(part.abs().amax()) for _, part in parts if part.numel() and is_inexact(part)], default=0.0)
    return GatheredTensor(value, tuple(differing), largest)


def _reduced(spec: DTensorSpec, addends: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduced value of Partial addends, rounded once."""
    if len(addends) == 1:
        return addends[0]
    placements = [spec.placements[axis] for axis in spec.partial_axes]
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    op = ops.pop() if len(ops) == 1 else "sum"
    wide = [widened(addend) for addend in addends] if is_inexact(addends[0]) else list(addends)
    total = reduce_tensors(wide, op)
    count = math.prod([spec.mesh.shape[a] for a in spec.partial_axes if spec.placements[a].is_partial("avg")])
    if count > 1 and total.dtype is not torch.bool:
        total = total / count if is_inexact(total) else torch.div(total, count, rounding_mode="floor")
    return total.to(addends[0].dtype)


def _put(full: torch.Tensor, part: torch.Tensor, spec: DTensorSpec, coordinate: Coordinate) -> None:
    index = [
        torch.cat([torch.arange(run.start, run.start + run.length) for run in runs]).to(full.device)
        for runs in spec.block(coordinate).runs
    ]
    if not index:
        full.copy_(part)
    elif part.numel():
        full[torch.meshgrid(*index, indexing="ij")] = part


def local_block(full: torch.Tensor, spec: DTensorSpec, coordinate: Coordinate) -> torch.Tensor:
    """The block of a global tensor that belongs to the rank at `coordinate`."""
    for dim, runs in enumerate(spec.block(coordinate).runs):
        parts = [full.narrow(dim, min(run.start, spec.shape[dim]), run.length) for run in runs]
        full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return full
