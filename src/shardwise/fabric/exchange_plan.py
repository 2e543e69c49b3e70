"""Which boxes one rank sends and receives in an exchange. Only its own are computed.

Pure functions on specs, in arrays over the ranks. Communicates nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.core.layout import Block, Run, intersect
from shardwise.core.spec import DTensorSpec
from shardwise.plan.state_transfer import Distances, IndexRange

__all__ = ["Boxes", "Traffic", "traffic"]


class Boxes(NamedTuple):
    """Boxes of elements that this rank's block shares with the blocks of other ranks, one row each, in rank order."""

    which: np.ndarray  # the other rank, as its position among the participants
    ours: np.ndarray  # where the box begins in our block
    shape: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The number of elements of each box."""
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
    """The boxes that a rank sends to and receives from each rank; and those it keeps, in the old and new block."""

    sends: Boxes
    receives: Boxes
    kept_from: Boxes
    kept_to: Boxes


def traffic(
    before: DTensorSpec,
    after: DTensorSpec,
    ranks: Sequence[int],
    me: int,
    having: np.ndarray,
    wanting: np.ndarray,
    *,
    turn: int = 0,
    window: IndexRange | None = None,
    distances: Distances | None = None,
) -> Traffic:
    """The boxes that the rank `ranks[me]` sends and receives when the layout `before` becomes `after`.

    Args:
        before: the current layout.
        after: the new layout.
        ranks: the participants.
        me: the index of this rank.
        having: the coordinate of each on the mesh of `before`, a row each; -1 outside the mesh.
        wanting: the same on the mesh of `after`.
        turn: the replica at which receivers begin their round over several replicas.
        window: only these indices are moved.
        distances: between the ranks that take part; None where all are equally far.
    """
    numbers, rank = np.asarray(ranks) + turn, ranks[me] + turn
    holds, wants = _rows_where(having >= 0), _rows_where(wanting >= 0)
    group = _replica_groups(before, having, holds)
    given = taken = _none(before.ndim)
    if holds[me]:
        replicas = np.flatnonzero(group == group[me])
        chosen = replicas[_nearest_in_turn(numbers, replicas, distances)]
        senders = np.where(group == group[me], np.arange(len(ranks)), chosen)
        receivers = np.flatnonzero(wants & (senders == me))
        given = _shared(before.block(having[me].tolist()), after, receivers, wanting, window, ours_first=True)
    if wants[me]:
        near = (
            holds if distances is None else holds & _are_nearest(distances.between([me], range(len(ranks)))[0], group)
        )
        place, count = _places(group, near)
        mine = (group == group[me]) & holds[me]
        senders = np.where(mine, np.arange(len(ranks)) == me, near & (place == rank % np.maximum(count, 1)))
        sending = np.flatnonzero(holds & senders)
        taken = _shared(after.block(wanting[me].tolist()), before, sending, having, window, ours_first=False)
    return Traffic(given.without(me), taken.without(me), given.of(me), taken.of(me))


def _nearest_in_turn(numbers: np.ndarray, replicas: np.ndarray, distances: Distances | None) -> np.ndarray:
    """For each rank the replica that sends to it: the nearest ones in turn."""
    if distances is None:
        return numbers % len(replicas)
    far = distances.between(np.arange(len(numbers)), replicas)
    near = far == far.min(axis=1, keepdims=True)
    place = np.cumsum(near, axis=1) - 1
    return (near & (place == (numbers % near.sum(axis=1))[:, None])).argmax(axis=1)


def _are_nearest(far: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Whether no rank of the same group is nearer."""
    least = np.full(group.max() + 1, np.inf)
    np.minimum.at(least, group, far)
    return far == least[group]


def _places(group: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each rank's position among the near ranks of its group, and the number of these."""
    order = np.argsort(group, kind="stable")
    before = np.cumsum(near[order]) - near[order]
    first = np.searchsorted(group[order], group[order])
    place = np.empty_like(group)
    place[order] = before - before[first]
    counts = np.bincount(group, weights=near, minlength=int(group.max()) + 1).astype(np.int64)
    return place, counts[group]


def _replica_groups(spec: DTensorSpec, coordinates: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """For each rank the number of its group, whose ranks hold the same block; ranks outside the mesh form one more
    group.

    A block with several holders is sent by the receiver itself if it is one of them, else by the holders in turn.
    """
    key = np.full(len(coordinates), -1)
    key[inside] = 0
    for axis in itertools.chain.from_iterable(spec.dim_axes):
        key[inside] = key[inside] * spec.mesh.shape[axis] + coordinates[inside, axis]
    return np.unique(key, return_inverse=True)[1]


def _rows_where(condition: np.ndarray) -> np.ndarray:
    """Which rows meet a condition in every column."""
    return np.asarray(condition.all(axis=1))


def _none(ndim: int) -> Boxes:
    return Boxes(np.zeros(0, dtype=np.int64), np.zeros((0, ndim), dtype=np.int64), np.zeros((0, ndim), dtype=np.int64))


def _shared(
    ours: Block,
    theirs: DTensorSpec,
    ranks: np.ndarray,
    coordinates: np.ndarray,
    window: IndexRange | None,
    *,
    ours_first: bool,
) -> Boxes:
    """The boxes inside the window that this rank's block shares with the block of each rank in `theirs`."""
    if theirs.is_strided or any(len(runs) > 1 for runs in ours.runs):
        return _shared_strided(ours, theirs, ranks, coordinates, window, ours_first)
    at, shape = [np.zeros((len(ranks), 0), dtype=np.int64)] * 2
    for dim, ((start, length),) in enumerate(ours.runs):
        other_start, other_length = theirs.starts_and_lengths(dim, coordinates[ranks])
        low, high = np.maximum(other_start, start), np.minimum(other_start + other_length, start + length)
        if window is not None and window.dim == dim:
            low, high = np.maximum(low, window.start), np.minimum(high, window.stop)
        at = np.column_stack([at, low - start])
        shape = np.column_stack([shape, np.maximum(high - low, 0)])
    return Boxes(ranks, at, shape)._taken(_rows_where(shape > 0))


def _shared_strided(
    ours: Block,
    theirs: DTensorSpec,
    ranks: np.ndarray,
    coordinates: np.ndarray,
    window: IndexRange | None,
    ours_first: bool,
) -> Boxes:
    """The same where blocks have several runs. Both sides list the boxes of a pair in the order of the sender's."""
    rows = [
        (rank, [at for at, _ in box], [length for _, length in box])
        for rank in ranks.tolist()
        for box in _boxes(ours, theirs, tuple(coordinates[rank].tolist()), window, ours_first)
    ]
    if not rows:
        return _none(theirs.ndim)
    which, at, shape = zip(*rows, strict=True)
    return Boxes(*[np.asarray(column, dtype=np.int64) for column in (which, at, shape)])


def _boxes(
    ours: Block, theirs: DTensorSpec, coordinate: tuple[int, ...], window: IndexRange | None, ours_first: bool
) -> Iterator[tuple[tuple[int, int], ...]]:
    """For each shared box and dim: its start in this rank's block, and its length."""
    columns = []
    for dim, runs in enumerate(ours.runs):
        other = theirs.runs(dim, coordinate)
        common = intersect(runs, other) if ours_first else intersect(other, runs)
        own = [(a if ours_first else b, length) for a, b, length in common]
        columns.append(own if window is None or window.dim != dim else _clipped(own, runs, window))
    return itertools.product(*columns)


def _clipped(shared: Sequence[tuple[int, int]], runs: Sequence[Run], window: IndexRange) -> list[tuple[int, int]]:
    """Intervals of a block, each inside one of its runs, clipped to the window."""
    starts = list(itertools.accumulate((run.length for run in runs), initial=0))
    found = []
    for at, length in shared:
        which = bisect.bisect_right(starts, at) - 1
        index = runs[which].start + at - starts[which]
        low, high = max(index, window.start), min(index + length, window.stop)
        if low < high:
            found.append((at + low - index, high - low))
    return found
