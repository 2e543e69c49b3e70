"""Report: a summary of records, and its output formats."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from shardwise.debug.explain_report import report_html, report_json, report_text, report_trace
from shardwise.debug.explain_report.summary import RecordSummary
from shardwise.debug.limits.lock_file import Lock

__all__ = ["Report"]


class Report(RecordSummary):
    """The result of `explain`. Prints as a table; displays as HTML in a notebook.

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

    def table(self, *, width: int = 80, color: bool = False) -> str:
        """The report as text: communication by line, sums, and how to avoid it."""
        return report_text.table(self, width=width, color=color)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        total = self.total
        return f"Report({len(self.records)} operators, {total.collectives} collectives, {total.received:.0f} bytes)"

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        return report_text.renderables(self)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `docs/explain.md` documents the keys."""
        return report_json.as_json(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page: sortable tables, the mesh, a timeline."""
        report_html.write(path, report_html.page(self))

    def _repr_html_(self) -> str:
        return report_html.cell(self)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing."""
        report_html.write(path, report_trace.as_text(self))

    def lock(self) -> Lock:
        """The communication without line numbers and paths: the content of a lock file."""
        return Lock.of(self.records, self.operator)

    def save_lock(self, path: str | os.PathLike[str]) -> None:
        """Write a lock file for `check_lock`."""
        report_html.write(path, self.lock().as_text())
