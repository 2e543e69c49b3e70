"""A report as a self-contained HTML page, and as a notebook cell. The template, style and script are in `page/`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from shardwise.core.html import escaped
from shardwise.debug.explain_report.report_json import as_json
from shardwise.debug.explain_report.summary import RecordSummary
from shardwise.text import human_bytes, human_seconds, plural

__all__ = ["cell", "page", "write"]

PARTS = Path(__file__).parent / "page"
MOST_ROWS = 40  # in a notebook


def page(report: RecordSummary) -> str:
    """The HTML of the page."""
    data = json.dumps(as_json(report), separators=(",", ":")).replace("<", "\\u003c")
    made = (PARTS / "page.html").read_text(encoding="utf-8")
    for mark, text in (("css", _part("page.css")), ("js", _part("page.js")), ("data", data)):
        made = made.replace(f"/*{mark}*/", text, 1)
    return made


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically: several ranks may write the same report to one path."""
    target = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)


def cell(report: RecordSummary) -> str:
    """The HTML of a notebook cell: the sums, and each line that communicated."""
    total = report.total
    head = (
        f"<b>{plural(len(report.records), 'operator')}, {plural(total.collectives, 'collective')}</b>: a rank received "
        f"{human_bytes(total.received)} in {human_seconds(total.seconds)} (modelled)"
    )
    moved = [record for record in report.records if record.moves]
    rows = [
        (
            record.phase, record.where.short, record.module, report.operator(record),
            ", ".join(move.words for move in record.moves), human_bytes(record.received),
        )
        for record in moved[:MOST_ROWS]
    ]  # fmt: skip
    titles = ("phase", "line", "module", "operator", "moved", "received")
    left = f"<p>and {len(moved) - MOST_ROWS} more</p>" if len(moved) > MOST_ROWS else ""
    return f"<div>{head}{_html_table(titles, rows) if rows else ''}{left}</div>"


def _html_table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    heading = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escaped(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>"
