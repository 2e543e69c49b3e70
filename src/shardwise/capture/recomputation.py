"""Values that are computed again before a later use, so that the memory of a program stays within a bound.

At the peak of memory some values wait: they were used before, and are used again after it. One that operators can give
again from what is there then is dropped after its last use before the peak. The operators are repeated before the next
use: they are given the same contents, so values have the same bits. Elementwise operators, views, norms and copies
come first, then matrix products. Collectives, random operators, and memory that is written to stay.

The choice is greedy, by bytes saved per byte moved, and does not depend on the bound: it goes on until that is met.
Each rank decides alone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.capture.call_sites import NOWHERE
from shardwise.capture.collective_calls import bound_arguments, is_collective
from shardwise.capture.copy_propagation import writes_roots
from shardwise.capture.memory_plan import MemoryPlan, Touched, memory_plan, plan_of
from shardwise.capture.overlap import filled_by
from shardwise.capture.program import Program
from shardwise.capture.tape import Call, Const, Ref, Unit, made_by, refs_of
from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_generators import draws
from shardwise.text import human_bytes
from shardwise.torch_private import tree_leaves, tree_map

__all__ = ["recomputed"]

Placed = tuple[int, Call | Unit]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_FLOPS_PER_BYTE = 16  # of a product, that take as long as a byte moved; it only ranks products among each other
_CHEAP = frozenset({
    "_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "amax", "cat", "clone", "embedding", "index_select",
    "mean", "native_group_norm", "native_layer_norm", "stack", "sum", "var_mean", "_unsafe_view",
})  # fmt: skip
_MOST_CALLS = 32  # that are repeated for one value
_MOST_TRIES = 16  # of choices that turn out not to lower the peak


def _tier(call: Call | Unit) -> int | None:
    """0 for what is cheap to repeat, 1 for products, None for what must not be repeated."""
    if not isinstance(call, Call) or call.op.namespace != "aten" or call.expected is not None or call.writes:
        return None
    if draws(call.op) or any(isinstance(leaf, Const) for leaf in tree_leaves((call.args, call.kwargs))):
        return None
    name = call.op._opname
    if name in _PRODUCTS:
        return 1
    return 0 if call.op.is_view or torch.Tag.pointwise in call.op.tags or name in _CHEAP else None


class _Choice(NamedTuple):
    """A memory that is dropped and made again."""

    memory: int
    before: int  # the index of the call before which it is made again
    repeated: tuple[int, ...]  # indices of the calls that are repeated, in order
    rank: tuple[float, ...]  # the smallest is the best


class _Search:
    """The calls of a program while values are chosen."""

    def __init__(self, program: Program) -> None:
        self.calls: list[Placed] = list(program.calls)
        self.again: list[bool] = [False] * len(self.calls)  # which of them repeat another
        facts = program.facts
        self.memory_of, self.geometry = dict(facts.memory_of), dict(facts.geometry)
        self.bytes_of, self.device_of = dict(facts.bytes_of), dict(facts.device_of)
        self.roots = {self.memory_of[number] for number in program.inputs()}
        self.wanted = program.wanted
        self.leaving = {self.memory_of[number] for number in program.wanted}
        self._next = max(self.memory_of, default=0) + 1
        self._known: dict[int, tuple[Call | Unit, Touched, int | None]] = {}
        self.plan = self._plan(self.calls)
        self._collect()

    def _about(self, call: Call | Unit) -> tuple[Call | Unit, Touched, int | None]:
        """What a call uses, and its tier; worked out once, since it is asked for often."""
        found = self._known.get(id(call))
        if found is None:
            found = self._known[id(call)] = (call, Touched.by(call), _tier(call))
        return found

    def _collect(self) -> None:
        self.maker: dict[int, int] = {}  # of memories: the index of the call that allocates them
        self.defined: dict[int, int] = {}  # of values
        self.touched: dict[int, list[int]] = {}  # of memories: indices of calls
        self.written: dict[int, list[int]] = {}
        self.root_writes: list[int] = []
        memory_of = self.memory_of
        for index, (_, call) in enumerate(self.calls):
            _, (given, made), _ = self._about(call)
            for number in made:
                self.defined[number] = index
                self.maker.setdefault(memory_of[number], index)
            for memory in {memory_of[number] for number in (*given, *made)}:
                self.touched.setdefault(memory, []).append(index)
            if isinstance(call, Unit):
                written = [ref.number for ref in call.reads]
                if writes_roots(call):
                    self.root_writes.append(index)
            else:
                written = filled_by(call) if is_collective(call) else call.writes
            for memory in {memory_of[number] for number in written}:
                self.written.setdefault(memory, []).append(index)
                if memory in self.roots and (not self.root_writes or self.root_writes[-1] != index):
                    self.root_writes.append(index)

    def _plan(self, calls: Sequence[Placed]) -> MemoryPlan:
        touched = [(position, self._about(call)[1]) for position, call in calls]
        return plan_of(touched, self.memory_of, self.bytes_of, self.roots, self.wanted, {})

    # ---------------------------------------------------------------- what can be dropped

    def choices(self) -> list[_Choice]:
        """What would lower the memory at the peak, the best first."""
        at = self.plan.curve.index(self.plan.peak)
        found: list[_Choice] = []
        for memory, uses in self.touched.items():
            next_use = bisect.bisect_right(uses, at)
            if memory not in self.maker or not 0 < next_use < len(uses) or uses[next_use - 1] == at:
                continue
            if memory in self.roots or memory in self.leaving or memory in self.written:
                continue
            choice = self._choice(memory, uses[next_use], at)
            if choice is not None:
                found.append(choice)
        return sorted(found, key=lambda choice: choice.rank)

    def _choice(self, memory: int, before: int, peak: int) -> _Choice | None:
        repeated: set[int] = set()
        kept: set[int] = set()  # memories that are kept longer for it
        todo = [self.maker[memory]]
        while todo:
            index = todo.pop()
            if index in repeated:
                continue
            repeated.add(index)
            _, touched, tier = self._about(self.calls[index][1])
            if tier is None or len(repeated) > _MOST_CALLS:
                return None
            for number in touched.given:
                source = self.memory_of[number]
                if not self._is_unchanged(source, index, before):
                    return None
                if source in self.roots or source in self.leaving or self.touched[source][-1] >= before:
                    continue
                making = self._making(number)
                if making is None:
                    kept.add(source)
                else:
                    todo += making
        freed = self.bytes_of[memory] - sum(self.bytes_of[m] for m in kept if self.touched[m][-1] < peak)
        if freed <= 0:
            return None
        costs = [self._cost(self.calls[index][1]) for index in repeated]
        tier = max(tier for tier, _ in costs)
        return _Choice(memory, before, tuple(sorted(repeated)), (tier, sum(cost for _, cost in costs) / freed, memory))

    def _is_unchanged(self, memory: int, since: int, until: int) -> bool:
        writes = self.root_writes if memory in self.roots else self.written.get(memory, [])
        return bisect.bisect_right(writes, since) == bisect.bisect_left(writes, until)

    def _making(self, number: int) -> list[int] | None:
        """The calls that make a value: that of its memory, and views. None where these must not be repeated."""
        memory = self.memory_of[number]
        if memory in self.written or memory not in self.maker:
            return None
        found: list[int] = []
        while True:
            index = self.defined[number]
            _, touched, tier = self._about(self.calls[index][1])
            if tier is None:
                return None
            found.append(index)
            if index == self.maker[memory]:
                return found
            number = next(one for one in touched.given if self.memory_of[one] == memory)

    def _cost(self, call: Call | Unit) -> tuple[int, float]:
        """The tier of a call, and bytes that it moves or that take as long."""
        assert isinstance(call, Call)
        if call.op.is_view:
            return 0, 0.0
        refs = (*refs_of(call), *made_by(call))
        moved = sum(math.prod(g.shape) * g.dtype.itemsize for g in (self.geometry[ref.number] for ref in refs))
        if call.op._opname not in _PRODUCTS:
            return 0, float(moved)
        bound = bound_arguments(call)
        left = bound.get("self" if call.op._opname in ("mm", "bmm") else "mat1") or bound.get("batch1")
        inner = self.geometry[left.number].shape[-1] if left is not None else 1
        made = sum(math.prod(self.geometry[ref.number].shape) for ref in made_by(call))
        return 1, moved + 2 * inner * made / _FLOPS_PER_BYTE

    # ---------------------------------------------------------------- dropping it

    def take(self, choice: _Choice) -> bool:
        """Drop a memory, if that lowers the peak or the number of calls at it."""
        names: dict[int, Ref] = {}
        repeated = list(dict.fromkeys([*choice.repeated, *self._views(choice)]))
        repeated.sort()
        inserted: list[Placed] = []
        for index in repeated:
            position, call = self.calls[index]
            assert isinstance(call, Call)
            for ref in made_by(call):
                names[ref.number] = self._copy_of(ref.number, names)
            inserted.append((position, _renamed(call, names)))
        new = names[self._first(choice.memory)].number
        own = {number: ref for number, ref in names.items() if self.memory_of[number] == choice.memory}
        later: list[Placed] = []
        moved: dict[int, int] = {}
        for position, call in self.calls[choice.before :]:
            _, touched, _ = self._about(call)
            moved |= {number: new for number in touched.made if self.memory_of[number] == choice.memory}
            later.append((position, call if own.keys().isdisjoint(touched.given) else _renamed(call, own)))
        calls = [*self.calls[: choice.before], *inserted, *later]
        former, self.memory_of = self.memory_of, self.memory_of | moved
        plan = self._plan(calls)
        if (plan.peak, plan.curve.count(plan.peak)) >= (self.plan.peak, self.plan.curve.count(self.plan.peak)):
            self.memory_of = former
            return False
        self.again[choice.before : choice.before] = [True] * len(inserted)
        self.calls, self.plan = calls, plan
        self._collect()
        return True

    def _first(self, memory: int) -> int:
        """The value that the maker of a memory gives in it."""
        made = made_by(self.calls[self.maker[memory]][1])
        return next(ref.number for ref in made if self.memory_of[ref.number] == memory)

    def _views(self, choice: _Choice) -> list[int]:
        """The calls that make the views of a memory which are used after it is made again."""
        found: list[int] = []
        for _, call in self.calls[choice.before :]:
            for number in self._about(call)[1].given:
                if self.memory_of[number] == choice.memory and self.defined[number] < choice.before:
                    making = self._making(number)
                    assert making is not None
                    found += making
        return found

    def _copy_of(self, number: int, names: dict[int, Ref]) -> Ref:
        """A new value like another one, in the memory of the copy of that one's memory."""
        made, self._next = Ref(self._next), self._next + 1
        memory, first = self.memory_of[number], self._first(self.memory_of[number])
        self.geometry[made.number] = self.geometry[number]
        known = made.number if number == first else self.memory_of[names[first].number]
        self.memory_of[made.number] = known
        if number == first:
            self.bytes_of[made.number] = self.bytes_of[memory]
            if memory in self.device_of:
                self.device_of[made.number] = self.device_of[memory]
        return made


def _renamed(call: Call | Unit, names: dict[int, Ref]) -> Call | Unit:
    if isinstance(call, Unit):
        return call._replace(reads=tuple(names.get(ref.number, ref) for ref in call.reads))

    def new(leaf: object) -> object:
        return names.get(leaf.number, leaf) if isinstance(leaf, Ref) else leaf

    args, kwargs, made = tree_map(new, (call.args, call.kwargs, call.made))
    writes = tuple(names[number].number if number in names else number for number in call.writes)
    return call._replace(args=args, kwargs=kwargs, made=made, writes=writes)


def recomputed(program: Program, max_bytes: int) -> Program:
    """The program with values recomputed so that those of its own take at most `max_bytes` on a rank.

    Raises:
        UnsupportedError: where that cannot be reached, with what can.
    """
    bound = max_bytes * program.ranks
    if memory_plan(program).peak <= bound:
        return program
    search, made = _Search(program), program
    while True:
        if search.plan.peak <= bound:
            made = _program(program, search)
            peak = memory_plan(made).peak  # collectives that are waited for late use their memory longer
            if peak <= bound:
                return made
        if not any(search.take(choice) for choice in search.choices()[:_MOST_TRIES]):
            break
    peak = memory_plan(_program(program, search)).peak
    raise UnsupportedError(
        f"captured: the values of the program take {human_bytes(peak / program.ranks)} on a rank at the least, with "
        f"recomputation of all that is cheap to compute, and max_bytes is {human_bytes(max_bytes)} "
        f"({math.ceil(peak / program.ranks)} and {max_bytes} bytes)",
        hint="allow more, use smaller microbatches, or torch.utils.checkpoint in the function",
    )


def _program(program: Program, search: _Search) -> Program:
    facts = program.facts._replace(
        memory_of=search.memory_of, geometry=search.geometry, bytes_of=search.bytes_of, device_of=search.device_of
    )
    made = program.with_calls(search.calls, facts)
    sites = made.facts.sites
    for at, is_again in enumerate(search.again):
        if is_again:
            sites[at] = sites.get(at, NOWHERE)._replace(phase="recompute")
    made.announce(made.facts.moves)  # its text shows the sites
    made.recorded = made
    return made
