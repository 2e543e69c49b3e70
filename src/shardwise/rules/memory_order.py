"""Memory orders that CPU kernels give their results, where torch's functions on meta tensors give others.

Random numbers are drawn in the order of memory, and `as_strided` reads it, so results need the strides of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.torch_private import OpOverload, suggest_memory_format

__all__ = ["CPU_ORDERS"]

aten = torch.ops.aten


Order = Callable[[Sequence[torch.Tensor], torch.Tensor, Mapping[str, Any]], torch.Tensor]


def as_suggested(operands: Sequence[torch.Tensor], result: torch.Tensor, _: Mapping[str, Any]) -> torch.Tensor:
    """Channels-last if the first operand is, otherwise contiguous."""
    return torch.empty(
        result.shape, dtype=result.dtype, device="meta", memory_format=suggest_memory_format(operands[0])
    )


def as_normalized(operands: Sequence[torch.Tensor], result: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor:
    """The gradient of a batch, in the order of the batch; it is not among the results if it was not requested."""
    batch = operands[1]
    return result if result.shape != batch.shape else as_suggested([batch], result, call)


def as_joined(operands: Sequence[torch.Tensor], result: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor:
    """The kernel joins the two parts of a dim, dim by dim. Without dims, it flattens the tensor first."""
    if not call["dims"]:
        return torch.empty(result.shape, dtype=result.dtype, device="meta")
    made = operands[0]
    for shift, dim in zip(call["shifts"], call["dims"], strict=True):
        size = made.shape[dim]
        start = -shift % size if size else 0
        made = torch.cat([made.narrow(dim, start, size - start), made.narrow(dim, 0, start)], dim)
    return made


def as_iterated(operands: Sequence[torch.Tensor], result: torch.Tensor, _: Mapping[str, Any]) -> torch.Tensor:
    """The order of an elementwise operator on one or two operands: torch's iterator chooses it."""
    # sums of any two dtypes are defined, and their function on meta tensors asks the iterator
    stride = torch.add(operands[0], operands[1] if len(operands) > 1 else 1).stride()
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device="meta")


# For each operator, the order of its first result: from its operands and this result, on meta, and its arguments.
CPU_ORDERS: dict[OpOverload, Order] = {
    **dict.fromkeys(
        (
            aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats, aten._batch_norm_with_update.default,
            aten.reflection_pad2d.default, aten.reflection_pad3d.default, aten.replication_pad2d.default,
            aten.replication_pad3d.default, aten.max_unpool2d.default, aten.channel_shuffle.default,
            aten.pixel_shuffle.default,
        ),
        as_suggested,
    ),
    aten.native_batch_norm_backward.default: as_normalized,
    aten.roll.default: as_joined,
    **dict.fromkeys(
        (
            aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode,
            aten.copysign.Tensor, aten.copysign.Scalar, aten.xlogy.Tensor, aten.xlogy.Scalar_Self,
            aten.xlogy.Scalar_Other, aten.special_xlog1py.default, aten.special_xlog1py.other_scalar,
            aten.special_xlog1py.self_scalar, aten.native_dropout_backward.default,
        ),
        as_iterated,
    ),
}  # fmt: skip
