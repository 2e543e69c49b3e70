"""One device's dropout mask of attention scores, tile by tile, from a sequential CPU generator.

The stream of the global mask is drawn once, and some states of the generator are stored. Parts are drawn again from
these. Costs the time of the global mask and the memory of one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.rng.cpu_stream import is_sequential

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
        self.step = max(1, -(-rows // count))  # rows between two states
        self.states: dict[tuple[int, int], torch.Tensor] = {}  # by sample and head, and first row
        scratch = torch.empty(min(AT_ONCE, max(self.step * columns, 1)), dtype=DTYPE)
        for plane in range(samples * heads):
            for row in range(0, rows, self.step):
                self.states[plane, row] = generator.get_state()
                left = min(self.step, rows - row) * columns
                while left:
                    drawn = min(left, scratch.numel())
                    scratch[:drawn].bernoulli_(keep, generator=generator)
                    left -= drawn

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
        begin = first // self.step * self.step
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
