"""Values that a step reads from tensors (`if mask.all()`), as conditions of a program: computed again before each run.

A value is a condition if it follows from the tensors that exist before the step by a few operators of one rank: nothing
that the step has written, drawn or communicated. Then it can be computed first. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.capture.collective_calls import is_collective
from shardwise.capture.local_optimizer import LocalStep
from shardwise.capture.program import Program
from shardwise.capture.snapshot import Snapshot
from shardwise.capture.tape import Call, Ref, Tape, Unit, ValueRead, made_by, refs_of
from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_generators import draws

__all__ = ["ReadGuard", "guards_of"]

MOST_OPERATORS = 64  # that are computed twice for one value


class ReadGuard(NamedTuple):
    """One value that was read.

    Args:
        op: the operator that reads it.
        program: computes the tensors that it is given.
        value: what it gave, as text: that of a NaN, of -0.0 and of True differs from others.
        line: the user's line.
    """

    op: Any
    program: Program
    value: str
    line: str

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the same value would be read again."""
        values = dict(zip(self.program.wanted, self.program.run(inputs), strict=True))
        return repr(self.op(*(values[number] for number in self.program.wanted))) == self.value


def guards_of(tape: Tape, before: Snapshot) -> tuple[ReadGuard, ...]:
    """The conditions of a recorded call, in the order of its reads.

    Args:
        tape: the calls and reads.
        before: the tensors that existed before the call.
    """
    return tuple(_guard(tape, before, read) for read in tape.reads)


def _guard(tape: Tape, before: Snapshot, read: ValueRead) -> ReadGuard:
    calls = _computing(tape, read)
    refs = [ref for ref in read.args if isinstance(ref, Ref)]
    numbers = {ref.number for call in calls for ref in (*refs_of(tape.calls[call]), *made_by(tape.calls[call]))}
    numbers.update(ref.number for ref in refs)
    _check_written(tape, before, read, numbers)
    _check_ranks(before, read, numbers)
    program = Program(tape, [ref.number for ref in refs], "condition")
    program = program.with_calls([(at, tape.calls[at]) for at in calls])
    return ReadGuard(read.op, program, repr(read.value), read.line)


def _computing(tape: Tape, read: ValueRead) -> list[int]:
    """The positions of the calls that a value follows from."""
    makers = {ref.number: at for at, call in enumerate(tape.calls[: read.position]) for ref in made_by(call)}
    found: set[int] = set()
    waiting = [ref.number for ref in read.args if isinstance(ref, Ref)]
    while waiting:
        at = makers.get(waiting.pop())
        if at is None or at in found:
            continue
        call = tape.calls[at]
        if isinstance(call, Unit) or is_collective(call):
            raise _refused(read, "it depends on a collective or on the step of an optimizer")
        if draws(call.op):
            raise _refused(read, "it depends on random numbers")
        found.add(at)
        if len(found) > MOST_OPERATORS:
            raise _refused(read, f"it follows from the state before by more than {MOST_OPERATORS} operators")
        waiting += [ref.number for ref in refs_of(call)]
    return sorted(found)


def _check_written(tape: Tape, before: Snapshot, read: ValueRead, numbers: set[int]) -> None:
    """What a value follows from must not have been written to, by any call before the read."""
    memories = {tape.memory_of[number] for number in numbers}
    for call in tape.calls[: read.position]:
        if any(tape.memory_of[number] in memories for number in _written(call, before)):
            raise _refused(read, "it follows from a tensor that the step has written to")


def _written(call: Call | Unit, before: Snapshot) -> Iterator[int]:
    yield from call.writes
    if isinstance(call, Unit) and isinstance(call.run, LocalStep):
        touched = set(map(id, call.run.tensors()))
        for was, numbers in zip(before.held, before.numbers, strict=True):
            if id(was.tensor) in touched:
                yield from numbers


def _check_ranks(before: Snapshot, read: ValueRead, numbers: set[int]) -> None:
    """On virtual ranks a collective is a copy: the value of one rank must not follow from another rank's local."""
    ranks = {at for own in before.numbers if len(own) > 1 for at, number in enumerate(own) if number in numbers}
    if len(ranks) > 1:
        raise _refused(read, "it depends on a collective")


def _refused(read: ValueRead, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"captured: the value of a tensor is read (at {read.line}), and {why}, so that it cannot be computed before "
        "the program runs",
        hint="read values of arguments that are plain tensors or replicated, or compute with the tensor",
    )
