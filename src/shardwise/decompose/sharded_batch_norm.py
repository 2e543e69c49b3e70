"""Batch norm over sharded batches: mean and variance of each channel are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.decompose.layout_helpers import as_laid_out, as_result, reduced, widened, without_partial
from shardwise.decompose.sharded_norms import but_channels, over_channels, scaled
from shardwise.decompose.sharded_statistics import moments
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


def batch_norm_of_shards(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Batch norm over sharded batches: mean and variance of each channel are reduced."""
    dims = but_channels(x)
    x = without_partial(x, dims)
    channels = [x.shape[1]]
    if training:
        var, mean = moments(x, dims, 0)
        var = reduced(var)
        if running_mean is not None:
            update(running_mean, mean.reshape(channels), momentum)
        if running_var is not None:
            count = math.prod(x.shape[d] for d in dims)
            update(running_var, var.reshape(channels) * (count / (count - 1) if count > 1 else math.nan), momentum)
        rstd = (var + eps).rsqrt()
        kept = (mean.reshape(channels), rstd.reshape(channels))
    else:
        own = (as_result(running_mean, widened(running_mean).dtype), (widened(running_var) + eps).rsqrt())
        mean, rstd = over_channels(own[0], x), over_channels(own[1], x)
        # CPU kernels save nothing; other devices save the inputs of the fused backward
        kept = (own[0].clone(), own[1])
        if x.device.type == "cpu":
            kept = tuple(torch.empty(0, dtype=running_mean.dtype, device=x.device) for _ in own)
    out = (widened(x) - mean) * (rstd if weight is None else rstd * over_channels(weight, x))
    return scaled(out, None, over_channels(bias, x), x.dtype), kept[0], kept[1]


def update(running: Any, value: Any, momentum: float) -> None:
    """Update a running statistic in place."""
    running.mul_(1 - momentum).add_(as_result(value * momentum, running.dtype))


decomposition(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)(batch_norm_of_shards)


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Batch norm that always uses the batch's own statistics."""
    return batch_norm_of_shards(x, weight, bias, None, None, True, momentum, eps)


def reserve(x: Any) -> Any:
    """The reserved tensor of fused backends, empty: this backward does not need it."""
    return torch.empty(0, dtype=torch.uint8, device=x.device)


@decomposition(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(x: Any, *args: Any) -> tuple[Any, ...]:
    """cuDNN's operator, computed by the operator of all backends."""
    return *aten.native_batch_norm.default(x, *args), reserve(x)


@decomposition(aten.miopen_batch_norm.default)
def miopen_batch_norm(x: Any, *args: Any) -> tuple[Any, ...]:
    """MIOpen's operator, computed by the operator of all backends."""
    return aten.native_batch_norm.default(x, *args)


@decomposition(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Batch norm in training, for all backends."""
    return *batch_norm_of_shards(x, weight, bias, running_mean, running_var, True, momentum, eps), reserve(x)


@decomposition(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Batch norm with the running statistics, for all backends."""
    return *batch_norm_of_shards(x, weight, bias, running_mean, running_var, False, momentum, eps), reserve(x)


@decomposition(aten.native_batch_norm_backward.default)
def batch_norm_backward_of_shards(
    grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_invstd: Any,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of a batch norm over sharded batches: two sums for each channel are reduced."""
    dims = but_channels(x)
    x = without_partial(x, dims)
    grad = widened(as_laid_out(grad, x))
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, (running_var + eps).rsqrt())
    mean, rstd = over_channels(reduced(mean), x), over_channels(reduced(rstd), x)
    normal = (widened(x) - mean) * rstd
    needed = train and output_mask[0]
    into_weight = reduced((grad * normal).sum(dims, keepdim=True)) if output_mask[1] or needed else None
    into_bias = reduced(grad.sum(dims, keepdim=True)) if output_mask[2] or needed else None
    into_x = None
    if output_mask[0]:
        count = math.prod(x.shape[d] for d in dims)
        into_x = grad - (into_bias + normal * into_weight) / count if train else grad
        into_x = as_result(into_x * (rstd if weight is None else rstd * over_channels(weight, x)), x.dtype)

    def as_weight(value: Any, wanted: bool) -> Any:
        return as_result(value.reshape(x.shape[1]), x.dtype if weight is None else weight.dtype) if wanted else None

    return into_x, as_weight(into_weight, output_mask[1]), as_weight(into_bias, output_mask[2])


@decomposition(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(
    x: Any, grad: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_var: Any, eps: float,
    reserve: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """cuDNN's operator, computed by that of all backends; its saved variance is the inverse standard deviation."""
    saved = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward.default(grad, x, weight, *saved, True, eps, [True, True, True])


@decomposition(aten.miopen_batch_norm_backward.default)
def miopen_batch_norm_backward(
    x: Any, grad: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_var: Any, eps: float
) -> tuple[Any, ...]:
    """MIOpen's operator, computed by the operator of all backends."""
    saved = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward.default(grad, x, weight, *saved, True, eps, [True, True, True])


@decomposition(aten.batch_norm_backward.default)
def any_batch_norm_backward(
    grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_var: Any, update: bool,
    eps: float, output_mask: Sequence[bool], reserve: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of `_batch_norm_with_update` and `_batch_norm_no_update`."""
    saved = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward.default(grad, x, weight, *saved, update, eps, output_mask)
