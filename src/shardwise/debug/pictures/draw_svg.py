"""draw: a layout, a route, a mesh or a captured program as an SVG, for notebooks, pages and slides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.spec import DTensorSpec
from shardwise.debug.pictures.draw_layout import draw_layout
from shardwise.debug.pictures.draw_mesh import draw_mesh
from shardwise.debug.pictures.draw_route import draw_route
from shardwise.debug.pictures.draw_timeline import Timeline, draw_timeline
from shardwise.errors import LayoutError
from shardwise.fabric.world import as_mesh
from shardwise.plan.route import Route
from shardwise.tensor import DTensor

__all__ = ["Drawing", "draw"]


class Drawing:
    """An SVG picture; notebooks display it.

    Args:
        svg: the SVG document.

    Example:
        >>> import shardwise as sw
        >>> sw.draw(sw.init_device_mesh("cpu", (2,))).svg[:4]
        '<svg'
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Drawing({len(self.svg):,} characters of SVG)"


def draw(what: Any, *, mesh: Any = None) -> Drawing:
    """An SVG of a layout (which rank holds which block), a route between two layouts, a mesh, or a captured program.

    Blocks are to scale along each dim. Replicas are drawn as a stack, Partial blocks are hatched. Of many ranks only
    the first and last are drawn. The picture is self-contained and follows the reader's light or dark setting.

    Args:
        what: a DTensor, a `DTensorSpec`, its short notation, a `Route`, a mesh, or a captured function, whose
            last program is drawn over time.
        mesh: the mesh of a spec in short notation.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> picture = sw.draw("f32[10,7] dp:S0 tp:S1", mesh=mesh)
        >>> picture.svg.count('class="tile"')
        4
    """
    if isinstance(what, str):
        if mesh is None:
            raise LayoutError(f"draw({what!r}) needs a mesh", hint="draw(text, mesh=mesh)")
        what = parse_spec(what, as_mesh(mesh))
    match what:
        case DTensor():
            return Drawing(draw_layout(what._spec).svg(str(what._spec)))
        case DTensorSpec():
            return Drawing(draw_layout(what).svg(str(what)))
        case Route():
            return Drawing(draw_route(what).svg(str(what)))
        case DeviceMesh():
            return Drawing(draw_mesh(what).svg(str(what)))
        case Timeline():
            return Drawing(draw_timeline(what).svg(what.title))
    if getattr(type(what), "is_captured", False):
        return draw(what.timeline())
    if hasattr(what, "mesh_dim_names"):  # torch's DeviceMesh
        return draw(as_mesh(what))
    raise LayoutError(
        f"draw does not support {type(what).__name__}",
        hint="pass a DTensor, a DTensorSpec, 'f32[8,4] dp:S0' with mesh=, a Route, a mesh or a captured function",
    )
