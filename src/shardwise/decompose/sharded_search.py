"""`topk`, `kthvalue`, `median` and `mode` along a sharded dim: candidates are exchanged, or the dim is sorted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.placement import Replicate, Shard
from shardwise.decompose.layout_helpers import moved_to, reduced, split_axes, without_partial
from shardwise.rules import sample_sort
from shardwise.rules.dims import wrapped
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.topk.default, reductions=2)
def topk_of_shards(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """The largest elements along a sharded dim: the largest of each part are exchanged by columns, and sorted.

    Sorting is stable, and only the last parts are padded, so an element precedes padding of the same value.
    """
    dim = wrapped(dim, x.dim())
    x = without_partial(x, (dim,))
    axes = split_axes(x, (dim,))
    if not axes or x.spec.is_strided:
        return NotImplemented
    parts = math.prod(x.device_mesh.shape[a] for a in axes)
    if k >= -(-x.shape[dim] // parts) and sorts_by_owner(x, dim):
        ordered = x.sort(dim=dim, descending=largest, stable=True)
        return tuple(t.narrow(dim, 0, k).contiguous() for t in ordered)
    if len(axes) != 1 or k >= -(-x.shape[dim] // parts):
        return NotImplemented
    found = torch.ops.shardwise.topk_part.default(x, k, dim, largest, parts)
    free = [d for d, split in enumerate(x.spec.dim_axes) if d != dim and not split and x.shape[d] > 1]
    to = Shard(max(free, key=lambda d: x.shape[d])) if free else Replicate()
    values, indices = (moved_to(t, [to if a in axes else p for a, p in enumerate(t.placements)]) for t in found)
    ordered = values.sort(dim=dim, descending=largest, stable=True)
    order = ordered.indices.narrow(dim, 0, k)
    return ordered.values.narrow(dim, 0, k).contiguous(), indices.gather(dim, order)


# ---------------------------------------------------------------- one of the sorted elements

MANY = 8  # ranks: sorting moves values and indices twice, six times a rank's part of float32; gathering moves all parts


def sorts_by_owner(x: Any, dim: int) -> bool:
    """Whether to sort along a sharded dim: there are many parts, and no other dim can be sharded instead."""
    axes = split_axes(x, (dim,))
    parts = math.prod(x.device_mesh.shape[a] for a in axes)
    if parts < MANY or not x.numel() or x.dtype not in sample_sort.SORTED_BY_OWNER or x.spec.is_strided:
        return False
    return not any(size >= parts and not x.spec.dim_axes[d] for d, size in enumerate(x.shape) if d != dim)


def from_sorted(choose: Callable[..., tuple[Any, Any]], x: Any, dim: int, keepdim: bool, *more: Any) -> Any:
    """Values and indices that `choose` selects from the sorted ones, with `dim` of size one or removed."""
    if not x.dim():
        return NotImplemented
    dim = wrapped(dim, x.dim())
    x = without_partial(x, (dim,))
    if not sorts_by_owner(x, dim):
        return NotImplemented
    found = choose(x, x.sort(dim=dim, stable=True), dim, *more)
    return tuple(t if keepdim else t.squeeze(dim) for t in found)


def _taken(ordered: Any, dim: int, at: Any) -> tuple[Any, Any]:
    return ordered.values.gather(dim, at), ordered.indices.gather(dim, at)


def _kth(x: Any, ordered: Any, dim: int, k: int) -> tuple[Any, Any]:
    return ordered.values.narrow(dim, k - 1, 1).clone(), ordered.indices.narrow(dim, k - 1, 1).clone()


def _median(x: Any, ordered: Any, dim: int, ignores_nan: bool) -> tuple[Any, Any]:
    """The lower of the two in the middle. NaNs come last; the first of them is the median, or they do not count."""
    size = x.shape[dim]
    if not x.is_floating_point():
        return _kth(x, ordered, dim, (size - 1) // 2 + 1)
    nans = reduced(x.isnan().sum(dim, keepdim=True))
    numbers = size - nans
    if ignores_nan:
        return _taken(ordered, dim, (numbers - 1).clamp(min=0) // 2)
    return _taken(ordered, dim, torch.where(nans > 0, numbers, (size - 1) // 2))


def _mode(x: Any, ordered: Any, dim: int) -> tuple[Any, Any]:
    """The end of the first of the longest runs of equal values."""
    values = ordered.values
    place = torch.ops.shardwise.positions.default(values, dim)
    begins = (values != values.roll(1, dim)) | (place == 0)
    since = torch.where(begins, place, 0).cummax(dim).values
    return _taken(ordered, dim, (place - since).max(dim, keepdim=True).indices)


@decomposition(aten.kthvalue.default, reductions=6)
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest along a sharded dim, which is sorted."""
    return from_sorted(_kth, x, dim, keepdim, k) if 0 < k <= (x.shape[dim] if x.dim() else 0) else NotImplemented


decomposition(aten.median.dim, reductions=6)(lambda x, dim, keepdim=False: from_sorted(_median, x, dim, keepdim, False))
decomposition(aten.nanmedian.dim, reductions=6)(
    lambda x, dim, keepdim=False: from_sorted(_median, x, dim, keepdim, True)
)
decomposition(aten.mode.default, reductions=8)(lambda x, dim=-1, keepdim=False: from_sorted(_mode, x, dim, keepdim))


def median_of_all(x: Any, ignores_nan: bool) -> Any:
    """The median of all elements, as one sharded dim."""
    x = without_partial(x, tuple(range(x.dim())))
    if not x.dim() or not split_axes(x, (0,)) or len(split_axes(x, range(x.dim()))) != len(split_axes(x, (0,))):
        return NotImplemented
    found = from_sorted(_median, x.reshape(-1), 0, False, ignores_nan)
    return found if found is NotImplemented else found[0]


decomposition(aten.median.default, reductions=6)(lambda x: median_of_all(x, False))
decomposition(aten.nanmedian.default, reductions=6)(lambda x: median_of_all(x, True))
