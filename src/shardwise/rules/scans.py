"""Running sums, products and the like: along a sharded dim ranks scan their parts and exchange totals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwise.core.placement import Replicate, Shard, StridedShard
from shardwise.rules.dims import along, names, wrapped
from shardwise.rules.engine import Factors
from shardwise.rules.extremes import at_extreme
from shardwise.rules.layout_helpers import as_result, moved_to, settled, split_axes, widened
from shardwise.rules.reduction import sums_pass
from shardwise.rules.registry import Call, decomposition, rule

aten = torch.ops.aten
# So few ranks that gathering the totals of all in one collective costs less than exchanging them twice.
FEW = 8


@rule(
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten._logcumsumexp.default,
)
def scanning(call: Call) -> Factors:
    """Each element depends on those before it."""
    return along(call, [call["dim"]])


@rule(aten.cumsum.default)
def summing_up(call: Call) -> Factors:
    """Sums of the elements so far."""
    return along(call, [call["dim"]], **sums_pass(call))


# ---------------------------------------------------------------- part by part


class Scan(NamedTuple):
    """How parts are scanned, what stands before the first, by dtype, and how that is joined to a part."""

    scan: Callable[[torch.Tensor, int], torch.Tensor]
    nothing: Callable[[torch.dtype], float]
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def lowest(dtype: torch.dtype) -> float:
    """What no element is below."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    """What no element is above."""
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


SCANS = {
    "sum": Scan(torch.cumsum, lambda dtype: 0, torch.add),
    "product": Scan(torch.cumprod, lambda dtype: 1, torch.mul),
    "logsumexp": Scan(torch.logcumsumexp, lowest, torch.logaddexp),
    "max": Scan(lambda x, dim: torch.cummax(x, dim).values, lowest, torch.maximum),
    "min": Scan(lambda x, dim: torch.cummin(x, dim).values, highest, torch.minimum),
}

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("scan_part(Tensor self, int dim, str kind) -> Tensor")
_library.define("scan_total(Tensor self, int dim, int parts, str kind) -> Tensor")
_library.define("scan_before(Tensor self, int dim, str kind) -> Tensor")
_library.define("scan_onward(Tensor self, Tensor before, int dim, str kind) -> Tensor")


def scan_part(local: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    """A part scanned by itself."""
    return SCANS[kind].scan(local, dim)


def scan_total(local: torch.Tensor, dim: int, parts: int, kind: str) -> torch.Tensor:
    """What a scanned part comes to: its last element, along a dim with one element for each part."""
    if local.shape[dim]:
        return local.narrow(dim, local.shape[dim] - 1, 1).clone()
    shape = [1 if d == dim else size for d, size in enumerate(local.shape)]
    return local.new_full(shape, SCANS[kind].nothing(local.dtype))


def scan_before(local: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    """What all parts before each come to, of what each comes to."""
    so_far = SCANS[kind].scan(local, dim).narrow(dim, 0, local.shape[dim] - 1)
    return torch.cat([torch.full_like(local.narrow(dim, 0, 1), SCANS[kind].nothing(local.dtype)), so_far], dim)


def scan_onward(local: torch.Tensor, before: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    """A scanned part with what stands before it."""
    return SCANS[kind].join(local, before)


def _total_shape(whole: torch.Tensor, dim: int, parts: int, kind: str) -> torch.Tensor:
    return whole.new_empty([parts if d == dim else size for d, size in enumerate(whole.shape)])


_library.impl("scan_part", scan_part, "CompositeExplicitAutograd")
_library.impl("scan_total", _total_shape, "CompositeExplicitAutograd")
_library.impl("scan_before", scan_before, "CompositeExplicitAutograd")
_library.impl("scan_onward", lambda whole, before, dim, kind: torch.empty_like(whole), "CompositeExplicitAutograd")
rule(torch.ops.shardwise.scan_before.default, local_op=scan_before)(scanning)


@rule(torch.ops.shardwise.scan_part.default, local_op=scan_part)
@rule(torch.ops.shardwise.scan_total.default, local_op=scan_total)
@rule(torch.ops.shardwise.scan_onward.default, local_op=scan_onward)
def by_parts(call: Call) -> Factors:
    """What is done part by part, as the tensor is split."""
    own = tuple(names(len(call.operands[0].shape)))
    return Factors((own,) * len(call.operands), (own,))


def scan_of_shards(kind: str, x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """A scan along a sharded dim."""
    dim = wrapped(dim, x.dim())
    kept = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    x = settled(x if x.dtype is kept else x.to(kept), (dim,))
    return as_result(part_by_part(kind, widened(x), dim), kept) if goes_by_parts(x, dim, kind) else NotImplemented


def extremes_so_far(kind: str, x: Any, dim: int) -> Any:
    """The extremes so far along a sharded dim, and where they last were: the last place that was an extreme then."""
    dim = wrapped(dim, x.dim())
    x = settled(x, (dim,))
    if not goes_by_parts(x, dim, kind):
        return NotImplemented
    extremes = part_by_part(kind, x, dim)
    places = torch.where(at_extreme(x, extremes), torch.ops.shardwise.positions.default(x, dim), 0)
    return extremes, part_by_part("max", places, dim)


def goes_by_parts(x: Any, dim: int, kind: str) -> bool:
    """Whether a dim falls into parts that follow each other, one on a rank, and totals can be told of them."""
    axes = split_axes(x, (dim,))
    totals = kind in ("sum", "product") or not x.is_complex()
    return bool(axes) and totals and not any(isinstance(x.placements[a], StridedShard) for a in axes)


def part_by_part(kind: str, x: Any, dim: int) -> Any:
    """A scan along a sharded dim: each part is scanned, and goes on from the totals of those before it."""
    axes, scans = split_axes(x, (dim,)), torch.ops.shardwise
    members = math.prod(x.device_mesh.shape[a] for a in axes)
    part = scans.scan_part.default(x, dim, kind)
    total = scans.scan_total.default(part, dim, members, kind)
    before = _gathered_before(total, dim, axes, kind) if members <= FEW else _exchanged_before(total, dim, axes, kind)
    return scans.scan_onward.default(part, before, dim, kind)


def _gathered_before(total: Any, dim: int, axes: list[int], kind: str) -> Any:
    """What stands before each part: every rank gets the totals of all. One collective."""
    whole = moved_to(total, [Replicate() if a in axes else p for a, p in enumerate(total.placements)])
    before = torch.ops.shardwise.scan_before.default(whole, dim, kind)
    return before.redistribute(placements=total.placements, shard_order=total.spec.shard_order)


def _exchanged_before(total: Any, dim: int, axes: list[int], kind: str) -> Any:
    """What stands before each part: a rank gets all totals of its share of the columns, and sends them back scanned.

    Two exchanges. A rank receives about two rows of totals, however many parts there are.
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
    # totals are gathered (of places, too), and the gradient, which runs the other way, is moved once more
    decomposition(op, reductions=2)(lambda *args, **kwargs: compute(kind, *args, **kwargs))


_declare_scan(aten.cumsum.default, scan_of_shards, "sum")
_declare_scan(aten.cumprod.default, scan_of_shards, "product")
_declare_scan(aten._logcumsumexp.default, scan_of_shards, "logsumexp")
_declare_scan(aten.logcumsumexp.default, scan_of_shards, "logsumexp")
_declare_scan(aten.cummax.default, extremes_so_far, "max")
_declare_scan(aten.cummin.default, extremes_so_far, "min")
