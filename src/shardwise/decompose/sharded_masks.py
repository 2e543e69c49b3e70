"""Masks and unique elements of large sharded tensors: ranks count, then exchange the selected elements.

The number of elements depends on values. So it is computed first, and the result is sharded. A compiler traces the
operators themselves, which replicate their operands.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.core.tracing import is_tracing
from shardwise.decompose.layout_helpers import as_laid_out, split_axes, without_partial
from shardwise.rules.registry import decomposition

aten = torch.ops.aten
# Bytes. Smaller tensors are replicated, which is faster.
LARGE = 1 << 20


def flattened(x: Any) -> Any:
    """A large tensor as one sharded dim; None if it is small, or if this needs communication."""
    if is_tracing() or not hasattr(x, "placements") or x.numel() * x.element_size() < LARGE:
        return None
    x = without_partial(x)
    if x.spec.is_strided or not split_axes(x, (0,)) or len(split_axes(x, range(x.dim()))) > len(x.spec.dim_axes[0]):
        return None
    members = math.prod(x.device_mesh.shape[axis] for axis in x.spec.dim_axes[0])
    return None if x.dim() > 1 and x.shape[0] % members else x.reshape(-1)


def selected(mask: Any, *tensors: Any) -> list[Any]:
    """The elements of tensors of one dim that a mask selects."""
    size, place = int(mask.sum()), mask.cumsum(0) - 1
    return [torch.ops.shardwise.compact.default(t, mask, place, size) for t in tensors]


def positions(x: Any) -> Any:
    """The indices of a tensor of one dim, sharded as it is."""
    return torch.ops.shardwise.positions.default(x, 0)


@decomposition(aten.nonzero.default)
def nonzero(x: Any) -> Any:
    """Each rank finds the nonzero elements of its local part."""
    flat = flattened(x)
    if flat is None:
        return NotImplemented
    (index,) = selected(flat != 0, positions(flat))
    found = []
    for size in reversed(x.shape):
        found.append(index % size)
        index = index // size
    return torch.stack(found[::-1], 1)


@decomposition(aten.masked_select.default)
def masked_select(x: Any, mask: Any) -> Any:
    """The elements of a tensor that a mask selects; the mask gets the layout of the tensor."""
    x, mask = torch.broadcast_tensors(x, mask)
    flat = flattened(x)
    if flat is None or not hasattr(mask, "placements"):
        return NotImplemented
    return selected(as_laid_out(without_partial(mask), without_partial(x)).reshape(-1), flat)[0]


@decomposition(aten.masked_scatter.default)
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """For each element that a mask selects, the next one of a source, by a look-up."""
    x, mask = torch.broadcast_tensors(x, mask)
    x = x if split_axes(x, range(x.dim())) else as_laid_out(x, without_partial(mask))
    flat = flattened(x)
    if flat is None:
        return NotImplemented
    chosen = as_laid_out(without_partial(mask), without_partial(x)).reshape(-1)
    if not source.numel():
        return NotImplemented if chosen.any() else x.clone()
    place = torch.where(chosen, chosen.cumsum(0) - 1, 0)
    return torch.where(chosen, aten.index.Tensor(source.reshape(-1), [place]), flat).reshape(x.shape)


@decomposition(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
    """The gradient of the source: that of the selected elements, in their order."""
    if hasattr(mask, "placements") and not split_axes(grad, range(grad.dim())):
        grad = as_laid_out(grad, without_partial(mask).expand(grad.shape))
    flat = flattened(grad)
    if flat is None or not hasattr(mask, "placements"):
        return NotImplemented
    chosen = as_laid_out(without_partial(mask).expand(grad.shape), without_partial(grad)).reshape(-1)
    made = torch.ops.shardwise.compact.default(flat, chosen, chosen.cumsum(0) - 1, math.prod(sizes))
    return made.reshape(sizes)


@decomposition(aten.bincount.default)
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Each rank counts its local part; counts are summed."""
    if flattened(x) is None or x.dim() != 1 or minlength < 0 or int(x.min()) < 0:
        return NotImplemented
    size = max(int(x.max()) + 1, minlength)
    if weights is None:
        return x.new_zeros(size, dtype=torch.int64).index_add(0, x, torch.ones_like(x, dtype=torch.int64))
    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return x.new_zeros(size, dtype=dtype).index_add(0, x, weights.to(dtype))


# ---------------------------------------------------------------- unique elements


def runs_of(values: Any, inverse: Any, wants_counts: bool) -> tuple[Any, Any, Any]:
    """The first of each run of equal values, the run of each element, and the lengths of runs.

    Args:
        values: of one dim.
        inverse: for each element the position at which the number of its run is stored; None if it is not wanted.
        wants_counts: whether lengths are wanted.
    """
    place, nothing = positions(values), values.new_empty(0, dtype=torch.int64)
    first = (values != values.roll(1)) | (place == 0)
    found = selected(first, values, place) if wants_counts else selected(first, values)
    runs = nothing if inverse is None else torch.zeros_like(place).scatter(0, inverse, first.cumsum(0) - 1)
    if not wants_counts:
        return found[0], runs, nothing
    starts = found[1]
    ends = torch.where(positions(starts) == len(starts) - 1, len(values), starts.roll(-1))
    return found[0], runs, ends - starts


@decomposition(aten._unique2.default)
def unique(x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:  # noqa: A002
    """The first of each run of equal sorted elements."""
    flat = flattened(x)
    if flat is None:
        return NotImplemented
    ordered = flat.sort(stable=True)
    found, inverse, counts = runs_of(ordered.values, ordered.indices if return_inverse else None, return_counts)
    return found, inverse.reshape(x.shape) if return_inverse else inverse, counts


@decomposition(aten.unique_consecutive.default)
def unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The first of each run of equal elements."""
    flat = flattened(x) if dim is None else None
    if flat is None:
        return NotImplemented
    found, inverse, counts = runs_of(flat, positions(flat) if return_inverse else None, return_counts)
    return found, inverse.reshape(x.shape) if return_inverse else inverse, counts
