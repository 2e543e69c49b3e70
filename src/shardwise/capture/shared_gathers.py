"""Gathers of what has been gathered before: the earlier result is used again, within a bound of memory.

Two all-gathers over one group give the same if their inputs have the same contents. Contents are known by how they came
about: a tensor of the caller that is not written to in between, or the same operator on the same contents. The later
gather, and the copies out of its flat buffer, become copies of the earlier results, which `copy_propagation` dissolves.

Ranks compare what is left before such a program is used (`schedule_check`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.capture.collective_calls import bound_arguments, group_ranks, is_collective
from shardwise.capture.copy_propagation import writes_roots
from shardwise.capture.program import Program
from shardwise.capture.tape import Call, Geometry, Ref, Unit, made_by, refs_of
from shardwise.fabric.rank_generators import draws
from shardwise.torch_private import tree_flatten

__all__ = ["with_shared_gathers"]

_aten = torch.ops.aten
_DATA = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Contents:
    """What the memories of a program hold, call by call; equal numbers are equal contents."""

    def __init__(self, program: Program) -> None:
        facts = program.facts
        self.memory_of, self.geometry, self.bytes_of = facts.memory_of, facts.geometry, facts.bytes_of
        self.roots = {self.memory_of[number] for number in program.inputs()}
        self._known: dict[Hashable, int] = {}
        self._now: dict[int, int] = {}  # of memories
        self._writes = 0

    def _id(self, what: Hashable) -> int:
        return self._known.setdefault(what, len(self._known))

    def known(self, what: Hashable) -> int:
        """The number of contents; -1 where they have never been there."""
        return self._known.get(what, -1)

    def of(self, memory: int) -> int:
        if memory not in self._now:
            self._now[memory] = self._id(("given", memory, self._writes))
        return self._now[memory]

    def value(self, number: int) -> tuple[int, Geometry]:
        return self.of(self.memory_of[number]), self.geometry[number]

    def is_whole(self, number: int) -> bool:
        """Whether a value is all of its memory, in order."""
        shape, stride, offset, dtype = self.geometry[number]
        expected = 1
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return offset == 0 and math.prod(shape) * dtype.itemsize == self.bytes_of[self.memory_of[number]]

    def key(self, call: Call | Unit) -> Hashable | None:
        """What a call computes of what, without what it overwrites; None where that cannot be compared."""
        if isinstance(call, Unit) or (call.expected is not None and not is_collective(call)):
            return None
        if is_collective(call):
            if call.op._opname != "_allgather_base_":
                return None
            bound = bound_arguments(call)
            shape = self.geometry[bound["output_tensor"].number].shape
            return "gather", group_ranks(call), self.value(bound["input_tensor"].number), shape
        if draws(call.op):
            return None
        replaced = {number for number in _filled(call) if self.is_whole(number)}
        leaves, tree = tree_flatten((call.args, call.kwargs))
        parts: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Ref):
                parts.append(self.geometry[leaf.number] if leaf.number in replaced else self.value(leaf.number))
            elif leaf is None or isinstance(leaf, _DATA):
                parts.append((leaf.__class__.__name__, repr(leaf)))  # 0.0 is not -0.0
            else:
                return None
        return str(call.op), tuple(parts), str(tree)

    def run(self, index: int, call: Call | Unit) -> None:
        """Go on after a call."""
        key = self.key(call)
        written = list(call.writes)
        if isinstance(call, Unit):
            written += [ref.number for ref in call.reads]
        elif is_collective(call) and key is not None:
            written = _filled(call)
        memories = dict.fromkeys(self.memory_of[number] for number in written)
        if memories.keys() & self.roots or (isinstance(call, Unit) and writes_roots(call)):
            self._writes += 1  # tensors of the caller may overlap
            for memory in self.roots:
                self._now.pop(memory, None)
        given = {self.memory_of[ref.number] for ref in refs_of(call)}
        made = [self.memory_of[ref.number] for ref in made_by(call)]
        memories |= dict.fromkeys(memory for memory in made if memory not in given)
        for at, memory in enumerate(memories):
            if memory not in self.roots:
                self._now[memory] = self._id(("new", index, at) if key is None else (key, at))


def _filled(call: Call | Unit) -> list[int]:
    """The values that a call overwrites, by what it is given besides them."""
    if isinstance(call, Unit):
        return []
    bound = bound_arguments(call)
    if call.op._opname == "_allgather_base_":
        return [bound["output_tensor"].number]
    if call.op is _aten.copy_.default:
        return [bound["self"].number]
    if call.op in (_aten.split_with_sizes_copy.out, _aten.cat.out):
        out = bound["out"]
        return [ref.number for ref in (out if isinstance(out, list | tuple) else [out])]
    return []


class _Again(NamedTuple):
    """A call whose results are there already."""

    at: int  # its index
    earlier: tuple[tuple[int, int], ...]  # pairs of a value that it fills, and one that holds the same


def _found_again(program: Program) -> list[_Again]:
    """The gathers, and copies into given memory, that give what is there already."""
    contents = _Contents(program)
    holders: dict[int, int] = {}  # contents: the value that holds them
    found: list[_Again] = []
    for index, (_, call) in enumerate(program.calls):
        key, filled = contents.key(call), _filled(call)
        is_alone = len({contents.memory_of[number] for number in filled}) == len(filled)
        known: list[tuple[int, int]] = []
        if key is not None and is_alone:
            for at, number in enumerate(filled):
                held = holders.get(contents.known((key, at)))
                whole = contents.is_whole(number) and contents.memory_of[number] not in contents.roots
                if held is not None and whole and contents.of(contents.memory_of[held]) == contents.known((key, at)):
                    known.append((number, held))
        if filled and len(known) == len(filled):
            found.append(_Again(index, tuple(known)))
        contents.run(index, call)
        for number in filled:
            if contents.is_whole(number):
                holders[contents.of(contents.memory_of[number])] = number
    return found


def with_shared_gathers(program: Program, max_bytes: int) -> Program:
    """The program without gathers whose results can be kept from before.

    Args:
        program: what was recorded.
        max_bytes: how much memory may be kept for it at a time. Gathers with the shortest time between them come first.
    """
    found = _found_again(program)
    gathers = [again for again in found if is_collective(program.calls[again.at][1])]
    if not gathers:
        return program
    last = _last_uses(program)
    chosen: set[int] = set()
    issued = list(itertools.accumulate(is_collective(call) for _, call in program.calls))
    kept = [0] * (issued[-1] + 1)
    choices = [_Choice.of(gather, found, program, last) for gather in gathers]
    # Ranks must choose alike: time is counted in collectives, which they have in common.
    spans = [range(issued[choice.start], issued[choice.end] + 1) for choice in choices]
    for choice, span in sorted(zip(choices, spans, strict=True), key=lambda each: (len(each[1]), each[1].start)):
        if all(kept[at] + choice.size <= max_bytes for at in span):
            chosen.update(choice.calls)
            for at in span:
                kept[at] += choice.size
    again = {each.at: each for each in found if each.at in chosen}
    calls: list[tuple[int, Call | Unit]] = []
    for index, (position, call) in enumerate(program.calls):
        if index not in again:
            calls.append((position, call))
            continue
        for number, held in again[index].earlier:
            copy = Call(_aten.copy_.default, (Ref(number), Ref(held)), {}, Ref(number), call.line, None, (number,))
            calls.append((position, copy))
    if not chosen:
        return program
    made = program.with_calls(calls)
    made.recorded = made
    return made


class _Choice(NamedTuple):
    """A gather that may be left out, with the copies out of its buffer."""

    calls: tuple[int, ...]
    size: int  # bytes that are kept
    start: int  # from the last use of the earlier results
    end: int

    @staticmethod
    def of(gather: _Again, found: Sequence[_Again], program: Program, last: dict[int, int]) -> _Choice:
        memory_of, bytes_of = program.facts.memory_of, program.facts.bytes_of
        buffer = memory_of[gather.earlier[0][0]]
        copies = [
            each
            for each in found
            if each.at > gather.at
            and any(memory_of[ref.number] == buffer for ref in refs_of(program.calls[each.at][1]))
        ]
        readers = [
            at for at, (_, call) in enumerate(program.calls) if at > gather.at and _reads(call, buffer, memory_of)
        ]
        is_copied = bool(copies) and {each.at for each in copies} >= set(readers)
        kept = [pair for each in (copies if is_copied else [gather]) for pair in each.earlier]
        size = bytes_of[buffer]
        start = min(last[memory_of[held]] for _, held in kept)
        end = max(each.at for each in (gather, *copies))
        calls = (gather.at, *(each.at for each in copies)) if is_copied else (gather.at,)
        return _Choice(calls, size, min(start, end), end)


def _reads(call: Call | Unit, memory: int, memory_of: dict[int, int]) -> bool:
    """Whether a call uses the values of a memory, and is no view of it."""
    if not any(memory_of[ref.number] == memory for ref in refs_of(call)):
        return False
    return not any(memory_of[ref.number] == memory for ref in made_by(call))


def _last_uses(program: Program) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, (_, call) in enumerate(program.calls):
        for ref in (*refs_of(call), *made_by(call)):
            last[program.facts.memory_of[ref.number]] = index
    return last
