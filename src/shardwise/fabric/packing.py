"""Packing and unpacking around a collective on process groups.

Pure functions on plain tensors and specs: the same whether the collective is issued now or recorded in a graph. Sizes
may be symbolic if all ranks have equal shards. Communicates nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.core.layout import Block, dense_strides, equal_chunks
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.core.symbolic import specialized
from shardwise.fabric.block_copies import chunk_rows, chunk_views, overlap
from shardwise.fabric.exchange_plan import Boxes, Traffic
from shardwise.plan.step import AllGather, AllToAll, Exchange, ReduceScatter

__all__ = [
    "Gathering", "Line", "Parcels", "Scattering", "Strip", "gathering", "offsets_of", "pack", "pack_traced",
    "parcels", "scattering", "sizes_by_rank", "split_in_front", "strips_alone", "strips_of", "swapping",
]  # fmt: skip


class Line(NamedTuple):
    """The ranks that differ from this one only along some mesh axes, by coordinate, the first axis major."""

    ranks: list[int]
    coordinates: np.ndarray  # a row each
    order: list[int]  # the rank of each in the group
    in_order: bool  # whether that is the order of the coordinates
    group_ranks: list[int]  # the same ranks as the group has them
    group_coordinates: np.ndarray


# ---------------------------------------------------------------- all-gather


class Gathering(NamedTuple):
    """How the parts of an all-gather are concatenated: each has the size `part`, shorter ones are padded."""

    part: list[int]
    pad: Callable[[torch.Tensor], torch.Tensor]
    assemble: Callable[[torch.Tensor], torch.Tensor]  # of a tensor of all parts, in the order of the group
    as_it_comes: bool  # whether the parts one after the other are the result
    shape: tuple[int, ...]


def gathering(step: AllGather, line: Line, coordinate: Coordinate) -> Gathering:
    """The packing of `step` for the rank at `coordinate`."""
    dim, goal = step.dim, step.after.block(coordinate)
    if line.in_order and _divides(step.before, dim):
        return Gathering(
            list(step.before.local_shape(coordinate)),
            torch.Tensor.contiguous,
            lambda parts: parts.movedim(0, dim).reshape(goal.shape).contiguous(),  # not a view of the parts
            dim == 0,
            goal.shape,
        )
    rows = _rows(step.before, step.axes, dim, line, goal)
    size = rows.size

    def pad(local: torch.Tensor) -> torch.Tensor:
        flat = local.reshape(-1)
        return flat.contiguous() if flat.shape[0] == size else _padded(flat, size)

    def assemble(parts: torch.Tensor) -> torch.Tensor:
        out = parts.new_empty(goal.shape)
        for row, view in rows.pairs(parts, out):
            view.copy_(row)
        return out

    return Gathering([size], pad, assemble, False, goal.shape)


# ---------------------------------------------------------------- reduce-scatter


class Scattering(NamedTuple):
    """How a local is packed for a reduce-scatter into parts of the size `part`, and how the own part is unpacked."""

    part: list[int]
    pack: Callable[[torch.Tensor], torch.Tensor]
    own: Callable[[torch.Tensor], torch.Tensor]


def scattering(step: ReduceScatter, line: Line, coordinate: Coordinate) -> Scattering:
    """The packing of `step` for the rank at `coordinate`."""
    dim, n = step.dim, len(line.ranks)
    source, mine = step.before.block(coordinate), step.after.local_shape(coordinate)
    if line.in_order and _divides(step.after, dim):
        part = list(source.shape)
        part[dim] = mine[dim]
        return Scattering(part, lambda local: split_in_front(local, dim, n), lambda total: total)
    rows = _rows(step.after, step.axes, dim, line, source)

    def pack(local: torch.Tensor) -> torch.Tensor:
        packed = local.new_zeros((n, rows.size))
        for row, view in rows.pairs(packed, local):
            row.copy_(view)
        return packed

    def own(total: torch.Tensor) -> torch.Tensor:
        held = math.prod(mine)
        return (total if held == rows.size else total.narrow(0, 0, held).clone()).view(mine)

    return Scattering([rows.size], pack, own)


# ---------------------------------------------------------------- uneven blocks in the rows of a buffer

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class PaddedRows(NamedTuple):
    """A row for each rank of a line, as long as the largest block, with the rank's block of a tensor at its start."""

    size: int
    pairs: Callable[[torch.Tensor, torch.Tensor], Pairs]  # of a buffer and the tensor: views of equal elements


def _rows(spec: DTensorSpec, axes: Sequence[int], dim: int, line: Line, gathered: Block) -> PaddedRows:
    """The rows of the blocks of `spec` into which `axes`, the most minor ones of `dim`, split the block `gathered`."""
    if not line.in_order or any(spec.rows(axis) for axis in spec.dim_axes[dim]):
        return _rows_of_blocks(spec, line, gathered)
    (size,) = specialized((gathered.shape[dim],))
    parts = [spec.mesh.shape[axis] for axis in axes]
    kinds = equal_chunks(size, parts)
    others = math.prod([n for i, n in enumerate(gathered.shape) if i != dim])

    def pairs(buffer: torch.Tensor, tensor: torch.Tensor) -> Pairs:
        grid = buffer.view(*parts, -1)
        found: Pairs = []
        for chunks in kinds:
            view = chunk_views(tensor, dim, chunks)
            found.append((chunk_rows(grid, 0, view.shape, chunks), view))
        return found

    return PaddedRows(max(kinds, key=lambda kind: kind.length).length * others, pairs)


def _rows_of_blocks(spec: DTensorSpec, line: Line, gathered: Block) -> PaddedRows:
    """The same rank by rank, where blocks are strided or ranks are not in the order of their coordinates."""
    blocks = [spec.block(coordinate) for coordinate in line.coordinates.tolist()]
    local = [block.shape for block in blocks]
    boxes = [overlap(block, gathered) for block in blocks]

    def pairs(buffer: torch.Tensor, tensor: torch.Tensor) -> Pairs:
        return [
            (buffer[line.order[i]].narrow(0, 0, math.prod(local[i])).view(local[i])[box.source], tensor[box.target])
            for i, of_rank in enumerate(boxes)
            for box in of_rank
        ]

    return PaddedRows(max(map(math.prod, local)), pairs)


# ---------------------------------------------------------------- all-to-all


def swapping(step: AllToAll, line: Line, coordinate: Coordinate) -> list[int] | None:
    """The shape of the result if all parts are of one size, in order and row-major; else None."""
    n, source_dim, target_dim = len(line.ranks), step.source_dim, step.target_dim
    alike = _divides(step.before, source_dim) and _divides(step.after, target_dim)
    row_major = step.after.tensor_meta.stride == dense_strides(step.after.shape)
    if not alike or not row_major or not line.in_order:
        return None
    shape = list(step.before.local_shape(coordinate))
    shape[target_dim] //= n
    return [size * n if dim == source_dim else size for dim, size in enumerate(shape)]


class Strip(NamedTuple):
    """Adjacent boxes of one shape in a block, stored densely one after the other in a flat buffer."""

    offset: int  # of the first in the buffer
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.count is not used
    start: tuple[int, ...]  # of the first in the block
    shape: tuple[int, ...]  # of each
    dim: int  # along which they follow each other

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return self.count * math.prod(self.shape)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The boxes, one below the other."""
        return buffer.narrow(0, self.offset, self.size).view(self.count, *self.shape)

    def in_block(self, block: torch.Tensor) -> torch.Tensor:
        """The same elements as a view of the block."""
        for dim, (at, size) in enumerate(zip(self.start, self.shape, strict=True)):
            block = block.narrow(dim, at, size * self.count if dim == self.dim else size)
        if self.count == 1:
            return block.unsqueeze(0)
        return block.unflatten(self.dim, (self.count, self.shape[self.dim])).movedim(self.dim, 0)


def strips_of(boxes: Boxes, offsets: np.ndarray) -> list[Strip]:
    """The boxes that begin at these offsets of a buffer, as few strips."""
    if not len(offsets):
        return []
    ours, shape, sizes = boxes.ours, boxes.shape, boxes.sizes
    step = np.diff(ours, axis=0)
    alike = (shape[1:] == shape[:-1]).all(axis=1) & (np.diff(offsets) == sizes[:-1])
    link = np.full(len(step), -1)  # the dim along which the next box follows
    for dim in range(shape.shape[1]):
        along = np.zeros_like(shape[:-1])
        along[:, dim] = shape[:-1, dim]
        link[alike & (step == along).all(axis=1)] = dim
    changes = [*(np.flatnonzero(np.diff(link)) + 1).tolist(), len(link)]
    found, at = [], 0
    while at < len(offsets):
        last = changes[bisect.bisect_right(changes, at)] if at < len(link) and link[at] >= 0 else at
        found.append(
            Strip(
                int(offsets[at]),
                last - at + 1,
                tuple(ours[at].tolist()),
                tuple(shape[at].tolist()),
                int(link[at]) if last > at else -1,
            )
        )
        at = last + 1
    return found


def pack(parts: Sequence[tuple[int, torch.Tensor]], buffer: torch.Tensor) -> torch.Tensor:
    """Tensors copied to these offsets of a flat buffer."""
    for offset, part in parts:
        buffer.narrow(0, offset, part.numel()).view(part.shape).copy_(part)
    return buffer


def pack_traced(
    parts: Sequence[tuple[int, torch.Tensor]], local: torch.Tensor, size: int, tag: int = 0
) -> torch.Tensor:
    """The same as one `cat`, with `tag` in unused elements.

    The sent buffer must depend on the local even if the rank sends none of it: a compiler splits a graph into forward
    and backward by dependencies, and the split must be the same on all ranks.
    """
    found, filled = [local.reshape(-1)[:0]], 0
    for offset, part in (*parts, (size, None)):
        if offset > filled:
            gap = torch.full((offset - filled,), float(tag), dtype=torch.float64, device=local.device)
            found.append(gap.to(local.dtype))
        if part is not None:
            found.append(part.reshape(-1))
            filled = offset + part.numel()
    return torch.cat(found)


class Parcels(NamedTuple):
    """One all-to-all with uneven splits: elements sent to and received from each rank, and their boxes."""

    sent_sizes: list[int]
    got_sizes: list[int]
    sends: list[Strip]
    receives: list[Strip]
    keeps: list[tuple[Strip, Strip]]  # in the old block and in the new one
    shape: tuple[int, ...] | None  # of the result; None on a rank outside the mesh that it goes to
    stride: tuple[int, ...] | None

    def splits(self, scale: int) -> tuple[list[int], list[int]]:
        """Received and sent elements by rank, if an element is carried as `scale`."""
        return [n * scale for n in self.got_sizes], [n * scale for n in self.sent_sizes]

    def packed(self, local: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The sent parts of the local, each with its offset in the buffer."""
        return [(strip.offset, strip.in_block(local)) for strip in self.sends]

    def buffer(self, local: torch.Tensor) -> torch.Tensor:
        """What is sent."""
        return pack(self.packed(local), local.new_empty(sum(self.sent_sizes)))

    def unpack(self, local: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The result, from the boxes that this rank keeps and those it received.

        It depends on the buffer even if nothing was received, so that a compiler sees that it comes from this
        collective.
        """
        if self.shape is None or self.stride is None:
            return buffer.new_empty(0)
        if 0 in self.shape:
            return buffer.narrow(0, 0, 0).view(self.shape)
        out = buffer.new_empty_strided(self.shape, self.stride)
        for old, new in self.keeps:
            new.in_block(out).copy_(old.in_block(local))
        for strip in self.receives:
            strip.in_block(out).copy_(strip.in_buffer(buffer))
        return out


def parcels(step: Exchange, ranks: int, me: int, moved: Traffic, want: Coordinate | None) -> Parcels:
    """The sent and received boxes of the `me`-th of the `ranks` that take part."""
    sent_sizes, got_sizes = (sizes_by_rank([boxes], ranks) for boxes in (moved.sends, moved.receives))
    if got_sizes.any() != sent_sizes.any():
        # torch's fake backend rejects empty inputs, and its compiler removes a call whose result is empty on this rank,
        # while the others would wait for it; so this rank sends one element to itself
        sent_sizes[me] = got_sizes[me] = 1
    alone = [strips_alone(boxes) for boxes in (moved.kept_from, moved.kept_to)]
    return Parcels(
        sent_sizes.tolist(),
        got_sizes.tolist(),
        strips_of(moved.sends, offsets_of(moved.sends.which, moved.sends.sizes, sent_sizes)),
        strips_of(moved.receives, offsets_of(moved.receives.which, moved.receives.sizes, got_sizes)),
        list(zip(*alone, strict=True)),
        None if want is None else step.after.local_shape(want),
        None if want is None else step.after.local_stride(want),
    )


def sizes_by_rank(several: Sequence[Boxes], ranks: int) -> np.ndarray:
    """The number of elements in the boxes of each rank."""
    sizes = np.zeros(ranks, dtype=np.int64)
    for boxes in several:
        np.add.at(sizes, boxes.which, boxes.sizes)
    return sizes


def offsets_of(which: np.ndarray, box_sizes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The offset of each box in a buffer whose parts have `sizes`, one for each rank; boxes are in rank order."""
    before = np.cumsum(box_sizes) - box_sizes  # of all boxes before it, those of its own rank included
    first = np.searchsorted(which, which)  # the first box of the same rank
    return (np.cumsum(sizes) - sizes)[which] + before - before[first]


def strips_alone(boxes: Boxes) -> list[Strip]:
    """A strip for each box, of blocks that need no buffer."""
    each = zip(boxes.ours.tolist(), boxes.shape.tolist(), strict=True)
    return [Strip(0, 1, tuple(start), tuple(shape), -1) for start, shape in each]


# ---------------------------------------------------------------- sizes


def _divides(spec: DTensorSpec, dim: int) -> bool:
    """Whether all ranks hold runs of one length of `dim`."""
    axes = spec.dim_axes[dim]
    if spec.is_strided and any(spec.rows(axis) for axis in axes):
        return False
    return spec.shape[dim] % math.prod([spec.mesh.shape[axis] for axis in axes]) == 0


def split_in_front(local: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """`local` as a dense row of `parts`, into which `dim` is split evenly."""
    shape = local.shape
    split = local.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    return split.movedim(dim, 0).contiguous()


def _padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    padded = flat.new_zeros(size)
    padded.narrow(0, 0, flat.shape[0]).copy_(flat)
    return padded
