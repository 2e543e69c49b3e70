"""Copies between blocks on one rank: matching boxes of two blocks, cutting a box out, inserting it.

Pure functions on plain tensors and specs, shared by the fabrics. Communicates nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.core.layout import Block, EqualChunks, dense_strides, intersect
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import norm_order
from shardwise.core.spec import DTensorSpec
from shardwise.core.symbolic import known_value, unrecorded
from shardwise.plan.step import (
    AllReduce,
    Compact,
    Expand,
    ReduceScatter,
    Rows,
    Slice,
    Step,
    Unreduce,
    average_over,
)
from shardwise.torch_private import dispatch_mode_count

__all__ = [
    "BoxPair", "ReceivedBoxes",
    "box_of", "choose_sender", "chunk_rows", "chunk_views", "local_step", "overlap", "received_boxes",
]  # fmt: skip

Local = Callable[[torch.Tensor], torch.Tensor]


class BoxPair(NamedTuple):
    """The same elements in two blocks: their position in the source's and in the target's."""

    source: tuple[slice, ...]
    target: tuple[slice, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class ReceivedBoxes(NamedTuple):
    """The boxes that a rank receives from another, and the other's grid position (or rank)."""

    sender: int
    boxes: tuple[BoxPair, ...]


def overlap(source: Block, target: Block) -> tuple[BoxPair, ...]:
    """The boxes of elements that both blocks hold."""
    if not all(target.shape) or not all(source.shape):
        return ()
    by_dim = []
    for a, b in zip(source.runs, target.runs, strict=True):
        common = intersect(a, b)
        if not common:
            return ()
        by_dim.append(common)
    return tuple([box_of(chosen) for chosen in itertools.product(*by_dim)])


def box_of(chosen: Sequence[tuple[int, int, int]]) -> BoxPair:
    """The box of the common indices in each dim: (position in the source, position in the target, length)."""
    source = tuple([slice(a, a + n) for a, _, n in chosen])
    target = tuple([slice(b, b + n) for _, b, n in chosen])
    return BoxPair(source, target, tuple([n for _, _, n in chosen]))


def received_boxes(target: Block, receiver: int, holders: Sequence[tuple[Block, Sequence[int]]]) -> list[ReceivedBoxes]:
    """The source of each part of `target`, given the distinct blocks and their holders.

    A receiver copies the parts that it holds itself; other parts come from their holders in turn.
    """
    pieces = []
    for block, who in holders:
        boxes = overlap(block, target)
        if boxes:
            pieces.append(ReceivedBoxes(choose_sender(receiver, who), boxes))
    return pieces


def choose_sender(receiver: int, holders: Sequence[int]) -> int:
    """The holder of a block that sends it to `receiver`: the receiver itself if it is one, else the holders in turn."""
    return receiver if receiver in holders else holders[receiver % len(holders)]


def distinct_blocks(spec: DTensorSpec, members: Sequence[int]) -> list[tuple[Block, list[int]]]:
    """The different blocks that the grid positions `members` hold, each with its holders."""
    coordinates = spec.mesh.coordinates
    sharding = sorted(axis for axes in spec.dim_axes for axis in axes)
    found: dict[Coordinate, tuple[Block, list[int]]] = {}
    for position in members:
        coordinate = coordinates[position].tolist()
        key = tuple(coordinate[a] for a in sharding)
        if key not in found:
            found[key] = (spec.block(coordinate), [])
        found[key][1].append(position)
    return list(found.values())


def fill_from(out: torch.Tensor, source: torch.Tensor, boxes: Sequence[BoxPair]) -> None:
    """Copy the boxes of `source` to their positions in `out`."""
    for box in boxes:
        out[box.target].copy_(source[box.source])


def chunk_views(tensor: torch.Tensor, dim: int, chunks: EqualChunks) -> torch.Tensor:
    """Equal chunks of `dim` of a tensor as one view, with a dim for each cut in front."""
    cuts = len(chunks.levels)
    for at, level in enumerate(chunks.levels, start=dim):
        taken = tensor.narrow(at, level.start, level.count * level.extent)
        tensor = taken.unflatten(at, (level.count, level.extent))
    tensor = tensor.narrow(dim + cuts, 0, chunks.length)
    return tensor.movedim(tuple(range(dim, dim + cuts)), tuple(range(cuts)))


def chunk_rows(grid: torch.Tensor, offset: int, shape: Sequence[int], chunks: EqualChunks) -> torch.Tensor:
    """Views of equal chunks in a buffer that has a row for each rank: from `offset` of the row on, as `shape`.

    Args:
        grid: the buffer, with a dim for each cut and one for the row.
        offset: where the chunk begins in its row.
        shape: as `chunk_views` gives it.
        chunks: which rows.
    """
    for at, level in enumerate(chunks.levels):
        grid = grid.narrow(at, level.first, level.count)
    return grid.narrow(-1, offset, math.prod(shape[len(chunks.levels) :])).view(tuple(shape))


def empty_block(spec: Rows, coordinate: Coordinate, like: torch.Tensor) -> torch.Tensor:
    """An uninitialised block of `spec`, its dims in memory as those of the global tensor."""
    shape, stride = spec.local_shape(coordinate), spec.local_stride(coordinate)
    return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)


# ---------------------------------------------------------------- steps without communication
# Each returns a copy: a view would keep the old block alive, and a write to one would change the other without autograd
# noticing.


def local_step(step: Step, coordinate: Coordinate) -> Local | None:
    """The function of the rank at `coordinate` for a step that needs no communication, None for any other step."""
    match step:
        case Slice(before=before, after=after) if before.mesh is not after.mesh:
            (position,) = (before.mesh.coordinates == np.array(coordinate)).all(axis=1).nonzero()[0].tolist()
            return slicer(before.block(coordinate), after.block(after.mesh.coordinates[position].tolist()))
        case Slice():
            return slicer(step.before.block(coordinate), step.after.block(coordinate))
        case Unreduce():
            return _unreducer(step, coordinate)
        case Compact():
            return functools.partial(compacted, dims=step.before.broadcast)
        case Expand():
            return _expander(step, coordinate)
        case _:
            return None


def slicer(before: Block, after: Block) -> Local:
    """Cuts the block `after` out of the block `before`, which contains it."""
    if before.runs == after.runs:
        return torch.clone
    cuts: list[tuple[int, list[tuple[int, int]]]] = []
    for dim, (have, want) in enumerate(zip(before.runs, after.runs, strict=True)):
        if have != want:
            parts = sorted((at_want, at_have, n) for at_have, at_want, n in intersect(have, want))
            cuts.append((dim, [(at_have, n) for _, at_have, n in parts] or [(0, 0)]))

    def cut(local: torch.Tensor) -> torch.Tensor:
        for dim, parts in cuts:
            if len(parts) == 1:
                local = _narrowed(local, dim, *parts[0])
            else:
                local = torch.cat([local.narrow(dim, at, n) for at, n in parts], dim)
        return local.clone()

    return cut


def compacted(local: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """One index of each of the broadcast `dims` of a local: a view."""
    if local.__class__ is torch.Tensor and not dispatch_mode_count():  # one view for all dims, not one for each
        shape = [*local.shape]
        for dim in dims:
            shape[dim] = min(shape[dim], 1)
        return local.as_strided(shape, local.stride())
    for dim in dims:
        local = torch.ops.aten.slice.Tensor(local, dim, 0, 1)
    return local


def _expander(step: Expand, coordinate: Coordinate) -> Local:
    shape, dims, still = step.after.local_shape(coordinate), step.dims, step.after.broadcast
    stored = tuple([1 if dim in still else size for dim, size in enumerate(shape)])
    stride = dense_strides(stored, like=step.after.tensor_meta.stride)

    def expand(local: torch.Tensor) -> torch.Tensor:
        part = compacted(local, dims)
        if not step.reads:
            part = torch.empty_strided(stored, stride, dtype=local.dtype, device=local.device).copy_(part)
        return part.expand(shape) if step.reads or still else part

    return expand


def _narrowed(local: torch.Tensor, dim: int, at: Any, n: Any) -> torch.Tensor:
    if at.__class__ is int and n.__class__ is int:
        return local.narrow(dim, at, n)
    with unrecorded():  # narrow adds the two; a tracer that has only a symbol for the sum must not see that
        end = known_value(at + n)
    return torch.ops.aten.slice.Tensor(local, dim, at, end)


def _unreducer(step: Unreduce, coordinate: Coordinate) -> Local:
    neutral = neutral_element(step, coordinate)
    return torch.clone if neutral is None else lambda local: torch.full_like(local, neutral)


def neutral_element(step: Unreduce, coordinate: Coordinate) -> float | None:
    """The local that replaces the value; None for the rank that keeps the value."""
    neutral = None
    for axis in step.new_axes:
        op = step.after.placements[axis].reduce_op  # pyright: ignore[reportAttributeAccessIssue]
        if coordinate[axis] != 0 and neutral is None:
            neutral = _adds_nothing(op)
    return neutral


def _adds_nothing(op: str) -> float | None:
    """The neutral local of the other ranks if one rank holds the value; None if every rank may hold it."""
    order = norm_order(op)
    if order is not None:
        return 0 if order > 0 else math.inf
    return {"sum": 0, "product": 1}.get(op)


# ---------------------------------------------------------------- reductions

_REDUCERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def reduce_tensors(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of equal-shaped tensors, in their order; sums of averages are divided by `divide_average`."""
    order = norm_order(op)
    if order is not None:
        return norm_from_powers(reduce_tensors([powers_of(t, order) for t in tensors], "sum"), order, tensors[0].dtype)
    # the average of truth values is rounded down, as that of integers: true where all are
    combine = torch.logical_and if op == "avg" and tensors[0].dtype is torch.bool else _REDUCERS[op]
    total = combine(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        total = combine(total, tensor)
    return total


def powers_of(norm: torch.Tensor, order: float) -> torch.Tensor:
    """The powers whose sum is reduced for a norm, in the precision of a norm on one device."""
    return (norm.float() if norm.dtype.itemsize < 4 else norm).pow(order)


def norm_from_powers(total: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm, from its sum of powers."""
    return (total.sqrt() if order == 2 else total.pow(1 / order)).to(dtype)


def divide_average(step: AllReduce | ReduceScatter, total: torch.Tensor) -> torch.Tensor:
    """A sum divided to the average of the step."""
    divide = average_divider(step)
    return total if divide is None else divide(total)


def average_divider(step: AllReduce | ReduceScatter) -> Local | None:
    """The function that divides a sum to the average of the step, in place; None if the step has no average."""
    count = average_over(step)
    if count == 1:
        return None

    def divide(total: torch.Tensor) -> torch.Tensor:
        if total.dtype is torch.bool:
            return total
        exact = total.is_floating_point() or total.is_complex()
        return total.div_(count) if exact else total.div_(count, rounding_mode="floor")

    return divide
