"""How tensors in safetensors files make up a tensor of the model: one to one, renamed, or fused.

Pure functions: from a layout to slices of the files' tensors with their place in a rank's local tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.checkpoint.partition.assembled_tensors import Assembled
from shardwise.checkpoint.partition.boxes import Box, boxes_of, full_box
from shardwise.core.layout import Cut, Run, runs_of
from shardwise.core.spec import DTensorSpec
from shardwise.errors import CheckpointError

__all__ = ["FileSlice", "Fused", "Source", "file_shapes", "file_slices", "source_of"]

Coordinate = tuple[int, ...]


class Fused(NamedTuple):
    """A tensor that is the concatenation of several tensors along `dim`: qkv, gate and up.

    Args:
        names: the tensors in the files, one for each part; or one name, if they are fused in the files as well.
        sizes: the sizes of the parts along `dim`; needed for one name, and to export.
        dim: the dim of the concatenation.
        by_parts: shard each part separately, so that q, k and v of a head are on one rank: a local tensor is the
            concatenation of the rank's shards of all parts. The tensor is sharded along `dim` by `Shard`, and the parts
            divide evenly. Otherwise the concatenation is sharded as its placements say (`StridedShard(dim, n)` also
            shards n equal parts separately).

    Example:
        >>> Fused(("q", "k", "v"), (8, 4, 4)).dim
        0
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    by_parts: bool = False


Source = str | Fused | Assembled


class FileSlice(NamedTuple):
    """A box of a tensor in the files, and its slices in a local tensor.

    `dims` are the dims of the files' tensor for those of the local one, where they differ; None for one of size 1.
    """

    name: str
    box: Box
    within: tuple[slice, ...]
    dims: tuple[int | None, ...] | None = None


def source_of(name: str, mapping: Mapping[str, Source] | None) -> Source:
    """The name or `Fused` description of a model's tensor in the files."""
    return (mapping or {}).get(name, name)


def file_shapes(name: str, shape: tuple[int, ...], source: Source) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the files' tensors that make up a tensor of the model."""
    if isinstance(source, str):
        return {source: shape}
    if isinstance(source, Assembled):
        return {part.name: part.shape for part in source.parts}
    names, sizes, dim, _ = source
    if not sizes or not 0 <= dim < len(shape) or sum(sizes) != shape[dim] or len(names) not in (1, len(sizes)):
        raise CheckpointError(
            f"{name} has the shape {shape}, which does not match {source}",
            hint="sizes along the dim must add up to the tensor's; give one name for each part, or one name for all",
        )
    if len(names) == 1:
        return {names[0]: shape}
    return {part: (*shape[:dim], size, *shape[dim + 1 :]) for part, size in zip(names, sizes, strict=True)}


def file_slices(
    name: str, shape: tuple[int, ...], source: Source, spec: DTensorSpec | None, coordinate: Coordinate
) -> list[FileSlice]:
    """The slices that make up the local tensor at `coordinate`; without a spec, the global tensor."""
    if spec is None:
        boxes = [(full_box(shape), full_box(shape).inside(full_box(shape)))] if full_box(shape).numel else []
    elif isinstance(source, Fused) and source.by_parts:
        boxes = _boxes_by_parts(name, source, spec, coordinate)
    else:
        boxes = boxes_of(spec.block(coordinate))
    if isinstance(source, str):
        return [FileSlice(source, box, within) for box, within in boxes]
    if isinstance(source, Assembled):
        return [piece for box, within in boxes for piece in _assembled(source, box, within)]
    return [piece for box, within in boxes for piece in _among_parts(source, box, within)]


def _boxes_by_parts(
    name: str, source: Fused, spec: DTensorSpec, coordinate: Coordinate
) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes, in the concatenated tensor, of a local tensor with a shard of each part."""
    dim, axes = source.dim, spec.dim_axes[source.dim]
    cuts = tuple(Cut(spec.mesh.shape[a], coordinate[a]) for a in axes)
    count = 1
    for axis in axes:
        count *= spec.mesh.shape[axis]
    if any(size % count for size in source.sizes) or any(spec.rows(axis) for axis in axes):
        raise CheckpointError(
            f"{name}: parts of sizes {source.sizes} cannot be sharded evenly over {count} ranks as {spec.layout}",
            hint="with by_parts, each size must be a multiple of the number of ranks, and the placements Shard",
        )
    starts = itertools.accumulate(source.sizes, initial=0)
    runs: list[Run] = []
    for start, size in zip(starts, source.sizes, strict=False):
        runs += [Run(start + run.start, run.length) for run in runs_of(size, cuts)]
    block = spec.block(coordinate)
    replaced = (*block.runs[:dim], tuple(runs), *block.runs[dim + 1 :])
    return boxes_of(block._replace(runs=replaced))


def _among_parts(source: Fused, box: Box, within: Sequence[slice]) -> list[FileSlice]:
    """Split a box of the concatenated tensor at the boundaries of its parts."""
    if len(source.names) == 1:
        return [FileSlice(source.names[0], box, tuple(within))]
    found: list[FileSlice] = []
    dim, start = source.dim, 0
    for name, size in zip(source.names, source.sizes, strict=True):
        low, high = max(box.offset[dim], start), min(box.offset[dim] + box.sizes[dim], start + size)
        if low < high:
            offset, sizes, place = list(box.offset), list(box.sizes), list(within)
            offset[dim], sizes[dim] = low - start, high - low
            first = within[dim].start + low - box.offset[dim]
            place[dim] = slice(first, first + high - low)
            found.append(FileSlice(name, Box(tuple(offset), tuple(sizes)), tuple(place)))
        start += size
    return found


def _assembled(source: Assembled, box: Box, within: Sequence[slice]) -> list[FileSlice]:
    """Split a box of an assembled tensor into those of its parts."""
    found: list[FileSlice] = []
    for part in source.parts:
        common = part.within(box)
        if common is not None:
            here, there = common
            starts = [at.start + low - first for at, low, first in zip(within, here.offset, box.offset, strict=True)]
            place = tuple([slice(start, start + size) for start, size in zip(starts, here.sizes, strict=True)])
            found.append(FileSlice(part.name, there, place, part.dims))
    return found
