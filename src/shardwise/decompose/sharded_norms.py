"""Layer, RMS and group norm over sharded dims: only statistics are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.decompose.layout_helpers import (
    as_laid_out,
    as_result,
    reduced,
    replicated,
    split_axes,
    statistic_of,
    widened,
    without_partial,
)
from shardwise.decompose.sharded_statistics import moments
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


# ---------------------------------------------------------------- layer norm, RMS norm


def norm_dims(x: Any, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """The normalized dims of `x`: the last ones."""
    return tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))


def scaled(value: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    """`value * weight + bias`, each if given."""
    value = value if weight is None else value * weight
    return as_result(value if bias is None else value + bias, dtype)


@decomposition(aten.native_layer_norm.default, reductions=2)
def layer_norm_of_shards(x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Layer norm over sharded dims: mean and variance are reduced."""
    dims = norm_dims(x, normalized_shape)
    x = without_partial(x, dims)
    if not split_axes(x, dims):
        return aten.native_layer_norm.default(x, normalized_shape, replicated(weight), replicated(bias), eps)
    var, mean = moments(x, dims, 0)
    rstd = (reduced(var) + eps).rsqrt()
    out = scaled((widened(x) - mean) * rstd, weight, bias, x.dtype)
    kept = x.dtype if x.device.type == "cpu" else mean.dtype
    return out, as_result(mean, kept), as_result(rstd, kept)


@decomposition(aten.native_layer_norm_backward.default, reductions=2)
def layer_norm_backward_of_shards(
    grad: Any, x: Any, normalized_shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradients of a layer norm over sharded dims: two means are reduced."""
    dims = norm_dims(x, normalized_shape)
    x = without_partial(x, dims)
    grad, mean, rstd = as_laid_out(grad, x), statistic_of(mean, x, dims), statistic_of(rstd, x, dims)
    if not split_axes(x, dims) and all(output_mask):
        weights = (replicated(weight), replicated(bias))
        return aten.native_layer_norm_backward.default(grad, x, normalized_shape, mean, rstd, *weights, output_mask)
    normal = (widened(x) - mean) * rstd
    into_x, into_weight = backward_through(widened(grad), normal, rstd, weight, dims, True, output_mask)
    outer = tuple(range(dims[0]))
    into_bias = summed_over(widened(grad), outer) if output_mask[2] else None
    return (
        None if into_x is None else as_result(into_x, x.dtype),
        None if into_weight is None else as_result(into_weight, x.dtype if weight is None else weight.dtype),
        None if into_bias is None else as_result(into_bias, x.dtype if bias is None else bias.dtype),
    )


def summed_over(x: Any, dims: Sequence[int]) -> Any:
    """The sum over `dims`; without dims, `x` itself."""
    return x.sum(dims) if dims else x


def backward_through(
    grad: Any, normal: Any, rstd: Any, weight: Any, dims: Sequence[int], centred: bool, mask: Sequence[bool]
) -> tuple[Any, Any]:
    """The gradients of `normal * weight` with respect to the input of the normalization and to the weight."""
    into_weight = summed_over(grad * normal, tuple(range(dims[0]))) if mask[1] else None
    if not mask[0]:
        return None, into_weight
    grad = grad if weight is None else grad * weight
    into_x = grad - normal * reduced((grad * normal).mean(dims, keepdim=True))
    if centred:
        into_x = into_x - reduced(grad.mean(dims, keepdim=True))
    return into_x * rstd, into_weight


@decomposition(aten._fused_rms_norm.default, reductions=1)
def rms_norm_of_shards(x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    """RMS norm over sharded dims: the mean square is reduced."""
    dims = norm_dims(x, normalized_shape)
    x = without_partial(x, dims)
    if not split_axes(x, dims):
        return aten._fused_rms_norm.default(x, normalized_shape, replicated(weight), eps)
    wide = widened(x)
    squares = torch.ops.shardwise.power_sum.default(wide, 2, dims, True)
    mean = reduced(squares / math.prod(normalized_shape))
    rstd = (mean + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return scaled(wide * rstd, weight, None, x.dtype), rstd


@decomposition(aten._fused_rms_norm_backward.default, reductions=1)
def rms_norm_backward_of_shards(
    grad: Any, x: Any, normalized_shape: Sequence[int], rstd: Any, weight: Any, output_mask: Sequence[bool]
) -> Any:
    """The gradients of an RMS norm over sharded dims: one mean is reduced."""
    dims = norm_dims(x, normalized_shape)
    x = without_partial(x, dims)
    grad, rstd = as_laid_out(grad, x), statistic_of(rstd, x, dims)
    if not split_axes(x, dims) and all(output_mask):
        return aten._fused_rms_norm_backward.default(grad, x, normalized_shape, rstd, replicated(weight), output_mask)
    found = backward_through(widened(grad), widened(x) * rstd, rstd, weight, dims, False, output_mask)
    dtypes = (x.dtype, x.dtype if weight is None else weight.dtype)
    return tuple(None if one is None else as_result(one, dtype) for one, dtype in zip(found, dtypes, strict=True))


# ---------------------------------------------------------------- group norm


def over_channels(value: Any, x: Any) -> Any:
    """A tensor with an element for each channel, in a shape that broadcasts with `x`."""
    return None if value is None else value.reshape([1, x.shape[1]] + [1] * (x.dim() - 2))


def but_channels(x: Any) -> tuple[int, ...]:
    """Every dim except the channels."""
    return tuple(d for d in range(x.dim()) if d != 1)


def mean_over(x: Any, dims: Sequence[int]) -> Any:
    """The mean over `dims`; without dims, `x` itself."""
    return x.mean(dims) if dims else x


def per_group(x: Any, group: int) -> Any:
    """The mean of each group of channels of a sample: over space first, then over the channels of the group."""
    by_channel = reduced(mean_over(x, tuple(range(2, x.dim()))))
    return reduced(by_channel.reshape(x.shape[0], group, x.shape[1] // group).mean(-1))


def per_channel(value: Any, x: Any) -> Any:
    """A value of each group, repeated for its channels, in a shape that broadcasts with `x`."""
    groups, channels = value.shape[1], x.shape[1]
    repeated = value.unsqueeze(-1).expand(x.shape[0], groups, channels // groups)
    return repeated.reshape([x.shape[0], channels] + [1] * (x.dim() - 2))


@decomposition(aten.native_group_norm.default)
def group_norm_of_shards(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    """Group norm over sharded channels or space: statistics of each channel are reduced."""
    x = without_partial(x, range(1, x.dim()))
    if not split_axes(x, range(1, x.dim())):
        return aten.native_group_norm.default(x, replicated(weight), replicated(bias), N, C, HxW, group, eps)
    wide = widened(x)
    mean = per_group(wide, group)
    centred = wide - per_channel(mean, x)
    rstd = (per_group(centred * centred, group) + eps).rsqrt()
    out = scaled(centred * per_channel(rstd, x), over_channels(weight, x), over_channels(bias, x), x.dtype)
    kept = x.dtype if x.device.type == "cpu" else mean.dtype
    return out, as_result(mean, kept), as_result(rstd, kept)


@decomposition(aten.native_group_norm_backward.default)
def group_norm_backward_of_shards(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, N: int, C: int, HxW: int, group: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of a group norm over sharded channels or space: two means of each channel are reduced."""
    inner = range(1, x.dim())
    x = without_partial(x, inner)
    grad, mean, rstd = as_laid_out(grad, x), statistic_of(mean, x, inner), statistic_of(rstd, x, inner)
    if not split_axes(x, inner) and all(output_mask):
        sizes = (N, C, HxW, group)
        return aten.native_group_norm_backward.default(grad, x, mean, rstd, replicated(weight), *sizes, output_mask)
    grad, scale = widened(grad), per_channel(rstd, x)
    normal = (widened(x) - per_channel(mean, x)) * scale
    into_x = None
    if output_mask[0]:
        weighted = grad if weight is None else grad * over_channels(weight, x)
        along_normal = per_channel(per_group(weighted * normal, group), x)
        into_x = (weighted - per_channel(per_group(weighted, group), x) - normal * along_normal) * scale
    kept = x.dtype if weight is None else weight.dtype
    return (
        None if into_x is None else as_result(into_x, x.dtype),
        as_result((grad * normal).sum(but_channels(x)), kept) if output_mask[1] else None,
        as_result(grad.sum(but_channels(x)), kept) if output_mask[2] else None,
    )


@decomposition(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Any, Any]:
    """The gradients of the direction and the length of a weight: one number for each row is reduced."""
    along = reduced((grad * v).sum([d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True))
    norms = reduced(norms)
    return (g / norms) * (grad - v * (along / (norms * norms))), along / norms
