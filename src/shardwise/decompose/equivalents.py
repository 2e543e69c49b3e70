"""Operators that other operators express directly: `equal`, `addbmm_`, zeros for tangents of forward mode, checks."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.tracing import is_tracing
from shardwise.decompose.layout_helpers import reduced
from shardwise.fabric.base import fabric_of
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten._has_same_storage_numel.default)
def has_same_storage_numel(one: Any, other: Any) -> bool:
    """Whether two global tensors have storages of equal size. Forward mode compares a value and its tangent."""
    return _storage_numel(one) == _storage_numel(other)


def _storage_numel(tensor: Any) -> int:
    sizes = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    return 0 if 0 in tensor.shape else 1 + sum((size - 1) * stride for size, stride in sizes)


@decomposition(aten._new_zeros_with_same_feature_meta.default)
def new_zeros_with_same_feature_meta(one: Any, other: Any, *, self_num_batch_dims: int = 0) -> Any:
    """Zeros in the layout of a value, into which forward mode copies a tangent of another layout."""
    if self_num_batch_dims == 0:
        return torch.zeros_like(other, dtype=one.dtype)
    step = _storage_numel(other)
    batch = one.shape[:self_num_batch_dims]
    strides = [step * stride for stride in dense_strides(batch)]
    return one.new_empty_strided([*batch, *other.shape], [*strides, *other.stride()]).zero_()


@decomposition(aten.addbmm_.default)
def resized_addbmm(self: Any, batch1: Any, batch2: Any, **scales: Any) -> Any:
    """Unlike other operators, addbmm_ gives self the shape that it broadcasts to."""
    result = aten.addbmm.default(self, batch1, batch2, **scales)
    return (self if self.shape == result.shape else self.resize_(result.shape)).copy_(result)


decomposition(aten._is_all_true.default)(torch.all)
decomposition(aten._is_any_true.default)(torch.any)


@decomposition(aten.equal.default)
def equal(a: Any, b: Any) -> bool:
    """Whether two tensors are equal: each rank compares its locals."""
    if a.dtype != b.dtype:
        return NotImplemented
    return a.shape == b.shape and bool((a == b).all())


@decomposition(aten._linalg_check_errors.default)
def check_errors(info: Any, api_name: str, *, is_matrix: bool) -> Any:
    """Reduce whether any factorization failed. Only the message of a failure needs the codes of all matrices."""
    if is_tracing() or not info.numel():
        return NotImplemented
    failed = reduced((info != 0).any())
    return NotImplemented if fabric_of(info.device_mesh).has_values and failed.item() else None
