"""Which rows go to which rank: the plan of one dispatch, made of the experts that tokens were given.

Ranks tell each other how many rows they have for each expert. All sizes follow from that table, which the host reads
once. Which row is for which expert is known where it arrives: rows are sorted by expert, or bring the numbers of their
experts (`token_sending`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import device_of, fabric_of
from shardwise.moe.expert_ranks import ExpertRanks
from shardwise.moe.line_sizes import LineSizes, expected_sizes, read_sizes
from shardwise.moe.token_maps import (
    LineRows,
    RowLayout,
    TokenMap,
    announce,
    lines_here,
    number_of,
    quiet_step,
    sorted_rows,
)
from shardwise.rules.owner_programs import Exchanging, Items
from shardwise.tensor import dtensor_of

__all__ = ["RoutingPlan", "SlotArrays", "TokenArrays", "plan_of"]


class SlotArrays(NamedTuple):
    """For each rank here, or for one: of the rows of all choices, one by one.

    Args:
        order: the choice of each row that is sent, in the order of the receivers, then of the experts.
        of_row: which of the arriving rows each row of the experts is.
        placed: the inverse: where each arriving row is put.
        sent_at: the inverse of `order`.
    """

    order: torch.Tensor
    of_row: torch.Tensor
    placed: torch.Tensor
    sent_at: torch.Tensor


class TokenArrays(NamedTuple):
    """For each rank here, or for one: of tokens, each sent once to a rank.

    Args:
        send: the token of each row that is sent.
        gather: which of the arriving rows each row of the experts is.
        chosen: of each row of the experts its choice, among the choices of all rows that arrive.
    """

    send: torch.Tensor
    gather: torch.Tensor
    chosen: torch.Tensor


@dataclass(eq=False)
class RoutingPlan:
    """The maps of one dispatch.

    Args:
        ranks: who has which experts.
        shape: the number of tokens, and of the experts of each.
        lines: the sizes of each line of ranks.
        per_rank: the rows of the experts of each rank along the axis, the largest of all lines.
        line: for each rank here the number of its line.
        counted: for each rank here what it found when it counted: see `_counting`.
        received: with several choices, the arrays of the tokens, once they have arrived.
    """

    ranks: ExpertRanks
    shape: tuple[int, int]
    lines: Mapping[int, LineSizes]
    per_rank: list[int]
    line: torch.Tensor
    counted: list[torch.Tensor]
    received: TokenArrays | None = None
    _of_rows: dict[DTensorSpec, DTensorSpec] = field(default_factory=dict)

    @cached_property
    def slot_arrays(self) -> SlotArrays:
        """Of the rows of all choices. Nothing is exchanged; with one choice they come with the tokens."""

        def arrive(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
            yield from ()
            return self.slots_of_rank(at, *own)

        ranks, locals_ = self.ranks, [self.line, self.counted[0]]
        step = quiet_step(ranks.ends_spec, ranks.over, "rows")
        return SlotArrays(*fabric_of(ranks.mesh).exchange_by_owner(step, arrive, locals_))

    def slots_of_rank(self, at: Coordinate, line: torch.Tensor, order: torch.Tensor) -> SlotArrays:
        """The rows of all choices that arrive at a rank, in the order of their experts."""
        device, ranks = order.device, self.ranks
        numbers = self.lines[number_of(line)].arriving(ranks.member(at))
        arriving, count = int(numbers[1].sum()), ranks.length(self.per_rank, at)
        shift, times = torch.from_numpy(numbers).to(device, non_blocking=True).unbind()
        placed = torch.repeat_interleave(shift, times, output_size=arriving)
        rows = torch.arange(arriving, device=device)
        placed += rows
        of_row = torch.empty_like(rows).scatter_(0, placed, rows)
        if count > arriving:  # the last ones are empty
            of_row = F.pad(of_row, (0, count - arriving), value=arriving)
        return SlotArrays(order, of_row, placed, _inverse(order))

    @cached_property
    def target(self) -> RowLayout:
        """How the rows of the experts lie."""
        return self.ranks.layout(self.per_rank)

    @cached_property
    def tokens(self) -> TokenMap:
        """From rows of the input to rows sorted by expert."""
        ranks, source, target = self.ranks, self.ranks.by_token(self.shape[0]), self.target
        if self.choices == 1:
            arrays = self.slot_arrays
            inverse = () if self.padded else (arrays.placed, arrays.sent_at)
            maps = (arrays.order, arrays.of_row, self.lines, ranks.over, self.line, inverse)
            return TokenMap(ranks.mesh, source, target, *maps, self.padded)
        assert self.received is not None, "the tokens have arrived"
        distinct: dict[int, LineRows] = {number: sizes.tokens for number, sizes in self.lines.items()}
        maps = (*self.received[:2], distinct, ranks.over, self.line, ())
        return TokenMap(ranks.mesh, source, target, *maps, self.padded)

    @cached_property
    def slots(self) -> TokenMap:
        """From the numbers of each token and choice to a number for each of these rows."""
        ranks, arrays = self.ranks, self.slot_arrays
        inverse = () if self.padded else (arrays.placed, arrays.sent_at)
        source = ranks.by_token(self.shape[0], (self.choices,))
        maps = (arrays.order, arrays.of_row, self.lines, ranks.over, self.line, inverse)
        return TokenMap(ranks.mesh, source, self.by_row, *maps, self.padded, "weights")

    @cached_property
    def by_row(self) -> RowLayout:
        """How numbers for each row of the experts lie."""
        target = self.target
        return RowLayout(target.rows, target.axes, target.placements, ())

    def crossing(self) -> float:
        """The tokens that go to another rank, of one line on average."""
        return sum(sizes.tokens.crossing() for sizes in self.lines.values()) / len(self.lines)

    @property
    def choices(self) -> int:
        """The number of experts of each token."""
        return self.shape[1]

    @cached_property
    def padded(self) -> bool:
        """Whether some line has fewer rows than the layout says."""
        return len(self.lines) > 1 and any(sizes.per_rank.tolist() != self.per_rank for sizes in self.lines.values())

    def of_choices(self, spec: DTensorSpec) -> DTensorSpec:
        """The layout that numbers for each choice are sent from."""
        return self.ranks.source(spec, (self.choices,))

    def of_rows(self, spec: DTensorSpec) -> DTensorSpec:
        """The layout of numbers for each row of the experts, of that of numbers for each choice or row."""
        found = self._of_rows.get(spec)
        if found is None:
            found = self._of_rows[spec] = self.by_row.of(spec)
            self._of_rows[found] = found
        return found

    @cached_property
    def offs(self) -> Any:
        """The end of each expert's rows, on each rank those of its experts."""
        ranks, per_rank = self.ranks, self.per_rank

        def ends(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
            rank, owned, total = at[ranks.axis], ranks.owned(at), self.lines[number_of(line)].total
            start = sum(per_rank[:rank])
            own = (total[owned.start + 1 : owned.stop + 1] + (start - total[owned.start])).astype(np.int32)
            own[-1:] = start + per_rank[rank]  # empty rows at the end belong to the last expert
            return self._on_device(own)

        return dtensor_of(ranks.ends_spec, fabric_of(ranks.mesh).map(ranks.mesh, ends, self.line))

    @cached_property
    def counts(self) -> Any:
        """How many tokens of all ranks chose each expert."""
        mesh = self.ranks.mesh

        def counts(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
            return self._on_device(np.diff(self.lines[number_of(line)].total))

        return dtensor_of(self.ranks.counts_specs[False], fabric_of(mesh).map(mesh, counts, self.line))

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        mesh = self.ranks.mesh
        made = torch.from_numpy(numbers)
        if not fabric_of(mesh).has_values:
            return made.to("meta")
        return made if mesh.device_type == "cpu" else made.to(device_of(mesh))


# ---------------------------------------------------------------- programs of one rank


def _told(own: torch.Tensor, members: int, meanwhile: Callable[[], object] | None = None) -> Items:
    """A row of numbers that each member is told."""
    own = own if own.dtype is torch.int32 else own.to(torch.int32)
    return Items((own.expand(members, -1),), (1,) * members, (1,) * members, meanwhile)


def _counting(ranks: ExpertRanks, me: int, ids: torch.Tensor) -> Exchanging:
    """What each member has for each expert. Gives the table, and the order of the rows of this rank by receiver.

    With several choices also the experts of each choice as they are sent, their receivers, both `[T, k]`, and whether a
    member gets a token, `[members, T]`.
    A row of the table is where the rows of each expert begin and end, the number of all rows, and the distinct tokens
    for each member: a token that goes to one rank for several experts goes once.
    """
    choices = ids.shape[1]
    flat = ids.reshape(-1)
    if ranks.minors:
        return (yield from _counting_first(ranks, me, ids, flat))
    order, bounds = ranks.sorted(flat)
    if choices == 1:
        return (yield _told(bounds, ranks.members)).tensors[0], order
    to = ids.div(ranks.chunk, rounding_mode="floor")
    goes = (to == ranks.numbers(to)).any(2)
    told, numbers = torch.cat([bounds, goes.sum(1, dtype=torch.int32)]), list[torch.Tensor]()
    table = yield _told(told, ranks.members, lambda: numbers.append(ids.to(ranks.number_dtype)))
    return table.tensors[0], order, *numbers, to, goes


def _counting_first(ranks: ExpertRanks, me: int, ids: torch.Tensor, flat: torch.Tensor) -> Exchanging:
    """The same where several axes split the tokens: who gets a row depends on the counts of all."""
    wrong = ((flat < 0) | (flat >= ranks.experts)).sum().view(1)
    expert, order, bounds = sorted_rows(flat.clamp(0, ranks.experts - 1), ranks.experts)
    table = (yield _told(torch.cat([bounds, wrong + len(flat)]), ranks.members)).tensors[0]
    member = _receivers(ranks, me, table[:, :-1].long().diff(), expert, bounds.diff())
    member, again = torch.sort(member, stable=True)
    order = order[again]
    if ids.shape[1] == 1:
        return table, order
    to = member[_inverse(order)].view(ids.shape)
    goes = (to == ranks.numbers(to)).any(2)
    distinct = yield _told(goes.sum(1), ranks.members)
    return torch.cat([table, distinct.tensors[0]], 1), order, ids.to(ranks.number_dtype), to, goes


def _receivers(
    ranks: ExpertRanks, me: int, table: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The member that each row, sorted by expert, goes to."""
    total = torch.cat([table.new_zeros(1), table.sum(0).cumsum(0)])
    first = torch.from_numpy(ranks.first_experts).to(table.device)
    start, length = ranks.blocks(total[first].diff())
    in_order = torch.argsort(start * 2 + (length > 0), stable=True)  # an empty block before the one that begins there
    begin = total[:-1] + table[:me].sum(0)  # of this rank's rows of each expert
    shift = begin - (counts.cumsum(0) - counts)
    position = torch.arange(len(expert), device=expert.device) + shift[expert]
    return in_order[torch.searchsorted((start + length)[in_order], position, right=True)]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


# ---------------------------------------------------------------- the plan


def plan_of(ranks: ExpertRanks, ids: Any) -> RoutingPlan:
    """The plan for the experts `ids` of tokens, whose rows lie over the axes `over`. The host reads one table."""
    mesh, (tokens, choices) = ranks.mesh, ids.shape
    fabric = fabric_of(mesh)
    width = ranks.experts + 2 + (ranks.members if choices > 1 else 0)
    told = ranks.ends_spec
    step = announce(
        told, lambda: told, ranks.over, "counts", lambda: ranks.members * (ranks.members - 1), lambda: width * 4
    )

    def count(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _counting(ranks, ranks.member(at), own[0])

    tables, *counted = fabric.exchange_by_owner(step, count, [ids._local_tensor])
    line = lines_here(mesh, ranks.over, tables)
    if not fabric.has_values:
        lines = {0: expected_sizes(ranks, tokens, choices)}
    else:
        lines = read_sizes(ranks, fabric.parts(mesh, tables), fabric.parts(mesh, line), choices)
    each = [sizes.per_rank.tolist() for sizes in lines.values()]
    per_rank = each[0] if len(each) == 1 else np.max(each, 0).tolist()  # of virtual ranks the largest of all slices
    return RoutingPlan(ranks, (tokens, choices), lines, per_rank, line, counted)
