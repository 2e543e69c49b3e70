"""What the host knows of one dispatch: how many rows each rank has for each expert, and all sizes that follow.

Arrays of numpy, read from the table that ranks tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from shardwise.core.mesh import Coordinate
from shardwise.moe.expert_ranks import ExpertRanks
from shardwise.moe.token_maps import Counts, LineRows, RowTable, number_of

__all__ = ["LineSizes", "begins", "expected_sizes", "read_sizes", "steps"]


@dataclass(eq=False)
class LineSizes(LineRows):
    """What the host knows of one line: how many rows each member has for each expert, in arrays."""

    ranks: ExpertRanks
    bounds: np.ndarray  # where the rows of each sender and expert begin, and their end
    distinct: RowTable | None = None  # tokens by sender and receiver, each once
    _found: dict[int, Counts] = field(default_factory=dict)

    @property
    def tokens(self) -> LineRows:
        """The same of tokens, each sent once to a rank."""
        return self.distinct or self

    @cached_property
    def total(self) -> np.ndarray:
        """Where the rows of each expert begin among all, and their number."""
        return self.bounds.sum(0)

    @cached_property
    def per_rank(self) -> np.ndarray:
        """The rows of the experts of each rank along the axis."""
        return steps(self.total[self.ranks.first_experts])

    @cached_property
    def table(self) -> np.ndarray:
        """The rows of each sender for each expert."""
        return steps(self.bounds)

    @cached_property
    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the rows of each member begin, and how many they are."""
        begin, size = self.ranks.blocks(torch.from_numpy(self.per_rank))
        return begin.numpy(), size.numpy()

    @cached_property
    def begin(self) -> np.ndarray:
        """Where the rows of each sender and expert begin among all."""
        return self.total[:-1] + np.cumsum(self.table, 0) - self.table

    def arriving(self, me: int) -> np.ndarray:
        """Of the rows that a member gets, by sender and expert, one after another: how many they are (the second row).

        And how much further each is put than it arrives (the first row), so that rows are in the order of the experts.
        """
        pieces, starts = self._pieces(me)
        found = np.empty((2, pieces.size), dtype=np.int64)
        found[1] = pieces.reshape(-1)
        np.subtract(starts.reshape(-1), found[1].cumsum() - found[1], out=found[0])
        return found

    def _pieces(self, me: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that a member gets, by sender and expert, and where they begin there."""
        if not self.ranks.minors:
            first, last = self.ranks.first_experts[me : me + 2].tolist()
            pieces = steps(self.bounds[:, first : last + 1])
            return pieces, self.total[first:last] - self.total[first] + pieces.cumsum(0) - pieces
        start, length = (int(each[me]) for each in self.blocks)
        low, high = np.maximum(self.begin, start), np.minimum(self.begin + self.table, start + length)
        return np.maximum(high - low, 0), low - start

    def between(self, me: int) -> Counts:
        """The rows of a member to each, and from each."""
        found = self._found.get(me)
        if found is None:
            found = self._found[me] = self._between(me)
        return found

    def _between(self, me: int) -> Counts:
        if not self.ranks.minors:
            firsts = self.ranks.first_experts
            received = self.bounds[:, firsts[me + 1]] - self.bounds[:, firsts[me]]
            return tuple(steps(self.bounds[me, firsts]).tolist()), tuple(received.tolist())
        begin, (start, length) = self.begin[me], self.blocks
        low, high = np.maximum(begin, start[:, None]), np.minimum(begin + self.table[me], (start + length)[:, None])
        sent = np.maximum(high - low, 0).sum(1)
        return tuple(sent.tolist()), tuple(self._pieces(me)[0].sum(1).tolist())

    def crossing(self) -> int:
        """The rows that go to another rank."""
        return int(self.total[-1]) - sum(self.between(me)[0][me] for me in range(self.ranks.members))


def steps(bounds: np.ndarray) -> np.ndarray:
    """The sizes of the parts between bounds; `np.diff` without what it checks."""
    return bounds[..., 1:] - bounds[..., :-1]


def begins(sizes: np.ndarray) -> np.ndarray:
    """Where parts of these sizes begin, and where the last one ends."""
    found = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def expected_sizes(ranks: ExpertRanks, tokens: int, choices: int) -> LineSizes:
    """The sizes of a dry run: as if every expert were chosen equally often."""
    members, experts = ranks.members, ranks.experts
    rows = -(-tokens // members) * choices
    table = np.full(experts, rows // experts)
    table[: rows % experts] += 1
    chosen = 1.0
    if choices <= experts:  # of a token, by at least one of its choices
        chosen -= math.comb(experts - ranks.sizes[0], choices) / math.comb(experts, choices)
    distinct = np.full((members, members), math.ceil(-(-tokens // members) * chosen))
    return LineSizes(ranks, np.tile(begins(table), (members, 1)), RowTable(distinct) if choices > 1 else None)


def read_sizes(
    ranks: ExpertRanks,
    tables: Sequence[tuple[Coordinate, torch.Tensor]],
    lines: Sequence[tuple[Coordinate, torch.Tensor]],
    choices: int,
) -> dict[int, LineSizes]:
    """The sizes of each line with ranks here. The host waits for them."""
    found: dict[int, LineSizes] = {}
    experts = ranks.experts
    for (_, table), (_, line) in zip(tables, lines, strict=True):
        if number_of(line) in found:
            continue
        here = table.cpu().numpy()
        bounds, rows = here[:, : experts + 1], here[:, experts + 1]
        wrong = int((rows - bounds[:, -1] + bounds[:, 0]).sum())
        if wrong:
            raise IndexError(f"{wrong} entries of expert_ids are no experts: these are 0 to {experts - 1}")
        distinct = RowTable(here[:, experts + 2 :]) if choices > 1 else None
        found[number_of(line)] = LineSizes(ranks, bounds, distinct)
    return found
