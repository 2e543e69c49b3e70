"""Who sends what to whom in an exchange, as one rank sees it: only its own sends and receives are computed.

Pure functions on specs, in arrays over the ranks. Communicates nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.core.layout import Block, intersect
from shardwise.core.spec import DTensorSpec

__all__ = ["Boxes", "Traffic", "traffic"]


class Boxes(NamedTuple):
    """Boxes of elements that our block shares with the blocks of other ranks, in the order of the ranks; a row each."""

    which: np.ndarray  # the other rank, as its position among those that take part
    ours: np.ndarray  # where the box begins in our block
    shape: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """How many elements each has."""
        return self.shape.prod(axis=1)

    def of(self, rank: int) -> Boxes:
        """The boxes that are shared with one rank."""
        return self._taken(self.which == rank)

    def without(self, rank: int) -> Boxes:
        """The boxes that are shared with any other rank."""
        return self._taken(self.which != rank)

    def _taken(self, rows: np.ndarray) -> Boxes:
        return Boxes(self.which[rows], self.ours[rows], self.shape[rows])


class Traffic(NamedTuple):
    """What a rank sends to each rank and receives from each; and what it keeps, in the old and in the new block."""

    sends: Boxes
    receives: Boxes
    kept_from: Boxes
    kept_to: Boxes


def traffic(
    before: DTensorSpec, after: DTensorSpec, ranks: Sequence[int], me: int, having: np.ndarray, wanting: np.ndarray
) -> Traffic:
    """What the rank `ranks[me]` sends and receives when the layout `before` becomes `after`.

    Args:
        before: the layout now.
        after: the layout to come.
        ranks: who takes part.
        me: which of them asks.
        having: the coordinate of each on the mesh of `before`, a row each; -1 outside the mesh.
        wanting: the same on the mesh of `after`.
    """
    numbers, rank = np.asarray(ranks), ranks[me]
    holds, wants = _rows_where(having >= 0), _rows_where(wanting >= 0)
    group, place, count = _replicas(before, having, holds)
    given = taken = _none(before.ndim)
    if holds[me]:
        replicas = numbers[group == group[me]]
        senders = np.where(group == group[me], numbers, replicas[numbers % len(replicas)])
        receivers = np.flatnonzero(wants & (senders == rank))
        given = _shared(before.block(having[me].tolist()), after, receivers, wanting, ours_first=True)
    if wants[me]:
        mine = (group == group[me]) & holds[me]
        senders = np.where(mine, numbers == rank, place == rank % np.maximum(count, 1))
        sending = np.flatnonzero(holds & senders)
        taken = _shared(after.block(wanting[me].tolist()), before, sending, having, ours_first=False)
    return Traffic(given.without(me), taken.without(me), given.of(me), taken.of(me))


def _replicas(spec: DTensorSpec, coordinates: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, ...]:
    """Ranks that hold the same block: the number of its group, the place in it, and how many are in it.

    A block that several hold is sent by the rank that needs it itself, else by its holders in turn.
    """
    key = np.full(len(coordinates), -1)
    key[inside] = 0
    for axis in itertools.chain.from_iterable(spec.dim_axes):
        key[inside] = key[inside] * spec.mesh.shape[axis] + coordinates[inside, axis]
    order = np.argsort(key, kind="stable")
    _, first, group_in_order, counts = np.unique(key[order], return_index=True, return_inverse=True, return_counts=True)
    group, place = np.empty_like(key), np.empty_like(key)
    group[order] = group_in_order
    place[order] = np.arange(len(key)) - first[group_in_order]
    return group, place, counts[group]


def _rows_where(condition: np.ndarray) -> np.ndarray:
    """Which rows meet a condition in every column."""
    return np.asarray(condition.all(axis=1))


def _none(ndim: int) -> Boxes:
    return Boxes(np.zeros(0, dtype=np.int64), np.zeros((0, ndim), dtype=np.int64), np.zeros((0, ndim), dtype=np.int64))


def _shared(ours: Block, theirs: DTensorSpec, ranks: np.ndarray, coordinates: np.ndarray, *, ours_first: bool) -> Boxes:
    """The boxes that our block shares with what each of the ranks holds of `theirs`."""
    if theirs.is_strided or any(len(runs) > 1 for runs in ours.runs):
        return _shared_strided(ours, theirs, ranks, coordinates, ours_first)
    at, shape = [np.zeros((len(ranks), 0), dtype=np.int64)] * 2
    for dim, ((start, length),) in enumerate(ours.runs):
        other_start, other_length = theirs.starts_and_lengths(dim, coordinates[ranks])
        low, high = np.maximum(other_start, start), np.minimum(other_start + other_length, start + length)
        at = np.column_stack([at, low - start])
        shape = np.column_stack([shape, np.maximum(high - low, 0)])
    return Boxes(ranks, at, shape)._taken(_rows_where(shape > 0))


def _shared_strided(
    ours: Block, theirs: DTensorSpec, ranks: np.ndarray, coordinates: np.ndarray, ours_first: bool
) -> Boxes:
    """The same where blocks have several runs. Both sides list the boxes of a pair in the order of the sender's."""
    rows = [
        (rank, [at for at, _ in box], [length for _, length in box])
        for rank in ranks.tolist()
        for box in _boxes(ours, theirs, tuple(coordinates[rank].tolist()), ours_first)
    ]
    if not rows:
        return _none(theirs.ndim)
    which, at, shape = zip(*rows, strict=True)
    return Boxes(*[np.asarray(column, dtype=np.int64) for column in (which, at, shape)])


def _boxes(
    ours: Block, theirs: DTensorSpec, coordinate: tuple[int, ...], ours_first: bool
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Of each shared box, dim by dim: where it begins in our block, and its length."""
    columns = []
    for dim, runs in enumerate(ours.runs):
        other = theirs.runs(dim, coordinate)
        common = intersect(runs, other) if ours_first else intersect(other, runs)
        columns.append([(a if ours_first else b, length) for a, b, length in common])
    return itertools.product(*columns)
