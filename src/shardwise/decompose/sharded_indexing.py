"""Indexing with masks, with indices shorter than a sharded dim, and with flat indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.decompose.layout_helpers import split_axes
from shardwise.rules.dims import wrapped
from shardwise.rules.indexing import (
    MASKS,
)
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


def without_masks(tensor: Any, indices: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Masks replaced by indices; one without dims adds a dim to the tensor."""
    found: list[Any] = []
    for each in indices:
        if each is None or each.dtype not in MASKS:
            found.append(each)
        elif each.dim():
            found.extend(each.nonzero().unbind(1))
        else:
            tensor = tensor.unsqueeze(len(found))
            found.append(each.reshape(1).nonzero().unbind(1)[0])
    return tensor, found


@decomposition(aten.index.Tensor)
def index_without_masks(tensor: Any, indices: Sequence[Any]) -> Any:
    """Only the masks are replicated."""
    tensor, found = without_masks(tensor, indices)
    return aten._unsafe_index.Tensor(tensor, found)


@decomposition(aten.index_put.default, aten._index_put_impl.default)
def index_put_without_masks(
    tensor: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """One number put by a mask needs no indices; otherwise only the masks are replicated."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype in MASKS and mask.dim() and values.numel() == 1:
        chosen = mask.to(torch.bool).reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))
        value = values.reshape(()) + tensor if accumulate else values.reshape(())
        return torch.where(chosen, value, tensor)
    seen, found = without_masks(tensor, indices)
    return aten._unsafe_index_put.default(seen, found, values, accumulate).reshape(tensor.shape)


# ---------------------------------------------------------------- indices shorter than a sharded dim


def sharded_and_shorter(tensor: Any, dim: int, index: Any) -> list[int]:
    """The sharded dims, except `dim`, that are longer than the indices."""
    at = wrapped(dim, tensor.dim())
    return [d for d in range(tensor.dim()) if d != at and index.shape[d] < tensor.shape[d] and split_axes(tensor, [d])]


@decomposition(aten.gather.default)
def gather_in_front(tensor: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """If the indices cover the front of a sharded dim, only that is read."""
    shorter = sharded_and_shorter(tensor, dim, index) if tensor.dim() == index.dim() and index.numel() else []
    for d in shorter:
        tensor = tensor.narrow(d, 0, index.shape[d])
    return aten.gather.default(tensor, dim, index) if shorter else NotImplemented


def write_in_front(op: Any) -> Callable[..., Any]:
    """If the indices cover the front of a sharded dim, only that is written to."""

    def write_front(tensor: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Any:
        shorter = sharded_and_shorter(tensor, dim, index) if tensor.dim() == index.dim() and index.numel() else []
        if not shorter:
            return NotImplemented
        fronts = [tensor]
        for d in shorter:
            fronts.append(fronts[-1].narrow(d, 0, index.shape[d]))
        if args and isinstance(args[0], torch.Tensor) and args[0].dim() == index.dim():
            source = args[0]
            for d, size in enumerate(index.shape):
                source = source if source.shape[d] == size else source.narrow(d, 0, size)
            args = (source, *args[1:])
        made = op(fronts.pop(), dim, index, *args, **kwargs)
        for d, before in zip(reversed(shorter), reversed(fronts), strict=True):
            made = aten.slice_scatter.default(before, made, d, 0, index.shape[d])
        return made

    return write_front


for write in (
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
    aten.scatter_reduce.two,
):  # fmt: skip
    decomposition(write)(write_in_front(write))


def in_order_of_shards(tensor: Any, index: Any) -> tuple[Any, int, Any]:
    """The tensor with its first sharded dim in front, that dim, and the flat indices into it.

    An index out of range remains out of range, so that the next operator refuses it.
    """
    dim, count = next((d for d in range(tensor.dim()) if split_axes(tensor, [d])), 0), tensor.numel()
    outer, size, inner = (
        math.prod(part) for part in (tensor.shape[:dim], tensor.shape[dim : dim + 1], tensor.shape[dim + 1 :])
    )
    index = index.reshape(-1)
    inside = (index >= -count) & (index < count)
    index = torch.where(index < 0, index + count, index)
    if outer > 1:
        row, column = index.div(inner, rounding_mode="floor"), index.remainder(inner)
        place = row.remainder(size) * outer + row.div(size, rounding_mode="floor")
        index = place * inner + column
    return tensor.movedim(dim, 0), dim, torch.where(inside, index, count)


@decomposition(aten.take.default)
def take_by_rows(tensor: Any, index: Any) -> Any:
    """A look-up along the sharded dim: only the requested elements move."""
    if not tensor.dim() or not tensor.numel() or not split_axes(tensor, range(tensor.dim())):
        return NotImplemented
    moved, _, at = in_order_of_shards(tensor, index)
    return aten.index_select.default(moved.reshape(-1), 0, at).reshape(index.shape)


@decomposition(aten.put.default)
def put_by_rows(tensor: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """A write along the sharded dim."""
    if not tensor.dim() or not tensor.numel() or index.numel() != source.numel():
        return NotImplemented
    moved, dim, at = in_order_of_shards(tensor, index)
    made = aten.index_put.default(moved.reshape(-1), [at], source.reshape(-1), accumulate)
    return made.reshape(moved.shape).movedim(0, dim)
