"""Redistributions of given shard sizes: only the runs of one dim over one axis change.

A few operations on lists of integers, one for each rank of the axis: sizes may be new at each step of a program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.placement import AnyShard, Owned, Placement, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec

__all__ = ["LineChange", "line_of"]


@dataclass(frozen=True, slots=True, eq=False)
class LineChange:
    """The runs of a dim on the ranks of an axis before and after, relative to the block of the preceding axes.

    Attributes:
        dim: the dim.
        axis: the axis.
        edges: the old start of each rank's run, then the end of the last.
        new_edges: the same afterwards; None if every rank gets all.
        received: the bytes that a rank lacks, on average over all ranks.
    """

    dim: int
    axis: int
    edges: Sequence[int]
    new_edges: Sequence[int] | None
    received: float

    def new_run(self, rank: int) -> tuple[int, int]:
        """Start and length of the new run of the rank at this position of the axis."""
        edges = self.new_edges
        return (0, self.edges[-1]) if edges is None else (edges[rank], edges[rank + 1] - edges[rank])

    def sent_by(self, rank: int) -> list[int]:
        """For each rank, the number of indices of its new run that the rank at this position holds."""
        start, stop = self.edges[rank], self.edges[rank + 1]
        edges = self.new_edges
        return [stop - start] * (len(self.edges) - 1) if edges is None else _inside(edges, start, stop)

    def got_by(self, rank: int) -> list[int]:
        """For each rank, the number of indices that it holds of the new run of the rank at this position."""
        start, length = self.new_run(rank)
        return _inside(self.edges, start, start + length)


def _inside(edges: Sequence[int], start: int, stop: int) -> list[int]:
    """The length of the overlap of each run with `start` to `stop`."""
    kept = [start if edge < start else stop if edge > stop else edge for edge in edges]
    return [high - low for low, high in itertools.pairwise(kept)]


def line_of(before: DTensorSpec, after: DTensorSpec) -> LineChange | None:
    """The change of one axis from the layout `before` to `after`; None if they differ in another way.

    Only if one of them has given sizes: other routes are cached.

    Example:
        >>> from shardwise.core.mesh import DeviceMesh
        >>> from shardwise.core.spec import TensorMeta
        >>> spec = DTensorSpec(DeviceMesh("cpu", range(3)), [Ragged(0, (5, 0, 3))], TensorMeta((8,)))
        >>> change = line_of(spec, spec.with_placements([Shard(0)]))
        >>> change.sent_by(0), change.got_by(1), change.received
        ([3, 2, 0], [2, 0, 1], 4.0)
    """
    mesh, meta = before.mesh, before.tensor_meta
    if not (before.is_ragged or after.is_ragged) or mesh is not after.mesh or meta.is_symbolic:
        return None
    axis = _changed_axis(before.placements, after.placements)
    old = None if axis is None else before.placements[axis]
    if axis is None or not isinstance(old, AnyShard) or before.broadcast or 0 in before.shape:
        return None
    dim, new, ranks = old.dim, after.placements[axis], mesh.shape[axis]
    if ranks == 1 or before.dim_axes[dim][-1] != axis or not _stays(before, after, dim, new):
        return None
    given = old if isinstance(old, Ragged) else new
    if not isinstance(given, Ragged):
        return None
    length = sum(given.sizes)  # of the block of the preceding axes
    edges, new_edges = _edges(old, ranks, length), _edges(new, ranks, length)
    replicates = isinstance(new, Replicate)
    if edges is None or (new_edges is None and not replicates):
        return None
    wanted = length * ranks if replicates else length
    kept = length if new_edges is None else _kept(edges, new_edges)
    each = meta.nbytes // before.shape[dim]  # the bytes of an index of the dim, on average
    for at, axes in enumerate(before.dim_axes):
        if axes and at != dim:
            each /= math.prod([mesh.shape[a] for a in axes])
    received = (wanted - kept) * each / ranks
    return LineChange(dim, axis, edges, new_edges, received)


def _changed_axis(old: tuple[Placement, ...], new: tuple[Placement, ...]) -> int | None:
    """The one axis whose placement changes; None if there are several."""
    changed = [axis for axis, (one, other) in enumerate(zip(old, new, strict=True)) if one is not other]
    return changed[0] if len(changed) == 1 else None


def _stays(before: DTensorSpec, after: DTensorSpec, dim: int, new: Placement) -> bool:
    """Whether all other axes split all dims as before, and the changed one the same dim or none."""
    if isinstance(new, Replicate):
        expected = tuple([axes[:-1] if at == dim else axes for at, axes in enumerate(before.dim_axes)])
        return after.dim_axes == expected
    return isinstance(new, AnyShard) and new.dim == dim and after.dim_axes == before.dim_axes


def _edges(placement: Placement, parts: int, length: int) -> list[int] | None:
    """The start of each rank's run in a dim of this size, and the end; None if a rank may have several runs."""
    match placement:
        case Ragged(blocks=None, sizes=sizes):
            return [*itertools.accumulate(sizes, initial=0)]
        case Shard():
            step = -(-length // parts)
            return [min(part * step, length) for part in range(parts + 1)]
        case Owned(rank=owner):
            return [0] * (owner + 1) + [length] * (parts - owner)
        case _:
            return None


def _kept(edges: Sequence[int], new_edges: Sequence[int]) -> int:
    """The number of indices that do not move."""
    starts, stops = map(max, edges, new_edges), map(min, edges[1:], new_edges[1:])
    return sum([stop - start for start, stop in zip(starts, stops, strict=False) if stop > start])
