"""Who sends what to whom in an exchange, as one rank sees it: its own sends and receives alone are worked out.

Pure functions on specs, shared by the fabrics. Communicates nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.core.layout import Block, intersect
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.pieces import Box, box_of, choose_sender

__all__ = ["Coordinates", "Traffic", "traffic"]

Coordinates = tuple[Coordinate | None, ...]  # of the ranks that take part, None outside the mesh
Common = list[tuple[int, int, int]]  # as `intersect` gives it


class Traffic(NamedTuple):
    """The boxes that a rank sends to each rank and gets from each, in the order of the ranks; and those it keeps."""

    sends: list[list[Box]]
    receives: list[list[Box]]
    keeps: list[Box]


def traffic(
    before: DTensorSpec, after: DTensorSpec, ranks: Sequence[int], me: int, having: Coordinates, wanting: Coordinates
) -> Traffic:
    """What the rank `ranks[me]` sends and gets when the layout `before` becomes `after`.

    Args:
        before: the layout now.
        after: the layout to come.
        ranks: who takes part.
        me: which of them asks.
        having: the coordinate of each on the mesh of `before`.
        wanting: the same on the mesh of `after`.
    """
    rank, have, want = ranks[me], having[me], wanting[me]
    blocks = _alike(having, tuple([axis for axes in before.dim_axes for axis in axes]))
    holders: list[list[int]] = [[] for _ in blocks.first]
    for at, block in enumerate(blocks.which):
        if block is not None:
            holders[block].append(ranks[at])
    made = Traffic([[] for _ in ranks], [[] for _ in ranks], [])
    if have is not None:
        who = holders[blocks.which[me] or 0]
        common = _common(before.block(have), after, wanting, ours_first=True)
        for at, receiver in enumerate(ranks):
            if wanting[at] is not None and choose_sender(receiver, who) == rank:
                (made.keeps if at == me else made.sends[at]).extend(_boxes(common, at))
    if want is not None:
        common = _common(after.block(want), before, having, ours_first=False)
        for first, who in zip(blocks.first, holders, strict=True):
            sender = choose_sender(rank, who)
            if sender != rank:
                made.receives[ranks.index(sender)].extend(_boxes(common, first))
    return made


class Alike(NamedTuple):
    """Ranks in groups: the first of each group, and the group of each rank, None outside the mesh."""

    first: tuple[int, ...]
    which: tuple[int | None, ...]


@lru_cache(maxsize=1024)
def _alike(coordinates: Coordinates, axes: tuple[int, ...]) -> Alike:
    """The ranks whose coordinates along `axes` are the same."""
    first: list[int] = []
    which: list[int | None] = []
    known: dict[Coordinate, int] = {}
    for at, coordinate in enumerate(coordinates):
        if coordinate is None:
            which.append(None)
            continue
        part = tuple([coordinate[axis] for axis in axes])
        if part not in known:
            known[part] = len(first)
            first.append(at)
        which.append(known[part])
    return Alike(tuple(first), tuple(which))


class Column(NamedTuple):
    """What a block has in common, in one dim, with each part of it; and the part that each rank has."""

    common: list[Common]
    which: tuple[int | None, ...]


def _common(ours: Block, others: DTensorSpec, coordinates: Coordinates, *, ours_first: bool) -> list[Column]:
    """What our block has in common with those of others, dim by dim, once for each part of a dim."""
    columns: list[Column] = []
    for dim, (runs, axes) in enumerate(zip(ours.runs, others.dim_axes, strict=True)):
        parts = _alike(coordinates, axes)
        theirs = [others.runs(dim, coordinates[at] or ()) for at in parts.first]
        common = [intersect(runs, other) if ours_first else intersect(other, runs) for other in theirs]
        columns.append(Column(common, parts.which))
    return columns


def _boxes(columns: list[Column], at: int) -> list[Box]:
    """The boxes in common with a rank that is on the mesh."""
    chosen = [common[which[at] or 0] for common, which in columns]
    return [box_of(each) for each in itertools.product(*chosen)]
