"""`shardwise draw`: which rank holds which block of a tensor, in the terminal or as an SVG file."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli.arguments import Command, parse_change, parse_mesh, writable
from shardwise.core.notation import parse_spec
from shardwise.core.spec import DTensorSpec, dtype_name
from shardwise.debug.pictures.draw_svg import draw
from shardwise.debug.pictures.draw_text import visualize_sharding
from shardwise.errors import LayoutError
from shardwise.plan.route import DTensorRedistributePlanner

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `draw`."""
    parser.add_argument("layout", nargs="?", help="'DTYPE[SIZES] LAYOUT [-> LAYOUT]'; without it, the mesh is drawn")
    parser.add_argument("--mesh", required=True, help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    parser.add_argument("--svg", metavar="FILE", help="write an SVG instead of printing")
    parser.add_argument("--color", action="store_true", help="print in colour")
    parser.add_argument("--json", action="store_true", help="print the indices of each rank as JSON")


def run_draw(arguments: argparse.Namespace) -> None:
    """Print the picture, or write it to a file."""
    mesh = parse_mesh(arguments.mesh)
    if arguments.layout is None:
        what = mesh
    elif "->" in arguments.layout:
        what = DTensorRedistributePlanner().plan(*parse_change(arguments.layout, mesh))
    else:
        what = parse_spec(arguments.layout, mesh)
    if arguments.json:
        if not isinstance(what, DTensorSpec):
            raise LayoutError(
                "--json supports one layout only", hint="for a route between two layouts: shardwise plan --json"
            )
        print(json.dumps(layout_as_json(what), indent=2))
        return
    if arguments.svg is not None:
        draw(what).save(writable(arguments.svg))
        return
    if "->" in (arguments.layout or "->"):
        raise LayoutError("routes and meshes are drawn as SVG only", hint="add --svg FILE")
    visualize_sharding(what, use_rich=arguments.color)


def layout_as_json(spec: DTensorSpec) -> dict[str, Any]:
    """The output of `draw --json`. Keys are stable; new ones may be added."""
    mesh = spec.mesh
    return {
        "mesh": {"axes": [mesh.axis_name(axis) for axis in range(mesh.ndim)], "shape": list(mesh.shape)},
        "tensor": {"dtype": dtype_name(spec.tensor_meta.dtype), "shape": list(spec.shape)},
        "layout": spec.layout,
        "ranks": [
            {
                "rank": rank,
                "coordinate": list(coordinate),
                "shape": list(spec.local_shape(coordinate)),
                "holds": [  # for each dim a list of [start, end], one for each run
                    [[start, start + length] for start, length in spec.runs(dim, coordinate) if length]
                    for dim in range(spec.ndim)
                ],
            }
            for rank, coordinate in enumerate(map(tuple, mesh.coordinates.tolist()))
        ],
    }


COMMAND = Command(
    "draw which rank holds which block of a tensor",
    add_arguments,
    run_draw,
    """examples:
  shardwise draw "f32[10,7] dp:S0 tp:S1" --mesh dp=2,tp=2
  shardwise draw "f32[10,7] dp:S0 tp:S1" --mesh dp=2,tp=2 --svg layout.svg
  shardwise draw "f32[10,7] dp:S0 tp:S1" --mesh dp=2,tp=2 --json
  shardwise draw "f32[10,7] dp:S0 -> tp:S1" --mesh dp=2,tp=2 --svg route.svg
  shardwise draw --mesh dp=2,tp=2 --svg mesh.svg""",
)
