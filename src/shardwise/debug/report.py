"""Report: everything that was recorded, its sums, and the forms in which it is shown or kept."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.core.mesh import DeviceMesh
from shardwise.debug import report_html, report_json, report_text, report_trace
from shardwise.debug.advice import advice_text, changes_for, rejected
from shardwise.debug.lock import Lock
from shardwise.debug.records import Move, Record
from shardwise.plan.alternatives import Candidate, Change

__all__ = ["Report", "Total"]


class Total(NamedTuple):
    """A sum: collectives, bytes that a rank received, modelled seconds."""

    collectives: int
    received: float
    seconds: float


@dataclass(eq=False)
class Report:
    """What `explain` recorded. Prints as a table; shows itself in a notebook.

    Args:
        records: the operators in the order of starting; those that another one is computed from stand after it.
        candidates: whether rejected candidates are shown.

    Example:
        >>> import shardwise as sw, torch
        >>> mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> x = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> with sw.explain() as report:
        ...     y = x.sum(1).exp()
        >>> [(record.name, str(record.outputs[0])) for record in report.records]
        [('aten.sum.dim_IntList', 'f32[8] tp:P'), ('aten.exp.default', 'f32[8] tp:R')]
        >>> report.by_collective
        {'all_reduce': Total(collectives=1, received=48.0, seconds=4.0024e-05)}
    """

    records: list[Record] = field(default_factory=list)
    candidates: bool = False

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
        if index is None or not self.records:
            return None
        at = index - self.records[0].index  # as a rule they are numbered without gaps
        if 0 <= at < len(self.records) and self.records[at].index == index:
            return self.records[at]
        return next((record for record in self.records if record.index == index), None)

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
    def _known(self) -> dict[tuple[str, int], Any]:
        return {}

    # ---------------------------------------------------------------- forms

    def table(self, *, width: int = 80, color: bool = False) -> str:
        """The report as text: what moved line by line, the sums, and what would spare it."""
        return report_text.table(self, width=width, color=color)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        total = self.total
        return f"Report({len(self.records)} operators, {total.collectives} collectives, {total.received:.0f} bytes)"

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        return report_text.renderables(self)

    def to_json(self) -> dict[str, Any]:
        """The whole report as plain data; `docs/explain.md` says what the keys mean."""
        return report_json.as_json(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs nothing else: tables that sort, the mesh, a timeline."""
        report_html.write(path, report_html.page(self))

    def _repr_html_(self) -> str:
        return report_html.cell(self)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto and chrome://tracing open."""
        report_html.write(path, report_trace.as_text(self))

    def lock(self) -> Lock:
        """What moved, without lines and paths: what a lock file holds."""
        return Lock.of(self.records)

    def save_lock(self, path: str | os.PathLike[str]) -> None:
        """Write the lock file that `check_lock` compares with."""
        report_html.write(path, self.lock().as_text())


def _once(report: Report, what: str, record: Record, find: Callable[[Record], Any]) -> Any:
    """What is asked of a decision is asked once: a loop has many records of one signature."""
    key = (what, id(record.decision), len(record.moves) > 0, record.way, *(o.owner for o in record.operands))
    if key not in report._known:
        report._known[key] = find(record)
    return report._known[key]


def _total(moves: Iterable[Move]) -> Total:
    listed = list(moves)
    return Total(len(listed), sum(move.received for move in listed), sum(move.seconds for move in listed))
