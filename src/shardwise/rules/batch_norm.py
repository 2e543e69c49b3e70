"""Batch norm, channel by channel; sharded batches are in `decompose/sharded_batch_norm.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.placement import AnyShard, Placement, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.registry import Call, layout_rule

aten = torch.ops.aten

Specs = tuple[DTensorSpec, ...]


def on_channels(call: Call, specs: Sequence[DTensorSpec]) -> tuple[Specs, Specs] | None:
    """The layouts of a batch norm without decomposition: batches not sharded, statistics and weights like the channels.

    Nothing may be moved: running statistics are written in place.
    """
    x = specs[0]
    if x.ndim < 2 or any(axes for d, axes in enumerate(x.dim_axes) if d != 1) or x.partial_axes:
        return None
    wanted = [like_channels(x, spec.tensor_meta) for spec in specs]
    if leaves_empty(x, 1) or any(have is not want for have, want in zip(specs, wanted, strict=True)):
        return None
    return tuple(specs), tuple(like_channels(x, meta) for meta in call.results)


def leaves_empty(x: DTensorSpec, dim: int) -> bool:
    """Whether a dim is empty on some rank."""
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
    return placement.on_dim(0) if isinstance(placement, AnyShard) else placement


@layout_rule(
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats
)
def batch_norm(call: Call, specs: Sequence[DTensorSpec]) -> tuple[Specs, Specs] | None:
    """Channel by channel, in training. In evaluation the operator is decomposed into pointwise ones."""
    return on_channels(call, specs) if call["training"] else None


def backward_on_meta(*args: Any) -> tuple[Any, ...]:
    """The requested gradients. torch's meta function always returns the gradient of the input; kernels do not."""
    gradients = aten.native_batch_norm_backward.default(*args)
    return tuple(each if wanted else None for each, wanted in zip(gradients, args[-1], strict=True))


@layout_rule(aten.native_batch_norm_backward.default, meta_op=backward_on_meta)
def batch_norm_backward(call: Call, specs: Sequence[DTensorSpec]) -> tuple[Specs, Specs] | None:
    """Channel by channel."""
    return on_channels(call, specs) if call["train"] else None
