"""The memory of a program's own values over time: each lives from the call that makes it to its last use."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.capture.program import Program
from shardwise.capture.tape import made_by, refs_of

__all__ = ["MemoryPlan", "memory_plan"]


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


def memory_plan(program: Program) -> MemoryPlan:
    """The memory of a program. Temporary memory inside of an operator or of an optimizer's step is not known."""
    facts = program.facts
    memory_of, bytes_of = facts.memory_of, facts.bytes_of
    given = {memory_of[number] for number in program.inputs()}
    ends = {memory_of[number]: len(program.calls) for number in program.wanted}
    for index, (_, call) in enumerate(program.calls):
        for ref in (*refs_of(call), *made_by(call)):
            memory = memory_of[ref.number]
            ends[memory] = max(ends.get(memory, 0), index)
    dying: dict[int, list[int]] = {}
    for memory, index in ends.items():
        dying.setdefault(index, []).append(memory)
    live: dict[int, tuple[int, int]] = {}
    curve: list[int] = []
    peak, at, alive, now = 0, None, (), 0
    for index, (position, call) in enumerate(program.calls):
        for ref in made_by(call):
            memory = memory_of[ref.number]
            if memory not in given and memory not in live:
                live[memory] = (position, bytes_of[memory])
                now += bytes_of[memory]
        if now > peak:
            peak, at, alive = now, position, tuple(live.values())
        curve.append(now)
        for memory in dying.get(index, ()):
            now -= live.pop(memory, (0, 0))[1]
    return MemoryPlan(sum(bytes_of[memory] for memory in given), tuple(curve), peak, at, alive)
