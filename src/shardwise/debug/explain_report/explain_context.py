"""explain: a context in which every operator on DTensors is recorded into a report."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.mode_stack import mode_context
from shardwise.debug.explain_report.report import Report
from shardwise.debug.recording.recorder import Listener, listening
from shardwise.debug.recording.records import Record

__all__ = ["explain"]


class _Recording(Listener):
    """Appends all records to a report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def begin(self, record: Record) -> None:
        self.report.records.append(record)


@mode_context
def explain(*, candidates: bool = False) -> Iterator[Report]:
    """Record every DTensor operator inside: what it communicated, on which line, why, and how to avoid it.

    Backward is recorded as well, on any thread. Its operators are attributed to the line and the module of the forward
    operator whose gradient they compute.

    Args:
        candidates: also show the alternatives of each operator that communicated, with their costs.

    Example:
        >>> import shardwise as sw, torch
        >>> mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> x = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> w = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> with sw.explain() as report:
        ...     y = x @ w
        >>> report.total.collectives, [move.words for _, move in report.moves]
        (1, ['all-gather dim 1 over tp'])
        >>> print(report.advice(report.records[0]))
        self is tp:S1, mat2 is tp:S1. With self as tp:R, nothing moves and the result is tp:S1. Redistributing it costs
        all-gather dim 1 over tp, 192 B.
    """
    report = Report(candidates=candidates)
    with listening(_Recording(report)):
        yield report
