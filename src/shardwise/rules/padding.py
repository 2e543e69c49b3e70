"""Padding: the dims that get longer are whole. Pure."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.rules.dims import kept
from shardwise.rules.notation import Factors
from shardwise.rules.pointwise import EXTREMA, alike
from shardwise.rules.registry import Call, is_zero, rule

aten = torch.ops.aten


@rule(aten.constant_pad_nd.default, reads={"value": is_zero})
def constant_pad(call: Call) -> Factors:
    """Padded dims must be whole; zeros pass with any Partial, other numbers with extrema."""
    ndim, pad = len(call["self"].shape), call["pad"]
    padded = [ndim - 1 - i // 2 for i, size in enumerate(pad) if size]
    own = tuple(kept(ndim, padded))
    zero = call["value"] == 0 or max(pad, default=0) <= 0
    return Factors((own,), (own,), moves=zero, rows=() if zero else alike(1, (0,), kinds=EXTREMA))


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
