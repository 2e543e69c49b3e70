"""Padding, windows and pixel shuffles of several sharded dims, dim by dim or over a plane of windows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.decompose.layout_helpers import split_axes
from shardwise.rules.padding import (
    padded_dims,
    pads_of,
)
from shardwise.rules.registry import decomposition
from shardwise.rules.unfolding import places_of

aten = torch.ops.aten


@decomposition(aten.pixel_shuffle.default)
def pixels_of_channels(x: Any, upscale_factor: int) -> Any:
    """The channels or the plane may be sharded, if blocks of pixels are not split."""
    if not x.numel():
        return NotImplemented
    if upscale_factor == 1:  # views alone would give a view
        return x.clone()
    *batch, channels, height, width = x.shape
    side, at = upscale_factor, len(batch)
    blocks = x.view(*batch, channels // side**2, side, side, height, width)
    turned = blocks.permute(*range(at), at, at + 3, at + 1, at + 4, at + 2)
    return turned.reshape(*batch, channels // side**2, height * side, width * side)


@decomposition(aten.pixel_unshuffle.default)
def channels_of_pixels(x: Any, downscale_factor: int) -> Any:
    """The channels or the plane may be sharded, if blocks of pixels are not split."""
    if not x.numel():
        return NotImplemented
    if downscale_factor == 1:  # views alone would give a view
        return x.clone()
    *batch, channels, height, width = x.shape
    side, at = downscale_factor, len(batch)
    blocks = x.view(*batch, channels, height // side, side, width // side, side)
    turned = blocks.permute(*range(at), at, at + 2, at + 4, at + 1, at + 3)
    return turned.reshape(*batch, channels * side**2, height // side, width // side)


# ---------------------------------------------------------------- several dims


def several_sharded(x: Any, pad: Sequence[int]) -> list[int]:
    """The padded dims that are sharded, if there are several: rows are exchanged along one dim at a time."""
    dims = [dim for dim in padded_dims(pad, x.dim()) if split_axes(x, (dim,))]
    return dims if len(dims) > 1 else []


def split_padding(pad: Sequence[int], ndim: int, dims: Sequence[int]) -> list[list[int]]:
    """The padding of the first of `dims` and of all other dims, and one padding for each further dim of `dims`."""
    separate = {dim: [n if i // 2 == ndim - 1 - dim else 0 for i, n in enumerate(pad)] for dim in dims[1:]}
    rest = [0 if ndim - 1 - i // 2 in separate else n for i, n in enumerate(pad)]
    return [rest, *separate.values()]


def pad_in_turn(op: Any) -> Callable[..., Any]:
    """A padding of several sharded dims, dim by dim; unsharded dims are padded with the first of them."""

    def pad_dims_in_turn(x: Any, pad: Sequence[int], *value: Any) -> Any:
        dims = several_sharded(x, pad)
        if not dims:
            return NotImplemented
        for part in split_padding(pad, x.dim(), dims):
            x = op(x, part, *value)
        return x

    return pad_dims_in_turn


decomposition(aten.constant_pad_nd.default)(pad_in_turn(aten.constant_pad_nd.default))
for count, kind in itertools.product((2, 3), ("reflection", "replication")):
    op = getattr(aten, f"{kind}_pad{count}d").default
    decomposition(op)(pad_in_turn(op))


def pad_backward_in_turn(op: Any) -> Callable[..., Any]:
    """The gradient of a padding of several sharded dims, dim by dim."""

    def pad_dims_backward(grad: Any, x: Any, padding: Sequence[int]) -> Any:
        dims = several_sharded(grad, padding)
        if not dims:
            return NotImplemented
        rest, *separate = split_padding(padding, x.dim(), dims)
        for part in (*separate, rest):
            shape = [n - sum(pads_of(part, x.dim(), dim)) for dim, n in enumerate(grad.shape)]
            # only the size of the forward's operand is read: it needs no memory
            grad = op(grad, grad.new_zeros(()).expand(shape), part)
        return grad

    return pad_dims_backward


for count, kind in itertools.product((2, 3), ("reflection", "replication")):
    op = getattr(aten, f"{kind}_pad{count}d_backward").default
    decomposition(op)(pad_backward_in_turn(op))


@decomposition(aten.im2col.default)
def columns_over_plane(x: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Each window of a sharded image is on the rank of its first row."""
    if not split_axes(x, (x.dim() - 2, x.dim() - 1)) or not x.numel():
        return NotImplemented
    return torch.ops.shardwise.image_to_columns.default(x, kernel_size, dilation, padding, stride).flatten(-2)


@decomposition(aten.col2im.default)
def image_of_plane(x: Any, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Windows with sharded positions are put back on each rank, and added over ranks."""
    if not split_axes(x, (x.dim() - 1,)) or not x.numel():
        return NotImplemented
    plane = places_of(output_size, kernel_size, dilation, padding, stride)
    return torch.ops.shardwise.columns_to_image.default(
        x.unflatten(-1, plane), output_size, kernel_size, dilation, padding, stride
    )
