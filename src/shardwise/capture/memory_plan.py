"""The memory of a program's own values over time: each lives from the call that makes it to its last use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwise.capture.program import Program
from shardwise.capture.tape import Call, Unit, made_by, refs_of

__all__ = ["MemoryPlan", "Touched", "memory_plan", "plan_of"]


class MemoryPlan(NamedTuple):
    """Bytes of the values that a program makes.

    Args:
        held: bytes of the tensors that it is given; these live throughout.
        curve: bytes of its own values after each call, in the order of the calls.
        peak: the largest of them.
        at: the position of the call after which it is reached; None where there is none.
        alive: the memories that are live then, each with the position of the call that made it and its bytes.
    """

    held: int
    curve: tuple[int, ...]
    peak: int
    at: int | None
    alive: tuple[tuple[int, int], ...]


class Touched(NamedTuple):
    """The numbers of the values that a call is given, and of those that it makes."""

    given: tuple[int, ...]
    made: tuple[int, ...]

    @staticmethod
    def by(call: Call | Unit) -> Touched:
        return Touched(tuple(ref.number for ref in refs_of(call)), tuple(ref.number for ref in made_by(call)))


def memory_plan(program: Program) -> MemoryPlan:
    """The memory of a program. Temporary memory inside of an operator or of an optimizer's step is not known."""
    facts = program.facts
    given = {facts.memory_of[number] for number in program.inputs()}
    touched = [(position, Touched.by(call)) for position, call in program.calls]
    return plan_of(touched, facts.memory_of, facts.bytes_of, given, program.wanted, program.late)


def plan_of(
    calls: Sequence[tuple[int, Touched]],
    memory_of: Mapping[int, int],
    bytes_of: Mapping[int, int],
    given: set[int],
    wanted: Iterable[int],
    late: Mapping[int, int],
) -> MemoryPlan:
    """The memory of calls, each with its position.

    Args:
        calls: what they use, in order.
        memory_of: the memories of values.
        bytes_of: the sizes of memories.
        given: the memories of tensors that are there before.
        wanted: the values that are returned.
        late: positions of collectives, with the index of the call before which they are waited for.
    """
    ends = {memory_of[number]: len(calls) for number in wanted}
    for index, (position, touched) in enumerate(calls):
        end = max(index, late.get(position, index)) if late else index
        for numbers in touched:
            for number in numbers:
                memory = memory_of[number]
                ends[memory] = max(ends.get(memory, 0), end)
    dying: dict[int, list[int]] = {}
    for memory, index in ends.items():
        dying.setdefault(index, []).append(memory)
    live: dict[int, tuple[int, int]] = {}
    curve: list[int] = []
    peak, at, alive, now = 0, None, (), 0
    for index, (position, touched) in enumerate(calls):
        for number in touched.made:
            memory = memory_of[number]
            if memory not in given and memory not in live:
                live[memory] = (position, bytes_of[memory])
                now += bytes_of[memory]
        if now > peak:
            peak, at, alive = now, position, tuple(live.values())
        curve.append(now)
        for memory in dying.get(index, ()):
            now -= live.pop(memory, (0, 0))[1]
    return MemoryPlan(sum(bytes_of[memory] for memory in given), tuple(curve), peak, at, alive)
