"""How a model's tensor is made of tensors in safetensors files: as it is, under another name, or of several fused ones.

Pure: from a layout to pieces, each a box of a file's tensor and where it lies in a rank's local.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.checkpoint.boxes import Box, boxes_of, whole
from shardwise.core.layout import Cut, Run, runs_of
from shardwise.core.spec import DTensorSpec
from shardwise.errors import CheckpointError

__all__ = ["Fused", "Piece", "Source", "file_shapes", "pieces_of", "source_of"]

Coordinate = tuple[int, ...]


class Fused(NamedTuple):
    """A tensor that is several ones in a row along `dim`: qkv, gate and up.

    Args:
        names: the tensors in the files, one for each part; or one name, if the files have them fused as well.
        sizes: the sizes of the parts along `dim`; needed for one name, and to export.
        dim: the dim along which they follow each other.
        by_parts: each rank holds its share of every part, one after another, so that a head's q, k and v are on one
            rank. The tensor is sharded along `dim` by `Shard`, and the parts divide evenly. Otherwise the tensor is
            the parts in a row, laid out as its placements say (`StridedShard(dim, n)` deals n equal parts so too).

    Example:
        >>> Fused(("q", "k", "v"), (8, 4, 4)).dim
        0
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    by_parts: bool = False


Source = str | Fused


class Piece(NamedTuple):
    """A box of a tensor in the files, and where it lies in a local."""

    name: str
    box: Box
    within: tuple[slice, ...]


def source_of(name: str, mapping: Mapping[str, Source] | None) -> Source:
    """What the files have for a tensor of the model."""
    return (mapping or {}).get(name, name)


def file_shapes(name: str, shape: tuple[int, ...], source: Source) -> dict[str, tuple[int, ...]]:
    """The tensors in the files that a tensor of the model is made of, with their shapes."""
    if isinstance(source, str):
        return {source: shape}
    names, sizes, dim, _ = source
    if not sizes or not 0 <= dim < len(shape) or sum(sizes) != shape[dim] or len(names) not in (1, len(sizes)):
        raise CheckpointError(
            f"{name} has the shape {shape}, which {source} does not make up",
            hint="give the size of each part along the dim; they add up to the tensor's; one name for each, or for all",
        )
    if len(names) == 1:
        return {names[0]: shape}
    return {part: (*shape[:dim], size, *shape[dim + 1 :]) for part, size in zip(names, sizes, strict=True)}


def pieces_of(
    name: str, shape: tuple[int, ...], source: Source, spec: DTensorSpec | None, coordinate: Coordinate
) -> list[Piece]:
    """What the local of the rank at `coordinate` is made of; without a spec, all of the tensor."""
    if spec is None:
        boxes = [(whole(shape), whole(shape).inside(whole(shape)))] if whole(shape).numel else []
    elif isinstance(source, Fused) and source.by_parts:
        boxes = _boxes_by_parts(name, source, spec, coordinate)
    else:
        boxes = boxes_of(spec.block(coordinate))
    if isinstance(source, str):
        return [Piece(source, box, within) for box, within in boxes]
    return [piece for box, within in boxes for piece in _among_parts(source, box, within)]


def _boxes_by_parts(
    name: str, source: Fused, spec: DTensorSpec, coordinate: Coordinate
) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes, in the tensor that is the parts in a row, of a local that is a share of each part."""
    dim, axes = source.dim, spec.dim_axes[source.dim]
    cuts = tuple(Cut(spec.mesh.shape[a], coordinate[a]) for a in axes)
    count = 1
    for axis in axes:
        count *= spec.mesh.shape[axis]
    if any(size % count for size in source.sizes) or any(spec.rows(axis) for axis in axes):
        raise CheckpointError(
            f"{name}: parts of sizes {source.sizes} cannot be dealt to {count} ranks evenly, as {spec.layout}",
            hint="parts that are sharded one by one divide by the number of ranks, on axes that are Shard",
        )
    starts = itertools.accumulate(source.sizes, initial=0)
    runs: list[Run] = []
    for start, size in zip(starts, source.sizes, strict=False):
        runs += [Run(start + run.start, run.length) for run in runs_of(size, cuts)]
    block = spec.block(coordinate)
    replaced = (*block.runs[:dim], tuple(runs), *block.runs[dim + 1 :])
    return boxes_of(block._replace(runs=replaced))


def _among_parts(source: Fused, box: Box, within: Sequence[slice]) -> list[Piece]:
    """A box of the parts in a row, cut where one part ends and the next begins."""
    if len(source.names) == 1:
        return [Piece(source.names[0], box, tuple(within))]
    found: list[Piece] = []
    dim, start = source.dim, 0
    for name, size in zip(source.names, source.sizes, strict=True):
        low, high = max(box.offset[dim], start), min(box.offset[dim] + box.sizes[dim], start + size)
        if low < high:
            offset, sizes, place = list(box.offset), list(box.sizes), list(within)
            offset[dim], sizes[dim] = low - start, high - low
            first = within[dim].start + low - box.offset[dim]
            place[dim] = slice(first, first + high - low)
            found.append(Piece(name, Box(tuple(offset), tuple(sizes)), tuple(place)))
        start += size
    return found
