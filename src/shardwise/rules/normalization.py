"""Softmax and the normalisations: fused where what they run over is whole, else by small reductions on the shards.

Dims that are not normalised over are factors. No operand is gathered for a statistic. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Placement, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.notation import Factors
from shardwise.rules.reduction import FIRST, along, moments, moved_to, reduced, settled, split_axes, widened
from shardwise.rules.registry import Call, decomposition, layout_rule, rule

aten = torch.ops.aten

Specs = tuple[DTensorSpec, ...]


def as_laid_out(x: Any, like: Any) -> Any:
    """`x` laid out like another tensor of its shape."""
    return moved_to(x, like.placements) if hasattr(like, "placements") else x


def replicated(x: Any) -> Any:
    """`x` whole on every rank; None as it is."""
    return moved_to(x, [Replicate()] * len(getattr(x, "placements", ())))


# ---------------------------------------------------------------- softmax


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(call: Call) -> Factors:
    """Each row by itself."""
    return along(call, call["dim"])


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: Call) -> Factors:
    """Each row by itself, linear in the gradient."""
    return along(call, call["dim"], linear=FIRST)


def shifted(x: Any, dim: int) -> Any:
    """`x` minus the largest element of each row, which is a small reduction."""
    wide = widened(x)
    return wide - reduced(torch.amax(wide, dim, keepdim=True))


def as_result(value: Any, dtype: torch.dtype) -> Any:
    """Back from the dtype that was computed in."""
    return value if value.dtype is dtype else value.to(dtype)


@decomposition(aten._softmax.default)
def softmax_of_shards(x: Any, dim: int, half_to_float: bool) -> Any:
    """Softmax along a sharded dim: the maximum and the sum are reduced."""
    dim %= max(x.dim(), 1)
    x = settled(x, (dim,))
    if not split_axes(x, (dim,)):
        return aten._softmax.default(x, dim, half_to_float)
    exps = shifted(x, dim).exp()
    return as_result(exps / reduced(exps.sum(dim, keepdim=True)), torch.float32 if half_to_float else x.dtype)


@decomposition(aten._log_softmax.default)
def log_softmax_of_shards(x: Any, dim: int, half_to_float: bool) -> Any:
    """The logarithm of a softmax along a sharded dim: the maximum and the sum are reduced."""
    dim %= max(x.dim(), 1)
    x = settled(x, (dim,))
    if not split_axes(x, (dim,)):
        return aten._log_softmax.default(x, dim, half_to_float)
    below = shifted(x, dim)
    return as_result(
        below - reduced(below.exp().sum(dim, keepdim=True)).log(), torch.float32 if half_to_float else x.dtype
    )


@decomposition(aten._safe_softmax.default)
def safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Softmax with zeros for rows in which nothing is allowed: those whose maximum says so."""
    dim %= max(x.dim(), 1)
    x = settled(x if dtype is None else x.to(dtype), (dim,))
    if not split_axes(x, (dim,)):
        return aten._safe_softmax.default(x, dim)
    wide = widened(x)
    top = reduced(torch.amax(wide, dim, keepdim=True))
    nothing = top == -math.inf
    exps = (wide - top.masked_fill(nothing, 0)).exp()
    return as_result(exps / reduced(exps.sum(dim, keepdim=True)).masked_fill(nothing, 1), x.dtype)


@decomposition(aten._softmax_backward_data.default)
def softmax_backward_of_shards(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    """The gradient of a softmax along a sharded dim: one sum is reduced."""
    dim %= max(output.dim(), 1)
    output = settled(output, (dim,))
    grad = as_laid_out(grad, output)
    if not split_axes(output, (dim,)):
        return aten._softmax_backward_data.default(grad, output, dim, input_dtype)
    output = widened(output)
    weighted = widened(grad) * output
    return as_result(weighted - output * reduced(weighted.sum(dim, keepdim=True)), input_dtype)


@decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward_of_shards(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    """The gradient of a log-softmax along a sharded dim: one sum is reduced."""
    dim %= max(output.dim(), 1)
    output = settled(output, (dim,))
    grad = as_laid_out(grad, output)
    if not split_axes(output, (dim,)):
        return aten._log_softmax_backward_data.default(grad, output, dim, input_dtype)
    grad = widened(grad)
    return as_result(grad - widened(output).exp() * reduced(grad.sum(dim, keepdim=True)), input_dtype)


# ---------------------------------------------------------------- layer norm, RMS norm


def norm_dims(x: Any, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """The last dims of `x`, which are normalised over."""
    return tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))


def normalizing(call: Call, **facts: Any) -> Factors:
    """The dims before those that are normalised over are factors wherever they are; weights are whole."""
    shape, inner = call["input"].shape, len(call["normalized_shape"])
    own = tuple(f"d{d}" if d < len(shape) - inner else None for d in range(len(shape)))

    def dims(meta: TensorMeta) -> tuple[str | None, ...]:
        return own if len(meta.shape) == len(shape) and inner < len(shape) else (None,) * len(meta.shape)

    return Factors(tuple(map(dims, call.operands)), tuple(map(dims, call.results)), **facts)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm(call: Call) -> Factors:
    """Each row by itself."""
    return normalizing(call)


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def layer_norm_backward(call: Call) -> Factors:
    """Each row by itself; the gradients of the weights sum over the rows."""
    outer = len(call["input"].shape) - len(call["normalized_shape"])
    return normalizing(call, summed=frozenset(f"d{d}" for d in range(outer)))


def scaled(value: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    """Times the weight and plus the bias, where there are such."""
    value = value if weight is None else value * weight
    return as_result(value if bias is None else value + bias, dtype)


@decomposition(aten.native_layer_norm.default)
def layer_norm_of_shards(x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Layer norm over sharded dims: mean and variance are reduced."""
    dims = norm_dims(x, normalized_shape)
    x = settled(x, dims)
    if not split_axes(x, dims):
        return aten.native_layer_norm.default(x, normalized_shape, replicated(weight), replicated(bias), eps)
    var, mean = moments(x, dims, 0)
    rstd = (reduced(var) + eps).rsqrt()
    out = scaled((widened(x) - mean) * rstd, weight, bias, x.dtype)
    kept = x.dtype if x.device.type == "cpu" else mean.dtype
    return out, as_result(mean, kept), as_result(rstd, kept)


@decomposition(aten.native_layer_norm_backward.default)
def layer_norm_backward_of_shards(
    grad: Any, x: Any, normalized_shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradients of a layer norm over sharded dims: two means are reduced."""
    dims = norm_dims(x, normalized_shape)
    x = settled(x, dims)
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


def statistic_of(value: Any, x: Any, dims: Sequence[int]) -> Any:
    """A statistic over `dims` of `x`, laid out as `x` is in the others."""
    if not hasattr(value, "placements") or not hasattr(x, "placements"):
        return value
    wanted = [Replicate() if isinstance(p, Shard | StridedShard) and p.dim in dims else p for p in x.placements]
    return moved_to(value, wanted)


def summed_over(x: Any, dims: Sequence[int]) -> Any:
    """The sum over `dims`; over none of them `x` itself."""
    return x.sum(dims) if dims else x


def backward_through(
    grad: Any, normal: Any, rstd: Any, weight: Any, dims: Sequence[int], centred: bool, mask: Sequence[bool]
) -> tuple[Any, Any]:
    """The gradients of `normal * weight` into the input of the normalisation and into the weight."""
    into_weight = summed_over(grad * normal, tuple(range(dims[0]))) if mask[1] else None
    if not mask[0]:
        return None, into_weight
    grad = grad if weight is None else grad * weight
    into_x = grad - normal * reduced((grad * normal).mean(dims, keepdim=True))
    if centred:
        into_x = into_x - reduced(grad.mean(dims, keepdim=True))
    return into_x * rstd, into_weight


@decomposition(aten._fused_rms_norm.default)
def rms_norm_of_shards(x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    """RMS norm over sharded dims: the mean square is reduced."""
    dims = norm_dims(x, normalized_shape)
    x = settled(x, dims)
    if not split_axes(x, dims):
        return aten._fused_rms_norm.default(x, normalized_shape, replicated(weight), eps)
    wide = widened(x)
    squares = torch.ops.shardwise.power_sum.default(wide, 2, dims, True)
    mean = reduced(squares / math.prod(normalized_shape))
    rstd = (mean + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return scaled(wide * rstd, weight, None, x.dtype), rstd


@decomposition(aten._fused_rms_norm_backward.default)
def rms_norm_backward_of_shards(
    grad: Any, x: Any, normalized_shape: Sequence[int], rstd: Any, weight: Any, output_mask: Sequence[bool]
) -> Any:
    """The gradients of an RMS norm over sharded dims: one mean is reduced."""
    dims = norm_dims(x, normalized_shape)
    x = settled(x, dims)
    grad, rstd = as_laid_out(grad, x), statistic_of(rstd, x, dims)
    if not split_axes(x, dims) and all(output_mask):
        return aten._fused_rms_norm_backward.default(grad, x, normalized_shape, rstd, replicated(weight), output_mask)
    found = backward_through(widened(grad), widened(x) * rstd, rstd, weight, dims, False, output_mask)
    dtypes = (x.dtype, x.dtype if weight is None else weight.dtype)
    return tuple(None if one is None else as_result(one, dtype) for one, dtype in zip(found, dtypes, strict=True))


# ---------------------------------------------------------------- batch norm


def on_channels(call: Call, specs: Sequence[DTensorSpec]) -> tuple[Specs, Specs] | None:
    """The layouts of a batch norm that can run as it is: batches whole, statistics and weights split as the channels.

    Nothing may be moved: running statistics are written to where they lie.
    """
    x = specs[0]
    if x.ndim < 2 or any(axes for d, axes in enumerate(x.dim_axes) if d != 1) or x.partial_axes:
        return None
    wanted = [like_channels(x, spec.tensor_meta) for spec in specs]
    if leaves_empty(x, 1) or any(have is not want for have, want in zip(specs, wanted, strict=True)):
        return None
    return tuple(specs), tuple(like_channels(x, meta) for meta in call.results)


def leaves_empty(x: DTensorSpec, dim: int) -> bool:
    """Whether some rank holds nothing of a dim."""
    indices = [range(n) if axis in x.dim_axes[dim] else (0,) for axis, n in enumerate(x.mesh.shape)]
    return any(x.local_shape(coordinate)[dim] == 0 for coordinate in itertools.product(*indices))


def like_channels(x: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout of a tensor of the shape of `x`, or of one with an element for each channel."""
    if meta.shape == x.shape:
        return DTensorSpec.from_dim_axes(x.mesh, x.placements, meta, x.dim_axes)
    if len(meta.shape) != 1 or meta.shape[0] != x.shape[1]:
        return DTensorSpec.from_dim_axes(x.mesh, (Replicate(),) * x.mesh.ndim, meta, ((),) * len(meta.shape))
    return DTensorSpec.from_dim_axes(x.mesh, tuple(map(_to_front, x.placements)), meta, (x.dim_axes[1],))


def _to_front(placement: Placement) -> Placement:
    if isinstance(placement, StridedShard):
        return StridedShard(0, placement.split_factor)
    return Shard(0) if isinstance(placement, Shard) else placement


@layout_rule(
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats
)
def batch_norm(call: Call, specs: Sequence[DTensorSpec]) -> tuple[Specs, Specs] | None:
    """Channel by channel, in training: without it the operator is only a few pointwise ones."""
    return on_channels(call, specs) if call["training"] else None


@layout_rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(call: Call, specs: Sequence[DTensorSpec]) -> tuple[Specs, Specs] | None:
    """Channel by channel."""
    return on_channels(call, specs) if call["train"] else None


def over_channels(value: Any, x: Any) -> Any:
    """Something with an element for each channel, shaped to be computed with `x`."""
    return None if value is None else value.reshape([1, x.shape[1]] + [1] * (x.dim() - 2))


def but_channels(x: Any) -> tuple[int, ...]:
    """Every dim but that of the channels."""
    return tuple(d for d in range(x.dim()) if d != 1)


def batch_norm_of_shards(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Batch norm over sharded batches: mean and variance of each channel are reduced, as one device has them."""
    dims = but_channels(x)
    x = settled(x, dims)
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
        mean, rstd = over_channels(running_mean, x), over_channels((running_var + eps).rsqrt(), x)
        empty = torch.empty(0, dtype=mean.dtype, device=x.device)
        kept = (empty, empty.clone())
    out = (widened(x) - mean) * (rstd if weight is None else rstd * over_channels(weight, x))
    return scaled(out, None, over_channels(bias, x), x.dtype), kept[0], kept[1]


def update(running: Any, value: Any, momentum: float) -> None:
    """Move a running statistic towards a value, where it lies."""
    running.mul_(1 - momentum).add_(as_result(value * momentum, running.dtype))


decomposition(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)(batch_norm_of_shards)


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Batch norm that always uses the batch's own statistics."""
    return batch_norm_of_shards(x, weight, bias, None, None, True, momentum, eps)


def reserve(x: Any) -> Any:
    """What the fused backward of some backends would need, and ours does not."""
    return torch.empty(0, dtype=torch.uint8, device=x.device)


@decomposition(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(x: Any, *args: Any) -> tuple[Any, ...]:
    """cuDNN's, by the one that every backend has."""
    return *aten.native_batch_norm.default(x, *args), reserve(x)


@decomposition(aten.miopen_batch_norm.default)
def miopen_batch_norm(x: Any, *args: Any) -> tuple[Any, ...]:
    """MIOpen's, by the one that every backend has."""
    return aten.native_batch_norm.default(x, *args)


@decomposition(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """In training, whatever the backend."""
    return *batch_norm_of_shards(x, weight, bias, running_mean, running_var, True, momentum, eps), reserve(x)


@decomposition(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """With the running statistics, whatever the backend."""
    return *batch_norm_of_shards(x, weight, bias, running_mean, running_var, False, momentum, eps), reserve(x)


@decomposition(aten.native_batch_norm_backward.default)
def batch_norm_backward_of_shards(
    grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_invstd: Any,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of a batch norm over sharded batches: two sums for each channel are reduced."""
    dims = but_channels(x)
    x = settled(x, dims)
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
    """cuDNN's, by the one that every backend has; what it saves as variance is the inverse of the deviation."""
    saved = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward.default(grad, x, weight, *saved, True, eps, [True, True, True])


@decomposition(aten.miopen_batch_norm_backward.default)
def miopen_batch_norm_backward(
    x: Any, grad: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_var: Any, eps: float
) -> tuple[Any, ...]:
    """MIOpen's, by the one that every backend has."""
    saved = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward.default(grad, x, weight, *saved, True, eps, [True, True, True])


@decomposition(aten.batch_norm_backward.default)
def any_batch_norm_backward(
    grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_var: Any, update: bool,
    eps: float, output_mask: Sequence[bool], reserve: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Of `_batch_norm_with_update` and `_batch_norm_no_update`."""
    saved = (running_mean, running_var, save_mean, save_var)
    return aten.native_batch_norm_backward.default(grad, x, weight, *saved, update, eps, output_mask)


# ---------------------------------------------------------------- group norm


def local_batch(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """How many of the batch a rank holds."""
    return {"N": inputs[0].local_shape(coordinate)[0]}


def by_batch(call: Call, **facts: Any) -> Factors:
    """The first dim of everything that has one for the batch."""

    def dims(meta: TensorMeta) -> tuple[str | None, ...]:
        return tuple("n" if d == 0 and len(meta.shape) > 1 else None for d in range(len(meta.shape)))

    return Factors(tuple(map(dims, call.operands)), tuple(map(dims, call.results)), **facts)


@rule(aten.native_group_norm.default, localize=local_batch)
def group_norm(call: Call) -> Factors:
    """Each of the batch by itself."""
    return by_batch(call)


@rule(aten.native_group_norm_backward.default, localize=local_batch)
def group_norm_backward(call: Call) -> Factors:
    """Each of the batch by itself; the gradients of the weights sum over it."""
    return by_batch(call, summed=frozenset("n"))


def mean_over(x: Any, dims: Sequence[int]) -> Any:
    """The mean over `dims`; over none of them `x` itself."""
    return x.mean(dims) if dims else x


def per_group(x: Any, group: int) -> Any:
    """The mean of each group of channels, of everything of a sample: sums over space first, then the small rest."""
    by_channel = reduced(mean_over(x, tuple(range(2, x.dim()))))
    return reduced(by_channel.reshape(x.shape[0], group, x.shape[1] // group).mean(-1))


def per_channel(value: Any, x: Any) -> Any:
    """Something of each group, repeated for its channels and shaped to be computed with `x`."""
    groups, channels = value.shape[1], x.shape[1]
    repeated = value.unsqueeze(-1).expand(x.shape[0], groups, channels // groups)
    return repeated.reshape([x.shape[0], channels] + [1] * (x.dim() - 2))


@decomposition(aten.native_group_norm.default)
def group_norm_of_shards(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    """Group norm over sharded channels or space: statistics of each channel are reduced, the tensor stays."""
    x = settled(x, range(1, x.dim()))
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
    x = settled(x, inner)
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
