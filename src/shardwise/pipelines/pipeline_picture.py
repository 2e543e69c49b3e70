"""The picture of a schedule: a row for each stage, a box for each forward and backward of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.debug.pictures.draw_canvas import COLOURS, Canvas, fitting
from shardwise.debug.pictures.draw_svg import Drawing
from shardwise.pipelines.pipeline_timeline import Timeline
from shardwise.text import human_bytes

__all__ = ["draw_pipeline"]

LEFT, TOP, WIDTH = 150.0, 96.0, 960.0
ROW, GAP = 30.0, 8.0
KINDS = {
    "F": ("forward", COLOURS[0]),
    "B": ("backward", COLOURS[1]),
    "I": ("gradients of inputs", COLOURS[1]),
    "W": ("gradients of weights", COLOURS[3]),
}


def draw_pipeline(timeline: Timeline, peak_bytes: Mapping[int, int] | None = None) -> Drawing:
    """The actions of each stage over time; stages of one rank are next to each other.

    Args:
        timeline: when actions run.
        peak_bytes: the peak memory of each stage, to be written beside it.

    Example:
        >>> from shardwise.pipelines.pipeline_tables import pipeline_table
        >>> from shardwise.pipelines.pipeline_timeline import timeline_of
        >>> draw_pipeline(timeline_of(pipeline_table("1f1b", 2, 4))).svg.count("<title>stage")
        16
    """
    canvas = Canvas()
    stages = {span.action.stage: rank for rank, spans in enumerate(timeline.ranks) for span in spans}
    count = 1 + max(span.action.microbatch for spans in timeline.ranks for span in spans)
    canvas.text(24, 34, f"{len(stages)} stages on {len(timeline.ranks)} ranks, {count} microbatches", 17, weight=600)
    canvas.text(24, 58, f"{timeline.seconds:.4g} s, ranks idle {timeline.bubble:.1%} of it", 13, kind="soft")
    scale = WIDTH / timeline.seconds
    y, rank_before = TOP, None
    for stage, rank in sorted(stages.items(), key=lambda found: (found[1], found[0])):
        y += GAP if rank_before not in (None, rank) else 0.0
        rank_before = rank
        canvas.text(24, y + ROW / 2 - 6, f"stage {stage}", 12.5, kind="ink mono")
        memory = "" if peak_bytes is None else f", {human_bytes(peak_bytes[stage])}"
        canvas.text(24, y + ROW / 2 + 8, f"rank {rank}{memory}", 11, kind="soft")
        canvas.rect(LEFT, y, WIDTH, ROW, radius=3, class_="chip")
        for action, start, stop in timeline.ranks[rank]:
            if action.stage == stage:
                _draw_box(
                    canvas, action, LEFT + start * scale, y, (stop - start) * scale, f"{start:.4g} to {stop:.4g} s"
                )
        y += ROW + 3
    used = {span.action.kind for spans in timeline.ranks for span in spans}
    x = LEFT
    for kind in (kind for kind in KINDS if kind in used):
        name, colour = KINDS[kind]
        canvas.rect(x, y + 10, 12, 12, radius=3, class_="key", fill=colour, fill_opacity="0.75")
        canvas.text(x + 18, y + 16, name, 11.5, kind="soft")
        x += 48 + 6.6 * len(name)
    return Drawing(canvas.svg("a pipeline"))


def _draw_box(canvas: Canvas, action: tuple[str, int, int], x: float, y: float, width: float, when: str) -> None:
    kind, stage, microbatch = action
    name, colour = KINDS[kind]
    canvas.rect(
        x, y, max(width - 1, 0.5), ROW, radius=2, title=f"stage {stage}, microbatch {microbatch}: {name}, {when}",
        fill=colour, fill_opacity="0.75",
    )  # fmt: skip
    size = fitting(str(microbatch), width - 2, ROW, 12)
    if size is not None:
        canvas.text(x + width / 2, y + ROW / 2, str(microbatch), size, anchor="middle")
