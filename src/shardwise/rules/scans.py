"""Running sums, products and extremes, and the parts of scans in `decompose/sharded_scans.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from shardwise.rules.dims import along, names
from shardwise.rules.engine import Factors
from shardwise.rules.reduction import highest, lowest, sums_pass
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


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


# ---------------------------------------------------------------- operators on the parts of a sharded dim


class Scan(NamedTuple):
    """How parts are scanned, the initial value by dtype, and how a prefix is combined with a part."""

    scan: Callable[[torch.Tensor, int], torch.Tensor]
    nothing: Callable[[torch.dtype], float]
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
    """The scan of one part."""
    return SCANS[kind].scan(local, dim)


def scan_total(local: torch.Tensor, dim: int, parts: int, kind: str) -> torch.Tensor:
    """The total of a scanned part: its last element, along a dim with one element for each part."""
    if local.shape[dim]:
        return local.narrow(dim, local.shape[dim] - 1, 1).clone()
    shape = [1 if d == dim else size for d, size in enumerate(local.shape)]
    return local.new_full(shape, SCANS[kind].nothing(local.dtype))


def scan_before(local: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    """The total of all parts before each part, from the totals of the parts."""
    so_far = SCANS[kind].scan(local, dim).narrow(dim, 0, local.shape[dim] - 1)
    return torch.cat([torch.full_like(local.narrow(dim, 0, 1), SCANS[kind].nothing(local.dtype)), so_far], dim)


def scan_onward(local: torch.Tensor, before: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    """A scanned part combined with the total before it."""
    return SCANS[kind].join(local, before)


def _total_shape(tensor: torch.Tensor, dim: int, parts: int, kind: str) -> torch.Tensor:
    return tensor.new_empty([parts if d == dim else size for d, size in enumerate(tensor.shape)])


_library.impl("scan_part", scan_part, "CompositeExplicitAutograd")
_library.impl("scan_total", _total_shape, "CompositeExplicitAutograd")
_library.impl("scan_before", scan_before, "CompositeExplicitAutograd")
_library.impl("scan_onward", lambda tensor, before, dim, kind: torch.empty_like(tensor), "CompositeExplicitAutograd")
rule(torch.ops.shardwise.scan_before.default, local_op=scan_before)(scanning)


@rule(torch.ops.shardwise.scan_part.default, local_op=scan_part)
@rule(torch.ops.shardwise.scan_total.default, local_op=scan_total)
@rule(torch.ops.shardwise.scan_onward.default, local_op=scan_onward)
def by_parts(call: Call) -> Factors:
    """The factors of operators on parts: the split of the tensor."""
    own = tuple(names(len(call.operands[0].shape)))
    return Factors((own,) * len(call.operands), (own,))
