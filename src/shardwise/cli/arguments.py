"""The type of a command, and parsers of arguments: meshes, layouts, counts, files."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_axes, parse_spec
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError, NotationError

__all__ = ["Command", "parse_change", "parse_count", "parse_mesh", "writable"]


class Command(NamedTuple):
    """A subcommand: a summary of one line, its arguments, its function, and examples for its help."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], object]
    examples: str | None = None


def parse_mesh(text: str, device_type: str = "cpu", first: int = 0) -> DeviceMesh:
    """Parse a mesh: `dp=2,tp=4` or, without names, `2x4`. It has the dry fabric: no rank runs.

    Args:
        text: the axes and their sizes.
        device_type: "cpu" or "cuda".
        first: the lowest of its ranks.

    Example:
        >>> parse_mesh("dp=2,tp=4"), parse_mesh("2x4")
        (DeviceMesh(cpu dp=2 tp=4, dry), DeviceMesh(cpu 2 4, dry))
    """
    sizes, names = parse_axes(text)
    ranks = np.arange(first, first + math.prod(sizes)).reshape(sizes)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, fabric="dry")


def parse_change(text: str, mesh: DeviceMesh, target_mesh: DeviceMesh | None = None) -> tuple[DTensorSpec, DTensorSpec]:
    """Parse two layouts: `f32[8,32] dp:S0 -> tp:S1`. Dtype and sizes are given once, before the arrow.

    Args:
        text: a layout with dtype and sizes, an arrow, and the target layout.
        mesh: the mesh of both layouts, or of the first one.
        target_mesh: the mesh of the second one, if it is another.

    Example:
        >>> parse_change("f32[8,32] dp:S0 -> tp:S1", parse_mesh("dp=2,tp=4"))
        (f32[8,32] dp:S0 tp:R, f32[8,32] dp:R tp:S1)
    """
    before, arrow, _ = text.partition("->")
    if not arrow:
        raise NotationError.at(text, len(text), "expected '->' and the target layout")
    try:
        source = parse_spec(before, mesh)
    except NotationError as error:
        # the caret keeps its position: show the full text above it
        raise NotationError(error.problem.replace(f"\n  {before}\n", f"\n  {text}\n"), hint=error.hint) from None
    return source, parse_spec(text, target_mesh or mesh, meta=source.tensor_meta, start=len(before) + len(arrow))


def parse_count(text: str, what: str) -> int:
    """Parse a count of at least one.

    Args:
        text: the argument.
        what: the name of the counted things, for the error.

    Example:
        >>> parse_count("200", "steps")
        200
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not int(text):
        raise NotationError.at(text, 0, f"expected a number of {what}, at least 1, found {text!r}")
    return int(text)


def writable(name: str) -> str:
    """Check that a file can be written, before a long run starts.

    Args:
        name: the name of the file, which is returned.

    Example:
        >>> writable("nowhere/report.html")
        Traceback (most recent call last):
        ...
        shardwise.errors.LayoutError: cannot write nowhere/report.html: there is no folder nowhere
          hint: use a file in a writable folder
    """
    path = Path(name)
    problem = ""
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "no permission to write"
    if problem:
        raise LayoutError(f"cannot write {name}: {problem}", hint="use a file in a writable folder")
    return name
