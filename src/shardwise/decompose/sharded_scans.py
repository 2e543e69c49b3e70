"""Scans along a sharded dim: ranks scan their parts, and exchange totals."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.core.placement import Replicate, Shard
from shardwise.decompose.layout_helpers import as_result, moved_to, split_axes, widened, without_partial
from shardwise.decompose.sharded_extremes import at_extreme
from shardwise.rules.dims import wrapped
from shardwise.rules.registry import decomposition

aten = torch.ops.aten
# Up to this number of ranks, gathering all totals in one collective costs less than exchanging them twice.
FEW = 8


def scan_of_shards(kind: str, x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """A scan along a sharded dim."""
    dim = wrapped(dim, x.dim())
    kept = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    x = without_partial(x if x.dtype is kept else x.to(kept), (dim,))
    return as_result(part_by_part(kind, widened(x), dim), kept) if goes_by_parts(x, dim, kind) else NotImplemented


def extremes_so_far(kind: str, x: Any, dim: int) -> Any:
    """The running extremes along a sharded dim, and their last positions."""
    dim = wrapped(dim, x.dim())
    x = without_partial(x, (dim,))
    if not goes_by_parts(x, dim, kind):
        return NotImplemented
    extremes = part_by_part(kind, x, dim)
    places = torch.where(at_extreme(x, extremes), torch.ops.shardwise.positions.default(x, dim), 0)
    return extremes, part_by_part("max", places, dim)


def goes_by_parts(x: Any, dim: int, kind: str) -> bool:
    """Whether each rank has one contiguous part of a sharded dim, and totals can be exchanged."""
    axes = split_axes(x, (dim,))
    totals = kind in ("sum", "product") or not x.is_complex()
    return bool(axes) and totals and all(isinstance(x.placements[a], Shard) for a in axes)


def part_by_part(kind: str, x: Any, dim: int) -> Any:
    """A scan along a sharded dim: each part is scanned, and combined with the total of the parts before it."""
    axes, scans = split_axes(x, (dim,)), torch.ops.shardwise
    members = math.prod(x.device_mesh.shape[a] for a in axes)
    part = scans.scan_part.default(x, dim, kind)
    total = scans.scan_total.default(part, dim, members, kind)
    before = _gathered_before(total, dim, axes, kind) if members <= FEW else _exchanged_before(total, dim, axes, kind)
    return scans.scan_onward.default(part, before, dim, kind)


def _gathered_before(total: Any, dim: int, axes: list[int], kind: str) -> Any:
    """The total before each part, by one all-gather of all totals."""
    gathered = moved_to(total, [Replicate() if a in axes else p for a, p in enumerate(total.placements)])
    before = torch.ops.shardwise.scan_before.default(gathered, dim, kind)
    return before.redistribute(placements=total.placements, shard_order=total.spec.shard_order)


def _exchanged_before(total: Any, dim: int, axes: list[int], kind: str) -> Any:
    """The total before each part, by two exchanges: a rank scans the totals of its share of the columns.

    A rank receives about two rows of totals for any number of parts.
    """
    columns = total.movedim(dim, 0)
    free = [d for d in range(1, columns.dim()) if not columns.spec.dim_axes[d]]
    if not free:
        return _gathered_before(total, dim, axes, kind)
    shape = columns.shape
    if len(free) == columns.dim() - 1:
        columns, to = columns.reshape(shape[0], -1), 1
    else:
        to = max(free, key=lambda d: shape[d])
    placements = [Shard(to) if a in axes else p for a, p in enumerate(columns.placements)]
    before = torch.ops.shardwise.scan_before.default(moved_to(columns, placements), 0, kind)
    before = before.redistribute(placements=columns.placements, shard_order=columns.spec.shard_order)
    return before.reshape(shape).movedim(0, dim)


def _declare_scan(op: Any, compute: Any, kind: str) -> None:
    # totals are gathered (also of positions), and the reversed gradient moves once more
    decomposition(op, reductions=2)(lambda *args, **kwargs: compute(kind, *args, **kwargs))


_declare_scan(aten.cumsum.default, scan_of_shards, "sum")
_declare_scan(aten.cumprod.default, scan_of_shards, "product")
_declare_scan(aten._logcumsumexp.default, scan_of_shards, "logsumexp")
_declare_scan(aten.logcumsumexp.default, scan_of_shards, "logsumexp")
_declare_scan(aten.cummax.default, extremes_so_far, "max")
_declare_scan(aten.cummin.default, extremes_so_far, "min")
