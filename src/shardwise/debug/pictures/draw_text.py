"""visualize_sharding: a layout as a picture of characters, 80 columns wide."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.debug.pictures.tiles import Face, IndexRange, Panel, face_of, ranks_text, some
from shardwise.errors import LayoutError
from shardwise.local import coordinates_here
from shardwise.tensor import DTensor

__all__ = ["picture_text", "visualize_sharding"]

WIDTH = 80
MOST_ROWS = 12
MOST_COLUMNS = 9
MOST_PANELS = 4
HEIGHT = 12  # lines of one panel, if its rows fit


def visualize_sharding(dtensor: Any, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which block of a DTensor; on process groups, the first rank of the mesh prints.

    Blocks are to scale, as far as characters allow. Of a tensor with more than two dims the picture shows the sharded
    dims; if more than two are sharded, as slices.

    Args:
        dtensor: the tensor, or its spec.
        header: a line to print above the picture.
        use_rich: colour each block.

    Example:
        >>> import torch, shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> x = sw.distribute_tensor(torch.zeros(3, 8), mesh, [sw.Shard(0), sw.Replicate()])
        >>> visualize_sharding(x)
        f32[3,8] dp:S0 tp:R on dp=2 tp=2
                dim 1
                          0:8
        dim 0  ┌────────────────────────┐
               │                        │
           0:2 │          0,1           │
               │                        │
               ├────────────────────────┤
           2:3 │          2,3           │
               └────────────────────────┘
        replicated over tp: 2 replicas of each block
    """
    spec = dtensor._spec if isinstance(dtensor, DTensor) else dtensor
    if not isinstance(spec, DTensorSpec):
        raise LayoutError(
            f"visualize_sharding draws DTensors, not a {type(dtensor).__name__}",
            hint="distribute_tensor(tensor, mesh, placements) makes a DTensor from a plain tensor",
        )
    if (0,) * spec.mesh.ndim not in coordinates_here(spec.mesh):
        return
    if use_rich:
        _print_rich(spec, header)
        return
    print("\n".join(([header] if header else []) + picture_text(spec)))


def picture_text(spec: DTensorSpec, width: int = WIDTH) -> list[str]:
    """The lines of the picture: a title, the panels, and notes.

    Example:
        >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3], fabric="dry")
        >>> from shardwise.core.notation import parse_spec
        >>> print("\\n".join(picture_text(parse_spec("f32[5] S0", mesh))))
        f32[5] S0 on 4
             dim 0
              0:2         2:4      4:5
          ┌──────────┬──────────┬─────┐
          │    0     │    1     │  2  │
          └──────────┴──────────┴─────┘
        rank 3 has no elements
    """
    face = face_of(spec)
    lines = [f"{spec} on {mesh_text(spec.mesh)}"]
    if 0 in spec.shape:
        return [*lines, "no elements"]
    for panel in itertools.islice(face.panels(), MOST_PANELS):
        if panel.fixed:
            lines += ["", panel_text(panel)]
        lines += _panel_lines(panel, width)
    left_out = face.panel_count - MOST_PANELS
    if left_out > 0:
        lines += ["", f"... and {left_out:,} more slices like these"]
    return [part for line in (*lines, *notes(face)) for part in _wrapped(line, width)]


def _wrapped(line: str, width: int) -> list[str]:
    return [line] if len(line) <= width else textwrap.wrap(line, width, subsequent_indent="  ")


def mesh_text(mesh: DeviceMesh) -> str:
    """The axes of a mesh: `dp=2 tp=2`; for a slice also the number of slices."""
    axes = " ".join(f"{mesh.axis_name(a)}={n}" if mesh.mesh_dim_names else str(n) for a, n in enumerate(mesh.shape))
    slices = mesh.grid_size // mesh.size()
    return axes if slices == 1 else f"{axes}, the first of {slices} slices"


def panel_text(panel: Panel) -> str:
    """The slice of the tensor in a panel, as a Python index: `[0:2, :, :]`."""
    fixed = dict(panel.fixed)
    return "[" + ", ".join(fixed[dim].text if dim in fixed else ":" for dim in range(panel.face.spec.ndim)) + "]"


def notes(face: Face) -> list[str]:
    """Notes below a picture: its marks, and ranks without elements."""
    spec, mesh = face.spec, face.spec.mesh
    holders = next(face.panels()).tile(face.rows[0], face.columns[0]).holders
    found = []
    if holders.reduce_op is not None:
        how = {"sum": "the sum", "mask": "the sum (at most one rank is nonzero)"}
        by = how.get(holders.reduce_op, f"the {holders.reduce_op}")
        found.append(f"partial over {_axis_names(mesh, spec.partial_axes)}: a block is {by} of its ranks' local values")
    split = {axis for axes in spec.dim_axes for axis in axes}
    copies = [axis for axis in range(mesh.ndim) if axis not in split and axis not in spec.partial_axes]
    copies = [axis for axis in copies if mesh.shape[axis] > 1]
    if copies:
        found.append(f"replicated over {_axis_names(mesh, copies)}: {len(holders.groups):,} replicas of each block")
    if (idle := face.idle_ranks) and 0 not in spec.shape:
        subject = f"rank {idle[0]} has" if len(idle) == 1 else f"ranks {ranks_text(idle)} have"
        found.append(f"{subject} no elements")
    return found


def _axis_names(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    return ", ".join(mesh.axis_name(axis) if mesh.mesh_dim_names else f"axis {axis}" for axis in axes)


# ---------------------------------------------------------------- one panel


def _panel_lines(panel: Panel, width: int) -> list[str]:
    face = panel.face
    rows = some(face.rows, MOST_ROWS)
    margin = 2 if face.row_dim is None else max(7, *(len(row.text) + 2 for row in rows if row is not None))
    most, room = MOST_COLUMNS, width - margin - 1
    columns, labels, widths = _columns(panel, rows, most, room)
    while sum(widths) + len(widths) > room and most > 3:
        most -= 1
        columns, labels, widths = _columns(panel, rows, most, room)
    legend: list[str] = []
    if sum(widths) + len(widths) > room:
        labels, legend = _lettered(labels)
        widths = _widths(columns, labels, room)
    return _table(face, rows, columns, labels, widths, margin) + legend


def _columns(
    panel: Panel, rows: Sequence[IndexRange | None], most: int, room: int
) -> tuple[list[IndexRange | None], list[list[str]], list[int]]:
    """At most `most` columns, their labels, and their widths."""
    columns = some(panel.face.columns, most)
    labels = [[_label(panel, row, column) for column in columns] for row in rows]
    return columns, labels, _widths(columns, labels, room)


def _label(panel: Panel, row: IndexRange | None, column: IndexRange | None) -> str:
    return "⋯" if row is None or column is None else panel.tile(row, column).holders.text


def _lettered(labels: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Letters in place of labels that are too long, and the lines of a legend."""
    letters: dict[str, str] = {}
    for label in itertools.chain.from_iterable(labels):
        if label != "⋯" and label not in letters:
            letters[label] = chr(ord("A") + len(letters) % 26) + (str(len(letters) // 26) if len(letters) > 25 else "")
    short = [[letters.get(label, label) for label in line] for line in labels]
    return short, [f"{letter}: {label}" for label, letter in letters.items()]


def _widths(columns: Sequence[IndexRange | None], labels: Sequence[Sequence[str]], width: int) -> list[int]:
    """The width of each column: proportional to its index range, at least the width of its labels."""
    needed = [
        max([len(column.text) if column is not None else 1, *(len(line[i]) for line in labels)]) + 2
        for i, column in enumerate(columns)
    ]
    total = sum(column.length for column in columns if column is not None)
    goal = min(max(24, *(n * total // max(c.length, 1) for n, c in zip(needed, columns, strict=True) if c)), 56, width)
    return [
        need if column is None else max(need, round(goal * column.length / max(total, 1)))
        for need, column in zip(needed, columns, strict=True)
    ]


def _heights(rows: Sequence[IndexRange | None]) -> list[int]:
    """The height of each row in lines: odd, so that labels can be centred."""
    lengths = [row.length for row in rows if row is not None]
    longest, many = max(lengths), len(rows) > HEIGHT // 3
    return [1 if row is None or many or len(rows) == 1 or 2 * row.length <= longest else 3 for row in rows]


def _table(
    face: Face,
    rows: Sequence[IndexRange | None],
    columns: Sequence[IndexRange | None],
    labels: Sequence[Sequence[str]],
    widths: Sequence[int],
    margin: int,
) -> list[str]:
    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for width in widths) + right

    lines = []
    if face.column_dim is not None:
        heads = [("" if column is None else column.text).center(n) for column, n in zip(columns, widths, strict=True)]
        lines += [" " * (margin + 1) + f"dim {face.column_dim}", " " * (margin + 1) + " ".join(heads)]
    corner = f"dim {face.row_dim}" if face.row_dim is not None else ""
    lines.append(corner.ljust(margin) + rule("┌", "┬", "┐"))
    for at, (row, height) in enumerate(zip(rows, _heights(rows), strict=True)):
        if at:
            lines.append(" " * margin + rule("├", "┼", "┤"))
        name = "" if row is None or face.row_dim is None else f"{row.text} "
        for line in range(height):
            middle = line == height // 2
            cells = [label.center(n) if middle else " " * n for label, n in zip(labels[at], widths, strict=True)]
            lines.append((name if middle else "").rjust(margin) + "│" + "│".join(cells) + "│")
    lines.append(" " * margin + rule("└", "┴", "┘"))
    return [line.rstrip() for line in lines]


# ---------------------------------------------------------------- colours


def _print_rich(spec: DTensorSpec, header: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=WIDTH, highlight=False)
    if header:
        console.print(Text(header, "bold"))
    for number, line in enumerate(picture_text(spec)):
        text = Text(line, "bold" if number == 0 else "")
        if "│" in line:
            _colour_cells(text, line)
        console.print(text)


_COLOURS = ("black on cyan", "black on magenta", "black on green", "black on yellow", "white on blue", "white on red")


def _colour_cells(text: Any, line: str) -> None:
    """Colour each cell of a line by its label."""
    walls = [at for at, character in enumerate(line) if character == "│"]
    for left, right in itertools.pairwise(walls):
        label = line[left + 1 : right].strip()
        if label and label != "⋯":
            text.stylize(_COLOURS[sum(map(ord, label)) % len(_COLOURS)], left + 1, right)
