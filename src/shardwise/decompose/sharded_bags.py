"""Sums and means of bags of rows of a table, by look-ups and sums of rows.

Bags of one length, as `F.embedding_bag` makes them of a 2-D input, are a separate dim, which stays sharded like the
input. Bags of other lengths are found from their offsets; this is done for tables that are sharded by rows.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.tracing import is_tracing
from shardwise.decompose.layout_helpers import replicated, split_axes
from shardwise.fabric.base import fabric_of
from shardwise.rules.embedding import MAX
from shardwise.rules.registry import decomposition

aten = torch.ops.aten
MEAN = 1


def bag_of_each(indices: Any, offsets: Any) -> Any:
    """The bag of each index, from the offsets of bags. Some kernels of the forward return it empty."""
    count = indices.shape[0]
    begins = offsets.new_zeros(count + 1).index_add(0, offsets, torch.ones_like(offsets))
    return begins[:count].cumsum(0) - 1


def length_of_bags(indices: Any, offsets: Any, include_last_offset: bool = False) -> int | None:
    """The common length of sharded bags; None if lengths differ. Dry runs assume equal lengths."""
    bags, count = offsets.shape[0] - int(include_last_offset), indices.shape[0]
    if not split_axes(indices, (0,)) or bags <= 0 or count % bags or is_tracing():
        return None
    length = count // bags
    if length and fabric_of(indices.device_mesh).has_values:
        begins = torch.arange(offsets.shape[0], dtype=offsets.dtype, device=offsets.device) * length
        if not bool((replicated(offsets) == begins).all()):
            return None
    return length or None


@decomposition(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Each rank looks up its rows and adds them by bag."""
    if mode == MAX or not indices.shape[0]:
        return NotImplemented
    length = length_of_bags(indices, offsets, include_last_offset)
    if length is not None:
        made, sizes = _equal_bags(weight, indices.view(-1, length), mode, per_sample_weights, padding_idx)
        return made, indices.new_zeros(0), sizes, indices.new_zeros(0)
    if not split_axes(weight, (0,)):
        return NotImplemented
    bags = offsets.shape[0] - int(include_last_offset)
    bag, counted = bag_of_each(indices, offsets), indices != padding_idx
    rows = aten.embedding.default(weight, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    rows = torch.where(counted.unsqueeze(1), rows, 0)
    made = rows.new_zeros(bags, weight.shape[1]).index_add(0, bag, rows)
    sizes = indices.new_zeros(bags).index_add(0, bag, counted.to(indices.dtype))
    if mode == MEAN:
        made = made / sizes.clamp(min=1).unsqueeze(1)
    return made, bag, sizes, indices.new_zeros(0)


def _equal_bags(weight: Any, indices: Any, mode: int, per_sample_weights: Any, padding_idx: int) -> tuple[Any, Any]:
    """The bags of a matrix of indices, one for each row, and the number of indices that count in each."""
    rows, counted = aten.embedding.default(weight, indices), indices != padding_idx
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.view(indices.shape).unsqueeze(2)
    made, sizes = torch.where(counted.unsqueeze(2), rows, 0).sum(1), counted.sum(1)
    return made / sizes.clamp(min=1).unsqueeze(1) if mode == MEAN else made, sizes


@decomposition(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    """The gradient of each bag for each of its rows; gradients of the table are sent to their owners."""
    if sparse or not indices.shape[0]:
        return NotImplemented
    bags = grad.shape[0]
    length = None if mode == MAX or scale_grad_by_freq else length_of_bags(indices, offsets[:bags])
    if length is not None:
        rows = _rows_of_equal_bags(grad, indices.view(bags, length), mode, per_sample_weights, padding_idx)
        return aten.embedding_dense_backward.default(rows, indices.view(bags, length), num_weights, padding_idx, False)
    bag = bag_of_each(indices, offsets)
    if mode == MAX or scale_grad_by_freq:
        return aten._embedding_bag_dense_backward.default(
            grad, indices, bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights,
            padding_idx,
        )  # fmt: skip
    if mode == MEAN:
        counted = (indices != padding_idx).to(grad.dtype)
        grad = grad / grad.new_zeros(grad.shape[0]).index_add(0, bag, counted).clamp(min=1).unsqueeze(1)
    rows = grad.index_select(0, bag)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return aten.embedding_dense_backward.default(rows, indices, num_weights, padding_idx, False)


def _rows_of_equal_bags(grad: Any, indices: Any, mode: int, per_sample_weights: Any, padding_idx: int) -> Any:
    """The gradient of each row of bags of one length, from the gradients of the bags."""
    if mode == MEAN:
        counted = (indices != padding_idx).sum(1).clamp(min=1)
        grad = grad / counted.to(grad.dtype).unsqueeze(1)
    rows = grad.unsqueeze(1).expand(*indices.shape, grad.shape[1])
    return rows if per_sample_weights is None else rows * per_sample_weights.view(*indices.shape, 1)


@decomposition(aten._embedding_bag_per_sample_weights_backward.default)
def weights_backward(
    grad: Any, weight: Any, indices: Any, offsets: Any, offset2bag: Any, mode: int, padding_idx: int = -1
) -> Any:
    """Products of the gradient of a bag with its rows."""
    if not indices.shape[0]:
        return NotImplemented
    length = length_of_bags(indices, offsets[: grad.shape[0]])
    if length is not None:
        rows = aten.embedding.default(weight, indices.view(-1, length))
        products = (grad.unsqueeze(1) * rows).sum(2).view(-1)
        return torch.where(indices != padding_idx, products, 0)
    if not split_axes(weight, (0,)):
        return NotImplemented
    bag = bag_of_each(indices, offsets)
    products = (grad.index_select(0, bag) * aten.embedding.default(weight, indices)).sum(1)
    return torch.where(indices != padding_idx, products, 0)
