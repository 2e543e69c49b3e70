"""One device's dropout mask of attention scores, tile by tile, from a sequential CPU generator.

Parts are drawn from states of the generator that are stored. If the mask of a sample and head is large, a state is
stored when a part needs it, by a jump; else the stream of the global mask is drawn once, which costs its time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shardwise.rng.cpu_stream import JUMP, can_jump, is_sequential, words_of
from shardwise.rng.mt19937_jump import Origin

__all__ = ["DropoutMask", "MaskTile", "can_repeat"]

aten = torch.ops.aten
AT_ONCE = 1 << 20  # numbers drawn at a time
DTYPE = torch.bfloat16  # of the draws; the numbers do not depend on it, and this is the fastest
MOST_STATES = 1024  # stored states, of 5 KB each
OF_EACH = 16  # states of each sample and head, if there are not too many of these


class MaskTile(NamedTuple):
    """Local rows of a rank, `row` up to `row + rows`, and global columns."""

    row: int
    rows: int
    first: int
    columns: int


def can_repeat(keep: float) -> bool:
    """Whether this build of torch draws masks in sequence."""
    return is_sequential(aten.bernoulli_.float, (keep,), DTYPE)


class DropoutMask:
    """The mask of scores (samples, heads, queries, keys). The generator advances as on one device.

    Args:
        shape: of the scores.
        keep: the probability that a score is kept.
        generator: on a CPU.
    """

    def __init__(self, shape: Sequence[int], keep: float, generator: torch.Generator) -> None:
        self.shape, self.keep = tuple(shape), keep
        samples, heads, rows, columns = shape
        count = max(1, min(OF_EACH, MOST_STATES // max(samples * heads, 1)))
        self.step = max(1, -(-rows // count))  # rows between two states, at most
        self.states: dict[tuple[int, int], torch.Tensor] = {}  # by sample and head, and first row
        self._rows: dict[int, list[int]] = {}  # those with a state, in order, by sample and head
        self._words = columns * words_of(generator, aten.bernoulli_.float, (keep,), DTYPE)  # of a row
        self._begin = generator.get_state()
        if can_jump(generator) and rows * self._words >= JUMP:
            self.step = -(-JUMP // self._words)
            Origin(generator).jump(generator, samples * heads * rows * self._words)
        else:
            self._draw_all(generator)

    def _draw_all(self, generator: torch.Generator) -> None:
        """Draw the global mask, and store some states."""
        samples, heads, rows, columns = self.shape
        scratch = torch.empty(min(AT_ONCE, max(self.step * columns, 1)), dtype=DTYPE)
        for plane in range(samples * heads):
            for row in range(0, rows, self.step):
                self._keep(plane, row, generator)
                left = min(self.step, rows - row) * columns
                while left:
                    drawn = min(left, scratch.numel())
                    scratch[:drawn].bernoulli_(self.keep, generator=generator)
                    left -= drawn

    def _keep(self, plane: int, row: int, generator: torch.Generator) -> None:
        self.states[plane, row] = generator.get_state()
        bisect.insort(self._rows.setdefault(plane, []), row)

    def _row_before(self, plane: int, row: int) -> int | None:
        """The last row up to this one with a state, if it is near."""
        rows = self._rows.get(plane, ())
        at = bisect.bisect(rows, row) - 1
        return rows[at] if at >= 0 and row - rows[at] < self.step else None

    def _store(self, places: Iterable[tuple[int, int]]) -> None:
        """Store states at or before these samples and heads, and rows."""
        generator, origin = torch.Generator(), None
        for plane, row in sorted(places):
            if self._row_before(plane, row) is None:
                if origin is None:
                    generator.set_state(self._begin)
                    origin = Origin(generator)
                origin.jump(generator, (plane * self.shape[2] + row) * self._words)
                self._keep(plane, row, generator)

    def parts(
        self, samples: Sequence[int], heads: Sequence[int], rows: Sequence[int], tiles: Sequence[MaskTile]
    ) -> list[torch.Tensor]:
        """Which scores of each tile are kept, for these samples, heads and queries, the rows of a rank.

        Example:
            >>> mask = DropoutMask((1, 1, 4, 6), 0.5, torch.Generator().manual_seed(0))
            >>> full = torch.empty(4, 6).bernoulli_(0.5, generator=torch.Generator().manual_seed(0)).bool()
            >>> torch.equal(mask.parts([0], [0], [2, 3], [MaskTile(0, 2, 1, 3)])[0][0, 0], full[2:, 1:4])
            True
        """
        found = [torch.empty(len(samples), len(heads), tile.rows, tile.columns, dtype=torch.bool) for tile in tiles]
        wanted = sorted({at for tile in tiles for at in range(tile.row, tile.row + tile.rows)})
        if not wanted:
            return found
        runs = _runs([(rows[at], at) for at in wanted])
        planes = [sample * self.shape[1] + head for sample in samples for head in heads]
        self._store((plane, first) for plane in planes for first, _, _ in runs)
        for i, sample in enumerate(samples):
            for j, head in enumerate(heads):
                for first, at, count in runs:
                    self._draw(sample * self.shape[1] + head, first, at, count, [part[i, j] for part in found], tiles)
        return found

    def _draw(
        self, plane: int, first: int, at: int, count: int, found: Sequence[torch.Tensor], tiles: Sequence[MaskTile]
    ) -> None:
        """Draw the global rows from `first` on, which are the local rows from `at` on."""
        columns = self.shape[3]
        begin = self._row_before(plane, first)
        assert begin is not None
        generator = torch.Generator()
        generator.set_state(self.states[plane, begin])
        most = max(1, AT_ONCE // columns)
        row = begin
        while row < first + count:
            size = min(most, (first if row < first else first + count) - row)
            drawn = torch.empty(size, columns, dtype=DTYPE).bernoulli_(self.keep, generator=generator)
            if row >= first:
                local = at + row - first
                for part, tile in zip(found, tiles, strict=True):
                    low, high = max(local, tile.row), min(local + size, tile.row + tile.rows)
                    if low < high:
                        kept = drawn[low - local : high - local, tile.first : tile.first + tile.columns]
                        part[low - tile.row : high - tile.row] = kept != 0
            row += size


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Consecutive pairs of a global and a local row: the first of each, and their number."""
    found: list[tuple[int, int, int]] = []
    for row, at in pairs:
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (row, at):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((row, at, 1))
    return found
