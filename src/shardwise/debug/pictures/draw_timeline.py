"""A recorded program as SVG: its operators in order, the collectives of each axis below them, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.debug.pictures.draw_canvas import COLOURS, Canvas
from shardwise.text import human_bytes

__all__ = ["Span", "Timeline", "draw_timeline"]

LEFT, TOP, WIDTH = 150.0, 92.0, 900.0
LANE, GAP = 26.0, 12.0
CURVE = 110.0


class Span(NamedTuple):
    """Consecutive calls of one kind, by their indices.

    Args:
        first: the index of its first call.
        last: the index after its last.
        name: what it is; equal names have one colour.
        title: the tooltip.
    """

    first: int
    last: int
    name: str
    title: str


class Timeline(NamedTuple):
    """A program in the order of its calls.

    Args:
        title: the name of the program.
        subtitle: its sums.
        calls: the number of calls.
        lanes: named rows of spans.
        memory: bytes after each call.
    """

    title: str
    subtitle: str
    calls: int
    lanes: tuple[tuple[str, tuple[Span, ...]], ...]
    memory: tuple[int, ...]


def draw_timeline(timeline: Timeline) -> Canvas:
    """The picture: one row for each lane, from the first call on the left to the last on the right."""
    canvas = Canvas()
    canvas.text(24, 34, timeline.title, 17, kind="ink mono", weight=600)
    canvas.text(24, 58, timeline.subtitle, 13, kind="soft")
    scale = WIDTH / max(timeline.calls, 1)
    names = dict.fromkeys(span.name for _, spans in timeline.lanes for span in spans)
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    y = TOP
    for name, spans in timeline.lanes:
        canvas.text(24, y + LANE / 2, name, 12, kind="ink mono")
        canvas.rect(LEFT, y, WIDTH, LANE, radius=4, class_="chip")
        for span in spans:
            width = max((span.last - span.first) * scale, 2.0)
            canvas.rect(
                LEFT + span.first * scale, y, width, LANE, title=span.title, class_="span", fill=colours[span.name],
                fill_opacity="0.75",
            )  # fmt: skip
        y += LANE + GAP
    y = _draw_legend(canvas, colours, y + 6)
    _draw_memory(canvas, timeline.memory, scale, y + 16)
    return canvas


def _draw_legend(canvas: Canvas, colours: dict[str, str], y: float) -> float:
    x = LEFT
    for name, colour in colours.items():
        if x > LEFT + WIDTH - 120:
            x, y = LEFT, y + 22
        canvas.rect(x, y - 6, 12, 12, radius=3, class_="key", fill=colour, fill_opacity="0.75")
        canvas.text(x + 18, y, name, 11.5, kind="soft")
        x += 40 + 6.6 * len(name)
    return y + 18


def _draw_memory(canvas: Canvas, memory: Sequence[int], scale: float, y: float) -> None:
    """The bytes of the program's own values, as steps."""
    peak = max(memory, default=0)
    if not peak:
        return
    canvas.text(24, y + CURVE / 2, "memory", 12, kind="ink mono")
    canvas.text(24, y + CURVE / 2 + 18, f"{human_bytes(peak)} at most", 11.5, kind="soft")
    points = [(LEFT, y + CURVE)]
    for at, size in enumerate(memory):
        level = y + CURVE * (1 - size / peak)
        if points[-1][1] != level:
            points += [(LEFT + at * scale, points[-1][1]), (LEFT + at * scale, level)]
    points.append((LEFT + WIDTH, points[-1][1]))
    canvas.path(points)
