"""One rank's packing, sending and unpacking in a row exchange: rows of its locals, by the segments of the step.

Pure functions on plain tensors and specs. Communicates nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.fabric.exchange_plan import Boxes
from shardwise.fabric.packing import Strip, offsets_of, sizes_by_rank, strips_of
from shardwise.plan.row_exchange import Places, places_after, places_before
from shardwise.plan.step import RowExchange, Rows, Windowed

__all__ = ["RowParcels", "row_parcels"]

Locals = Sequence[torch.Tensor]


class RowView(NamedTuple):
    """`count` rows of a local from `row` on, `step` apart; with a negative step in reverse order."""

    tensor: int  # which operand or result
    dim: int
    row: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.count is not used
    step: int

    def of(self, locals_: Locals) -> torch.Tensor:
        """The rows as a view; those in reverse order as a copy."""
        step, end = abs(self.step), self.row + (self.count - 1) * abs(self.step) + 1
        rows = torch.ops.aten.slice.Tensor(locals_[self.tensor], self.dim, self.row, end, step)
        return rows.flip(self.dim) if self.step < 0 else rows


class Sent(NamedTuple):
    """The parts of a segment that a rank sends or receives: boxes of a view of a local, and their offsets."""

    view: RowView
    strips: list[Strip]


class KeptRows(NamedTuple):
    """Rows of an operand that stay on the rank as rows of a result."""

    source: RowView
    target: RowView


class RowParcels(NamedTuple):
    """One all-to-all with uneven splits. Sizes are stored only for ranks with which something is exchanged.

    A rank sends one element to itself. In a graph this is a tag: two different exchanges may look equal on one rank,
    and if a compiler merged them on this rank alone, the others would wait.
    """

    ranks: int
    sent: tuple[tuple[int, int], ...]  # (rank, elements)
    got: tuple[tuple[int, int], ...]
    sends: list[Sent]
    receives: list[Sent]
    keeps: list[KeptRows]
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # shape and stride of each result
    filled: list[bool]  # whether some rows of a result have no source
    adds: bool  # whether rows received from several ranks are added
    dim: int
    tag: int  # of the step

    def splits(self, scale: int) -> tuple[list[int], list[int]]:
        """Received and sent elements by rank, if an element is carried as `scale`."""
        return self._sizes(self.got, scale), self._sizes(self.sent, scale)

    def _sizes(self, pairs: Sequence[tuple[int, int]], scale: int) -> list[int]:
        sizes = [0] * self.ranks
        for rank, size in pairs:
            sizes[rank] = size * scale
        return sizes

    def packed(self, locals_: Locals) -> list[tuple[int, torch.Tensor]]:
        """The sent parts of the locals, each with its offset in the buffer."""
        parts = []
        for view, strips in self.sends:
            rows = view.of(locals_)
            parts += [(strip.offset, strip.in_block(rows)) for strip in strips]
        return sorted(parts, key=lambda part: part[0])

    def unpack(self, locals_: Locals, buffer: torch.Tensor, fill: Any = 0) -> list[torch.Tensor]:
        """The results, from the rows that this rank keeps and those it received."""
        results = []
        put = torch.Tensor.add_ if self.adds else torch.Tensor.copy_
        for (shape, stride), filled in zip(self.shapes, self.filled, strict=True):
            made = buffer.new_empty_strided(shape, stride)
            results.append(made.fill_(0 if self.adds else fill) if filled else made)
        for source, target in self.keeps:
            put(target.of(results), source.of(locals_))
        for view, strips in self.receives:
            rows = view.of(results)
            for strip in strips:
                put(strip.in_block(rows), strip.in_buffer(buffer))
        return results

    def unpack_traced(self, locals_: Locals, buffer: torch.Tensor, fill: Any = 0) -> list[torch.Tensor]:
        """The same, with each result depending on the buffer, because a compiler removes unused values.

        On a rank that receives nothing it would remove the collective, for which the others wait.
        """
        results = self.unpack(locals_, buffer, fill)
        received = {view.tensor for view, _ in self.receives}
        for i, (shape, stride) in enumerate(self.shapes):
            if i not in received:
                nothing = buffer.narrow(0, 0, 0).view([0 if d == self.dim else n for d, n in enumerate(shape)])
                made = torch.cat([results[i], nothing], self.dim)
                tied = made.stride() == stride or not made.numel()
                results[i] = made if tied else made.new_empty_strided(shape, stride).copy_(made)
        return results


def row_parcels(step: RowExchange, me: int, coordinates: np.ndarray) -> RowParcels:
    """The rows that the `me`-th of the ranks at these coordinates sends, receives and keeps."""
    ranks, here = len(coordinates), tuple(coordinates[me].tolist())
    sends: list[tuple[RowView, Boxes]] = []
    receives: list[tuple[RowView, Boxes]] = []
    keeps: list[KeptRows] = []
    for segment in step.segments:
        have, want = places_before(step, segment, coordinates), places_after(step, segment, coordinates)
        source = _view(segment.operand, step.dim, have, me, segment.step)
        target = _view(segment.result, step.dim, want, me, segment.stride)
        block = step.results[segment.result].local_shape(here)
        for found, view, mine, theirs in ((sends, source, have, want), (receives, target, want, have)):
            boxes = _shared(mine, theirs, me, step.dim, block)
            if len(boxes.which):
                found.append((view, boxes))
        low, high = max(have.low[me], want.low[me]), min(have.high[me], want.high[me])
        if low < high:
            keeps.append(KeptRows(_part(source, have.low[me], low, high), _part(target, want.low[me], low, high)))
    sent, got = (sizes_by_rank([boxes for _, boxes in found], ranks) for found in (sends, receives))
    sent[me] = got[me] = 1  # for the tag
    return RowParcels(
        ranks,
        _nonzero(sent),
        _nonzero(got),
        _placed(sends, sent),
        _placed(receives, got),
        keeps,
        [(spec.local_shape(here), spec.local_stride(here)) for spec in step.results],
        [step.adds or _has_rows_without_source(step, i, coordinates[me : me + 1]) for i in range(len(step.results))],
        step.adds,
        step.dim,
        zlib.crc32(repr((step.dim, step.segments, _described(step.operands), _described(step.results))).encode()),
    )


def _view(tensor: int, dim: int, places: Places, me: int, step: int) -> RowView:
    return RowView(tensor, dim, int(places.row[me]), int(places.high[me] - places.low[me]), step)


def _part(view: RowView, first: int, low: int, high: int) -> RowView:
    """The positions `low` up to `high` of a view whose first position is `first`."""
    skipped = int(low - first) if view.step > 0 else int(first + view.count - high)
    return view._replace(row=view.row + skipped * abs(view.step), count=int(high - low))


def _shared(mine: Places, theirs: Places, me: int, dim: int, block: Sequence[int]) -> Boxes:
    """The parts of other ranks' segments that this rank holds: boxes of its view of the segment."""
    low, high = np.maximum(theirs.low, mine.low[me]), np.minimum(theirs.high, mine.high[me])
    shared = high > low
    shared[me] = False
    which = np.flatnonzero(shared)
    ours, shape = np.zeros((len(which), len(block)), dtype=np.int64), np.tile(np.asarray(block), (len(which), 1))
    ours[:, dim], shape[:, dim] = low[which] - mine.low[me], (high - low)[which]
    return Boxes(which, ours, shape)


def _placed(found: Sequence[tuple[RowView, Boxes]], sizes: np.ndarray) -> list[Sent]:
    """Each segment's boxes with their offsets in the buffer, ordered by rank, then by segment."""
    if not found:
        return []
    which = np.concatenate([boxes.which for _, boxes in found])
    order = np.argsort(which, kind="stable")
    all_sizes = np.concatenate([boxes.sizes for _, boxes in found])
    offsets = np.empty_like(all_sizes)
    offsets[order] = offsets_of(which[order], all_sizes[order], sizes)
    ends = np.cumsum([len(boxes.which) for _, boxes in found])
    parts = np.split(offsets, ends[:-1])
    return [Sent(view, strips_of(boxes, part)) for (view, boxes), part in zip(found, parts, strict=True)]


def _nonzero(sizes: np.ndarray) -> tuple[tuple[int, int], ...]:
    ranks = np.flatnonzero(sizes)
    return tuple(zip(ranks.tolist(), sizes[ranks].tolist(), strict=True))


def _described(specs: Sequence[Rows]) -> list[Any]:
    """A key that distinguishes tensors of exchanges: shapes and windows."""
    return [(spec.shape, [w[:2] for w in spec.windows] if isinstance(spec, Windowed) else ()) for spec in specs]


def _has_rows_without_source(step: RowExchange, result: int, here: np.ndarray) -> bool:
    """Whether segments do not cover all rows of a result (for a result with halos: all its local rows)."""
    spec, found = step.results[result], [segment for segment in step.segments if segment.result == result]
    if not isinstance(spec, Windowed):
        return sum(segment.length for segment in found) < spec.shape[step.dim]
    places = [places_after(step, segment, here) for segment in found]
    return sum(int((at.high - at.low)[0]) for at in places) < spec.starts_and_lengths(step.dim, here)[1][0]
