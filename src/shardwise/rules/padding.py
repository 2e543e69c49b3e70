"""Padding along a sharded dim: rows are exchanged, repeated ones too; their gradients are added."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.layout import Segment
from shardwise.rules.dims import names
from shardwise.rules.engine import Factors
from shardwise.rules.pointwise import EXTREMA, alike
from shardwise.rules.registry import Call, Rows, is_zero, rule

aten = torch.ops.aten


def pads_of(pad: Sequence[int], ndim: int, dim: int) -> tuple[int, int]:
    """The number of rows added before and after each dim: the last dim comes first."""
    at = 2 * (ndim - 1 - dim)
    return (pad[at], pad[at + 1]) if at < len(pad) else (0, 0)


def without(pad: Sequence[int], ndim: int, dim: int) -> list[int]:
    """The padding with zero along one dim."""
    return [0 if i // 2 == ndim - 1 - dim else n for i, n in enumerate(pad)]


def padded_dims(pad: Sequence[int], ndim: int) -> list[int]:
    """The dims along which the number of rows changes, or rows are removed."""
    return [dim for dim in range(ndim) if any(pads_of(pad, ndim, dim))]


def rows_padded(call: Call, dim: int) -> Rows:
    """The rows between those that are added; negative padding leaves rows out."""
    pad, size, ndim = call["pad"], call["self"].shape[dim], len(call["self"].shape)
    before, after = pads_of(pad, ndim, dim)
    others = without(pad, ndim, dim)
    first = (lambda local, fill: aten.constant_pad_nd.default(local, others, fill)) if any(others) else None
    start, length = max(-before, 0), size + min(before, 0) + min(after, 0)
    segments = (Segment(0, start, 0, max(before, 0), length),) if length > 0 else ()
    return Rows(segments, fill="value", first=first)


@rule(aten.constant_pad_nd.default, reads={"value": is_zero}, rows=rows_padded)
def constant_pad(call: Call) -> Factors:
    """Zeros pass with any Partial, other numbers with extrema."""
    ndim, pad = len(call["self"].shape), call["pad"]
    own = tuple(names(ndim))
    padded = frozenset(own[dim] for dim in padded_dims(pad, ndim))
    zero = call["value"] == 0 or max(pad, default=0) <= 0
    rows = () if zero else alike(1, (0,), kinds=EXTREMA)
    return Factors((own,), (own,), moves=zero, rows=rows, exchanged=padded)


# ---------------------------------------------------------------- elements that are repeated


def mirrored(size: int, before: int, after: int) -> list[Segment]:
    """The segments of a dim that is reflected at its ends; negative padding leaves rows out."""
    found = [_kept(size, before, after)]
    if before > 0:
        found.append(Segment(0, before, 0, 0, before, step=-1))
    if after > 0:
        found.append(Segment(0, size - 2, 0, max(before, 0) + size + min(before, 0), after, step=-1))
    return found


def extended(size: int, before: int, after: int) -> list[Segment]:
    """The segments of a dim whose first and last rows are repeated."""
    front = [Segment(0, 0, 0, at, 1) for at in range(max(before, 0))]
    end = max(before, 0) + size + min(before, 0) + min(after, 0)
    return [*front, _kept(size, before, after), *(Segment(0, size - 1, 0, end + at, 1) for at in range(max(after, 0)))]


def _kept(size: int, before: int, after: int) -> Segment:
    return Segment(0, max(-before, 0), 0, max(before, 0), size + min(before, 0) + min(after, 0))


Repeated = Callable[[int, int, int], list[Segment]]


def rows_repeated(call: Call, dim: int, segments: Repeated) -> Rows:
    """The rows of a padding that repeats them."""
    ndim = len(call["self"].shape)
    others = without(call["padding"], ndim, dim)

    def first(local: torch.Tensor, fill: Any) -> torch.Tensor:
        if local.numel():
            return call.op(local, others)
        return local.new_empty([n + sum(pads_of(others, ndim, d)) for d, n in enumerate(local.shape)])

    found = segments(call["self"].shape[dim], *pads_of(call["padding"], ndim, dim))
    return Rows(tuple(found), first=first if any(others) else None)


def rows_given_back(call: Call, dim: int, segments: Repeated) -> Rows:
    """The rows of the gradient of a padding that repeats rows: gradients of repeated rows are added up."""
    ndim = len(call["self"].shape)
    others = without(call["padding"], ndim, dim)

    def first(grad: torch.Tensor, fill: Any) -> torch.Tensor:
        shape = [n - sum(pads_of(others, ndim, d)) for d, n in enumerate(grad.shape)]
        return call.op(grad, grad.new_empty(shape), others) if grad.numel() else grad.new_empty(shape)

    found = segments(call["self"].shape[dim], *pads_of(call["padding"], ndim, dim))
    turned = [Segment(0, s.at, 0, s.first, s.length) for s in found if s.step > 0]
    # rows in reverse order are read in that order
    turned += [
        Segment(0, s.at + s.length - 1, 0, s.first - s.length + 1, s.length, step=-1) for s in found if s.step < 0
    ]
    return Rows(tuple(turned), first=first if any(others) else None, adds=True)


def pad_rule(dims: int, backward: bool) -> Callable[[Call], Factors]:
    """The rule of a padding that repeats elements of the last `dims` dims."""

    def factors(call: Call) -> Factors:
        ndim = len(call["self"].shape)
        own = tuple(names(ndim))
        padded = frozenset(own[dim] for dim in padded_dims(call["padding"], ndim))
        # kernels refuse empty dims; rows of a padded dim are exchanged, and empty locals never reach the kernel
        full = frozenset(own) - padded
        if backward:
            return Factors((own, own), (own,), linear=((0,),), nonempty=full, exchanged=padded)
        return Factors((own,), (own,), moves=True, nonempty=full, exchanged=padded)

    return factors


for count, (kind, repeated) in itertools.product((1, 2, 3), {"reflection": mirrored, "replication": extended}.items()):
    rule(
        getattr(aten, f"{kind}_pad{count}d").default, rows=lambda call, dim, fn=repeated: rows_repeated(call, dim, fn)
    )(pad_rule(count, backward=False))
    rule(
        getattr(aten, f"{kind}_pad{count}d_backward").default,
        rows=lambda call, dim, fn=repeated: rows_given_back(call, dim, fn),
    )(pad_rule(count, backward=True))
