"""What is done around a collective on process groups: how a local is packed for it, and what comes back unpacked.

Pure functions on plain tensors and specs: the same whether the collective is issued now or recorded in a graph. Sizes
may be symbolic where ranks hold equally much. Communicates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.core.layout import Block, dense_strides
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.pieces import Box, fill_from, overlap
from shardwise.fabric.traffic import Traffic
from shardwise.plan.step import AllGather, AllToAll, Exchange, ReduceScatter

__all__ = [
    "Gathering", "Line", "Parcels", "Scattering", "gathering", "parcels", "scattering", "split_in_front", "swapping",
]  # fmt: skip


class Line(NamedTuple):
    """The ranks that differ from this one along some axes of a mesh alone, by coordinate, the first axis major."""

    ranks: list[int]
    coordinates: list[Coordinate]
    order: list[int]  # the rank of each in the group
    in_order: bool  # whether that is the order of the coordinates
    group_ranks: list[int]  # the same ranks as the group has them
    group_coordinates: tuple[Coordinate, ...]


# ---------------------------------------------------------------- all-gather


class Gathering(NamedTuple):
    """How the parts of an all-gather are put together: each is `part` large, those that are shorter are padded."""

    part: list[int]
    pad: Callable[[torch.Tensor], torch.Tensor]
    assemble: Callable[[torch.Tensor], torch.Tensor]  # of a tensor of all parts, in the order of the group
    as_it_comes: bool  # whether the parts one after the other are the result
    shape: tuple[int, ...]


def gathering(step: AllGather, line: Line, coordinate: Coordinate) -> Gathering:
    """How `step` goes for the rank at `coordinate`."""
    order, dim, n = line.order, step.dim, len(line.ranks)
    goal = step.after.block(coordinate)
    even = line.in_order and _divides(step.before, dim)
    blocks = [] if even else [step.before.block(other) for other in line.coordinates]
    in_order = even or (line.in_order and _follow_each_other(blocks, goal, dim))
    sizes = [block.shape[dim] for block in blocks]
    part = list(step.before.local_shape(coordinate))
    if not even:
        part[dim] = max(sizes)
    widest = part[dim]

    def pad(local: torch.Tensor) -> torch.Tensor:
        return (_padded(local, dim, widest) if not even and local.shape[dim] < widest else local).contiguous()

    def assemble(parts: torch.Tensor) -> torch.Tensor:
        if even:
            return parts.movedim(0, dim).reshape(goal.shape)
        pieces = [parts[order[i]].narrow(dim, 0, sizes[i]) for i in range(n)]
        if in_order:
            return torch.cat(pieces, dim)
        out = parts.new_empty(goal.shape)
        for block, piece in zip(blocks, pieces, strict=True):
            fill_from(out, piece, overlap(block, goal))
        return out

    return Gathering(part, pad, assemble, even and dim == 0, goal.shape)


# ---------------------------------------------------------------- reduce-scatter


class Scattering(NamedTuple):
    """How a local is packed for a reduce-scatter, each rank's part `part` large, and one's own is taken out of it."""

    part: list[int]
    pack: Callable[[torch.Tensor], torch.Tensor]
    own: Callable[[torch.Tensor], torch.Tensor]


def scattering(step: ReduceScatter, line: Line, coordinate: Coordinate) -> Scattering:
    """How `step` goes for the rank at `coordinate`."""
    order, dim, n = line.order, step.dim, len(line.ranks)
    even = line.in_order and _divides(step.after, dim)
    blocks = [] if even else [step.after.block(other) for other in line.coordinates]
    source = step.before.block(coordinate)
    boxes = [overlap(source, block) for block in blocks]
    mine = step.after.local_shape(coordinate)[dim]
    widest = mine if even else max([block.shape[dim] for block in blocks])
    part = list(source.shape)
    part[dim] = widest

    def pack(local: torch.Tensor) -> torch.Tensor:
        if even:
            return split_in_front(local, dim, n)
        packed = local.new_zeros((n, *part))
        for i, parts in enumerate(boxes):
            fill_from(packed[order[i]], local, parts)
        return packed

    def own(total: torch.Tensor) -> torch.Tensor:
        return total if even or mine == widest else total.narrow(dim, 0, mine).clone()

    return Scattering(part, pack, own)


# ---------------------------------------------------------------- all-to-all


def swapping(step: AllToAll, line: Line, coordinate: Coordinate) -> list[int] | None:
    """The shape of the result where all parts are of one size, in order and row-major; None where they are not."""
    n, source_dim, target_dim = len(line.ranks), step.source_dim, step.target_dim
    alike = _divides(step.before, source_dim) and _divides(step.after, target_dim)
    row_major = step.after.tensor_meta.stride == dense_strides(step.after.shape)
    if not alike or not row_major or not line.in_order:
        return None
    shape = list(step.before.local_shape(coordinate))
    shape[target_dim] //= n
    return [size * n if dim == source_dim else size for dim, size in enumerate(shape)]


class Parts(NamedTuple):
    """A flat buffer in parts: the box that each is, None for elements that nobody wants, and how long each is."""

    boxes: list[Box | None]
    lengths: list[int]


def _parts(boxes: Sequence[Sequence[Box]], sizes: Sequence[int]) -> Parts:
    """The parts of a buffer in which the ranks have places of `sizes`."""
    made = Parts([], [])
    for of_rank, size in zip(boxes, sizes, strict=True):
        made.boxes.extend(of_rank or [None])
        made.lengths.extend([box.numel for box in of_rank] or [size])
    return made


class Parcels(NamedTuple):
    """One all-to-all with uneven splits: how many elements go to each rank and come from each, and as which boxes."""

    sent_sizes: list[int]
    got_sizes: list[int]
    sends: Parts
    receives: Parts
    keeps: list[Box]
    shape: tuple[int, ...] | None  # of the result; None on a rank outside the mesh that it goes to
    stride: tuple[int, ...] | None

    def unpack(self, local: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The result, of what this rank keeps and what it got.

        It is made of the buffer even where nothing was got, so that a compiler sees that it comes from this collective.
        """
        if self.shape is None or self.stride is None:
            return buffer.new_empty(0)
        if 0 in self.shape:
            return buffer.narrow(0, 0, 0).view(self.shape)
        out = buffer.new_empty_strided(self.shape, self.stride)
        fill_from(out, local, self.keeps)
        for box, part in zip(self.receives.boxes, buffer.split_with_sizes(self.receives.lengths), strict=True):
            if box is not None:
                out[box.target].copy_(part.view(box.shape))
        return out


def parcels(step: Exchange, me: int, moved: Traffic, want: Coordinate | None) -> Parcels:
    """What the rank that is the `me`-th of those that take part sends and gets."""
    sent_sizes = [sum([box.numel for box in boxes]) for boxes in moved.sends]
    got_sizes = [sum([box.numel for box in boxes]) for boxes in moved.receives]
    if any(got_sizes) != any(sent_sizes):
        # torch's fake backend takes no empty input, and its compiler leaves a call out on a rank where the result is
        # empty, for which the others would wait; so one element goes from this rank to itself
        sent_sizes[me] = got_sizes[me] = 1
    sends, receives = _parts(moved.sends, sent_sizes), _parts(moved.receives, got_sizes)
    shape = None if want is None else step.after.local_shape(want)
    stride = None if want is None else step.after.local_stride(want)
    return Parcels(sent_sizes, got_sizes, sends, receives, moved.keeps, shape, stride)


# ---------------------------------------------------------------- sizes


def _divides(spec: DTensorSpec, dim: int) -> bool:
    """Whether all ranks hold runs of one length of `dim`."""
    axes = spec.dim_axes[dim]
    if spec.is_strided and any(spec.rows(axis) for axis in axes):
        return False
    return spec.shape[dim] % math.prod([spec.mesh.shape[axis] for axis in axes]) == 0


def _follow_each_other(blocks: Sequence[Block], whole: Block, dim: int) -> bool:
    """Whether in `dim` the blocks, one after the other, are `whole`; strided ones need not be."""
    runs = [run for block in blocks for run in block.runs[dim] if run.length]
    ends = [run.start + run.length for run in runs]
    return len(whole.runs[dim]) == 1 and all(run.start == end for run, end in zip(runs[1:], ends, strict=False))


def split_in_front(local: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """`local` as a dense row of `parts`, into which `dim` is split evenly."""
    shape = local.shape
    split = local.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    return split.movedim(dim, 0).contiguous()


def _padded(local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = size
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return padded
