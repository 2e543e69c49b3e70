"""Operators that only move elements: permute, transpose, squeeze, expand, slice, split, cat, flip, pad, ...

Every dim that stays as it is is a factor; a dim whose indices change must be whole. Any Partial passes, also where
zeros are put in: they are the sum, the mean, the extremum and the product of zeros. Where little is taken of a sharded
dim, those who hold it contribute it and nothing is moved. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import Run
from shardwise.core.spec import DTensorSpec
from shardwise.errors import UnsupportedError
from shardwise.rules.notation import Dim, Factors
from shardwise.rules.pointwise import EXTREMA, SUMS, alike
from shardwise.rules.registry import Call, decomposition, is_zero, rule
from shardwise.rules.view import local_size

aten = torch.ops.aten


def names(ndim: int) -> list[str]:
    """A factor for each dim."""
    return [f"d{i}" for i in range(ndim)]


def moved(operand: Sequence[Dim], result: Sequence[Dim], **more: Any) -> Factors:
    """The factors of an operator with one operand and one result."""
    return Factors((tuple(operand),), (tuple(result),), moves=True, **more)


def wrapped(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim % ndim if ndim else 0


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
    """Squeeze the dims that the whole tensor loses: a shard may have size one in others."""
    return aten.squeeze.dims(local, list(dim))


def squeezed_dims(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """The dims that are squeezed, named."""
    return {"dim": squeezed(call)}


def squeeze(call: Call) -> Factors:
    """Dims of size one removed; they must be whole."""
    gone = squeezed(call)
    own: list[Dim] = [None if d in gone else f"d{d}" for d in range(len(call["self"].shape))]
    return moved(own, [name for d, name in enumerate(own) if d not in gone])


rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, localize=squeezed_dims, local_op=local_squeeze)(squeeze)


# ---------------------------------------------------------------- the same elements, differently held


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


@rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(call: Call) -> Factors:
    """The last dim is real and imaginary parts; it must be whole, and sums only pass where they mean the same."""
    own = names(len(call["self"].shape) - 1)
    return Factors(((*own, None),), (tuple(own),), linear=((0,),), keeps_zero=True)


@rule(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(call: Call) -> Factors:
    """The bits read as another dtype: a dim whose size changes must be whole, and zeros are zeros in all of them."""
    before, after = call["self"].shape, call.results[0].shape
    own: list[Dim] = [f"d{d}" if size == after[d] else None for d, size in enumerate(before)]
    return Factors((tuple(own),), (tuple(own),), keeps_zero=torch.bool not in (m.dtype for m in call.results))


# ---------------------------------------------------------------- dims that must be whole


def kept(ndim: int, gone: Sequence[int]) -> list[Dim]:
    """A factor for each dim but those of `gone`, which must be whole."""
    return [None if d in gone else f"d{d}" for d in range(ndim)]


def along(*arguments: str) -> Callable[[Call], Factors]:
    """The rule of an operator that works along the dims given by some arguments and leaves the others alone."""

    def factors(call: Call) -> Factors:
        ndim = len(call.operands[0].shape)
        given = [call[name] for name in arguments]
        dims = [wrapped(d, ndim) for each in given for d in ([each] if isinstance(each, int) else each)]
        own = tuple(kept(ndim, dims))
        return Factors((own,) * len(call.operands), (own,) * len(call.results), moves=True)

    return factors


rule(
    aten.split.Tensor, aten.split_copy.Tensor, aten.split_with_sizes.default, aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.narrow_copy.default,
)(along("dim"))  # fmt: skip
rule(aten.flip.default)(along("dims"))


@rule(aten.rot90.default)
def rotate(call: Call) -> Factors:
    """A plane turned; four quarters are none."""
    ndim = len(call["self"].shape)
    own = kept(ndim, [dim % ndim for dim in call["dims"]] if call["k"] % 4 else [])
    return moved(own, own)


def together(operands: Sequence[tuple[Dim, ...]], result: tuple[Dim, ...], fit: bool = True) -> Factors:
    """The factors of several operands whose elements are put into one result: they may be sums, all alike.

    Extrema may not: that of one on one axis and a sum of another on another axis would not be one reduction.
    """
    count = len(operands)
    return Factors(tuple(operands), (result,), rows=alike(count, range(count), kinds=SUMS) if fit else ())


@rule(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Factors:
    """A tensor with some indices of a dim replaced."""
    ndim = len(call["self"].shape)
    own = tuple(kept(ndim, [wrapped(call["dim"], ndim)]))
    return together((own, own), own)


@rule(aten.roll.default)
def roll(call: Call) -> Factors:
    """Without dims the tensor is rolled as if it were flat."""
    ndim = len(call["self"].shape)
    dims = [wrapped(d, ndim) for d in call["dims"]] or range(ndim)
    own = kept(ndim, dims)
    return moved(own, own)


def shuffle_some(local: torch.Tensor, groups: int) -> torch.Tensor:
    """The channels of what a rank has in another order; torch refuses nothing."""
    return aten.channel_shuffle.default(local, groups) if local.numel() else local.clone()


@rule(aten.channel_shuffle.default, local_op=shuffle_some)
def channel_shuffle(call: Call) -> Factors:
    """Dim 1 in another order."""
    own = kept(len(call["self"].shape), [1])
    return moved(own, own)


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> Factors:
    """Elements go between the channels and the plane."""
    ndim = len(call["self"].shape)
    own = kept(ndim, range(ndim - 3, ndim))
    return moved(own, own, nonempty=frozenset(name for name in own if name))  # torch leaves an empty one as it is


@decomposition(aten.pixel_shuffle.default)
def pixels_of_channels(x: Any, upscale_factor: int) -> Any:
    """The channels or the plane may be sharded, if whole blocks of pixels are."""
    if not x.numel():
        return NotImplemented
    *batch, channels, height, width = x.shape
    side, at = upscale_factor, len(batch)
    blocks = x.view(*batch, channels // side**2, side, side, height, width)
    turned = blocks.permute(*range(at), at, at + 3, at + 1, at + 4, at + 2)
    return turned.reshape(*batch, channels // side**2, height * side, width * side)


@decomposition(aten.pixel_unshuffle.default)
def channels_of_pixels(x: Any, downscale_factor: int) -> Any:
    """The channels or the plane may be sharded, if whole blocks of pixels are."""
    if not x.numel():
        return NotImplemented
    *batch, channels, height, width = x.shape
    side, at = downscale_factor, len(batch)
    blocks = x.view(*batch, channels, height // side, side, width // side, side)
    turned = blocks.permute(*range(at), at, at + 2, at + 4, at + 1, at + 3)
    return turned.reshape(*batch, channels * side**2, height // side, width // side)


@rule(aten.unbind.int, aten.unbind_copy.int)
def unbind(call: Call) -> Factors:
    """A dim taken apart."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = kept(ndim, [at])
    return Factors((tuple(own),), (tuple(own[:at] + own[at + 1 :]),) * len(call.results), moves=True)


def same_dtype(call: Call) -> bool:
    """Whether all tensors of a call are of one dtype, so that nothing is cast on the way."""
    return all(m.dtype is call.results[0].dtype for m in call.operands)


@rule(aten.cat.default)
def cat(call: Call) -> Factors:
    """Tensors one after the other along a dim; old-style empty ones of one dim are left out by torch too."""
    ndim = len(call.results[0].shape)
    own = tuple(kept(ndim, [wrapped(call["dim"], ndim)]))
    operands = tuple(own if len(m.shape) == ndim else (None,) * len(m.shape) for m in call.operands)
    return together(operands, own, same_dtype(call))


@rule(aten.stack.default, aten._stack.default)
def stack(call: Call) -> Factors:
    """Tensors along a new dim."""
    own = names(len(call.operands[0].shape))
    at = wrapped(call["dim"], len(own) + 1)
    result = (*own[:at], None, *own[at:])
    return together((tuple(own),) * len(call.operands), result, same_dtype(call))


@rule(aten.repeat.default)
def repeat(call: Call) -> Factors:
    """Dims repeated must be whole; new ones come in front."""
    shape, repeats = call["self"].shape, call["repeats"]
    new = len(repeats) - len(shape)
    own: list[Dim] = [f"d{d}" if repeats[new + d] == 1 else None for d in range(len(shape))]
    return moved(own, [None] * new + own)


@rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(call: Call) -> Factors:
    """Windows of a dim: where they begin stays at its place, what is in them comes last."""
    ndim = len(call["self"].shape)
    own = kept(ndim, [wrapped(call["dimension"], ndim)])
    return moved(own, [*own, None] if ndim else [None])


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


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Factors:
    """A tensor with its diagonal replaced."""
    ndim = len(call["self"].shape)
    gone = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    own = kept(ndim, gone)
    diagonal = [*(name for d, name in enumerate(own) if d not in gone), None]
    return together((tuple(own), tuple(diagonal)), tuple(own))


@rule(aten.select_scatter.default)
def select_scatter(call: Call) -> Factors:
    """A tensor with one index of a dim replaced."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = kept(ndim, [at])
    return together((tuple(own), tuple(own[:at] + own[at + 1 :])), tuple(own))


# ---------------------------------------------------------------- taking a little of a sharded dim


def sums_masks(dtype: torch.dtype) -> bool:
    """Whether parts of this dtype can be added up by a collective."""
    return dtype is not torch.bool and (dtype.itemsize > 1 or not dtype.is_floating_point)


def contributed(own: Sequence[str], result: Sequence[Dim], dim: int, masked: bool) -> Factors:
    """The factors of taking something of `dim`; `masked` where each rank may contribute what it holds of a sharded one.

    Then only sums pass besides: the sum over one axis and the extremum over another would not be one reduction.
    """
    if not masked:
        return moved(own, result, whole=frozenset({own[dim]}))
    return Factors((tuple(own),), (tuple(result),), reduce={own[dim]: "mask"}, linear=((0,),), keeps_zero=True)


def runs_along(spec: DTensorSpec, dim: int, coordinate: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of global indices of a dim that the rank at `coordinate` holds, or one of all where it is whole."""
    return spec.block(coordinate).runs[dim]


def local_index(runs: Sequence[Run], index: int) -> int | None:
    """Where a global index lies on a rank that holds these runs; None where it does not."""
    at = 0
    for run in runs:
        if run.start <= index < run.start + run.length:
            return at + index - run.start
        at += run.length
    return None


def where_selected(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """Which local index is selected, if any, and whether the result is a part of it only."""
    spec = inputs[0]
    dim = wrapped(call["dim"], spec.ndim)
    index = call["index"] % spec.shape[dim] if spec.shape[dim] else call["index"]
    if not spec.dim_axes[dim]:
        return {"index": index}
    return {"index": local_index(runs_along(spec, dim, coordinate), index), "masked": True}


def local_select(local: torch.Tensor, dim: int, index: int | None, masked: bool = False) -> torch.Tensor:
    """The selected slice of a rank that holds it, zeros on the others."""
    if index is None:
        at = dim % local.dim()
        return local.new_zeros([size for d, size in enumerate(local.shape) if d != at])
    chosen = aten.select.int(local, dim, index)
    return chosen.clone() if masked else chosen


@rule(aten.select.int, aten.select_copy.int, localize=where_selected, local_op=local_select)
def select(call: Call) -> Factors:
    """One index of a dim: of a sharded one, the rank that holds it contributes it."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = names(ndim)
    return contributed(own, own[:at] + own[at + 1 :], at, sums_masks(call.results[0].dtype))


def slice_range(call: Call) -> range:
    """The indices that a slice takes, as Python counts them."""
    size = call["self"].shape[wrapped(call["dim"], len(call["self"].shape))]
    return range(*slice(call["start"], call["end"], call["step"]).indices(size))


def where_sliced(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """For a slice of a sharded dim, the pieces that a rank holds of it."""
    spec = inputs[0]
    dim = wrapped(call["dim"], spec.ndim)
    if not spec.dim_axes[dim] or call.results[0].shape[dim] == spec.shape[dim]:
        return {}
    taken = slice_range(call)
    return {"pieces": tuple(_pieces(runs_along(spec, dim, coordinate), taken)), "length": len(taken)}


def _pieces(runs: Sequence[Run], taken: range) -> list[tuple[int, int, int]]:
    """What a rank with these runs holds of the indices taken: (first local index, first of the result, how many)."""
    found = []
    at = 0
    for run in runs:
        first = max(0, -(-(run.start - taken.start) // taken.step))
        last = min(len(taken), -(-(run.start + run.length - taken.start) // taken.step))
        if first < last:
            found.append((at + taken.start + first * taken.step - run.start, first, last - first))
        at += run.length
    return found


def local_slice(
    local: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
    *,
    pieces: Sequence[tuple[int, int, int]] | None = None,
    length: int = 0,
) -> torch.Tensor:
    """The slice; of a sharded dim, zeros with the pieces that this rank holds."""
    if pieces is None:
        return aten.slice.Tensor(local, dim, start, end, step)
    shape = list(local.shape)
    shape[dim] = length
    result = local.new_zeros(shape)
    for at, first, count in pieces:
        result.narrow(dim, first, count).copy_(aten.slice.Tensor(local, dim, at, at + (count - 1) * step + 1, step))
    return result


@rule(aten.slice.Tensor, aten.slice_copy.Tensor, localize=where_sliced, local_op=local_slice)
def slice_(call: Call) -> Factors:
    """Some indices of a dim. All of them leave it as it is; less than half of a sharded one are contributed."""
    shape = call["self"].shape
    at = wrapped(call["dim"], len(shape))
    own = names(len(shape))
    if call.results[0].shape[at] == shape[at]:
        return moved(own, own)
    little = 2 * call.results[0].shape[at] <= shape[at]
    return contributed(own, kept(len(shape), [at]), at, little and sums_masks(call.results[0].dtype))


# ---------------------------------------------------------------- backward of those


def local_input_sizes(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """The size of the tensor that was taken from, on the rank at `coordinate`."""
    return {"input_sizes": list(outputs[0].local_shape(coordinate))}


@rule(aten.slice_backward.default, localize=local_input_sizes)
def slice_backward(call: Call) -> Factors:
    """Zeros but for the slice."""
    shape = call.results[0].shape
    own = kept(len(shape), [wrapped(call["dim"], len(shape))])
    return moved(own, own)


@rule(aten.select_backward.default, localize=local_input_sizes)
def select_backward(call: Call) -> Factors:
    """Zeros but for one index of a dim."""
    ndim = len(call.results[0].shape)
    at = wrapped(call["dim"], ndim)
    own = kept(ndim, [at])
    return moved(own[:at] + own[at + 1 :], own)


@rule(aten.diagonal_backward.default, localize=local_input_sizes)
def diagonal_backward(call: Call) -> Factors:
    """Zeros but for the diagonal."""
    ndim = len(call.results[0].shape)
    gone = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    own = kept(ndim, gone)
    return moved([*(name for d, name in enumerate(own) if d not in gone), None], own)


@rule(aten.unfold_backward.default, localize=local_input_sizes)
def unfold_backward(call: Call) -> Factors:
    """Windows added up: they may overlap."""
    ndim = len(call.results[0].shape)
    own = tuple(kept(ndim, [wrapped(call["dim"], ndim)]))
    return Factors(((*own, None),), (own,), linear=((0,),))


# ---------------------------------------------------------------- padding


@rule(aten.constant_pad_nd.default, reads={"value": is_zero})
def constant_pad(call: Call) -> Factors:
    """Padded dims must be whole; zeros pass with any Partial, other numbers with extrema."""
    ndim, pad = len(call["self"].shape), call["pad"]
    padded = [ndim - 1 - i // 2 for i, size in enumerate(pad) if size]
    own = tuple(kept(ndim, padded))
    zero = call["value"] == 0 or max(pad, default=0) <= 0
    return Factors((own,), (own,), moves=zero, rows=() if zero else alike(1, (0,), kinds=EXTREMA))


def pad_rule(dims: int, backward: bool) -> Callable[[Call], Factors]:
    """The rule of a padding that repeats elements of the last `dims` dims."""

    def factors(call: Call) -> Factors:
        ndim = len(call.operands[0].shape)
        own = tuple(kept(ndim, range(ndim - dims, ndim)))
        full = frozenset(name for name in own if name)
        if backward:
            return Factors((own,) * len(call.operands), (own,), linear=((0,),), nonempty=full)
        return Factors((own,), (own,), moves=True, nonempty=full)

    return factors


for count in (1, 2, 3):
    for kind in ("reflection", "replication"):
        rule(getattr(aten, f"{kind}_pad{count}d").default)(pad_rule(count, backward=False))
        rule(getattr(aten, f"{kind}_pad{count}d_backward").default)(pad_rule(count, backward=True))


# ---------------------------------------------------------------- triangles


def where_triangle(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """The diagonal seen from a rank's block; the indices themselves where the block is not one piece."""
    rows, columns = inputs[0].block(coordinate).runs[-2:]
    if len(rows) == len(columns) == 1:
        return {"diagonal": call["diagonal"] + rows[0].start - columns[0].start}
    return {"rows": rows, "columns": columns}


def local_triangle(op: Any, sign: int) -> Callable[..., torch.Tensor]:
    """The triangle of a block that may consist of several runs of rows or columns."""

    def run(
        local: torch.Tensor, diagonal: int = 0, *, rows: Sequence[Run] = (), columns: Sequence[Run] = ()
    ) -> torch.Tensor:
        if not rows:
            return op(local, diagonal)
        distance = indices_of(columns, local.device) - indices_of(rows, local.device).unsqueeze(1) - diagonal
        return torch.where(sign * distance >= 0, local, torch.zeros((), dtype=local.dtype, device=local.device))

    return run


def indices_of(runs: Sequence[Run], device: torch.device) -> torch.Tensor:
    """The global indices of some runs."""
    return torch.cat([torch.arange(run.start, run.start + run.length, device=device) for run in runs])


def triangle(call: Call) -> Factors:
    """Part of the elements becomes zero, by global row and column."""
    own = names(len(call["self"].shape))
    return moved(own, own)


rule(aten.tril.default, localize=where_triangle, local_op=local_triangle(aten.tril.default, -1))(triangle)
rule(aten.triu.default, localize=where_triangle, local_op=local_triangle(aten.triu.default, 1))(triangle)


# ---------------------------------------------------------------- strides


def whole_strides(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """The strides that the whole tensor has on one device."""
    return {"held": call["self"].stride}


def local_as_strided(
    local: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    held: Sequence[int] = (),
) -> torch.Tensor:
    """A view by strides, on memory that is laid out as one device would have it."""
    if storage_offset and local.storage_offset():
        raise UnsupportedError(
            "as_strided with a storage_offset on a DTensor that is itself a view: its parts do not share one storage",
            hint="take the view of its base, or clone() it first",
        )
    if tuple(local.stride()) != tuple(held) and local.numel():
        local = torch.empty_strided(local.shape, held, dtype=local.dtype, device=local.device).copy_(local)
    return aten.as_strided.default(local, size, stride, storage_offset or local.storage_offset())


@rule(aten.as_strided.default, aten.as_strided_copy.default, localize=whole_strides, local_op=local_as_strided)
def as_strided(call: Call) -> Factors:
    """Elements by their place in memory: only of a whole tensor."""
    return moved([None] * len(call["self"].shape), [None] * len(call.results[0].shape))
