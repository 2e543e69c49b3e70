"""Collectives of a program while operators run: issued as early, and waited for as late, as memory allows.

The order of collectives stays as it is, so each rank decides alone. Calls of which one writes to memory that the other
uses keep their order. Tensors of the caller may overlap in unknown ways: they count as one memory. Steps of optimizers,
compiled functions, assertions and values that are compared may use any memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.capture.collective_calls import bound_arguments, is_collective
from shardwise.capture.tape import Call, Ref, Unit, made_by, refs_of
from shardwise.fabric.rank_generators import draws
from shardwise.torch_private import tree_leaves

__all__ = ["Memories", "Uses", "filled_by", "issued_early", "late_waits"]

_READ_ONLY = {"_allgather_base_": "input_tensor", "_reduce_scatter_base_": "input_tensor", "alltoall_base_": "input"}
_ANY = -1  # the memory of all tensors of the caller
_RANDOM = -2  # the states of random generators


class Uses(NamedTuple):
    """The memories that a call reads, makes or writes, and those that it writes."""

    used: frozenset[int]
    written: frozenset[int]
    given: frozenset[int]  # numbers of values
    made: frozenset[int]

    def conflicts(self, later: Uses) -> bool:
        """Whether a later call must stay after this one."""
        return bool(self.made & later.given or self.written & later.used or self.used & later.written)


class Memories:
    """What the calls of a program use.

    Args:
        memory_of: the memories of values.
        roots: the memories of the caller's tensors.
    """

    def __init__(self, memory_of: Mapping[int, int], roots: frozenset[int]) -> None:
        self.memory_of = memory_of
        self.roots = roots

    def _of(self, numbers: Sequence[int]) -> frozenset[int]:
        found = {self.memory_of[number] for number in numbers}
        return frozenset(_ANY if memory in self.roots else memory for memory in found)

    def uses(self, call: Call | Unit) -> Uses | None:
        """What a call uses; None for one that may use anything."""
        if isinstance(call, Unit) or (call.expected is not None and not is_collective(call)):
            return None
        numbers = [leaf.number for leaf in tree_leaves((call.args, call.kwargs, call.made)) if isinstance(leaf, Ref)]
        used, written = self._of(numbers), self._of(call.writes)
        if is_collective(call):
            written = self._of(filled_by(call))
        elif draws(call.op):
            used, written = used | {_RANDOM}, written | {_RANDOM}
        elif not call.writes and not any(isinstance(leaf, Ref) for leaf in tree_leaves(call.made)):
            return None  # an assertion
        given, made = (frozenset(ref.number for ref in refs) for refs in (refs_of(call), made_by(call)))
        return Uses(used, written, given, made)


def filled_by(call: Call) -> list[int]:
    """The values that a collective writes to."""
    name = _READ_ONLY.get(call.op._opname)
    only_read = [] if name is None else [bound_arguments(call)[name].number]
    return [number for number in call.writes if number not in only_read]


def issued_early(calls: Sequence[tuple[int, Call | Unit]], memories: Memories) -> list[tuple[int, Call | Unit]]:
    """The calls with each collective, and what it depends on, before operators that it does not depend on.

    No call passes another collective or a call that may use anything.
    """
    found: list[tuple[int, Call | Unit]] = []
    region: list[tuple[tuple[int, Call | Unit], Uses]] = []
    for each in calls:
        uses = memories.uses(each[1])
        if uses is None:
            found += [*(one for one, _ in region), each]
            region.clear()
        elif is_collective(each[1]):
            needed = [uses]
            first: list[tuple[int, Call | Unit]] = []
            rest: list[tuple[tuple[int, Call | Unit], Uses]] = []
            for one, its in reversed(region):
                if any(its.conflicts(other) for other in needed):
                    needed.append(its)
                    first.append(one)
                else:
                    rest.append((one, its))
            found += [*reversed(first), each]
            region = rest[::-1]
        else:
            region.append((each, uses))
    return [*found, *(one for one, _ in region)]


def late_waits(calls: Sequence[tuple[int, Call | Unit]], memories: Memories) -> dict[int, int]:
    """For each collective with other calls before its end: its position, and the index of the call to wait before."""
    late: dict[int, int] = {}
    flying: list[tuple[int, int, Uses]] = []  # index, position
    for index, (position, call) in enumerate(calls):
        uses = memories.uses(call)
        for one in list(flying):
            issued, at, its = one
            if uses is None or its.conflicts(uses):
                flying.remove(one)
                if index > issued + 1:
                    late[at] = index
        if uses is not None and is_collective(call):
            flying.append((index, position, uses))
    for issued, at, _ in flying:
        if len(calls) > issued + 1:
            late[at] = len(calls)
    return late
