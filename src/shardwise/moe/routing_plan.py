"""Which rows go to which rank: the plan of one dispatch, made of the experts that tokens were given.

Ranks tell each other how many rows they have for each expert. All sizes follow from that table, which the host reads
once. With a capacity nothing is read: every rank has as many rows for each expert, some of them empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Partial, Placement, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.base import device_of, fabric_of
from shardwise.moe.token_maps import (
    FIRST,
    Counts,
    LineRows,
    RowLayout,
    RowTable,
    TokenMap,
    announce,
    lines_here,
    member_of,
    number_of,
)
from shardwise.plan.step import TokenExchange
from shardwise.rules.owner_programs import Exchanging, Items

__all__ = ["ExpertRanks", "RoutingPlan", "expert_ranks", "expert_sizes", "plan_of", "plan_with_capacity"]

MAX_MESHES = 64


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

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of experts of each rank along the axis."""
        return expert_sizes(self.experts, self.mesh.shape[self.axis])

    @cached_property
    def minors(self) -> tuple[int, ...]:
        """The other axes that split rows."""
        return tuple([axis for axis in self.over if axis != self.axis])

    @cached_property
    def members(self) -> int:
        """The number of ranks that exchange."""
        return math.prod(self.mesh.shape[axis] for axis in self.over)

    @cached_property
    def chunk(self) -> int:
        """The number of experts of a rank that has all it can have."""
        return -(-self.experts // self.mesh.shape[self.axis])

    def source(self, spec: DTensorSpec, rest: tuple[int, ...] | None = None) -> DTensorSpec:
        """The layout that tokens of this one are exchanged from, or numbers for each token."""
        found = self._sources.get((spec, rest))
        if found is None:
            layout = RowLayout(spec.shape[0], self.over, tuple([Shard(0) for _ in self.over]), rest)
            found = self._sources.keep_recent((spec, rest), layout.of(spec))
        return found

    @cached_property
    def _sources(self) -> BoundedCache[tuple[Any, ...], DTensorSpec]:
        return BoundedCache(MAX_MESHES)

    def layout(self, per_rank: Sequence[int]) -> RowLayout:
        """How rows lie that are sorted by expert, so many for the experts of each rank along the axis."""
        splits = (Ragged(0, per_rank), *[Shard(0) for _ in self.minors])
        return RowLayout(sum(per_rank), (self.axis, *self.minors), splits)

    def member(self, at: Coordinate) -> int:
        """The number of the rank at a coordinate among those that exchange."""
        return member_of(self.mesh, self.over, at)

    @cached_property
    def first_experts(self) -> np.ndarray:
        """The first expert of each rank along the axis, and their number."""
        return np.cumsum((0, *self.sizes))

    def owned(self, at: Coordinate) -> slice:
        """The experts of a rank."""
        first, last = self.first_experts[at[self.axis] : at[self.axis] + 2].tolist()
        return slice(first, last)

    def bounds_of_members(self, bounds: torch.Tensor) -> torch.Tensor:
        """Of where the rows of each expert begin, and their end: the same for members. Without other axes."""
        if self.members * self.chunk == self.experts:
            return bounds[:: self.chunk]
        return bounds[torch.from_numpy(self.first_experts).to(bounds.device)]

    @cached_property
    def ends_spec(self) -> DTensorSpec:
        """The layout of the ends of the experts' rows."""
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        placements[self.axis] = Ragged(0, self.sizes)
        return DTensorSpec(self.mesh, placements, TensorMeta((self.experts,), dtype=torch.int32))

    @cached_property
    def counts_specs(self) -> tuple[DTensorSpec, DTensorSpec]:
        """The layouts of the numbers of choices: of all tokens, and of each rank's."""
        meta = TensorMeta((self.experts,), dtype=torch.int64)
        partial: list[Placement] = [Partial() if axis in self.over else Replicate() for axis in range(self.mesh.ndim)]
        return (
            DTensorSpec(self.mesh, [Replicate()] * self.mesh.ndim, meta),
            DTensorSpec(self.mesh, partial, meta),
        )

    def length(self, per_rank: Sequence[int], at: Coordinate) -> int:
        """The rows of one rank."""
        if not self.minors:
            return per_rank[at[self.axis]]
        return int(self.blocks(torch.tensor(per_rank))[1][self.member(at)])

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


_ranks: BoundedCache[tuple[Any, ...], ExpertRanks] = BoundedCache(MAX_MESHES)


def expert_ranks(mesh: DeviceMesh, over: tuple[int, ...], axis: int, experts: int) -> ExpertRanks:
    """Who has which experts, kept for the next call."""
    key = (mesh, over, axis, experts)
    return _ranks.get(key) or _ranks.keep(key, ExpertRanks(*key))


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


@dataclass(frozen=True, eq=False)
class LineSizes(LineRows):
    """What the host knows of one line: the rows of each member for each expert, in arrays."""

    ranks: ExpertRanks
    table: np.ndarray  # rows by sender and expert
    distinct: RowTable | None = None  # tokens by sender and receiver, each once
    _found: dict[int, Counts] = field(default_factory=dict)

    @cached_property
    def total(self) -> np.ndarray:
        """Where the rows of each expert begin among all, and their number."""
        return _begins(self.table.sum(0))

    @cached_property
    def per_rank(self) -> np.ndarray:
        """The rows of the experts of each rank along the axis."""
        return np.diff(self.total[self.ranks.first_experts])

    @cached_property
    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the rows of each member begin, and how many they are."""
        begin, size = self.ranks.blocks(torch.from_numpy(self.per_rank))
        return begin.numpy(), size.numpy()

    @cached_property
    def begin(self) -> np.ndarray:
        """Where the rows of each sender and expert begin among all."""
        return self.total[:-1] + np.cumsum(self.table, 0) - self.table

    def arriving(self, me: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that a member gets, by sender and expert, and where they begin there."""
        if not self.ranks.minors:
            first, last = self.ranks.first_experts[me : me + 2]
            return self.table[:, first:last], self.begin[:, first:last] - self.total[first]
        start, length = (int(each[me]) for each in self.blocks)
        low, high = np.maximum(self.begin, start), np.minimum(self.begin + self.table, start + length)
        return np.maximum(high - low, 0), low - start

    def between(self, me: int) -> Counts:
        """The rows of a member to each, and from each."""
        found = self._found.get(me)
        if found is None:
            received = self.arriving(me)[0].sum(1).tolist()
            found = self._found[me] = (tuple(self._sent(me).tolist()), tuple(received))
        return found

    def _sent(self, me: int) -> np.ndarray:
        own = self.table[me]
        if not self.ranks.minors:
            return np.diff(_begins(own)[self.ranks.first_experts])
        begin, (start, length) = self.begin[me], self.blocks
        low, high = np.maximum(begin, start[:, None]), np.minimum(begin + own, (start + length)[:, None])
        return np.maximum(high - low, 0).sum(1)

    def crossing(self) -> int:
        """The rows that go to another rank."""
        return int(self.table.sum()) - sum(self.between(me)[0][me] for me in range(self.ranks.members))


def _begins(sizes: np.ndarray) -> np.ndarray:
    """Where parts of these sizes begin, and where the last one ends."""
    found = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


# ---------------------------------------------------------------- programs of one rank


def _sorted(flat: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert: their experts, their order, and where the rows of each expert begin, and their end."""
    expert, order = torch.sort(flat, stable=True)
    edges = torch.arange(experts + 1, device=flat.device, dtype=expert.dtype)
    return expert, order, torch.searchsorted(expert, edges)


def _told(own: torch.Tensor, members: int) -> Items:
    """A row of numbers that each member is told."""
    return Items((own.to(torch.int32).expand(members, -1).contiguous(),), (1,) * members, (1,) * members)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _counting(ranks: ExpertRanks, me: int, ids: torch.Tensor) -> Exchanging:
    """What each member has for each expert. Gives the table, and the rows of this rank by receiver.

    A row of the table is where the rows of each expert begin and end, the number of all rows, and the distinct tokens
    for each member: a token that goes to one rank for several experts goes once.
    """
    members, choices = ranks.members, ids.shape[1]
    flat = ids.reshape(-1)
    if ranks.minors:  # who gets a row depends on the counts of all
        wrong = ((flat < 0) | (flat >= ranks.experts)).sum().view(1)
        expert, order, bounds = _sorted(flat.clamp(0, ranks.experts - 1), ranks.experts)
        table = (yield _told(torch.cat([bounds, wrong + len(flat)]), members)).tensors[0]
        member = _receivers(ranks, me, table[:, :-1].long().diff(), expert, bounds.diff())
        member, again = torch.sort(member, stable=True)
        order = order[again]
        if choices == 1:
            return table, order, order, order
        edges = torch.searchsorted(member, torch.arange(members + 1, device=order.device))
        to = member[_inverse(order)].view(-1, choices)
        number, leads, distinct = _distinct(order, to, edges)
        return torch.cat([table, (yield _told(distinct, members)).tensors[0]], 1), order, number, leads
    _, order, bounds = _sorted(flat, ranks.experts)
    own = F.pad(bounds, (0, 1), value=len(flat))
    number = leads = order
    if choices > 1:
        to = ids.div(ranks.chunk, rounding_mode="floor")
        number, leads, distinct = _distinct(order, to, ranks.bounds_of_members(bounds))
        own = torch.cat([own, distinct])
    table = (yield _told(own, members)).tensors[0]
    return table, order, number, leads


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


def _distinct(
    order: torch.Tensor, to: torch.Tensor, edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rows that are sorted by receiver: the number of each row's token among all that are sent, each once.

    And whether a row is the one that its token is sent for; and how many tokens each receiver gets. `to` are the
    receivers of each token and choice, `edges` where the rows of each begin.
    """
    choices = to.shape[1]
    leading = (to[:, :, None] == to[:, None, :]).to(torch.uint8).argmax(2)  # the first choice with the same receiver
    turn = torch.arange(choices, device=order.device)
    leads = (leading == turn).view(-1)[order]
    passed = F.pad(leads.cumsum(0), (1, 0))  # how many lead, before each row
    leader = (leading + torch.arange(0, len(order), choices, device=order.device).unsqueeze(1)).view(-1)
    number = passed[_inverse(order)[leader[order]]]
    return number.to(torch.int32), leads, passed[edges].diff()


def _filling(ranks: ExpertRanks, me: int, capacity: int, ids: torch.Tensor) -> Exchanging:
    """For each expert the first `capacity` rows of this rank; the number of all rows marks an empty slot."""
    flat = ids.reshape(-1)
    wrong = ((flat < 0) | (flat >= ranks.experts)).sum()
    expert, order, bounds = _sorted(flat.clamp(0, ranks.experts - 1), ranks.experts)
    counts = bounds.diff()
    torch.ops.aten._assert_async.msg(wrong == 0, f"expert_ids: experts are 0 to {ranks.experts - 1}")
    size = ranks.experts * capacity
    turn = torch.arange(len(order), device=order.device) - bounds[expert]
    slot = torch.where(turn < capacity, expert * capacity + turn, size)
    rows = torch.full((size + 1,), len(order), device=order.device).scatter_(0, slot, order)[:size]
    if ranks.minors:
        same = torch.full((ranks.members, ranks.experts), capacity, device=order.device)
        filled = torch.arange(size, device=order.device).div(capacity, rounding_mode="floor")
        rows = rows[torch.argsort(_receivers(ranks, me, same, filled, same[0]), stable=True)]
    yield from ()
    return rows, counts


def _arriving(
    sizes: LineSizes,
    me: int,
    count: int,
    choices: int,
    order: torch.Tensor,
    number: torch.Tensor,
    leads: torch.Tensor,
    dropped: bool = False,
) -> Exchanging:
    """The rows that arrive, in the order of their experts. Gives `send` and `gather` of both maps, and the inverses.

    `count` is the number of rows afterwards, of which the last may be empty. `dropped`: so may any of `order`.
    """
    device = order.device
    sent_at = order if dropped else _inverse(order)
    pieces, begins = sizes.arriving(me)
    shift = begins - _begins(pieces.reshape(-1))[:-1].reshape(pieces.shape)
    arriving = int(pieces.sum())
    rows = torch.arange(arriving, device=device)
    placed = rows + _repeated(shift, pieces, arriving, device)
    gather = rows - _repeated(shift.T, pieces.T, arriving, device)
    if count > arriving:
        gather = F.pad(gather, (0, count - arriving), value=arriving)
    if sizes.distinct is None:
        send = order if choices == 1 else order.div(choices, rounding_mode="floor")
        return send, order, gather, gather, placed, sent_at
    sent, of_sender = sizes.between(me)
    (arrived,) = (yield Items((number,), sent, of_sender)).tensors
    base = _repeated(sizes.distinct.shift(me), np.array(of_sender), arriving, device)
    tokens = arrived + base
    if count > arriving:
        tokens = F.pad(tokens, (0, 1), value=sum(sizes.distinct.between(me)[1]))
    leaders = sum(sizes.distinct.between(me)[0])
    if leads.is_meta:
        send = order.new_empty(leaders)
    else:
        send = order[torch.nonzero_static(leads, size=leaders).view(-1)].div(choices, rounding_mode="floor")
    return send, order, tokens[gather], gather, placed, sent_at


def _repeated(values: np.ndarray, counts: np.ndarray, total: int, device: torch.device) -> torch.Tensor:
    """Each value so many times."""
    given = (torch.from_numpy(np.ascontiguousarray(each).reshape(-1)).to(device) for each in (values, counts))
    return torch.repeat_interleave(*given, output_size=total)


# ---------------------------------------------------------------- the plan


def plan_of(ranks: ExpertRanks, ids: Any) -> RoutingPlan:
    """The plan for the experts `ids` of tokens, whose rows lie over the axes `over`. The host reads one table."""
    spec, mesh, choices = ids._spec, ranks.mesh, ids.shape[1]
    fabric = fabric_of(mesh)
    width = ranks.experts + 2 + (ranks.members if choices > 1 else 0)
    told = ranks.ends_spec
    step = announce(told, told, ranks.over, "counts", lambda: ranks.members * (ranks.members - 1), lambda: width * 4)

    def count(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _counting(ranks, ranks.member(at), *own)

    tables, order, number, leads = fabric.exchange_by_owner(step, count, [ids._local_tensor])
    line = lines_here(mesh, ranks.over, tables)
    if not fabric.has_values:
        lines = {0: _expected(ranks, ids.shape[0], choices)}
    else:
        lines = _read(ranks, fabric.parts(mesh, tables), fabric.parts(mesh, line), choices)
    each = [sizes.per_rank.tolist() for sizes in lines.values()]
    per_rank = each[0] if len(each) == 1 else np.max(each, 0).tolist()  # of virtual ranks the largest of all slices
    target = ranks.layout(per_rank)
    if choices > 1:
        numbers = target.of(spec)
        step = announce(spec, numbers, ranks.over, "numbers of tokens", lambda: _crossing(lines), lambda: 4)

    def arrive(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        order, number, leads, line = own
        length = ranks.length(per_rank, at)
        return _arriving(lines[number_of(line)], ranks.member(at), length, choices, order, number, leads)

    found = fabric.exchange_by_owner(step, arrive, [order, number, leads, line])
    padded = any(own != per_rank for own in each)
    ends, counts = _numbers(ranks, line, lines, per_rank)
    return RoutingPlan(*_maps(ranks, ids.shape, line, lines, target, found, padded), ends, counts, False)


def plan_with_capacity(ranks: ExpertRanks, ids: Any, capacity: int) -> RoutingPlan:
    """The plan with `capacity` rows for each expert and rank. The host reads nothing."""
    mesh, choices = ranks.mesh, ids.shape[1]
    fabric = fabric_of(mesh)
    sizes = LineSizes(ranks, np.full((ranks.members, ranks.experts), capacity))
    line = fabric.build(mesh, lambda _: FIRST)  # all lines have the same sizes
    lines = {0: sizes}
    per_rank = sizes.per_rank.tolist()
    target = ranks.layout(per_rank)
    step = TokenExchange(ids._spec, ids._spec, 0, ranks.over)  # nothing is sent

    def fill(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _filling(ranks, ranks.member(at), capacity, *own)

    def arrive(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        (rows,) = own
        length = ranks.length(per_rank, at)
        return _arriving(sizes, ranks.member(at), length, choices, rows, rows, rows, dropped=True)

    rows, chosen = fabric.exchange_by_owner(step, fill, [ids._local_tensor])
    found = fabric.exchange_by_owner(step, arrive, [rows])
    ends, _ = _numbers(ranks, line, lines, per_rank)
    return RoutingPlan(*_maps(ranks, ids.shape, line, lines, target, found, True), ends, chosen, True)


def _maps(
    ranks: ExpertRanks,
    shape: Sequence[int],
    line: torch.Tensor,
    lines: Mapping[int, LineSizes],
    target: RowLayout,
    found: Sequence[torch.Tensor],
    padded: bool,
) -> tuple[TokenMap, TokenMap]:
    """The maps of tokens and of their choices."""
    tokens, choices = shape
    splits = tuple([Shard(0) for _ in ranks.over])
    distinct: dict[int, LineRows] = {number: sizes.distinct or sizes for number, sizes in lines.items()}
    send, order, gather, of_row, *inverse = found
    once = () if padded else tuple(inverse)
    source, choice = (RowLayout(tokens, ranks.over, splits, rest) for rest in (None, (choices,)))
    numbers = RowLayout(target.rows, target.axes, target.placements, ())
    return (
        TokenMap(source, target, send, gather, distinct, ranks.over, line, once if choices == 1 else (), padded),
        TokenMap(choice, numbers, order, of_row, lines, ranks.over, line, once, padded, "weights"),
    )


def _crossing(lines: Mapping[int, LineSizes]) -> float:
    """The rows that go to another rank, of one line on average."""
    return sum(sizes.crossing() for sizes in lines.values()) / len(lines)


def _numbers(
    ranks: ExpertRanks, line: torch.Tensor, lines: Mapping[int, LineSizes], per_rank: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each rank here the ends of its experts' rows, and how many rows there are of each expert."""
    fabric, starts = fabric_of(ranks.mesh), _begins(np.array(per_rank))
    device = device_of(ranks.mesh) if fabric.has_values else "meta"

    def ends(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
        rank, owned, total = at[ranks.axis], ranks.owned(at), lines[number_of(line)].total
        own = total[owned.start + 1 : owned.stop + 1] + (starts[rank] - total[owned.start])
        own[-1:] = starts[rank + 1]  # empty rows at the end belong to the last expert
        return torch.from_numpy(own.astype(np.int32)).to(device)

    def counts(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.diff(lines[number_of(line)].total)).to(device)

    return fabric.map(ranks.mesh, ends, line), fabric.map(ranks.mesh, counts, line)


def _expected(ranks: ExpertRanks, tokens: int, choices: int) -> LineSizes:
    """The sizes of a dry run: as if every expert were chosen equally often."""
    members, experts = ranks.members, ranks.experts
    rows = -(-tokens // members) * choices
    table = np.full(experts, rows // experts)
    table[: rows % experts] += 1
    chosen = 1.0
    if choices <= experts:  # of a token, by at least one of its choices
        chosen -= math.comb(experts - ranks.sizes[0], choices) / math.comb(experts, choices)
    distinct = np.full((members, members), math.ceil(-(-tokens // members) * chosen))
    return LineSizes(ranks, np.tile(table, (members, 1)), RowTable(distinct) if choices > 1 else None)


def _read(
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
        here = table.cpu().numpy().astype(np.int64)
        bounds, rows = here[:, : experts + 1], here[:, experts + 1]
        wrong = int((rows - bounds[:, -1] + bounds[:, 0]).sum())
        if wrong:
            raise IndexError(f"{wrong} entries of expert_ids are no experts: these are 0 to {experts - 1}")
        distinct = RowTable(here[:, experts + 2 :]) if choices > 1 else None
        found[number_of(line)] = LineSizes(ranks, np.diff(bounds), distinct)
    return found
