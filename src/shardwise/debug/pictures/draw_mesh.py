"""A mesh as SVG: a grid of ranks, the last axis to the right, the one before it down, other axes as panels."""

from __future__ import annotations

import itertools

from shardwise.core.mesh import DeviceMesh
from shardwise.debug.pictures.draw_canvas import COLOURS, Canvas, fitting
from shardwise.debug.pictures.draw_text import mesh_text
from shardwise.debug.pictures.tiles import IndexRange, mesh_ranks, some

__all__ = ["draw_mesh"]

CELL = 48.0
MOST = 16
FEWER = 10
MOST_PANELS = 6


def draw_mesh(mesh: DeviceMesh) -> Canvas:
    """The picture of a mesh."""
    canvas = Canvas()
    canvas.text(24, 34, mesh_text(mesh), 17, kind="ink mono", weight=600)
    canvas.text(24, 58, f"{mesh.grid_size:,} ranks of {mesh.device_type}", 13, kind="soft")
    outer = list(itertools.islice(itertools.product(*(range(n) for n in mesh.shape[:-2])), MOST_PANELS))
    left, top, bottom = 24.0, 84.0, 84.0
    for number, index in enumerate(outer):
        if number and number % 3 == 0:
            left, top = 24.0, bottom + 28
        right, low = _draw_panel(canvas, mesh, index, left, top)
        left, bottom = right + 30, max(bottom, low)
    panels = mesh.size() // (mesh.shape[-1] * (mesh.shape[-2] if mesh.ndim > 1 else 1))
    if panels > len(outer):
        canvas.text(24, bottom + 22, f"and {panels - len(outer):,} more like these", 13, kind="soft")
    return canvas


def _draw_panel(canvas: Canvas, mesh: DeviceMesh, index: tuple[int, ...], x: float, y: float) -> tuple[float, float]:
    if index:
        where = ", ".join(f"{_name(mesh, axis)}={i}" for axis, i in enumerate(index))
        canvas.text(x, y + 4, where, 13, kind="ink mono")
        y += 24
    ranks = mesh_ranks(mesh)[index].reshape(-1, mesh.shape[-1])
    rows, columns = (some([IndexRange(i, 1, ()) for i in range(n)], MOST if n <= MOST else FEWER) for n in ranks.shape)
    left, top = x + (26 if mesh.ndim > 1 else 0), y + 26
    _draw_axis(canvas, _name(mesh, mesh.ndim - 1), (left, y + 10), len(columns) * CELL, down=False)
    if mesh.ndim > 1:
        _draw_axis(canvas, _name(mesh, mesh.ndim - 2), (x + 8, top), len(rows) * CELL, down=True)
    for (j, row), (i, column) in itertools.product(enumerate(rows), enumerate(columns)):
        at = (left + i * CELL, top + j * CELL)
        if row is None or column is None:
            canvas.text(at[0] + CELL / 2, at[1] + CELL / 2, "⋯", 15, kind="soft", anchor="middle")
        else:
            _draw_rank(canvas, int(ranks[row.start, column.start]), row.start if mesh.ndim > 1 else 0, at)
    return left + len(columns) * CELL, top + len(rows) * CELL


def _draw_rank(canvas: Canvas, rank: int, hue: int, at: tuple[float, float]) -> None:
    colour = COLOURS[hue % len(COLOURS)]
    canvas.rect(
        at[0] + 2, at[1] + 2, CELL - 4, CELL - 4, radius=6, title=f"rank {rank}", class_="tile", fill=colour,
        stroke=colour, fill_opacity="0.24", stroke_width="1.2", data_ranks=str(rank),
    )  # fmt: skip
    size = fitting(str(rank), CELL - 10, 14) or 7
    canvas.text(at[0] + CELL / 2, at[1] + CELL / 2, str(rank), size, anchor="middle", weight=600)


def _draw_axis(canvas: Canvas, name: str, at: tuple[float, float], length: float, *, down: bool) -> None:
    """Draw an arrow along an axis, with its name at the start."""
    x, y = at
    room = 9.0 + 8 * len(name)
    if down:
        canvas.text(x, y + room / 2, name, 12, kind="soft", anchor="middle", weight=600, turned=True)
        canvas.path([(x, y + room + 2), (x, y + length - 3)], arrow=True)
    else:
        canvas.text(x + 2, y, name, 12, kind="soft", weight=600)
        canvas.path([(x + room, y), (x + length - 3, y)], arrow=True)


def _name(mesh: DeviceMesh, axis: int) -> str:
    return mesh.axis_name(axis) if mesh.mesh_dim_names else f"axis {axis}"
