"""A report as plain data, for `to_json` and the HTML page. Keys are stable; new ones may be added."""

from __future__ import annotations

import math
from typing import Any

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.debug.explain_report.summary import RecordSummary, Total
from shardwise.debug.recording.records import MoveRecord, Operand, Record
from shardwise.plan.alternatives import Candidate, Change
from shardwise.plan.route import Route

__all__ = ["as_json"]

VERSION = 1
MOST_RANKS = 4096  # ranks of larger meshes are not listed


def as_json(report: RecordSummary) -> dict[str, Any]:
    """The report as a dict."""
    places = {record.index: place for place, record in enumerate(report.records)}
    sums = {
        "collective": report.by_collective,
        "axis": report.by_axis,
        "phase": report.by_phase,
        "module": report.by_module,
        "line": report.by_line,
    }
    return {
        "version": VERSION,
        "meshes": [_mesh(mesh) for mesh in report.meshes],
        "operators": len(report.records),
        "total": _total(report.total),
        "totals": {by: {name: _total(total) for name, total in found.items()} for by, found in sums.items()},
        "records": [_record(report, record, places) for record in report.records],
    }


def _total(total: Total) -> dict[str, Any]:
    return {"collectives": total.collectives, "received_bytes": total.received, "seconds": total.seconds}


def _mesh(mesh: DeviceMesh) -> dict[str, Any]:
    few = mesh.grid_size <= MOST_RANKS
    return {
        "axes": [mesh.axis_name(axis) for axis in range(mesh.ndim)],
        "shape": list(mesh.shape),
        "device": mesh.device_type,
        "fabric": mesh.fabric,
        "ranks": [int(rank) for rank in mesh.grid_ranks] if few and mesh.size() == mesh.grid_size else [],
    }


def _record(report: RecordSummary, record: Record, places: dict[int, int]) -> dict[str, Any]:
    start = report.records[0].started
    found: dict[str, Any] = {
        "index": places[record.index],
        "operator": record.name,
        "called": report.operator(record),
        "kind": record.kind,
        "phase": record.phase,
        "file": record.where.path,
        "line": record.where.line,
        "function": record.where.function,
        "backward_called_at": str(record.called),
        "module": record.module,
        "parent": _place(record.parent, places),
        "forward": _place(record.cause, places),
        "inputs": [_operand(operand, places) for operand in record.operands],
        "wanted": [spec.layout for spec in record.wanted],
        "outputs": [_spec(spec) for spec in record.outputs],
        "way": record.way,
        "rule": record.rule,
        "moves": [_move(move) for move in record.moves],
        "routes": [_route(route) for route in record.routes],
        "received_bytes": record.received,
        "received_inside_bytes": record.received_inside,
        "seconds": record.seconds,
        "advice": report.advice(record),
        "changes": [_change(record, change) for change in report.changes(record)[:3]],
        "measured": {"start": record.started - start, "end": record.ended - start},
        "error": record.error,
    }
    if report.candidates and record.moves:
        found["candidates"] = [_candidate(record, candidate) for candidate in report.alternatives(record)]
    return found


def _place(index: int | None, places: dict[int, int]) -> int | None:
    return None if index is None else places.get(index)


def _spec(spec: DTensorSpec) -> dict[str, str]:
    return {"tensor": str(spec.tensor_meta), "layout": spec.layout}


def _operand(operand: Operand, places: dict[int, int]) -> dict[str, Any]:
    made = {"name": operand.name, "parameter": operand.owner, "made_by": _place(operand.made_by, places)}
    return made | _spec(operand.spec)


def _move(move: MoveRecord) -> dict[str, Any]:
    return {
        "collective": move.collective,
        "words": move.words,
        "axis": move.axis,
        "group": move.group,
        "tensor": str(move.before.tensor_meta),
        "before": move.before.layout,
        "after": move.after.layout,
        "received_bytes": move.received,
        "seconds": move.seconds,
    }


def _route(route: Route) -> dict[str, Any]:
    """A route with all its steps, local ones included."""
    steps = [
        {
            "words": step.describe(),
            "layout": step.after.layout,
            "received_bytes": cost.received,
            "seconds": cost.seconds,
        }
        for step, cost in zip(route.steps, route.costs, strict=True)
    ]
    return {"before": str(route.source), "after": route.target.layout, "steps": steps}


def _change(record: Record, change: Change) -> dict[str, Any]:
    return {
        "operand": record.operands[change.operand].name,
        "layout": change.spec.layout,
        "outputs": [spec.layout for spec in change.outputs],
        "route": [step.describe() for step in change.route.steps],
        "received_bytes": change.route.received,
        "seconds": change.route.seconds,
    }


def _candidate(record: Record, candidate: Candidate) -> dict[str, Any]:
    return {
        "axis": record.operands[0].spec.mesh.axis_name(candidate.axis),
        "inputs": [placement.short for placement in candidate.row.inputs],
        "outputs": [placement.short for placement in candidate.row.outputs],
        "seconds": None if math.isinf(candidate.seconds) else candidate.seconds,  # None: unreachable
        "owed": candidate.owed,
        "chosen": candidate.chosen,
    }
