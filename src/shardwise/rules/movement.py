"""Operators that only move elements: permute, transpose, squeeze, expand, split, flip, repeat, ...

Every unchanged dim is a factor. If the indices of a sharded dim change, ranks exchange rows, or the dim must not be
sharded. Any Partial passes, also if zeros are inserted: these are the sum, the mean, the extremum and the product of
zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import Run, Segment
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.errors import UnsupportedError
from shardwise.rules.dims import kept, moved, names, wrapped
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, Rows, rule
from shardwise.rules.slicing import local_input_sizes
from shardwise.rules.view import NOT_A_VIEW, local_size
from shardwise.torch_private import OpOverload

aten = torch.ops.aten


@rule(aten.permute.default, aten.permute_copy.default)
def permute(call: Call) -> Factors:
    """Dims in another order."""
    own = names(len(call["self"].shape))
    return moved(own, [own[d] for d in call["dims"]])


@rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(call: Call) -> Factors:
    """Two dims change places."""
    own = names(len(call["self"].shape))
    result = list(own)
    if own:
        a, b = wrapped(call["dim0"], len(own)), wrapped(call["dim1"], len(own))
        result[a], result[b] = result[b], result[a]
    return moved(own, result)


@rule(aten.t.default, aten.t_copy.default)
def t(call: Call) -> Factors:
    """The transpose of a matrix."""
    own = names(len(call["self"].shape))
    return moved(own, own[::-1])


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(call: Call) -> Factors:
    """A new dim of size one."""
    own = names(len(call["self"].shape))
    at = wrapped(call["dim"], len(own) + 1)
    return moved(own, [*own[:at], None, *own[at:]])


@rule(aten.expand.default, localize=local_size)
def expand(call: Call) -> Factors:
    """Dims of size one repeated, new dims in front."""
    shape, result = call["self"].shape, call.results[0].shape
    new = len(result) - len(shape)
    own: list[Dim] = [f"d{i}" if size == result[new + i] else None for i, size in enumerate(shape)]
    return moved(own, [None] * new + own)


def squeezed(call: Call) -> list[int]:
    """The dims that a squeeze removes."""
    shape = call["self"].shape
    dims = call.get("dim")
    if dims is None:
        return [d for d, size in enumerate(shape) if size == 1]
    chosen = [dims] if isinstance(dims, int) else dims
    return [d for d in {wrapped(d, len(shape)) for d in chosen} if shape and shape[d] == 1]


def local_squeeze(local: torch.Tensor, dim: Sequence[int] = ()) -> torch.Tensor:
    """Squeeze the dims that the global tensor loses: a shard may have size one in others."""
    return aten.squeeze.dims(local, list(dim))


def squeezed_dims(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The dims that are squeezed, named."""
    return {"dim": squeezed(call)}


def squeeze(call: Call) -> Factors:
    """Dims of size one removed; they must not be sharded."""
    gone = squeezed(call)
    own: list[Dim] = [None if d in gone else f"d{d}" for d in range(len(call["self"].shape))]
    return moved(own, [name for d, name in enumerate(own) if d not in gone])


rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, localize=squeezed_dims, local_op=local_squeeze)(squeeze)


# ---------------------------------------------------------------- the same elements, other dtypes or memory


@rule(
    aten.clone.default, aten.detach.default, aten.alias.default, aten.lift.default, aten.lift_fresh.default,
    aten.alias_copy.default, aten.detach_copy.default, aten.lift_fresh_copy.default, aten._lazy_clone.default,
)  # fmt: skip
def same(call: Call) -> Factors:
    """The same tensor again."""
    own = names(len(call["self"].shape))
    return moved(own, own)


@rule(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(call: Call) -> Factors:
    """A new last dim of real and imaginary parts."""
    own = names(len(call["self"].shape))
    return moved(own, [*own, None])


def or_of_a_copy(op: OpOverload) -> Callable[..., Any]:
    """A view that needs a contiguous last dim; a view of a copy if the local has none."""

    def view_or_copy(local: torch.Tensor, *args: Any) -> torch.Tensor:
        try:
            return op(local, *args)
        except NOT_A_VIEW:
            return op(local.contiguous(), *args)

    return view_or_copy


@rule(aten.view_as_complex.default, local_op=or_of_a_copy(aten.view_as_complex.default))
@rule(aten.view_as_complex_copy.default)
def view_as_complex(call: Call) -> Factors:
    """The last dim is real and imaginary parts and must not be sharded. Sums pass, extrema do not."""
    own = names(len(call["self"].shape) - 1)
    return Factors(((*own, None),), (tuple(own),), linear=((0,),), keeps_zero=True)


@rule(aten.view.dtype, local_op=or_of_a_copy(aten.view.dtype))
@rule(aten.view_copy.dtype)
def view_dtype(call: Call) -> Factors:
    """The bits read as another dtype. A dim whose size changes must not be sharded; zero is zero in all dtypes."""
    before, after = call["self"].shape, call.results[0].shape
    own: list[Dim] = [f"d{d}" if size == after[d] else None for d, size in enumerate(before)]
    return Factors((tuple(own),), (tuple(own),), keeps_zero=torch.bool not in (m.dtype for m in call.results))


# ---------------------------------------------------------------- dims whose indices change


def exchanging(own: Sequence[str], dims: Iterable[int]) -> Factors:
    """The factors of one operand and one result of as many dims, where the indices of `dims` change."""
    return moved(own, own, exchanged=frozenset(own[dim] for dim in dims))


def rows_split(call: Call, dim: int) -> Rows:
    """The rows of the parts of a dim, one part after the other."""
    sizes = [meta.shape[dim] for meta in call.results]
    starts = [0, *itertools.accumulate(sizes[:-1])]
    return Rows(tuple(Segment(0, start, i, 0, size) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))))


@rule(
    aten.split.Tensor, aten.split_copy.Tensor, aten.split_with_sizes.default, aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, rows=rows_split,
)  # fmt: skip
def split(call: Call) -> Factors:
    """A dim in several parts."""
    own = tuple(names(len(call["self"].shape)))
    cut = frozenset({own[wrapped(call["dim"], len(own))]})
    return Factors((own,), (own,) * len(call.results), moves=True, exchanged=cut)


def rows_narrowed(call: Call, dim: int) -> Rows:
    """The rows that `narrow` takes."""
    start = call["start"]
    first = start if start >= 0 else start + call["self"].shape[dim]
    return Rows((Segment(0, first, 0, 0, call["length"]),))


@rule(aten.narrow_copy.default, rows=rows_narrowed)
def narrow(call: Call) -> Factors:
    """Consecutive indices of a dim."""
    own = names(len(call["self"].shape))
    return exchanging(own, [wrapped(call["dim"], len(own))])


def rows_flipped(call: Call, dim: int) -> Rows:
    """The rows in reverse order."""
    ndim, size = len(call["self"].shape), call["self"].shape[dim]
    others = [d for d in call["dims"] if wrapped(d, ndim) != dim]
    first = (lambda local, fill: local.flip(others)) if others else None
    return Rows((Segment(0, size - 1, 0, 0, size, step=-1),), first=first)


@rule(aten.flip.default, rows=rows_flipped)
def flip(call: Call) -> Factors:
    """Dims in reverse order."""
    own = names(len(call["self"].shape))
    return exchanging(own, [wrapped(d, len(own)) for d in call["dims"]])


def rolled_dims(call: Call) -> list[tuple[int, int]]:
    """The rolled dims with their shifts. For a tensor of one dim, `dims` may be empty."""
    ndim = len(call["self"].shape)
    return list(zip([wrapped(d, ndim) for d in call["dims"] or [0]], call["shifts"], strict=True))


def rows_rolled(call: Call, dim: int) -> Rows:
    """The rows shifted, the last ones in front."""
    size, rolled = call["self"].shape[dim], rolled_dims(call)
    shift = sum(by for d, by in rolled if d == dim) % max(size, 1)
    others = [(d, by) for d, by in rolled if d != dim]
    first = (lambda local, fill: local.roll([by for _, by in others], [d for d, _ in others])) if others else None
    segments = (Segment(0, size - shift, 0, 0, shift), Segment(0, 0, 0, shift, size - shift))
    return Rows(tuple(segment for segment in segments if segment.length), first=first)


@rule(aten.roll.default, rows=rows_rolled)
def roll(call: Call) -> Factors:
    """Without dims the tensor is rolled as if it were flat."""
    ndim = len(call["self"].shape)
    if not call["dims"] and ndim != 1:
        return moved([None] * ndim, [None] * ndim)
    return exchanging(names(ndim), [d for d, _ in rolled_dims(call)])


def shuffle_some(local: torch.Tensor, groups: int) -> torch.Tensor:
    """The channels of a local in another order; torch refuses empty tensors."""
    return aten.channel_shuffle.default(local, groups) if local.numel() else local.clone()


@rule(aten.channel_shuffle.default, local_op=shuffle_some)
def channel_shuffle(call: Call) -> Factors:
    """Dim 1 in another order."""
    own = kept(len(call["self"].shape), [1])
    return moved(own, own)


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> Factors:
    """Elements move between the channels and the plane."""
    ndim = len(call["self"].shape)
    own = kept(ndim, range(ndim - 3, ndim))
    return moved(own, own, nonempty=frozenset(name for name in own if name))  # torch leaves an empty one as it is


@rule(aten.unbind.int, aten.unbind_copy.int)
def unbind(call: Call) -> Factors:
    """A dim taken apart."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = kept(ndim, [at])
    return Factors((tuple(own),), (tuple(own[:at] + own[at + 1 :]),) * len(call.results), moves=True)


@rule(aten.repeat.default)
def repeat(call: Call) -> Factors:
    """Dims repeated must not be sharded; new ones come in front."""
    shape, repeats = call["self"].shape, call["repeats"]
    new = len(repeats) - len(shape)
    own: list[Dim] = [f"d{d}" if repeats[new + d] == 1 else None for d in range(len(shape))]
    return moved(own, [None] * new + own)


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call) -> Factors:
    """The diagonal of two dims comes last."""
    ndim = len(call["self"].shape)
    gone = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    own = kept(ndim, gone)
    return moved(own, [*(name for d, name in enumerate(own) if d not in gone), None])


@rule(aten.diag_embed.default)
def diag_embed(call: Call) -> Factors:
    """The last dim becomes the diagonal of two."""
    ndim = len(call.results[0].shape)
    at = {wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)}
    own = names(ndim - 2)
    rest = iter(own)
    return moved([*own, None], [None if d in at else next(rest) for d in range(ndim)])


# ---------------------------------------------------------------- backward


@rule(aten.diagonal_backward.default, localize=local_input_sizes)
def diagonal_backward(call: Call) -> Factors:
    """Zero except on the diagonal."""
    ndim = len(call.results[0].shape)
    gone = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    own = kept(ndim, gone)
    return moved([*(name for d, name in enumerate(own) if d not in gone), None], own)


# ---------------------------------------------------------------- triangles


def where_triangle(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The diagonal relative to a rank's block; the indices themselves if the block is not contiguous."""
    rows, columns = inputs[0].block(coordinate).runs[-2:]
    if len(rows) == len(columns) == 1:
        return {"diagonal": call["diagonal"] + rows[0].start - columns[0].start}
    return {"rows": rows, "columns": columns}


def local_triangle(op: Any, sign: int) -> Callable[..., torch.Tensor]:
    """The triangle of a block that may consist of several runs of rows or columns."""

    def part_of_triangle(
        local: torch.Tensor, diagonal: int = 0, *, rows: Sequence[Run] = (), columns: Sequence[Run] = ()
    ) -> torch.Tensor:
        if not rows:
            return op(local, diagonal)
        distance = indices_of(columns, local.device) - indices_of(rows, local.device).unsqueeze(1) - diagonal
        return torch.where(sign * distance >= 0, local, torch.zeros((), dtype=local.dtype, device=local.device))

    return part_of_triangle


def indices_of(runs: Sequence[Run], device: torch.device) -> torch.Tensor:
    """The global indices of some runs."""
    return torch.cat([torch.arange(run.start, run.start + run.length, device=device) for run in runs])


def triangle(call: Call) -> Factors:
    """Elements are set to zero by their global row and column."""
    own = names(len(call["self"].shape))
    return moved(own, own)


rule(aten.tril.default, localize=where_triangle, local_op=local_triangle(aten.tril.default, -1))(triangle)
rule(aten.triu.default, localize=where_triangle, local_op=local_triangle(aten.triu.default, 1))(triangle)


# ---------------------------------------------------------------- strides


def global_strides(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The strides of the global tensor on one device."""
    return {"global_stride": call["self"].stride}


def local_as_strided(
    local: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    global_stride: Sequence[int] = (),
) -> torch.Tensor:
    """A view by strides, of memory in the order of one device."""
    if storage_offset and local.storage_offset():
        raise UnsupportedError(
            "as_strided with a storage_offset on a DTensor that is itself a view: its parts do not share one storage",
            hint="take the view of its base, or clone() it first",
        )
    if tuple(local.stride()) != tuple(global_stride) and local.numel():
        local = torch.empty_strided(local.shape, global_stride, dtype=local.dtype, device=local.device).copy_(local)
    return aten.as_strided.default(local, size, stride, storage_offset or local.storage_offset())


def local_as_strided_copy(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The same in memory of its own, where no two elements share a place."""
    return local_as_strided(*args, **kwargs).clone(memory_format=torch.contiguous_format)


@rule(aten.as_strided.default, localize=global_strides, local_op=local_as_strided)
@rule(aten.as_strided_copy.default, localize=global_strides, local_op=local_as_strided_copy)
def as_strided(call: Call) -> Factors:
    """Elements by their position in memory: only of a replicated tensor."""
    return moved([None] * len(call["self"].shape), [None] * len(call.results[0].shape))
