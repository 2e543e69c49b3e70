"""Views that regroup dims: view, reshape, flatten, unflatten, on sharded, uneven and strided dims.

A dim's index is a number in mixed radix, and an even split is one of its digits. A view regroups digits: a split
goes to the dim of its digit, as a `Shard` if the digit is the leading one there and as a `StridedShard` if not. The
blocks of a `Zigzag` are a digit too; if they are uneven, its rows must not change. The sizes of a `Ragged` first dim
are counted in elements of the first dim after the view, if possible. If a digit crosses dims, the only split of a group
is moved to one that does not. Other layouts are gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import AnyShard, Owned, Placement, Ragged, Replicate, Shard, StridedShard, Zigzag
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.registry import Call, layout_rule

aten = torch.ops.aten


class Digit(NamedTuple):
    """One split of a group of dims. `prefix` is the product of the radices of all more significant digits.

    For a zigzag the radix counts blocks, and `end` is the product of the sizes up to the end of its dim.
    """

    axis: int
    radix: int
    prefix: int
    end: int | None = None


# For each dim the axes that split it, major first, each with the rows of a strided split or 0.
Splits = list[list[tuple[int, int]]]


class DimGroup(NamedTuple):
    """Neighbouring dims of input and output that hold the same elements; dims of size one belong to none."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def groups_of(before: Sequence[int], after: Sequence[int]) -> list[DimGroup]:
    """The smallest groups of dims with equal products.

    Example:
        >>> groups_of((2, 3, 4), (6, 1, 2, 2))
        [DimGroup(inputs=(0, 1), outputs=(0,)), DimGroup(inputs=(2,), outputs=(2, 3))]
    """
    ins = [d for d, size in enumerate(before) if size != 1]
    outs = [d for d, size in enumerate(after) if size != 1]
    groups = []
    i = j = 0
    while i < len(ins) and j < len(outs):
        first_i, first_j = i, j
        left, right = before[ins[i]], after[outs[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= before[ins[i]]
                i += 1
            else:
                right *= after[outs[j]]
                j += 1
        groups.append(DimGroup(tuple(ins[first_i:i]), tuple(outs[first_j:j])))
    return groups


def _digits(spec: DTensorSpec, dims: Sequence[int], axes: Sequence[Sequence[int]]) -> Iterator[Digit | None]:
    """The digits of the splits of a group, dim by dim, axis by axis; None for a split that is not even."""
    outer = 1
    for dim in dims:
        left, prefix = spec.shape[dim], outer
        for axis in axes[dim]:
            n, rows = spec.mesh.shape[axis], spec.rows(axis) or 1
            if n == 1:
                yield Digit(axis, 1, prefix)
                continue
            blocks = spec.division(axis).blocks
            if left % (rows * n if blocks is None else rows):
                yield None
                return
            end = None if blocks is None else outer * spec.shape[dim]
            yield Digit(axis, n if blocks is None else len(blocks), prefix * rows, end)
            if (rows > 1 or blocks) and axis != axes[dim][-1]:  # later splits have no digit then
                yield None
                return
            left, prefix = left // n, prefix * n
        outer *= spec.shape[dim]


def _place(digits: Sequence[Digit], sizes: Sequence[int]) -> list[list[tuple[int, int]]] | int:
    """For each output size its splits (axis, rows), major first; or the axis of a digit that fits into no dim."""
    placed: list[list[tuple[int, int]]] = [[] for _ in sizes]
    taken = [1] * len(sizes)
    zigzags: set[int] = set()
    for digit in sorted(digits, key=lambda d: d.prefix):
        before = 1
        for at, size in enumerate(sizes):
            if digit.prefix < before * size or (digit.radix == 1 and at == len(sizes) - 1):
                break
            before *= size
        else:
            return digit.axis
        through = digit.prefix * digit.radix
        even = (before * size) % through == 0 and (digit.end is None or digit.end % through == 0)
        if digit.prefix % before or at in zigzags or not (even or digit.end == before * size):
            return digit.axis
        within = digit.prefix // before
        if within % taken[at]:
            return digit.axis
        rows = within // taken[at]
        placed[at].append((digit.axis, 0 if rows == 1 else rows))
        taken[at] *= digit.radix
        if digit.end is not None:
            zigzags.add(at)
    return placed


def map_group(
    spec: DTensorSpec, group: DimGroup, after: Sequence[int], axes: Sequence[Sequence[int]]
) -> list[list[tuple[int, int]]] | int:
    """The splits of a group after the view; or the axis of one that must be gathered."""
    split = [dim for dim in group.inputs if axes[dim]]
    if not split:
        return [[] for _ in group.outputs]
    if len(group.inputs) == len(group.outputs) == 1:
        return [[(axis, spec.rows(axis) or 0) for axis in axes[group.inputs[0]]]]
    only = split[0] if len(split) == 1 and len(axes[split[0]]) == 1 else None
    for axis in (axis for dim in split for axis in axes[dim]):
        if isinstance(placement := spec.placements[axis], Ragged | Owned):
            fits = only is not None and _fits_as_given(placement, spec, group, after)
            return [[(axis, 1)], *([] for _ in group.outputs[1:])] if fits else axis
    if only is not None:
        uneven = _uneven(spec, group, after, only, axes[only][0])
        if uneven is not None:
            return uneven
    digits = list(_digits(spec, group.inputs, axes))
    if None in digits:
        return [axis for dim in group.inputs for axis in axes[dim]][digits.index(None)]
    return _place([d for d in digits if d is not None], [after[dim] for dim in group.outputs])


def _fits_as_given(placement: Ragged | Owned, spec: DTensorSpec, group: DimGroup, after: Sequence[int]) -> bool:
    """Whether the first dim after the view can be split at the same elements as the only split of the group."""
    if isinstance(placement, Owned):
        return True
    sizes = [size * after[group.outputs[0]] for size in placement.sizes]
    return placement.dim == group.inputs[0] and not any(size % spec.shape[placement.dim] for size in sizes)


def _same_parts(spec: DTensorSpec, group: DimGroup, after: Sequence[int], axis: int) -> bool:
    """Whether the first dims of a group, before and after, are cut at the same elements."""
    n, total = spec.mesh.shape[axis], math.prod(spec.shape[d] for d in group.inputs)
    sizes = spec.shape[group.inputs[0]], after[group.outputs[0]]
    before, later = (math.ceil(size / n) * (total // size) for size in sizes)
    return before == later


def _uneven(
    spec: DTensorSpec, group: DimGroup, after: Sequence[int], dim: int, axis: int
) -> list[list[tuple[int, int]]] | None:
    """The splits after the view of an uneven single split; None if it cannot be kept.

    A split of the last dim splits each row alike, before and after the view. A split of the first dim is kept if the
    first dim after the view is cut at the same elements.
    """
    if dim == group.inputs[0] and not spec.rows(axis) and _same_parts(spec, group, after, axis):
        return [[(axis, 0)], *([] for _ in group.outputs[1:])]
    if dim != group.inputs[-1]:
        return None
    rows = math.prod(spec.shape[d] for d in group.inputs[:-1]) * (spec.rows(axis) or 1)
    if spec.shape[dim] % (spec.rows(axis) or 1):
        return None
    row_length = math.prod(spec.shape[d] for d in group.inputs) // rows
    placed: list[list[tuple[int, int]]] = [[] for _ in group.outputs]
    last = after[group.outputs[-1]]
    if last % row_length:
        return None
    inner = last // row_length
    placed[-1].append((axis, 0 if inner == 1 else inner))
    return placed


def _moved_split(spec: DTensorSpec, group: DimGroup, after: Sequence[int], axis: int) -> list[Splits] | None:
    """Even splits by one axis before and after the view, for an axis whose current split fits no dim.

    The major dims after the view are tried first. Ranks exchange their shards, which is cheaper than an all-gather.
    """
    n, prefix = spec.mesh.shape[axis], 1
    for size in (after[dim] for dim in group.outputs):
        digit = [Digit(axis, n, prefix)]
        found = [_place(digit, [sizes[d] for d in dims]) for dims, sizes in
                 ((group.inputs, spec.shape), (group.outputs, after))]  # fmt: skip
        if not any(isinstance(splits, int) for splits in found):
            return found  # pyright: ignore[reportReturnType]
        prefix *= size
    return None


def _splits_of(spec: DTensorSpec) -> Splits:
    """The splits (axis, rows) of each dim of a tensor."""
    return [[(axis, spec.rows(axis) or 0) for axis in axes] for axes in spec.dim_axes]


def regroup(spec: DTensorSpec, after: Sequence[int]) -> tuple[Splits, Splits]:
    """The splits (axis, rows) of each input dim that the view needs, and those of each output dim."""
    axes = [list(dim_axes) for dim_axes in spec.dim_axes]
    if tuple(after) == tuple(spec.shape):
        same = _splits_of(spec)
        return same, same
    if 0 in spec.shape:
        return [[] for _ in axes], [[] for _ in after]
    placed: Splits = [[] for _ in after]
    moved: dict[int, list[tuple[int, int]]] = {}
    for dim, size in enumerate(spec.shape):
        if size == 1:
            axes[dim] = []
    for group in groups_of(spec.shape, after):
        while True:
            found = map_group(spec, group, after, axes)
            if not isinstance(found, int):
                break
            alone = [found] == [axis for dim in group.inputs for axis in axes[dim]]
            if alone and not isinstance(spec.placements[found], Zigzag):
                both = _moved_split(spec, group, after, found)
                if both is not None:
                    moved.update(zip(group.inputs, both[0], strict=True))
                    found = both[1]
                    break
            for dim in group.inputs:
                if found in axes[dim]:
                    del axes[dim][axes[dim].index(found) :]
        for dim, splits in zip(group.outputs, found, strict=True):
            placed[dim] = splits
    needed = [moved.get(dim, [(a, spec.rows(a) or 0) for a in dim_axes]) for dim, dim_axes in enumerate(axes)]
    return needed, placed


def _with_rows(spec: DTensorSpec, axis: int, dim: int, rows: int, size: int) -> Placement:
    """The split of an axis on a dim of this size: of the result, or of the operand as the view needs it.

    One row is a split as given (`Ragged`, `Owned`) where the axis has one; several rows are an even split of each.
    """
    placement = spec.placements[axis]
    if isinstance(placement, Zigzag):
        return Zigzag(dim, placement.blocks, rows or 1)
    if rows == 1 and isinstance(placement, Ragged):
        return Ragged(dim, [part * size // spec.shape[placement.dim] for part in placement.sizes], placement.blocks)
    if rows == 1 and isinstance(placement, Owned):
        return placement.on_dim(dim)
    return StridedShard(dim, rows) if rows else Shard(dim)


def _with_splits(spec: DTensorSpec, meta: TensorMeta, splits: Splits) -> DTensorSpec:
    """A tensor on the mesh of `spec`, Partial where it is, with these axes splitting its dims."""
    placements: list[Placement] = [Replicate() if isinstance(p, AnyShard) else p for p in spec.placements]
    for dim, found in enumerate(splits):
        for axis, rows in found:
            placements[axis] = _with_rows(spec, axis, dim, rows, meta.shape[dim])
    order = [tuple(axis for axis, _ in found) for found in splits]
    return DTensorSpec.from_dim_axes(spec.mesh, tuple(placements), meta, order)


def viewed_freely(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec | None:
    """The layout of a view without communication; None if the view needs some."""
    needed, placed = regroup(spec, meta.shape)
    if needed != _splits_of(spec):
        return None
    return _with_splits(spec, meta, placed)


def local_size(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The size argument on the rank at `coordinate`: the shape of its block of the result."""
    return {"size": list(outputs[0].local_shape(coordinate))}


NOT_A_VIEW = (RuntimeError, ValueError)  # raised if the memory allows no view; the latter by fake tensors


def view_or_copy(local: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A view of the local if its memory allows one, else a copy."""
    try:
        return aten.view.default(local, size)
    except NOT_A_VIEW:
        return local.reshape(size)


@layout_rule(aten.view.default, aten._unsafe_view.default, localize=local_size, local_op=view_or_copy)
def view(call: Call, specs: Sequence[DTensorSpec]) -> tuple[tuple[DTensorSpec, ...], tuple[DTensorSpec, ...]]:
    """The layouts of the operand and the result of a view."""
    spec, result = specs[0], call.results[0]
    needed, placed = regroup(spec, result.shape)
    wanted = spec if needed == _splits_of(spec) else _with_splits(spec, spec.tensor_meta, needed)
    return (wanted,), (_with_splits(spec, result, placed),)
