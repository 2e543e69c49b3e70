"""Sorting along a sharded dim: a sample sort, by exchanges by owner; and searching in a sorted sequence.

Each rank sorts its part. Splitters, chosen from samples of all ranks, cut the sorted order of all elements into as many
parts; each rank gets one, sorts it, and sends its elements to the ranks that own their positions in the result. Columns
are sorted as one sequence, column by column, so short columns cost no more than long ones. Equal elements keep their
order. Comparisons include indices, so splitters also cut runs of equal elements.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.rules.owner_programs import Exchanging, Items, OwnedPart, Program, by_member, owner_of

__all__ = ["SORTED_BY_OWNER", "search", "sort"]

SAMPLES = 64  # the most samples of a rank
PART = 8  # the samples of all ranks are at most one element in PART of a rank's elements
# dtypes whose order is that of 64-bit integers
SORTED_BY_OWNER = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


class _Sequence(NamedTuple):
    """Elements of all columns: their values, and `column * size + index` of each."""

    values: torch.Tensor
    places: torch.Tensor


def order_of(values: torch.Tensor, descending: bool) -> torch.Tensor:
    """Integers in the order in which torch sorts: zeros of both signs are equal, and so are NaNs, above all numbers."""
    if values.is_floating_point():
        wide = values.double() + 0.0  # makes -0.0 into 0.0
        bits = wide.view(torch.int64)
        keys = (bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)).masked_fill_(
            wide.isnan(), torch.iinfo(torch.int64).max
        )
    else:
        keys = values.long()
    return ~keys if descending else keys


def sort(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """Sorted values and their indices along a sharded dim, sharded as it is. Stable."""
    local, dim, descending = named["self"].movedim(place.dim, 0), place.dim, bool(named["descending"])
    columns = math.prod(local.shape[1:])
    ordered = local.sort(dim=0, descending=descending, stable=True)
    if not columns:  # split by another axis; all ranks that would exchange decide the same
        return ordered.values.movedim(0, dim), ordered.indices.movedim(0, dim)
    first = torch.arange(columns, device=local.device).mul_(place.size).add_(place.start).view(local.shape[1:])
    own = _Sequence(
        *(t.reshape(len(local), columns).t().reshape(-1) for t in (ordered.values, ordered.indices + first))
    )
    bounds = yield from _splitters(place, own, descending)
    ends = _ends(place, own, bounds, descending)
    got = yield Items((own.values, own.places), ends.diff())
    part = _merged(place, _Sequence(*got.tensors), descending)
    start = yield from _start(place, part)
    at = torch.arange(len(part.values), device=local.device).add_(start)
    member, _ = owner_of(place, at.remainder_(place.size))
    order, counts = by_member(place, member)
    got = yield Items((part.values[order], part.places[order].remainder_(place.size)), counts)
    # ranks come in the order of their elements: column by column, and in each in the order of the result
    values, indices = (t.view(columns, place.length).t().reshape(local.shape).movedim(0, dim) for t in got.tensors)
    return values, indices


def _merged(place: OwnedPart, part: _Sequence, descending: bool) -> _Sequence:
    """Merge the concatenated sorted parts of several ranks."""
    order = order_of(part.values, descending).argsort(stable=True)
    column = part.places[order].div_(place.size, rounding_mode="floor")
    order = order[column.argsort(stable=True)]
    return _Sequence(part.values[order], part.places[order])


def _to_all(place: OwnedPart, *tensors: torch.Tensor) -> Items:
    """The same rows for every member."""
    repeated = tuple(t.expand(place.members, *t.shape).reshape(-1, *t.shape[1:]) for t in tensors)
    return Items(repeated, torch.full((place.members,), len(tensors[0]), device=tensors[0].device))


def _splitters(place: OwnedPart, own: _Sequence, descending: bool) -> Exchanging:
    """The elements at which the parts of all but the first member begin."""
    count = len(own.values)
    wanted = min(count, SAMPLES, max(1, count // (PART * place.members)))
    at = (
        torch.arange(wanted, device=own.values.device)
        .mul_(2)
        .add_(1)
        .mul_(count)
        .div_(2 * max(wanted, 1), rounding_mode="floor")
    )
    got = yield _to_all(place, own.values[at], own.places[at])
    samples = _merged(place, _Sequence(*got.tensors), descending)
    cuts = (
        torch.arange(1, place.members, device=at.device)
        .mul_(len(samples.values))
        .div_(place.members, rounding_mode="floor")
    )
    return _Sequence(samples.values[cuts], samples.places[cuts])


def _ends(place: OwnedPart, own: _Sequence, bounds: _Sequence, descending: bool) -> torch.Tensor:
    """The positions in a sorted sequence at which the elements of each member begin, and its end: by bisection."""
    count, size = len(own.values), place.size
    low = torch.zeros(len(bounds.values), dtype=torch.int64, device=own.values.device)
    high = torch.full_like(low, count)
    column, key = bounds.places.div(size, rounding_mode="floor"), order_of(bounds.values, descending)
    for _ in range(count.bit_length()):
        middle = (low + high).div_(2, rounding_mode="floor")
        at = middle.clamp(max=max(count - 1, 0))
        places = own.places[at]
        there, keys = places.div(size, rounding_mode="floor"), order_of(own.values[at], descending)
        same = there == column
        before = (there < column) | same & ((keys < key) | (keys == key) & (places < bounds.places))
        before &= low < high
        low, high = torch.where(before, middle + 1, low), torch.where(before, high, torch.minimum(middle, high))
    edges = low.new_tensor([0, count]) if not low.is_meta else low.new_empty(2)
    return torch.cat([edges[:1], low, edges[1:]])


def _start(place: OwnedPart, part: _Sequence) -> Exchanging:
    """How many elements are in the parts of the members before this one."""
    got = yield _to_all(place, part.places.new_full((1,), len(part.values)))
    return got.tensors[0][: place.member].sum()


# ---------------------------------------------------------------- searching in a sorted sequence


def search(values: str, boundaries: str) -> Program:
    """The program of a search for sharded values in a sharded sequence: each value is sent to the rank of its range."""

    def search_by_owner(
        place: OwnedPart, named: Mapping[str, Any]
    ) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
        sequence, wanted = named[boundaries], named[values]
        right = bool(named["right"]) or named.get("side") == "right"
        dtype = torch.int32 if named["out_int32"] else torch.int64
        here = torch.full_like(sequence[:1], place.member, dtype=torch.int64)
        firsts = yield _to_all(place, sequence[:1], here)
        at = torch.searchsorted(firsts.tensors[0], wanted.reshape(-1), right=right).sub_(1).clamp_(min=0)
        order, counts = by_member(place, firsts.tensors[1][at])
        asked = yield Items((wanted.reshape(-1)[order],), counts)
        found = torch.searchsorted(sequence.contiguous(), asked.tensors[0], right=right).add_(place.start)
        answers = yield asked.answer(found)
        result = torch.empty_like(answers.tensors[0])
        result[order] = answers.tensors[0]
        return (result.view(wanted.shape).to(dtype),)

    return search_by_owner
