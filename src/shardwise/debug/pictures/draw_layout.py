"""Layouts as SVG: tiles to scale, replicas as a stack behind them, Partial tiles hatched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.spec import DTensorSpec
from shardwise.debug.pictures.draw_canvas import COLOURS, Canvas, fitting, text_width
from shardwise.debug.pictures.draw_text import mesh_text, notes, panel_text
from shardwise.debug.pictures.tiles import Face, IndexRange, Panel, Tile, face_of, some

__all__ = ["draw_face", "draw_layout"]

MOST = 16  # up to this number, all index ranges of a dim are shown
FEWER = 10  # the number shown otherwise
MOST_PANELS = 6
GAP = 30  # pixels in place of omitted index ranges
STACK = 6  # pixels between stacked replicas
SIDE = 250.0  # pixels of a tensor of few blocks
LONGEST = 1100.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a dim: its index ranges, and the pixels for one index."""

    index_ranges: Sequence[IndexRange | None]
    pixels: float

    def places(self) -> list[tuple[IndexRange | None, float, float]]:
        """Each index range with its start and length in pixels."""
        found, at = [], 0.0
        for index_range in self.index_ranges:
            length = GAP if index_range is None else index_range.length * self.pixels
            found.append((index_range, at, length))
            at += length
        return found

    @property
    def length(self) -> float:
        """The length of the dim in pixels."""
        return sum(length for _, _, length in self.places())


def draw_layout(spec: DTensorSpec) -> Canvas:
    """The picture of a layout: title, panels and notes."""
    canvas = Canvas()
    canvas.text(24, 34, str(spec), 17, kind="ink mono", weight=600)
    canvas.text(24, 58, f"on {mesh_text(spec.mesh)} · {spec.mesh.size():,} ranks", 13, kind="soft")
    face = face_of(spec)
    if 0 in spec.shape:
        canvas.text(24, 88, "no elements", 13)
        return canvas
    bottom = _draw_panels(canvas, face, 24, 84)
    for note in _notes(face):
        bottom += 26
        _draw_note(canvas, 24, bottom, *note)
    return canvas


def _draw_panels(canvas: Canvas, face: Face, x: float, y: float) -> float:
    """Draw the panels, three in a line; returns the bottom edge."""
    shown = list(itertools.islice(face.panels(), MOST_PANELS))
    left, top, bottom = x, y, y
    for number, panel in enumerate(shown):
        if number and number % 3 == 0:
            left, top = x, bottom + 24
        begin = top
        if panel.fixed:
            canvas.text(left, top + 4, panel_text(panel), 13, kind="ink mono")
            begin += 22
        right, low = draw_face(canvas, panel, left, begin)
        left, bottom = right + 28, max(bottom, low)
    if face.panel_count > len(shown):
        canvas.text(x, bottom + 20, f"and {face.panel_count - len(shown):,} more slices like these", 13, kind="soft")
        bottom += 24
    return bottom


def draw_face(canvas: Canvas, panel: Panel, x: float, y: float, side: float = SIDE) -> tuple[float, float]:
    """Draw one panel with its rulers; returns its right and bottom edges."""
    face = panel.face
    across, down = _scales(panel, side)
    depth = _depth(face)
    left = x + (0 if face.row_dim is None else 18 + _ruler_width(down))
    top = y + (0 if face.column_dim is None else 40) + depth * STACK
    _draw_rulers(canvas, face, across, down, left, top, depth)
    _draw_stack(canvas, left, top, across.length, down.length, depth)
    for row, at_y, height in down.places():
        for column, at_x, width in across.places():
            if row is None or column is None:
                canvas.text(left + at_x + width / 2, top + at_y + height / 2, "⋯", 15, kind="soft", anchor="middle")
            else:
                _draw_tile(canvas, panel.tile(row, column), face, (left + at_x, top + at_y, width, height))
    return left + across.length + depth * STACK, top + down.length


def _scales(panel: Panel, side: float) -> tuple[Scale, Scale]:
    """The scales of both dims: labels fit into blocks, and the aspect ratio follows the tensor within limits."""
    face = panel.face
    columns, rows = _shown(face.columns), _shown(face.rows)
    wide, high = (sum(s.length for s in shown if s is not None) for shown in (columns, rows))
    label = max(
        len(panel.tile(row, column).holders.text)
        for row in rows[:3]
        if row is not None
        for column in (columns[0], columns[-1])
        if column is not None
    )
    shape = 1.6 if face.row_dim is None else min(2.2, max(0.45, math.sqrt(wide / max(high, 1))))
    ruler = max(len(column.text) for column in columns if column is not None)
    width = max(side * math.sqrt(shape), _least(columns, wide, max(10 + 8 * label, 8 + 6.8 * ruler)), 110)
    height = 54 if face.row_dim is None else max(side / math.sqrt(shape), _least(rows, high, 34))
    return Scale(columns, min(width, LONGEST) / max(wide, 1)), Scale(rows, min(height, LONGEST) / max(high, 1))


def _shown(index_ranges: Sequence[IndexRange]) -> list[IndexRange | None]:
    return some(index_ranges, MOST if len(index_ranges) <= MOST else FEWER)


def _least(index_ranges: Sequence[IndexRange | None], size: int, pixels: float) -> float:
    """The length of a dim at which its longest index range has `pixels` pixels."""
    return pixels * size / max(1, *(s.length for s in index_ranges if s is not None))


def _depth(face: Face) -> int:
    """The number of replicas drawn behind the front one: at most three."""
    spec = face.spec
    split = {axis for axes in spec.dim_axes for axis in axes}
    copies = math.prod(n for axis, n in enumerate(spec.mesh.shape) if axis not in split)
    return min(copies - 1, 3)


def _ruler_width(scale: Scale) -> float:
    return max(text_width(s.text, 11) for s in scale.index_ranges if s is not None) + 6


def _draw_rulers(canvas: Canvas, face: Face, across: Scale, down: Scale, left: float, top: float, depth: int) -> None:
    up = top - depth * STACK - 10
    if face.column_dim is not None:
        canvas.text(left, up - 18, f"dim {face.column_dim}", 12, kind="soft", weight=600)
        for index_range, at, length in across.places():
            if index_range is not None:
                _draw_mark(canvas, index_range, left + at, up, length)
    if face.row_dim is not None:
        name = left - _ruler_width(down) - 10
        canvas.text(
            name,
            top + down.length / 2,
            f"dim {face.row_dim}",
            12,
            kind="soft",
            anchor="middle",
            weight=600,
            turned=True,
        )
        for index_range, at, length in down.places():
            if index_range is not None and length >= 9:
                canvas.text(left - 7, top + at + length / 2, index_range.text, 11, kind="soft mono", anchor="end")


def _draw_mark(canvas: Canvas, index_range: IndexRange, x: float, y: float, length: float) -> None:
    """Draw the indices of a range, or only its start if space is short."""
    for text in (index_range.text, str(index_range.start)):
        if (size := fitting(text, length - 4, 11, 11)) and size >= 9:
            canvas.text(x + length / 2, y, text, size, kind="soft mono", anchor="middle")
            return


def _draw_stack(canvas: Canvas, x: float, y: float, width: float, height: float, depth: int) -> None:
    for level in range(depth, 0, -1):
        canvas.rect(x + level * STACK, y - level * STACK, width, height, radius=5, class_="card")
    canvas.rect(x, y, width, height, radius=5, class_="card")


def _draw_tile(canvas: Canvas, tile: Tile, face: Face, box: tuple[float, float, float, float]) -> None:
    x, y, width, height = box
    colour, opacity = _colour(face, tile)
    label, holders = tile.holders.text, tile.holders
    where = ", ".join(
        index_range.text
        for dim, index_range in ((face.row_dim, tile.rows), (face.column_dim, tile.columns))
        if dim is not None
    )
    who = "rank" if len(holders.ranks) == 1 else "ranks"
    canvas.rect(
        x, y, width, height, radius=3, title=f"{who} {label}" + (f": [{where}]" if where else ""),
        class_="tile", fill=colour, stroke=colour, fill_opacity=f"{opacity:.2f}", stroke_width="1.2",
        data_ranks=",".join(map(str, holders.ranks[:64])),
    )  # fmt: skip
    if holders.reduce_op is not None:
        canvas.rect(x, y, width, height, radius=3, fill="url(#hatch)", pointer_events="none")
    if size := fitting(label, width - 6, height - 4):
        canvas.text(x + width / 2, y + height / 2, label, size, anchor="middle", weight=600)
    elif size := fitting(label, height - 6, width - 2):
        canvas.text(x + width / 2, y + height / 2, label, size, anchor="middle", weight=600, turned=True)


def _colour(face: Face, tile: Tile) -> tuple[str, float]:
    """The colour of a tile: a hue for each block along the first sharded dim, a shade along the other."""
    rows, columns = _index(face, tile.rows, face.row_dim), _index(face, tile.columns, face.column_dim)
    if rows[1] == 1:
        rows, columns = columns, (0, 1)
    hue = COLOURS[rows[0] % len(COLOURS)]
    return hue, 0.24 if columns[1] == 1 else 0.16 + 0.42 * (columns[0] / max(1, columns[1] - 1))


def _index(face: Face, index_range: IndexRange, dim: int | None) -> tuple[int, int]:
    """The shard index of an index range and the number of shards; strided parts of one rank have one index."""
    if dim is None or not face.spec.dim_axes[dim]:
        return 0, 1
    sizes = [face.spec.mesh.shape[axis] for axis in face.spec.dim_axes[dim]]
    index = 0
    for size, position in zip(sizes, index_range.owner, strict=True):
        index = index * size + position
    return index, math.prod(sizes)


def _notes(face: Face) -> list[tuple[str, str]]:
    """The notes below the picture, each with its sign."""
    signs = {"partial": "hatch", "replicated": "stack"}
    found = [(signs.get(note.split()[0], "none"), note) for note in notes(face)]
    hidden = [n for n in (len(face.rows), len(face.columns)) if n > MOST]
    if hidden:
        total = len(face.rows) * len(face.columns)
        found.append(
            ("none", f"{len(face.rows):,} x {len(face.columns):,} = {total:,} blocks, the first and last shown")
        )
    return found


def _draw_note(canvas: Canvas, x: float, y: float, sign: str, words: str) -> None:
    if sign == "hatch":
        canvas.rect(x, y - 7, 18, 14, radius=3, class_="chip")
        canvas.rect(x, y - 7, 18, 14, radius=3, fill="url(#hatch)")
    elif sign == "stack":
        canvas.rect(x + 4, y - 8, 14, 11, radius=2, class_="card")
        canvas.rect(x, y - 4, 14, 11, radius=2, class_="card")
    else:
        canvas.text(x + 9, y, "·", 16, kind="soft", anchor="middle")
    canvas.text(x + 28, y, words, 12.5, kind="soft")
