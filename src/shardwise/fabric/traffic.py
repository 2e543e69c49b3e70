"""Who sends what to whom in an exchange, as one rank sees it: its own sends and receives alone are worked out.

Pure functions on specs, shared by the fabrics. Communicates nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.core.layout import Run, intersect
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.pieces import Box, Coordinate, box_of, choose_sender

__all__ = ["Traffic", "traffic"]

Common = list[tuple[int, int, int]]  # as `intersect` gives it


class Traffic(NamedTuple):
    """The boxes that a rank sends to each rank and gets from each, in the order of the ranks; and those it keeps."""

    sends: list[list[Box]]
    receives: list[list[Box]]
    keeps: list[Box]


def traffic(
    before: DTensorSpec,
    after: DTensorSpec,
    ranks: Sequence[int],
    me: int,
    having: Sequence[Coordinate | None],
    wanting: Sequence[Coordinate | None],
) -> Traffic:
    """What the rank `ranks[me]` sends and gets when the layout `before` becomes `after`.

    Args:
        before: the layout now.
        after: the layout to come.
        ranks: who takes part.
        me: which of them asks.
        having: the coordinate of each on the mesh of `before`, None outside.
        wanting: the same on the mesh of `after`.
    """
    rank, have, want = ranks[me], having[me], wanting[me]
    holders = _holders(before, ranks, having)
    made = Traffic([[] for _ in ranks], [[] for _ in ranks], [])
    if have is not None:
        mine = Overlaps(after, before.block(have).runs, ours_first=True)
        who = holders[_part(before, have)]
        for at, (receiver, coordinate) in enumerate(zip(ranks, wanting, strict=True)):
            if coordinate is not None and choose_sender(receiver, who) == rank:
                (made.keeps if at == me else made.sends[at]).extend(mine.boxes(coordinate))
    if want is not None:
        mine = Overlaps(before, after.block(want).runs, ours_first=False)
        place = {name: at for at, name in enumerate(ranks)}
        for who in holders.values():
            sender = place[choose_sender(rank, who)]
            if sender != me:
                coordinate = having[place[who[0]]]
                assert coordinate is not None, "a holder is on the mesh"
                made.receives[sender].extend(mine.boxes(coordinate))
    return made


def _holders(
    spec: DTensorSpec, ranks: Sequence[int], coordinates: Sequence[Coordinate | None]
) -> dict[Coordinate, list[int]]:
    """The ranks that hold each of the different blocks."""
    found: dict[Coordinate, list[int]] = {}
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        if coordinate is not None:
            found.setdefault(_part(spec, coordinate), []).append(rank)
    return found


def _part(spec: DTensorSpec, coordinate: Coordinate) -> Coordinate:
    """What of a coordinate decides which block its rank holds."""
    return tuple([coordinate[axis] for axes in spec.dim_axes for axis in axes])


class Overlaps:
    """What the blocks of other coordinates have in common with one block, worked out once for each part of a dim."""

    def __init__(self, others: DTensorSpec, ours: Sequence[tuple[Run, ...]], *, ours_first: bool) -> None:
        self.others, self.ours, self.ours_first = others, ours, ours_first
        self._known: list[dict[Coordinate, Common]] = [{} for _ in ours]

    def boxes(self, coordinate: Coordinate) -> list[Box]:
        """The boxes of elements that the rank at `coordinate` has too; ours is the source of them if it is first."""
        by_dim: list[Common] = []
        for dim, (axes, known) in enumerate(zip(self.others.dim_axes, self._known, strict=True)):
            part = tuple([coordinate[axis] for axis in axes])
            common = known.get(part)
            if common is None:
                theirs = self.others.runs(dim, coordinate)
                common = intersect(self.ours[dim], theirs) if self.ours_first else intersect(theirs, self.ours[dim])
                known[part] = common
            if not common:
                return []
            by_dim.append(common)
        return [box_of(chosen) for chosen in itertools.product(*by_dim)]
