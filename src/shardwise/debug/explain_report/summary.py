"""RecordSummary: the records of a program, their sums, and the planner's advice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.core.mesh import DeviceMesh
from shardwise.debug.explain_report.advice import advice_text, changes_for, rejected
from shardwise.debug.recording.records import MoveRecord, Record, operator_text
from shardwise.plan.alternatives import Candidate, Change

__all__ = ["RecordSummary", "Total"]


class Total(NamedTuple):
    """A sum: number of collectives, bytes received by a rank, modelled seconds."""

    collectives: int
    received: float
    seconds: float


@dataclass(eq=False)
class RecordSummary:
    """Records, and queries on them.

    Args:
        records: the operators in starting order; the operators of a decomposition follow the decomposed one.
        candidates: whether reports show rejected candidates.
    """

    records: list[Record] = field(default_factory=list)
    candidates: bool = False
    _numbered: dict[int, Record] = field(default_factory=dict, init=False, repr=False)

    # ---------------------------------------------------------------- sums

    @property
    def moves(self) -> list[tuple[Record, MoveRecord]]:
        """All collectives, each with the record that issued it."""
        return [(record, move) for record in self.records for move in record.moves]

    @property
    def total(self) -> Total:
        """The sum of all collectives."""
        return _total(move for _, move in self.moves)

    @property
    def by_collective(self) -> dict[str, Total]:
        """Sums for each kind of collective."""
        return self._sums(lambda record, move: move.collective)

    @property
    def by_axis(self) -> dict[str, Total]:
        """Sums for each group of mesh axes: `tp`, `dpxtp`."""
        return self._sums(lambda record, move: move.axis)

    @property
    def by_module(self) -> dict[str, Total]:
        """Sums for each module without its submodules; "" is outside all modules."""
        return self._sums(lambda record, move: record.module)

    @property
    def by_line(self) -> dict[str, Total]:
        """Sums for each user line, backward included: `model.py:12`."""
        return self._sums(lambda record, move: str(record.where))

    @property
    def by_phase(self) -> dict[str, Total]:
        """Sums for forward, backward and recompute."""
        return self._sums(lambda record, move: record.phase)

    def _sums(self, key: Callable[[Record, MoveRecord], str]) -> dict[str, Total]:
        groups: dict[str, list[MoveRecord]] = {}
        for record, move in self.moves:
            groups.setdefault(key(record, move), []).append(move)
        return {name: _total(moves) for name, moves in groups.items()}

    @property
    def meshes(self) -> list[DeviceMesh]:
        """The meshes of all tensors, in order of appearance."""
        specs = (spec for record in self.records for spec in (*(o.spec for o in record.operands), *record.outputs))
        return list(dict.fromkeys(spec.mesh for spec in specs))

    def record_at(self, index: int | None) -> Record | None:
        """The record with an index, None if it is not in this report."""
        if len(self._numbered) != len(self.records):
            self._numbered.update((record.index, record) for record in self.records[len(self._numbered) :])
        return None if index is None else self._numbered.get(index)

    def outermost(self, record: Record) -> Record:
        """The record of the operator that the user called, for an operator of its decomposition."""
        outer = self.record_at(record.parent)
        return record if outer is None else self.outermost(outer)

    def operator(self, record: Record) -> str:
        """The name of an operator; inside a decomposition with the called one: `aten._softmax > redistribute`."""
        outer = self.outermost(record)
        name = operator_text(record.name)
        return name if outer is record else f"{operator_text(outer.name)} > {name}"

    # ---------------------------------------------------------------- why

    def changes(self, record: Record) -> tuple[Change, ...]:
        """The single layout changes that avoid an operator's communication, the best first."""
        return _once(self, "changes", record, changes_for)

    def advice(self, record: Record) -> str:
        """The best change as a sentence; "" if nothing moved or no change helps."""
        return advice_text(record, self.changes(record), self.record_at)

    def alternatives(self, record: Record) -> tuple[Candidate, ...]:
        """All candidates of the rule on each axis, with their costs; the chosen ones are marked."""
        return _once(self, "alternatives", record, rejected)

    @functools.cached_property
    def _known(self) -> dict[tuple[Any, ...], Any]:
        return {}


def _once(summary: RecordSummary, query: str, record: Record, find: Callable[[Record], Any]) -> Any:
    """`find(record)`, computed once for each signature: a loop has many records of one signature."""
    key = (
        query,
        id(record.decision),
        len(record.moves) > 0,
        record.received_inside > 0,
        record.way,
        *(o.owner for o in record.operands),
    )
    if key not in summary._known:
        summary._known[key] = find(record)
    return summary._known[key]


def _total(moves: Iterable[MoveRecord]) -> Total:
    listed = list(moves)
    return Total(len(listed), sum(move.received for move in listed), sum(move.seconds for move in listed))
