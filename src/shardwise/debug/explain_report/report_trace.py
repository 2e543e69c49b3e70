"""A report in Chrome's trace event format, for Perfetto and chrome://tracing.

Two processes with separate clocks: the program as measured, and its communication as modelled, with one track for
each group of mesh axes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardwise.debug.explain_report.summary import RecordSummary
from shardwise.debug.recording.records import Record, layouts_text, operator_text

__all__ = ["as_text"]

PROGRAM, MODELLED = 1, 2  # the processes
MICRO = 1e6


def as_text(report: RecordSummary) -> str:
    """The text of the trace file."""
    events = [*_program(report), *_modelled(report)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, indent=None, separators=(",", ":")) + "\n"


def _named(process: int, name: str, tracks: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for track, number in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}


def _slice(process: int, track: int, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": "shardwise", "pid": process, "tid": track,
        "ts": round(start * MICRO, 3), "dur": round(max(end - start, 0.0) * MICRO, 3), "args": args,
    }  # fmt: skip


def _program(report: RecordSummary) -> Iterator[dict[str, Any]]:
    """Operators with their measured times, one track for each module."""
    tracks = {name: i for i, name in enumerate(dict.fromkeys(record.module for record in report.records), start=1)}
    yield from _named(PROGRAM, "program, measured here", {name or "(no module)": i for name, i in tracks.items()})
    for record in report.records:
        start = report.records[0].started
        times = record.started - start, max(record.ended, record.started) - start
        yield _slice(PROGRAM, tracks[record.module], operator_text(record.name), *times, **_facts(record))


def _facts(record: Record) -> dict[str, Any]:
    return {
        "phase": record.phase,
        "line": str(record.where),
        "inputs": layouts_text(operand.spec for operand in record.operands),
        "outputs": layouts_text(record.outputs),
        "way": record.way,
    }


def _modelled(report: RecordSummary) -> Iterator[dict[str, Any]]:
    """Collectives in sequence, with their modelled times."""
    tracks = {name: i for i, name in enumerate(report.by_axis, start=1)}
    yield from _named(MODELLED, "communication, modelled", {f"over {name}": i for name, i in tracks.items()})
    now = 0.0
    for record, move in report.moves:
        facts = _facts(record) | {"operator": record.name, "module": record.module, "received_bytes": move.received}
        layouts = f"{move.before} -> {move.after.layout}"
        yield _slice(MODELLED, tracks[move.axis], move.words, now, now + move.seconds, layouts=layouts, **facts)
        now += move.seconds
