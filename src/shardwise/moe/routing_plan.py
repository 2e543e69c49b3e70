"""Which rows go to which rank: the plan of one dispatch, made of the experts that tokens were given.

Ranks tell each other how many rows they have for each expert. All sizes follow from that table, which the host reads
once. With a capacity nothing is read: every rank has as many rows for each expert, some of them empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Ragged, Shard
from shardwise.core.spec import TensorMeta
from shardwise.fabric.base import device_of, fabric_of
from shardwise.moe.token_maps import RowLayout, TokenMap, announce, lines_here, member_of, number_of
from shardwise.plan.step import TokenExchange
from shardwise.rules.owner_programs import Exchanging, Items

__all__ = ["ExpertRanks", "RoutingPlan", "expert_sizes", "plan_of", "plan_with_capacity"]


def expert_sizes(experts: int, ranks: int) -> tuple[int, ...]:
    """How many experts each rank has, as `torch.chunk` divides them.

    Example:
        >>> expert_sizes(6, 4)
        (2, 2, 2, 0)
    """
    chunk = -(-experts // ranks)
    return tuple([max(0, min(chunk, experts - rank * chunk)) for rank in range(ranks)])


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Who has which experts: the axis that they are sharded over, and the axes along which ranks exchange tokens.

    `over` are the axes that split the tokens, in their order; the axis of the experts is one of them. The rows of a
    rank's experts are split again over the others.
    """

    mesh: DeviceMesh
    over: tuple[int, ...]
    axis: int
    experts: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of experts of each rank along the axis."""
        return expert_sizes(self.experts, self.mesh.shape[self.axis])

    @property
    def minors(self) -> tuple[int, ...]:
        """The other axes that split rows."""
        return tuple([axis for axis in self.over if axis != self.axis])

    @property
    def members(self) -> int:
        """The number of ranks that exchange."""
        return math.prod(self.mesh.shape[axis] for axis in self.over)

    def layout(self, per_rank: Sequence[int]) -> RowLayout:
        """How rows lie that are sorted by expert, so many for the experts of each rank along the axis."""
        splits = (Ragged(0, per_rank), *[Shard(0) for _ in self.minors])
        return RowLayout(sum(per_rank), (self.axis, *self.minors), splits)

    def member(self, at: Coordinate) -> int:
        """The number of the rank at a coordinate among those that exchange."""
        return member_of(self.mesh, self.over, at)

    def first_experts(self) -> list[int]:
        """The first expert of each rank along the axis, and their number."""
        return [0, *np.cumsum(self.sizes).tolist()]

    def blocks(self, per_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of each member begin, and how many they are."""
        shape = [self.mesh.shape[axis] for axis in self.over]
        numbers = torch.arange(self.members, device=per_rank.device)
        at = dict(zip(self.over, torch.unravel_index(numbers, shape), strict=True))
        start, size = (per_rank.cumsum(0) - per_rank)[at[self.axis]], per_rank[at[self.axis]]
        for axis in self.minors:
            parts = self.mesh.shape[axis]
            chunk = (size + (parts - 1)).div(parts, rounding_mode="floor")
            begin = torch.minimum(at[axis] * chunk, size)
            start, size = start + begin, torch.minimum(chunk, size - begin)
        return start, size


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The maps of one dispatch.

    Args:
        tokens: from rows of the input to rows sorted by expert.
        slots: from the numbers of each token and choice to a number for each of these rows.
        ends: the end of each expert's rows, on each rank those of its experts.
        counts: how many tokens chose each expert, on each rank: of all ranks, or of its own tokens where `is_partial`.
        is_partial: see `counts`.
    """

    tokens: TokenMap
    slots: TokenMap
    ends: torch.Tensor
    counts: torch.Tensor
    is_partial: bool


# ---------------------------------------------------------------- sizes that the host knows


def _overlaps(ranks: ExpertRanks, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which rows each member gets: for each sender, receiver and expert their number, and where they begin there.

    And the number of rows of each receiver. `table[sender, expert]` rows are there of each sender.
    """
    per_expert = table.sum(0)
    first = torch.tensor(ranks.first_experts())
    total = torch.cat([per_expert.new_zeros(1), per_expert.cumsum(0)])
    start, length = ranks.blocks(total[first].diff())
    begin = total[:-1] + table.cumsum(0) - table  # of each sender and expert, among all rows
    low = torch.maximum(begin[:, None], start[:, None])
    high = torch.minimum((begin + table)[:, None], (start + length)[:, None])
    return (high - low).clamp_(min=0), low - start[:, None], length


@dataclass(frozen=True, eq=False)
class LineSizes:
    """What the host knows of one line: the rows that go from each member to each, and those of each expert."""

    table: torch.Tensor  # rows of each member for each expert
    pieces: torch.Tensor  # rows by sender, receiver and expert
    begins: torch.Tensor  # where each of these begins on its receiver
    lengths: torch.Tensor  # rows of each receiver
    distinct: torch.Tensor | None  # tokens by sender and receiver, each once

    @staticmethod
    def of(ranks: ExpertRanks, table: torch.Tensor, distinct: torch.Tensor | None) -> LineSizes:
        """From the table of one line, on the host."""
        return LineSizes(table, *_overlaps(ranks, table), distinct)

    @property
    def rows(self) -> np.ndarray:
        """Rows by sender and receiver."""
        return self.pieces.sum(2).numpy()

    def per_rank(self, ranks: ExpertRanks) -> list[int]:
        """The rows of the experts of each rank along the axis."""
        total = torch.cat([self.table.new_zeros(1), self.table.sum(0).cumsum(0)])
        return total[torch.tensor(ranks.first_experts())].diff().tolist()


# ---------------------------------------------------------------- programs of one rank


def _by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert: their experts and order, how many there are of each, and how many have no expert."""
    flat = ids.reshape(-1)
    wrong = ((flat < 0) | (flat >= experts)).sum()
    expert, order = torch.sort(flat.clamp(0, experts - 1), stable=True)
    bounds = torch.searchsorted(expert, torch.arange(experts + 1, device=flat.device, dtype=expert.dtype))
    return expert, order, bounds.diff(), wrong


def _told(own: torch.Tensor, members: int) -> Items:
    """A row of numbers that each member is told."""
    return Items((own.to(torch.int32).expand(members, -1).contiguous(),), (1,) * members, (1,) * members)


def _counting(ranks: ExpertRanks, me: int, ids: torch.Tensor) -> Exchanging:
    """What each member has for each expert. Gives the table, and the rows of this rank by receiver.

    A token that goes to one rank for several experts goes once: `number` is that of its row among the distinct ones.
    """
    members, choices = ranks.members, ids.shape[1]
    expert, order, counts, wrong = _by_expert(ids, ranks.experts)
    chunk = max(1, -(-ranks.experts // ranks.mesh.shape[ranks.axis]))
    own = torch.cat([counts, wrong.view(1)])
    if ranks.minors:
        table = (yield _told(own, members)).tensors[0].long()
        member = _receivers(ranks, me, table[:, :-1], expert, counts)
        member, again = torch.sort(member, stable=True)
        order = order[again]
    else:
        member, table = expert.div(chunk, rounding_mode="floor"), own
    number, send, distinct = _distinct(order, member, choices, members)
    if not ranks.minors:
        table = (yield _told(torch.cat([own, distinct]), members)).tensors[0].long()
    elif choices > 1:  # who gets a row depends on the counts of all
        table = torch.cat([table, (yield _told(distinct, members)).tensors[0].long()], 1)
    return table, order, number, send


def _receivers(
    ranks: ExpertRanks, me: int, table: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The member that each row, sorted by expert, goes to."""
    total = torch.cat([table.new_zeros(1), table.sum(0).cumsum(0)])
    first = torch.tensor(ranks.first_experts(), device=table.device)
    start, length = ranks.blocks(total[first].diff())
    in_order = torch.argsort(start * 2 + (length > 0), stable=True)  # an empty block before the one that begins there
    begin = total[:-1] + table[:me].sum(0)  # of this rank's rows of each expert
    shift = begin - (counts.cumsum(0) - counts)
    position = torch.arange(len(expert), device=expert.device) + shift[expert]
    return in_order[torch.searchsorted((start + length)[in_order], position, right=True)]


def _distinct(
    order: torch.Tensor, member: torch.Tensor, choices: int, members: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rows that are sorted by receiver: the number of each row's token among those that go there, each once.

    And these tokens, with room for as many as rows; and how many they are for each receiver.
    """
    bounds = torch.searchsorted(member, torch.arange(members + 1, device=order.device, dtype=member.dtype))
    if choices == 1:
        return order, order, bounds.diff()
    to = torch.empty_like(member).scatter_(0, order, member).view(-1, choices)  # of each token and choice
    same = to[:, :, None] == to[:, None, :]
    leading = same.to(torch.uint8).argmax(2)  # the first choice of this token with the same receiver
    rows = torch.arange(len(order), device=order.device)
    leader = (leading + rows.view(-1, choices)[:, :1]).view(-1)
    leads = (leader == rows)[order]
    passed = torch.cat([bounds.new_zeros(1), leads.cumsum(0)])  # how many lead, up to each row
    number = torch.empty_like(order).scatter_(0, order, passed[1:] - 1)[leader[order]]
    number = number - passed[bounds[:-1]][member]
    send = torch.zeros_like(order).scatter_reduce_(0, (passed[1:] - 1).clamp_(min=0), order * leads, "amax")
    return number, send.div(choices, rounding_mode="floor"), passed[bounds].diff()


def _filling(ranks: ExpertRanks, me: int, capacity: int, ids: torch.Tensor) -> Exchanging:
    """For each expert the first `capacity` rows of this rank; the number of all rows marks an empty slot."""
    expert, order, counts, wrong = _by_expert(ids, ranks.experts)
    torch.ops.aten._assert_async.msg(wrong == 0, f"expert_ids: experts are 0 to {ranks.experts - 1}")
    size = ranks.experts * capacity
    turn = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert]
    slot = torch.where(turn < capacity, expert * capacity + turn, size)
    rows = torch.full((size + 1,), len(order), device=order.device).scatter_(0, slot, order)[:size]
    if ranks.minors:
        same = torch.full((ranks.members, ranks.experts), capacity, device=order.device)
        filled = torch.arange(size, device=order.device).div(capacity, rounding_mode="floor")
        rows = rows[torch.argsort(_receivers(ranks, me, same, filled, same[0]), stable=True)]
    yield from ()
    return rows, counts


def _arriving(
    sizes: LineSizes, me: int, count: int, choices: int, order: torch.Tensor, number: torch.Tensor, send: torch.Tensor
) -> Exchanging:
    """The rows that arrive, in the order of their experts. Gives `send` and `gather` of both maps.

    `count` is the number of rows afterwards, of which the last may be empty.
    """
    device = order.device
    pieces, begins = sizes.pieces[:, me], sizes.begins[:, me]
    each = pieces.reshape(-1)
    arriving = int(each.sum())
    shift = (begins.reshape(-1) - (each.cumsum(0) - each)).to(device)
    rows = torch.arange(arriving, device=device)
    gather = torch.full((count,), arriving, device=device)
    gather[rows + torch.repeat_interleave(shift, each.to(device), output_size=arriving)] = rows
    if sizes.distinct is None:
        return order.div(choices, rounding_mode="floor"), order, gather, gather
    of_sender, distinct = pieces.sum(1), sizes.distinct[:, me]
    sent = tuple(sizes.rows[me].tolist())
    got = yield Items((number.to(torch.int32),), sent, tuple(of_sender.tolist()))
    base = (distinct.cumsum(0) - distinct).to(device)
    base = torch.repeat_interleave(base, of_sender.to(device), output_size=arriving)
    tokens = torch.cat([got.tensors[0].long() + base, distinct.sum().to(device).view(1)])
    return send[: int(sizes.distinct[me].sum())], order, tokens[gather], gather


# ---------------------------------------------------------------- the plan


def plan_of(ranks: ExpertRanks, ids: Any) -> RoutingPlan:
    """The plan for the experts `ids` of tokens, whose rows lie over the axes `over`. The host reads one table."""
    spec, mesh, choices = ids._spec, ranks.mesh, ids.shape[1]
    fabric = fabric_of(mesh)
    width = ranks.experts + 1 + ranks.members
    told = spec.with_meta(TensorMeta((ranks.members, width), dtype=torch.int32))
    step = announce(told, told, ranks.over, "counts", ranks.members * (ranks.members - 1), width * 4)

    def count(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _counting(ranks, ranks.member(at), *own)

    tables, order, number, send = fabric.exchange_by_owner(step, count, [ids._local_tensor])
    line = lines_here(mesh, ranks.over, tables)
    if not fabric.has_values:
        lines = {0: _expected(ranks, ids.shape[0], choices)}
    else:
        lines = _read(ranks, fabric.parts(mesh, tables), fabric.parts(mesh, line), choices)
    each = [sizes.per_rank(ranks) for sizes in lines.values()]
    per_rank = np.max(each, 0).tolist()  # of virtual ranks the largest of all slices
    after = ranks.layout(per_rank).of(spec)
    if choices > 1:
        step = announce(spec, after, ranks.over, "numbers of tokens", _crossing(lines), 4)

    def arrive(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        *tensors, line = own
        return _arriving(lines[number_of(line)], ranks.member(at), after.local_shape(at)[0], choices, *tensors)

    found = fabric.exchange_by_owner(step, arrive, [order, number, send, line])
    padded = any(own != per_rank for own in each)
    ends, counts = _numbers(ranks, line, lines, per_rank)
    return RoutingPlan(*_maps(ranks, ids.shape, line, lines, per_rank, found, padded), ends, counts, False)


def plan_with_capacity(ranks: ExpertRanks, ids: Any, capacity: int) -> RoutingPlan:
    """The plan in which each rank sends at most `capacity` rows to each expert. The host reads nothing."""
    mesh, choices = ranks.mesh, ids.shape[1]
    fabric = fabric_of(mesh)
    sizes = LineSizes.of(ranks, torch.full((ranks.members, ranks.experts), capacity), None)
    line = fabric.build(mesh, lambda _: torch.tensor(0, device="cpu"))  # all lines have the same sizes
    lines = {0: sizes}
    per_rank = sizes.per_rank(ranks)
    after = ranks.layout(per_rank).of(ids._spec)
    step = TokenExchange(ids._spec, after, 0, ranks.over)

    def fill(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _filling(ranks, ranks.member(at), capacity, *own)

    def arrive(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _arriving(sizes, ranks.member(at), after.local_shape(at)[0], choices, *own)

    rows, chosen = fabric.exchange_by_owner(step, fill, [ids._local_tensor])
    found = fabric.exchange_by_owner(step, arrive, [rows, rows, rows])
    ends, _ = _numbers(ranks, line, lines, per_rank)
    return RoutingPlan(*_maps(ranks, ids.shape, line, lines, per_rank, found, True), ends, chosen, True)


def _maps(
    ranks: ExpertRanks,
    shape: Sequence[int],
    line: torch.Tensor,
    lines: Mapping[int, LineSizes],
    per_rank: Sequence[int],
    found: Sequence[torch.Tensor],
    padded: bool,
) -> tuple[TokenMap, TokenMap]:
    """The maps of tokens and of their choices."""
    tokens, choices = shape
    splits = tuple([Shard(0) for _ in ranks.over])
    target, source = ranks.layout(per_rank), RowLayout(tokens, ranks.over, splits)
    rows = {number: sizes.rows for number, sizes in lines.items()}
    distinct = {n: sizes.rows if sizes.distinct is None else sizes.distinct.numpy() for n, sizes in lines.items()}
    once = choices == 1
    send, order, gather, of_row = found
    return (
        TokenMap(source, target, send, gather, distinct, ranks.over, line, once, padded),
        TokenMap(
            replace(source, rest=(choices,)), replace(target, rest=()), order, of_row, rows, ranks.over, line, True,
            padded, "weights",
        ),
    )  # fmt: skip


def _crossing(lines: Mapping[int, LineSizes]) -> float:
    """The rows that go to another rank, of one line on average."""
    return float(np.mean([sizes.rows.sum() - np.trace(sizes.rows) for sizes in lines.values()]))


def _numbers(
    ranks: ExpertRanks, line: torch.Tensor, lines: Mapping[int, LineSizes], per_rank: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each rank here the ends of its experts' rows, and how many rows there are of each expert."""
    fabric, first, starts = fabric_of(ranks.mesh), ranks.first_experts(), np.cumsum([0, *per_rank])
    device = device_of(ranks.mesh) if fabric.has_values else "meta"

    def ends(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
        rank = at[ranks.axis]
        own = lines[number_of(line)].table.sum(0)[first[rank] : first[rank + 1]].cumsum(0) + int(starts[rank])
        own[-1:] = int(starts[rank + 1])  # empty rows at the end belong to the last expert
        return own.to(torch.int32).to(device)

    def counts(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
        return lines[number_of(line)].table.sum(0).to(device)

    return fabric.map(ranks.mesh, ends, line), fabric.map(ranks.mesh, counts, line)


def _expected(ranks: ExpertRanks, tokens: int, choices: int) -> LineSizes:
    """The sizes of a dry run: as if every expert were chosen equally often."""
    members, experts = ranks.members, ranks.experts
    rows = -(-tokens // members) * choices
    table = torch.full((experts,), rows // experts)
    table[: rows % experts] += 1
    each = expert_sizes(experts, ranks.mesh.shape[ranks.axis])[0]
    chosen = 1.0
    if choices <= experts:  # of a token, by at least one of its choices
        chosen -= math.comb(experts - each, choices) / math.comb(experts, choices)
    distinct = torch.full((members, members), math.ceil(-(-tokens // members) * chosen))
    return LineSizes.of(ranks, table.expand(members, -1), distinct if choices > 1 else None)


def _read(
    ranks: ExpertRanks,
    tables: Sequence[tuple[Coordinate, torch.Tensor]],
    lines: Sequence[tuple[Coordinate, torch.Tensor]],
    choices: int,
) -> dict[int, LineSizes]:
    """The sizes of each line with ranks here. The host waits for them."""
    found: dict[int, LineSizes] = {}
    for (_, table), (_, line) in zip(tables, lines, strict=True):
        if number_of(line) in found:
            continue
        here = table.cpu()
        counts, wrong, distinct = here[:, : ranks.experts], here[:, ranks.experts], here[:, ranks.experts + 1 :]
        if bool(wrong.any()):
            raise IndexError(
                f"{int(wrong.sum())} entries of expert_ids are no experts: these are 0 to {ranks.experts - 1}"
            )
        found[number_of(line)] = LineSizes.of(ranks, counts, distinct if choices > 1 else None)
    return found
