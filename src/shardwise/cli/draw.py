"""`shardwise draw`: which rank holds which block of a tensor, in the terminal or as an SVG file."""

from __future__ import annotations

import argparse

from shardwise.cli.command import Command
from shardwise.cli.words import parse_change, parse_mesh
from shardwise.core.notation import parse_spec
from shardwise.debug.drawing import draw
from shardwise.debug.visualize import visualize_sharding
from shardwise.errors import LayoutError
from shardwise.plan.route import DTensorRedistributePlanner

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `draw`."""
    parser.add_argument("layout", nargs="?", help="'DTYPE[SIZES] LAYOUT', or two with an arrow between; none: the mesh")
    parser.add_argument("--mesh", required=True, help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    parser.add_argument("--svg", metavar="FILE", help="write an SVG instead of printing")
    parser.add_argument("--color", action="store_true", help="print in colours")


def run(arguments: argparse.Namespace) -> None:
    """Print the picture, or write it to a file."""
    mesh = parse_mesh(arguments.mesh)
    if arguments.layout is None:
        what = mesh
    elif "->" in arguments.layout:
        what = DTensorRedistributePlanner().plan(*parse_change(arguments.layout, mesh))
    else:
        what = parse_spec(arguments.layout, mesh)
    if arguments.svg is not None:
        try:
            draw(what).save(arguments.svg)
        except OSError as error:
            raise LayoutError(
                f"cannot write {arguments.svg}: {error.strerror}", hint="name a file in a folder"
            ) from None
        return
    if "->" in (arguments.layout or "->"):
        raise LayoutError("the way between layouts, and meshes, are drawn as SVG", hint="add --svg FILE")
    visualize_sharding(what, use_rich=arguments.color)


COMMAND = Command(
    "draw which rank holds which block of a tensor",
    add_arguments,
    run,
    """examples:
  shardwise draw "f32[10,7] dp:S0 tp:S1" --mesh dp=2,tp=2
  shardwise draw "f32[10,7] dp:S0 tp:S1" --mesh dp=2,tp=2 --svg layout.svg
  shardwise draw "f32[10,7] dp:S0 -> tp:S1" --mesh dp=2,tp=2 --svg route.svg
  shardwise draw --mesh dp=2,tp=2 --svg mesh.svg""",
)
