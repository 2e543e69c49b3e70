"""The turns of a ring as SVG: which scores each rank computes in a turn, and from whom its keys and values come."""

from __future__ import annotations

from typing import Any

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.debug.pictures.draw_canvas import COLOURS, Canvas
from shardwise.debug.pictures.draw_svg import Drawing
from shardwise.errors import LayoutError
from shardwise.plan.sequence_attention import Pairs, ring_pairs
from shardwise.rules.attention_blocks import SEQUENCE, ScoreTile
from shardwise.tensor import DTensor

__all__ = ["draw_ring"]

SIDE, GAP, TOP, LEFT = 150.0, 34.0, 118.0, 44.0
A_LINE = 4  # turns in a line
MOST = 64  # the most positions of a ring in one picture


def draw_ring(what: Any, *, causal: bool = True) -> Drawing:
    """An SVG of a ring of attention over a sharded sequence: the scores that each rank computes in each turn.

    Rows are queries and columns are keys, both in the order of the tokens. Colours are positions in the ring. Below is
    how many scores the busiest rank computes, relative to the average.

    Args:
        what: queries as a DTensor, or its `DTensorSpec`: (batch, heads, tokens, width), with the tokens sharded.
        causal: whether queries see only the keys up to their own position.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        >>> q = sw.zeros(1, 2, 32, 8, device_mesh=mesh, placements=[sw.Zigzag(2)])
        >>> sw.debug.draw_ring(q).svg[:4]
        '<svg'
    """
    spec = what.spec if isinstance(what, DTensor) else what
    if not isinstance(spec, DTensorSpec) or spec.ndim != 4 or not spec.dim_axes[SEQUENCE]:
        raise LayoutError(
            "draw_ring draws queries whose tokens are sharded: (batch, heads, tokens, width)",
            hint="pass a DTensor or a DTensorSpec of four dims with Shard(2) or Zigzag(2)",
        )
    pairs = ring_pairs(spec, spec, causal, masked=False)
    if pairs.count > MOST or spec.shape[SEQUENCE] == 0:
        raise LayoutError(
            f"draw_ring: a ring of {pairs.count} ranks is too large for a picture", hint=f"draw at most {MOST} ranks"
        )
    return Drawing(_picture(spec, pairs).svg(f"a ring of {spec}"))


def _picture(spec: DTensorSpec, pairs: Pairs) -> Canvas:
    canvas = Canvas()
    canvas.text(24, 34, str(spec), 17, kind="ink mono", weight=600)
    kind = "causal attention" if pairs.causal else "attention"
    canvas.text(24, 58, f"{kind} in {pairs.count} turns; rows are queries, columns are keys", 13, kind="soft")
    coordinates = _ring(spec, pairs)
    _draw_legend(canvas, pairs.count)
    bottom, work = TOP, [0.0] * pairs.count
    for turn in range(pairs.count):
        x = LEFT + turn % A_LINE * (SIDE + GAP)
        y = TOP + turn // A_LINE * (SIDE + 74)
        origin = "its own keys" if turn == 0 else f"keys from {turn} before"
        canvas.text(x, y - 8, f"turn {turn}", 13, weight=600)
        canvas.text(x + 48, y - 8, origin, 11.5, kind="soft")
        canvas.rect(x, y + 8, SIDE, SIDE, class_="card", stroke_width="1")
        for position, coordinate in enumerate(coordinates):
            work[position] += _draw_scores(canvas, spec, pairs, position, coordinate, turn, (x, y + 8))
        bottom = max(bottom, y + 8 + SIDE)
    share = max(work) * pairs.count / sum(work)
    canvas.text(LEFT, bottom + 24, f"the busiest rank computes {share:.2f} times the average", 13)
    return canvas


def _ring(spec: DTensorSpec, pairs: Pairs) -> list[tuple[int, ...]]:
    mesh: DeviceMesh = spec.mesh
    return [tuple(at) for at in mesh.coordinates[mesh.group_through(pairs.over, 0)].tolist()]


def _draw_legend(canvas: Canvas, count: int) -> None:
    x = LEFT
    for position in range(min(count, 16)):
        canvas.rect(x, 74, 14, 14, radius=3, fill=_colour(position), fill_opacity="0.75")
        canvas.text(x + 19, 81, str(position), 11.5, kind="soft")
        x += 42
    if count > 16:
        canvas.text(x, 81, "⋯", 13, kind="soft")


def _draw_scores(
    canvas: Canvas,
    spec: DTensorSpec,
    pairs: Pairs,
    position: int,
    coordinate: tuple[int, ...],
    turn: int,
    at: tuple[float, float],
) -> float:
    """Draw the scores that a rank computes in a turn; returns their number."""
    block, length, scores = (position - turn) % pairs.count, spec.shape[SEQUENCE], 0.0
    scale = SIDE / length
    for queries, keys, tile in pairs.pieces(coordinate, block):
        row, column = queries.start + tile.row, keys.start + tile.column
        title = f"rank {position}: queries {row}:{row + tile.rows}, keys {column}:{column + tile.columns}"
        corners = [(0, 0), (tile.columns, tile.rows), (0, tile.rows)] if tile.causal else _corners(tile)
        points = [(at[0] + (column + right) * scale, at[1] + (row + down) * scale) for right, down in corners]
        canvas.area(points, title=title, class_="tile", fill=_colour(position), fill_opacity="0.75")
        scores += tile.rows * (tile.columns + 1) / 2 if tile.causal else tile.rows * tile.columns
    return scores


def _corners(tile: ScoreTile) -> list[tuple[int, int]]:
    return [(0, 0), (tile.columns, 0), (tile.columns, tile.rows), (0, tile.rows)]


def _colour(position: int) -> str:
    return COLOURS[position % len(COLOURS)]
