"""Layer, RMS and group norm: dims that are not normalized are factors.

Over sharded dims they are decomposed (`decompose/sharded_norms.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.engine import Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


def normalizing(call: Call, **facts: Any) -> Factors:
    """The dims before the normalized ones are factors; weights are not sharded."""
    shape, inner = call["input"].shape, len(call["normalized_shape"])
    own = tuple(f"d{d}" if d < len(shape) - inner else None for d in range(len(shape)))

    def dims(meta: TensorMeta) -> tuple[str | None, ...]:
        return own if len(meta.shape) == len(shape) and inner < len(shape) else (None,) * len(meta.shape)

    return Factors(tuple(map(dims, call.operands)), tuple(map(dims, call.results)), **facts)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm(call: Call) -> Factors:
    """Rows are independent."""
    return normalizing(call)


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def layer_norm_backward(call: Call) -> Factors:
    """Rows are independent; the gradients of the weights sum over them."""
    outer = len(call["input"].shape) - len(call["normalized_shape"])
    return normalizing(call, summed=frozenset(f"d{d}" for d in range(outer)))


def local_batch(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local batch size."""
    return {"N": inputs[0].local_shape(coordinate)[0]}


def by_batch(call: Call, **facts: Any) -> Factors:
    """The first dim of every tensor with a batch dim is a factor."""

    def dims(meta: TensorMeta) -> tuple[str | None, ...]:
        return tuple("n" if d == 0 and len(meta.shape) > 1 else None for d in range(len(meta.shape)))

    return Factors(tuple(map(dims, call.operands)), tuple(map(dims, call.results)), **facts)


def by_channels(x: torch.Tensor) -> bool:
    """Whether the kernels of group norm read this local as channels-last. Only CPU kernels do."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return (
        order is not None and x.device.type == "cpu" and not x.is_contiguous() and x.is_contiguous(memory_format=order)
    )


def dense(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """A local in one of the two memory orders, copied only if necessary.

    Dims of size one get the strides of a new tensor: kernels derive the order from them.
    """
    if not channels_last:
        return x.contiguous().view(-1).view(x.shape)
    return dense(x.movedim(1, -1), False).movedim(-1, 1)


def local_group_norm(x: torch.Tensor, *rest: Any) -> Any:
    """Group norm of a local, whose memory order may differ from that on one device."""
    return aten.native_group_norm.default(dense(x, by_channels(x)), *rest)


def local_group_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    """The gradients of a group norm of a local. The kernel assumes one memory order for both, without a check."""
    last = by_channels(x)
    return aten.native_group_norm_backward.default(dense(grad, last), dense(x, last), *rest)


@rule(aten.native_group_norm.default, localize=local_batch, local_op=local_group_norm)
def group_norm(call: Call) -> Factors:
    """Samples are independent."""
    return by_batch(call)


@rule(aten.native_group_norm_backward.default, localize=local_batch, local_op=local_group_norm_backward)
def group_norm_backward(call: Call) -> Factors:
    """Samples are independent; the gradients of the weights sum over them."""
    return by_batch(call, summed=frozenset("n"))
