"""A report as text: communication by line, sums, and how to avoid it. With or without colour."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.debug.explain_report.summary import RecordSummary, Total
from shardwise.debug.recording.records import MoveRecord, Record, operator_text
from shardwise.text import DottedName, human_bytes, human_seconds, plural, slim_table

__all__ = ["renderables", "table"]

MOST_ADVICE = 5
MOST_LINES = 60
MOST_SUMS = 12


def table(report: RecordSummary, *, width: int, color: bool) -> str:
    """The report as text, without trailing spaces."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, highlight=False, soft_wrap=False, legacy_windows=False,
        color_system="standard" if color else None,
    )  # fmt: skip
    for part in renderables(report):
        console.print(part)
    written = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return "\n".join(line.rstrip() for line in written.rstrip().splitlines())


def renderables(report: RecordSummary) -> Iterator[Any]:
    """The report as renderables of rich."""
    from rich.text import Text

    total = report.total
    yield Text(f"{plural(len(report.records), 'operator')}, {plural(total.collectives, 'collective')}", "bold")
    for mesh in report.meshes:
        yield Text(f"on {mesh}")
    if not total.collectives:
        yield Text("nothing was moved")
        return
    yield Text(f"a rank received {human_bytes(total.received)} in {human_seconds(total.seconds)} (modelled)")
    yield Text("")
    yield _lines_table(report)
    for title, sums in (("collective", report.by_collective), ("axis", report.by_axis), ("module", report.by_module)):
        yield Text("")
        yield _sums_table(title, sums)
    yield from _advice(report)
    if report.candidates:
        yield from _candidates(report)


# ---------------------------------------------------------------- by line


@dataclass
class _Row:
    """Records of one line with equal moves, in one module or in several of a module list: one record and a count."""

    record: Record
    moves: tuple[MoveRecord, ...]
    modules: set[str] = field(default_factory=set)
    count: int = 0
    received: float = 0.0

    @property
    def module(self) -> str:
        """The module path; for several modules of a list, `layers.*.up`."""
        return next(iter(self.modules)) if len(self.modules) == 1 else _alike(self.record.module)


def _alike(module: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def _rows(report: RecordSummary) -> list[_Row]:
    rows: dict[Any, _Row] = {}
    for record in report.records:
        if record.moves:
            moved = tuple((move.collective, move.axis, move.before, move.after) for move in record.moves)
            key = (record.phase, record.where, _alike(record.module), report.operator(record), moved)
            row = rows.setdefault(key, _Row(record, tuple(record.moves)))
            row.modules.add(record.module)
            row.count += 1
            row.received += record.received
    return list(rows.values())


def _lines_table(report: RecordSummary) -> Any:
    from rich.text import Text

    made = slim_table(expand=True)
    made.add_column("line", max_width=18, overflow="fold")
    made.add_column("module", min_width=11, overflow="fold", ratio=1)
    made.add_column("operator", max_width=15, overflow="ellipsis", no_wrap=True)
    made.add_column("moved", no_wrap=True)
    made.add_column("x", justify="right", no_wrap=True)
    made.add_column("received", justify="right", no_wrap=True)
    rows = _rows(report)
    roots = {row.module.partition(".")[0] for row in rows if row.module}
    phase = ""
    for row in rows[:MOST_LINES]:
        if row.record.phase != phase:
            phase = row.record.phase
            made.add_row(Text(phase, "bold magenta" if phase == "backward" else "bold cyan"))
        module = row.module.partition(".")[2] or row.module if len(roots) == 1 else row.module
        operator = operator_text(report.outermost(row.record).name).removeprefix("aten.")
        moved = Counter(f"{move.collective} {move.axis}" for move in row.moves)
        collectives = "\n".join(text if times == 1 else f"{times} {text}" for text, times in moved.items())
        made.add_row(
            Text(row.record.where.short, "cyan"), DottedName(module), operator, Text(collectives, "yellow"),
            str(row.count), human_bytes(row.received),
        )  # fmt: skip
    if len(rows) > MOST_LINES:
        made.add_row(Text(f"and {len(rows) - MOST_LINES} more", "bold"))
    return made


def _sums_table(title: str, sums: dict[str, Total]) -> Any:
    made = slim_table(expand=True)
    made.add_column(f"by {title}", ratio=1, overflow="fold")
    for heading in ("collectives", "received", "time"):
        made.add_column(heading, justify="right", no_wrap=True)
    ordered = sorted(sums.items(), key=lambda item: -item[1].received)
    for name, total in ordered[:MOST_SUMS]:
        made.add_row(
            DottedName(name) if name and title == "module" else name or f"(no {title})",
            str(total.collectives),
            human_bytes(total.received),
            human_seconds(total.seconds),
        )
    if len(ordered) > MOST_SUMS:
        made.add_row(f"and {len(ordered) - MOST_SUMS} more")
    return made


# ---------------------------------------------------------------- why


def _advice(report: RecordSummary) -> Iterator[Any]:
    """Advice for the most received bytes, each signature once."""
    from rich.padding import Padding
    from rich.text import Text

    received: dict[tuple[str, str], float] = {}
    for row in _rows(report):
        outer = report.outermost(row.record)
        advice = f"{outer.where.short} {operator_text(outer.name)} ({outer.phase})", report.advice(outer)
        received[advice] = received.get(advice, 0.0) + row.received
    found = sorted(((head, text, moved) for (head, text), moved in received.items() if text), key=lambda item: -item[2])
    if found:
        yield Text("\nhow to avoid it", "bold")
    for head, text, moved in found[:MOST_ADVICE]:
        yield Text(f"{head}, {human_bytes(moved)}", "cyan")
        yield Padding(Text(text), (0, 0, 0, 2))


def _candidates(report: RecordSummary) -> Iterator[Any]:
    """The candidates of each operator that communicated, on each axis."""
    from rich.text import Text

    shown: set[int] = set()
    for row in _rows(report):
        candidates = report.alternatives(row.record)
        if not candidates or id(candidates) in shown:  # each signature once
            continue
        shown.add(id(candidates))
        yield Text(f"\n{row.record.where.short} {operator_text(row.record.name)}: candidates", "bold")
        made = slim_table(expand=True)
        for heading in ("axis", "operands", "results"):
            made.add_column(heading, ratio=1 if heading == "operands" else None)
        made.add_column("takes", justify="right")
        mesh = row.record.operands[0].spec.mesh
        for candidate in candidates:
            name: Callable[[Any], str] = lambda placements: ", ".join(p.short for p in placements)  # noqa: E731
            takes = "never" if candidate.seconds == float("inf") else human_seconds(candidate.seconds)
            if candidate.owed and takes != "never":
                takes += f", owes {human_seconds(candidate.owed)}"
            made.add_row(
                mesh.axis_name(candidate.axis), name(candidate.row.inputs), name(candidate.row.outputs),
                f"{takes} <- chosen" if candidate.chosen else takes,
            )  # fmt: skip
        yield made
