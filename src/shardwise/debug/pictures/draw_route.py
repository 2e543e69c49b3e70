"""A route as SVG: its layouts from left to right, with the collectives and their bytes between them."""

from __future__ import annotations

from shardwise.core.spec import DTensorSpec
from shardwise.debug.pictures.draw_canvas import Canvas, text_width
from shardwise.debug.pictures.draw_layout import draw_face
from shardwise.debug.pictures.tiles import face_of
from shardwise.plan.route import Route, StepCost
from shardwise.plan.step import Step
from shardwise.text import human_bytes

__all__ = ["draw_route"]

TOP = 96.0
SIDE = 150.0
A_LINE = 4  # layouts in a line


def draw_route(route: Route) -> Canvas:
    """The picture of a route: every layout, and every step between."""
    canvas = Canvas()
    canvas.text(24, 34, f"{route.source} → {route.target.layout}", 17, kind="ink mono", weight=600)
    many = "1 collective" if route.collectives == 1 else f"{route.collectives} collectives"
    total = f"{many} · {human_bytes(route.received)} received by a rank · {human_bytes(route.peak_bytes)} peak memory"
    canvas.text(24, 58, total if route.steps else "nothing to do: the layouts are the same", 13, kind="soft")
    right, bottom = _draw_state(canvas, route.source, 24, TOP)
    top = TOP
    for number, (step, cost) in enumerate(zip(route.steps, route.costs, strict=True), start=1):
        if number % A_LINE == 0:
            right, top = 0.0, bottom + 50
        right = _draw_step(canvas, step, cost, right + 12, top + 110)
        right, low = _draw_state(canvas, step.after, right + 12, top)
        bottom = max(bottom, low)
    return canvas


def _draw_state(canvas: Canvas, spec: DTensorSpec, x: float, y: float) -> tuple[float, float]:
    canvas.text(x, y, spec.layout, 13, kind="ink mono", weight=600)
    canvas.text(x, y + 18, f"{human_bytes(spec.local_bytes)} a rank", 11.5, kind="soft")
    end = x + text_width(spec.layout, 13)
    face = face_of(spec)
    if 0 in spec.shape:
        return end, y + 40
    right, bottom = draw_face(canvas, next(face.panels()), x, y + 36, SIDE)
    if face.panel_count > 1:
        bottom += 18
        canvas.text(x, bottom, f"the first of {face.panel_count:,} slices", 11.5, kind="soft")
    return max(right, end), bottom


def _draw_step(canvas: Canvas, step: Step, cost: StepCost, x: float, y: float) -> float:
    name, _, rest = step.describe().partition(" ")
    words = [*_broken(rest), f"{human_bytes(cost.received)}" if step.collective is not None else "no bytes"]
    width = max(text_width(name, 13), *(text_width(word, 11.5) for word in words), 70) + 14
    middle = x + width / 2
    canvas.text(middle, y - 14, name, 13, anchor="middle", weight=600)
    canvas.path([(x, y), (x + width, y)], arrow=True)
    for line, word in enumerate(words):
        canvas.text(middle, y + 16 + 16 * line, word, 11.5, kind="soft", anchor="middle")
    return x + width


def _broken(words: str) -> list[str]:
    """`dim 0 over dp` split into two short lines."""
    before, over, axes = words.partition("over ")
    return [part for part in (before.strip(), (over + axes).strip()) if part]
