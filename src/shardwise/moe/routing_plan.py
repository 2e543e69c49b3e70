"""Which rows go to which rank: the plan of one dispatch, made of the experts that tokens were given.

Ranks tell each other how many rows they have for each expert. All sizes follow from that table, which the host reads
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Partial, Placement, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.base import device_of, fabric_of
from shardwise.moe.token_maps import (
    Counts,
    LineRows,
    RowLayout,
    RowTable,
    TokenMap,
    announce,
    lines_here,
    member_of,
    number_of,
    sorted_rows,
)
from shardwise.rules.owner_programs import Exchanging, Items
from shardwise.tensor import dtensor_of

__all__ = ["ExpertRanks", "RoutingPlan", "expert_ranks", "expert_sizes", "plan_of"]

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

    def by_token(self, tokens: int, rest: tuple[int, ...] | None = None) -> RowLayout:
        """How tokens lie before they are sent, or numbers for each of them."""
        return RowLayout(tokens, self.over, tuple([Shard(0) for _ in self.over]), rest)

    def source(self, spec: DTensorSpec, rest: tuple[int, ...] | None = None) -> DTensorSpec:
        """The layout that tokens of this one are exchanged from, or numbers for each token."""
        found = self._sources.get((spec, rest))
        if found is None:
            found = self._sources.keep_recent((spec, rest), self.by_token(spec.shape[0], rest).of(spec))
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
            return bounds[: self.experts + 1 : self.chunk]
        return bounds[torch.from_numpy(self.first_experts).to(bounds.device)]

    def sorted(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The order of rows by expert, and where the rows of each expert begin, their end, and the number of all.

        An id below 0 comes before the first expert, one that is too large after the last.
        """
        expert, order = torch.sort(flat, stable=True)
        return order, torch.searchsorted(expert, self._edges(flat), right=True, out_int32=True)

    def _edges(self, flat: torch.Tensor) -> torch.Tensor:
        """The largest id before each expert, the last expert, and the largest number."""
        key = (flat.dtype, flat.device)
        found = self._kept_edges.get(key)
        if found is None or flat.__class__ is not torch.Tensor:
            numbers = [*range(-1, self.experts), torch.iinfo(flat.dtype).max]
            found = torch.tensor(numbers, dtype=flat.dtype, device=flat.device)
            if flat.__class__ is torch.Tensor:
                self._kept_edges[key] = found
        return found

    @cached_property
    def _kept_edges(self) -> dict[Any, torch.Tensor]:
        return {}

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


@dataclass(eq=False)
class RoutingPlan:
    """The maps of one dispatch.

    Args:
        ranks: who has which experts.
        shape: the number of tokens, and of the experts of each.
        lines: the sizes of each line of ranks.
        per_rank: the rows of the experts of each rank along the axis, the largest of all lines.
        line: for each rank here the number of its line.
        arrays: for each rank here `send` and `gather` of the map of tokens, those of choices, and the inverses of the
            latter: see `TokenMap`.
    """

    ranks: ExpertRanks
    shape: tuple[int, int]
    lines: Mapping[int, LineSizes]
    per_rank: list[int]
    line: torch.Tensor
    arrays: PlanArrays

    @cached_property
    def tokens(self) -> TokenMap:
        """From rows of the input to rows sorted by expert."""
        distinct: dict[int, LineRows] = {number: sizes.distinct or sizes for number, sizes in self.lines.items()}
        ranks, arrays = self.ranks, self.arrays
        inverse = (arrays.placed, arrays.sent_at) if self.choices == 1 and not self.padded else ()
        source, target = ranks.by_token(self.shape[0]), ranks.layout(self.per_rank)
        maps = (arrays.send, arrays.gather)
        return TokenMap(ranks.mesh, source, target, *maps, distinct, ranks.over, self.line, inverse, self.padded)

    @cached_property
    def slots(self) -> TokenMap:
        """From the numbers of each token and choice to a number for each of these rows."""
        ranks, arrays, target = self.ranks, self.arrays, self.tokens.target
        inverse = () if self.padded else (arrays.placed, arrays.sent_at)
        source = ranks.by_token(self.shape[0], (self.choices,))
        numbers = RowLayout(target.rows, target.axes, target.placements, ())
        maps = (arrays.order, arrays.of_row)
        rows = (self.lines, ranks.over, self.line)
        return TokenMap(ranks.mesh, source, numbers, *maps, *rows, inverse, self.padded, "weights")

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

    @cached_property
    def offs(self) -> Any:
        """The end of each expert's rows, on each rank those of its experts."""
        ranks, starts = self.ranks, _begins(np.array(self.per_rank))

        def ends(at: Coordinate, line: torch.Tensor) -> torch.Tensor:
            rank, owned, total = at[ranks.axis], ranks.owned(at), self.lines[number_of(line)].total
            own = total[owned.start + 1 : owned.stop + 1] + (starts[rank] - total[owned.start])
            own[-1:] = starts[rank + 1]  # empty rows at the end belong to the last expert
            return self._on_device(own.astype(np.int32))

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


# ---------------------------------------------------------------- sizes that the host knows


@dataclass(eq=False)
class LineSizes(LineRows):
    """What the host knows of one line: how many rows each member has for each expert, in arrays."""

    ranks: ExpertRanks
    bounds: np.ndarray  # where the rows of each sender and expert begin, and their end
    distinct: RowTable | None = None  # tokens by sender and receiver, each once
    _found: dict[int, Counts] = field(default_factory=dict)

    @cached_property
    def total(self) -> np.ndarray:
        """Where the rows of each expert begin among all, and their number."""
        return self.bounds.sum(0)

    @cached_property
    def per_rank(self) -> np.ndarray:
        """The rows of the experts of each rank along the axis."""
        return _steps(self.total[self.ranks.first_experts])

    @cached_property
    def table(self) -> np.ndarray:
        """The rows of each sender for each expert."""
        return _steps(self.bounds)

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
            first, last = self.ranks.first_experts[me : me + 2].tolist()
            pieces = _steps(self.bounds[:, first : last + 1])
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
            return tuple(_steps(self.bounds[me, firsts]).tolist()), tuple(received.tolist())
        begin, (start, length) = self.begin[me], self.blocks
        low, high = np.maximum(begin, start[:, None]), np.minimum(begin + self.table[me], (start + length)[:, None])
        sent = np.maximum(high - low, 0).sum(1)
        return tuple(sent.tolist()), tuple(self.arriving(me)[0].sum(1).tolist())

    def crossing(self) -> int:
        """The rows that go to another rank."""
        return int(self.total[-1]) - sum(self.between(me)[0][me] for me in range(self.ranks.members))


def _steps(bounds: np.ndarray) -> np.ndarray:
    """The sizes of the parts between bounds; `np.diff` without what it checks."""
    return bounds[..., 1:] - bounds[..., :-1]


def _begins(sizes: np.ndarray) -> np.ndarray:
    """Where parts of these sizes begin, and where the last one ends."""
    found = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


# ---------------------------------------------------------------- programs of one rank


def _told(own: torch.Tensor, members: int) -> Items:
    """A row of numbers that each member is told."""
    own = own if own.dtype is torch.int32 else own.to(torch.int32)
    return Items((own.expand(members, -1),), (1,) * members, (1,) * members)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _counting(ranks: ExpertRanks, me: int, ids: torch.Tensor) -> Exchanging:
    """What each member has for each expert. Gives the table, and the rows of this rank by receiver: see `_arriving`.

    A row of the table is where the rows of each expert begin and end, the number of all rows, and the distinct tokens
    for each member: a token that goes to one rank for several experts goes once.
    """
    members, choices = ranks.members, ids.shape[1]
    flat = ids.reshape(-1)
    if ranks.minors:
        return (yield from _counting_first(ranks, me, flat, choices))
    order, bounds = ranks.sorted(flat)
    sent_at = _inverse(order)
    if choices == 1:
        table = (yield _told(bounds, members)).tensors[0]
        return table, order, sent_at, order, order
    to = ids.div(ranks.chunk, rounding_mode="floor")
    number, leads, distinct = _distinct(order, sent_at, to, ranks.bounds_of_members(bounds))
    table = (yield _told(torch.cat([bounds, distinct]), members)).tensors[0]
    return table, order, sent_at, number, leads


def _counting_first(ranks: ExpertRanks, me: int, flat: torch.Tensor, choices: int) -> Exchanging:
    """The same where several axes split the tokens: who gets a row depends on the counts of all."""
    members = ranks.members
    wrong = ((flat < 0) | (flat >= ranks.experts)).sum().view(1)
    expert, order, bounds = sorted_rows(flat.clamp(0, ranks.experts - 1), ranks.experts)
    table = (yield _told(torch.cat([bounds, wrong + len(flat)]), members)).tensors[0]
    member = _receivers(ranks, me, table[:, :-1].long().diff(), expert, bounds.diff())
    member, again = torch.sort(member, stable=True)
    order = order[again]
    sent_at = _inverse(order)
    if choices == 1:
        return table, order, sent_at, order, order
    edges = torch.searchsorted(member, torch.arange(members + 1, device=order.device))
    number, leads, distinct = _distinct(order, sent_at, member[sent_at].view(-1, choices), edges)
    return torch.cat([table, (yield _told(distinct, members)).tensors[0]], 1), order, sent_at, number, leads


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
    order: torch.Tensor, sent_at: torch.Tensor, to: torch.Tensor, edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rows that are sorted by receiver: the number of each row's token among all that are sent, each once.

    And whether a row is the one that its token is sent for; and how many tokens each receiver gets. `to` are the
    receivers of each token and choice, `edges` where the rows of each begin.
    """
    choices = to.shape[1]
    leading = (to[:, :, None] == to[:, None, :]).to(torch.uint8).argmax(2)  # the first choice with the same receiver
    leads = (leading == torch.arange(choices, device=order.device)).view(-1).index_select(0, order)
    passed = F.pad(leads.cumsum(0, dtype=torch.int32), (1, 0))  # how many lead, before each row
    of_choice = passed.index_select(0, sent_at).view(-1, choices).gather(1, leading)
    return of_choice.view(-1).index_select(0, order), leads, passed[edges].diff()


class PlanArrays(NamedTuple):
    """For each rank here, or for one: `send` and `gather` of the map of tokens, those of choices, their inverses."""

    send: torch.Tensor
    gather: torch.Tensor
    order: torch.Tensor
    of_row: torch.Tensor
    placed: torch.Tensor
    sent_at: torch.Tensor


def _arriving(sizes: LineSizes, me: int, count: int, choices: int, own: Sequence[torch.Tensor]) -> Exchanging:
    """The rows that arrive, in the order of their experts. Gives the arrays of the plan.

    Args:
        sizes: of the line of this rank.
        me: its number there.
        count: the number of rows afterwards, of which the last may be empty.
        choices: the number of experts of each token.
        own: the order of the rows that this rank sends, by receiver; its inverse; of each row the number of its token
            among all that are sent, and whether it is the one that the token is sent for.
    """
    order, sent_at, number, leads = own
    device = order.device
    pieces, begins = sizes.arriving(me)
    arriving = int(pieces.sum())
    flat = pieces.reshape(-1)
    placed = _repeated(begins.reshape(-1) - flat.cumsum() + flat, flat, arriving, device)
    rows = torch.arange(arriving, device=device)
    placed += rows
    gather = torch.empty_like(rows).scatter_(0, placed, rows)
    if count > arriving:
        gather = F.pad(gather, (0, count - arriving), value=arriving)
    if sizes.distinct is None:
        send = order if choices == 1 else order.div(choices, rounding_mode="floor")
        return PlanArrays(send, gather, order, gather, placed, sent_at)
    sent, of_sender = sizes.between(me)
    (tokens,) = (yield Items((number,), sent, of_sender)).tensors
    tokens = tokens + _repeated(sizes.distinct.shift(me), np.array(of_sender), arriving, device)
    if count > arriving:
        tokens = F.pad(tokens, (0, 1), value=sum(sizes.distinct.between(me)[1]))
    leaders = sum(sizes.distinct.between(me)[0])
    if leads.is_meta:
        send = order.new_empty(leaders)
    else:
        first = torch.nonzero_static(leads, size=leaders).view(-1)
        send = order.index_select(0, first).div_(choices, rounding_mode="floor")
    return PlanArrays(send, tokens.index_select(0, gather), order, gather, placed, sent_at)


def _repeated(values: np.ndarray, times: np.ndarray, total: int, device: torch.device) -> torch.Tensor:
    """Each value so many times. All numbers go to the device as one."""
    numbers = torch.from_numpy(np.stack((values, times)))
    numbers = numbers if device.type == "cpu" else numbers.to(device, non_blocking=True)
    return torch.repeat_interleave(numbers[0], numbers[1], output_size=total)


# ---------------------------------------------------------------- the plan


def plan_of(ranks: ExpertRanks, ids: Any) -> RoutingPlan:
    """The plan for the experts `ids` of tokens, whose rows lie over the axes `over`. The host reads one table."""
    spec, mesh, (tokens, choices) = ids._spec, ranks.mesh, ids.shape
    fabric = fabric_of(mesh)
    width = ranks.experts + 2 + (ranks.members if choices > 1 else 0)
    told = ranks.ends_spec
    step = announce(
        told, lambda: told, ranks.over, "counts", lambda: ranks.members * (ranks.members - 1), lambda: width * 4
    )

    def count(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        return _counting(ranks, ranks.member(at), *own)

    tables, *counted = fabric.exchange_by_owner(step, count, [ids._local_tensor])
    line = lines_here(mesh, ranks.over, tables)
    if not fabric.has_values:
        lines = {0: _expected(ranks, tokens, choices)}
    else:
        lines = _read(ranks, fabric.parts(mesh, tables), fabric.parts(mesh, line), choices)
    each = [sizes.per_rank.tolist() for sizes in lines.values()]
    per_rank = each[0] if len(each) == 1 else np.max(each, 0).tolist()  # of virtual ranks the largest of all slices
    if choices > 1:
        after = ranks.layout(per_rank).of
        step = announce(spec, lambda: after(spec), ranks.over, "numbers of tokens", lambda: _crossing(lines), lambda: 4)

    def arrive(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
        *mine, line = own
        return _arriving(lines[number_of(line)], ranks.member(at), ranks.length(per_rank, at), choices, mine)

    arrays = PlanArrays(*fabric.exchange_by_owner(step, arrive, [*counted, line]))
    return RoutingPlan(ranks, (tokens, choices), lines, per_rank, line, arrays)


def _crossing(lines: Mapping[int, LineSizes]) -> float:
    """The rows that go to another rank, of one line on average."""
    return sum(sizes.crossing() for sizes in lines.values()) / len(lines)


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
    return LineSizes(ranks, np.tile(_begins(table), (members, 1)), RowTable(distinct) if choices > 1 else None)


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
        here = table.cpu().numpy()
        bounds, rows = here[:, : experts + 1], here[:, experts + 1]
        wrong = int((rows - bounds[:, -1] + bounds[:, 0]).sum())
        if wrong:
            raise IndexError(f"{wrong} entries of expert_ids are no experts: these are 0 to {experts - 1}")
        distinct = RowTable(here[:, experts + 2 :]) if choices > 1 else None
        found[number_of(line)] = LineSizes(ranks, bounds, distinct)
    return found
