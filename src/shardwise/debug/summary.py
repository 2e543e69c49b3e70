"""Summary: what was recorded, its sums, and what the planner says about it. Knows nothing of how it is shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.core.mesh import DeviceMesh
from shardwise.debug.advice import advice_text, changes_for, rejected
from shardwise.debug.records import Move, Record
from shardwise.debug.units import operator_text
from shardwise.plan.alternatives import Candidate, Change

__all__ = ["Summary", "Total"]


class Total(NamedTuple):
    """A sum: collectives, bytes that a rank received, modelled seconds."""

    collectives: int
    received: float
    seconds: float


@dataclass(eq=False)
class Summary:
    """Records and what can be asked of them.

    Args:
        records: the operators in the order of starting; those that another one is computed from stand after it.
        candidates: whether rejected candidates are shown.
    """

    records: list[Record] = field(default_factory=list)
    candidates: bool = False
    _numbered: dict[int, Record] = field(default_factory=dict, init=False, repr=False)

    # ---------------------------------------------------------------- sums

    @property
    def moves(self) -> list[tuple[Record, Move]]:
        """Every collective with the record that issued it."""
        return [(record, move) for record in self.records for move in record.moves]

    @property
    def total(self) -> Total:
        """All there was."""
        return _total(move for _, move in self.moves)

    @property
    def by_collective(self) -> dict[str, Total]:
        """Sums for each collective."""
        return self._sums(lambda record, move: move.collective)

    @property
    def by_axis(self) -> dict[str, Total]:
        """Sums for each group of mesh axes: `tp`, `dpxtp`."""
        return self._sums(lambda record, move: move.axis)

    @property
    def by_module(self) -> dict[str, Total]:
        """Sums for each module, its parts not included; "" is what no module did."""
        return self._sums(lambda record, move: record.module)

    @property
    def by_line(self) -> dict[str, Total]:
        """Sums for each line of the user's, backward included: `model.py:12`."""
        return self._sums(lambda record, move: str(record.where))

    @property
    def by_phase(self) -> dict[str, Total]:
        """Sums for forward, backward and recompute."""
        return self._sums(lambda record, move: record.phase)

    def _sums(self, key: Callable[[Record, Move], str]) -> dict[str, Total]:
        groups: dict[str, list[Move]] = {}
        for record, move in self.moves:
            groups.setdefault(key(record, move), []).append(move)
        return {name: _total(moves) for name, moves in groups.items()}

    @property
    def meshes(self) -> list[DeviceMesh]:
        """The meshes that tensors lay on, in order of appearance."""
        specs = (spec for record in self.records for spec in (*(o.spec for o in record.operands), *record.outputs))
        return list(dict.fromkeys(spec.mesh for spec in specs))

    def record_at(self, index: int | None) -> Record | None:
        """The record of a number, None where it is not in this report."""
        if len(self._numbered) != len(self.records):
            self._numbered.update((record.index, record) for record in self.records[len(self._numbered) :])
        return None if index is None else self._numbered.get(index)

    def whole(self, record: Record) -> Record:
        """The operator that the user called, of which a record is a part."""
        outer = self.record_at(record.parent)
        return record if outer is None else self.whole(outer)

    def operator(self, record: Record) -> str:
        """An operator's name; of a part, after that of the one that was called: `aten._softmax > redistribute`."""
        whole = self.whole(record)
        name = operator_text(record.name)
        return name if whole is record else f"{operator_text(whole.name)} > {name}"

    # ---------------------------------------------------------------- why

    def changes(self, record: Record) -> tuple[Change, ...]:
        """The single changes of a layout with which an operator would have moved nothing, the best first."""
        return _once(self, "changes", record, changes_for)

    def advice(self, record: Record) -> str:
        """The best of them in words; "" where nothing moved or nothing helps."""
        return advice_text(record, self.changes(record), self.record_at)

    def alternatives(self, record: Record) -> tuple[Candidate, ...]:
        """Every candidate that the rule allowed on each axis, with its cost; the chosen ones are marked."""
        return _once(self, "alternatives", record, rejected)

    @functools.cached_property
    def _known(self) -> dict[tuple[Any, ...], Any]:
        return {}


def _once(summary: Summary, what: str, record: Record, find: Callable[[Record], Any]) -> Any:
    """What is asked of a decision is asked once: a loop has many records of one signature."""
    key = (
        what,
        id(record.decision),
        len(record.moves) > 0,
        record.received_inside > 0,
        record.way,
        *(o.owner for o in record.operands),
    )
    if key not in summary._known:
        summary._known[key] = find(record)
    return summary._known[key]


def _total(moves: Iterable[Move]) -> Total:
    listed = list(moves)
    return Total(len(listed), sum(move.received for move in listed), sum(move.seconds for move in listed))
