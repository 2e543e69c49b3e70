"""Line plots as SVG, with both axes logarithmic, that follow the reader's light or dark setting.

A few lines in place of a plotting library: the pictures of docs/performance.md are all of this one kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 36, 44
COLORS = ("#3b7dd8", "#d9822b", "#3d9a5f", "#c2476b", "#7d5fc4", "#6f7b86")
STYLE = (
    "text{font:12px sans-serif;fill:#24292f}.grid{stroke:#d0d7de}.axis{stroke:#57606a}"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7de}.grid{stroke:#30363d}.axis{stroke:#8b949e}}"
)


class Series(NamedTuple):
    """One line: its name, and its points."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float) -> list[float]:
    """Powers of ten that include both ends; within one decade also 2 and 5 times these."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [tick for tick in found if 10.0**first <= tick <= 10.0**last]


def label(value: float) -> str:
    """A tick in as few characters as it needs."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def line_plot(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """An SVG with a line for each series.

    Args:
        title: of the picture.
        series: lines; all numbers must be positive.
        x_label: name of the horizontal axis; its ticks are the x of the points.
        y_label: name of the vertical axis.
    """
    xs = sorted({x for each in series for x, _ in each.points})
    levels = ticks(min(y for each in series for _, y in each.points), max(y for each in series for _, y in each.points))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x_span = math.log(xs[-1] / xs[0]) or 1.0
    y_span = math.log(levels[-1] / levels[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * math.log(x / xs[0]) / x_span, TOP + high * (1 - math.log(y / levels[0]) / y_span)

    box, turned = f"0 0 {WIDTH} {HEIGHT}", f"rotate(-90 14 {TOP + high / 2})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="14" y="{TOP + high / 2}" text-anchor="middle" transform="{turned}">{escape(y_label)}</text>',
    ]
    for level in levels:
        _, y = place(xs[0], level)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(level)}</text>')
    for value in xs:
        x, _ = place(value, levels[0])
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + high}" y2="{TOP + high + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + high + 18}" text-anchor="middle">{label(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + wide}" y1="{TOP + high}" y2="{TOP + high}"/>')
    for index, each in enumerate(series):
        color = COLORS[index % len(COLORS)]
        spots = [place(x, y) for x, y in sorted(each.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in spots]
        legend = TOP + 10 + 20 * index
        parts.append(f'<rect x="{LEFT + wide + 14}" y="{legend - 9}" width="12" height="4" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + wide + 32}" y="{legend - 3}">{escape(each.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
