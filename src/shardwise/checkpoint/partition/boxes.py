"""Boxes of a global tensor: from layouts, intersections, overlap checks, byte ranges. Integer arithmetic only."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.core.layout import Block, Run, chunk
from shardwise.core.spec import DTensorSpec

__all__ = [
    "Box",
    "ByteRuns",
    "HeldBox",
    "block_holders",
    "boxes_of",
    "byte_runs",
    "full_box",
    "held_boxes",
    "intersection",
    "overlapping",
    "split_box",
]


class Box(NamedTuple):
    """Consecutive indices in each dim of a global tensor: offset and sizes."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The slices of this box in a tensor with the elements of `outer`."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple([slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True)])


class HeldBox(NamedTuple):
    """A box, its slices in the local tensor, and the ranks that hold it."""

    box: Box
    within: tuple[slice, ...]
    ranks: tuple[int, ...]


class ByteRuns(NamedTuple):
    """Byte runs of equal length at equal distances: run i starts at `start + i * pitch`."""

    start: int
    number: int
    pitch: int
    length: int


def full_box(shape: Sequence[int]) -> Box:
    """The box of all elements of a shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, None if it is empty.

    Example:
        >>> intersection(Box((0, 0), (4, 4)), Box((2, 1), (4, 2)))
        Box(offset=(2, 1), sizes=(2, 2))
    """
    low = tuple(map(max, a.offset, b.offset))
    ends = [min(i + m, j + n) for i, m, j, n in zip(a.offset, a.sizes, b.offset, b.sizes, strict=True)]
    sizes = tuple([end - start for start, end in zip(low, ends, strict=True)])
    return Box(low, sizes) if min(sizes, default=1) > 0 else None


def split_box(box: Box, parts: int) -> list[Box]:
    """Split a box into at most `parts` boxes of similar size, along its first dim longer than one.

    Example:
        >>> [part.sizes for part in split_box(Box((0, 0, 0), (1, 5, 2)), 2)]
        [(1, 3, 2), (1, 2, 2)]
    """
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or parts < 2:
        return [box]
    pieces = [chunk(box.sizes[dim], parts, index) for index in range(parts)]
    return [_narrowed(box, dim, piece) for piece in pieces if piece.length]


def _narrowed(box: Box, dim: int, run: Run) -> Box:
    offset, sizes = list(box.offset), list(box.sizes)
    offset[dim], sizes[dim] = offset[dim] + run.start, run.length
    return Box(tuple(offset), tuple(sizes))


# ---------------------------------------------------------------- of layouts


def boxes_of(block: Block) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of a rank's block (several if it is strided), each with its slices in the local tensor."""
    if not all(block.shape):
        return []
    placed: list[list[tuple[Run, int]]] = []
    for runs in block.runs:
        starts = itertools.accumulate((run.length for run in runs), initial=0)
        placed.append(list(zip(runs, starts, strict=False)))
    found = []
    for chosen in itertools.product(*placed):
        box = Box(tuple([run.start for run, _ in chosen]), tuple([run.length for run, _ in chosen]))
        found.append((box, tuple([slice(at, at + run.length) for run, at in chosen])))
    return found


def block_holders(spec: DTensorSpec) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each distinct block of a layout: one coordinate that holds it, and all ranks that hold it.

    On a slice of a mesh, all slices are assumed to have the same values.
    """
    mesh = spec.mesh
    sharding = sorted(axis for axes in spec.dim_axes for axis in axes)
    found: dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]] = {}
    for rank, coordinate in zip(mesh.grid_ranks, mesh.coordinates.tolist(), strict=True):
        key = tuple([coordinate[axis] for axis in sharding])
        found.setdefault(key, (tuple(coordinate), []))[1].append(rank)
    return [(coordinate, tuple(ranks)) for coordinate, ranks in found.values()]


@functools.lru_cache(maxsize=4096)
def held_boxes(spec: DTensorSpec) -> tuple[HeldBox, ...]:
    """Every box of a tensor of this layout, with the ranks that hold it."""
    return tuple(
        [
            HeldBox(box, within, ranks)
            for coordinate, ranks in block_holders(spec)
            for box, within in boxes_of(spec.block(coordinate))
        ]
    )


# ---------------------------------------------------------------- checks


def overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes that overlap, None if no two overlap.

    Example:
        >>> overlapping([Box((0,), (2,)), Box((4,), (2,)), Box((1,), (2,))])
        (0, 2)
    """
    full = [i for i, box in enumerate(boxes) if box.numel]
    if len(full) < 2:
        return None
    ndim = len(boxes[0].sizes)
    if ndim == 0:
        return full[0], full[1]
    # sweep along the dim with the most different offsets, so that few boxes are open at a time
    dim = max(range(ndim), key=lambda d: len({boxes[i].offset[d] for i in full}))
    still_open: list[int] = []
    for i in sorted(full, key=lambda i: boxes[i].offset[dim]):
        start = boxes[i].offset[dim]
        still_open = [j for j in still_open if boxes[j].offset[dim] + boxes[j].sizes[dim] > start]
        for j in still_open:
            if intersection(boxes[i], boxes[j]) is not None:
                return min(i, j), max(i, j)
        still_open.append(i)
    return None


# ---------------------------------------------------------------- byte runs


def byte_runs(sizes: Sequence[int], part: Sequence[slice], itemsize: int) -> Iterator[ByteRuns]:
    """The byte runs of a part of a dense row-major tensor of these sizes, in the order of the part's elements.

    Example:
        >>> list(byte_runs((4, 6), (slice(1, 3), slice(0, 6)), 4))
        [ByteRuns(start=24, number=1, pitch=48, length=48)]
        >>> list(byte_runs((4, 6), (slice(1, 3), slice(2, 4)), 4))
        [ByteRuns(start=32, number=2, pitch=24, length=8)]
    """
    strides = [itemsize] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    counts = [piece.stop - piece.start for piece in part]
    start = sum(piece.start * stride for piece, stride in zip(part, strides, strict=True))
    inner = len(sizes)  # dims from here on are contiguous
    length = itemsize
    while inner and length == strides[inner - 1]:
        inner -= 1
        length *= counts[inner]
        if counts[inner] != sizes[inner]:
            break
    if inner == 0:
        yield ByteRuns(start, 1, length, length)
        return
    for index in itertools.product(*[range(n) for n in counts[: inner - 1]]):
        at = start + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield ByteRuns(at, counts[inner - 1], strides[inner - 1], length)
