"""Padding: constants along a sharded dim are an exchange of rows; repeated elements need the dim whole. Pure."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.core.layout import Segment
from shardwise.rules.dims import kept, names
from shardwise.rules.notation import Factors
from shardwise.rules.pointwise import EXTREMA, alike
from shardwise.rules.registry import Call, Rows, is_zero, rule

aten = torch.ops.aten


def rows_padded(call: Call, dim: int) -> Rows:
    """The rows between those that are added; negative padding leaves rows out."""
    pad, size = call["pad"], call["self"].shape[dim]
    at = 2 * (len(call["self"].shape) - 1 - dim)
    before, after = pad[at : at + 2]
    others = [0 if at <= i < at + 2 else n for i, n in enumerate(pad)]
    first = (lambda local, fill: aten.constant_pad_nd.default(local, others, fill)) if any(others) else None
    start, length = max(-before, 0), size + min(before, 0) + min(after, 0)
    segments = (Segment(0, start, 0, max(before, 0), length),) if length > 0 else ()
    return Rows(segments, fill="value", first=first)


@rule(aten.constant_pad_nd.default, reads={"value": is_zero}, rows=rows_padded)
def constant_pad(call: Call) -> Factors:
    """Zeros pass with any Partial, other numbers with extrema."""
    ndim, pad = len(call["self"].shape), call["pad"]
    own = tuple(names(ndim))
    padded = frozenset(own[ndim - 1 - i // 2] for i, size in enumerate(pad) if size)
    zero = call["value"] == 0 or max(pad, default=0) <= 0
    rows = () if zero else alike(1, (0,), kinds=EXTREMA)
    return Factors((own,), (own,), moves=zero, rows=rows, exchanged=padded)


def pad_rule(dims: int, backward: bool) -> Callable[[Call], Factors]:
    """The rule of a padding that repeats elements of the last `dims` dims."""

    def factors(call: Call) -> Factors:
        ndim = len(call.operands[0].shape)
        own = tuple(kept(ndim, range(ndim - dims, ndim)))
        full = frozenset(name for name in own if name)
        if backward:
            return Factors((own,) * len(call.operands), (own,), linear=((0,),), nonempty=full)
        return Factors((own,), (own,), moves=True, nonempty=full)

    return factors


for count in (1, 2, 3):
    for kind in ("reflection", "replication"):
        rule(getattr(aten, f"{kind}_pad{count}d").default)(pad_rule(count, backward=False))
        rule(getattr(aten, f"{kind}_pad{count}d_backward").default)(pad_rule(count, backward=True))
