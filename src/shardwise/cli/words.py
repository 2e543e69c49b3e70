"""What people write on the command line, read into what the library means: meshes, layouts."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np

from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_axes, parse_spec
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError, NotationError

__all__ = ["parse_change", "parse_count", "parse_mesh", "writable"]


def parse_mesh(text: str, device_type: str = "cpu") -> DeviceMesh:
    """The mesh that `dp=2,tp=4` or, without names, `2x4` describes. It is of the dry fabric: no rank runs.

    Args:
        text: the axes with their sizes.
        device_type: "cpu" or "cuda".

    Example:
        >>> parse_mesh("dp=2,tp=4"), parse_mesh("2x4")
        (DeviceMesh(cpu dp=2 tp=4, dry), DeviceMesh(cpu 2 4, dry))
    """
    sizes, names = parse_axes(text)
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, fabric="dry")


def parse_change(text: str, mesh: DeviceMesh) -> tuple[DTensorSpec, DTensorSpec]:
    """The two layouts of `f32[8,32] dp:S0 -> tp:S1`. The tensor is named once, before the arrow.

    Args:
        text: a layout with dtype and sizes, an arrow, and the layout to go to.
        mesh: whose axes are meant.

    Example:
        >>> parse_change("f32[8,32] dp:S0 -> tp:S1", parse_mesh("dp=2,tp=4"))
        (f32[8,32] dp:S0 tp:R, f32[8,32] dp:R tp:S1)
    """
    before, arrow, _ = text.partition("->")
    if not arrow:
        raise NotationError.at(text, len(text), "expected '->' and the layout to go to")
    try:
        source = parse_spec(before, mesh)
    except NotationError as error:
        # the caret stands where it stood: show the whole of what was written above it
        raise NotationError(error.problem.replace(f"\n  {before}\n", f"\n  {text}\n"), hint=error.hint) from None
    return source, parse_spec(text, mesh, meta=source.tensor_meta, start=len(before) + len(arrow))


def parse_count(text: str, what: str) -> int:
    """A number of things, at least one.

    Args:
        text: what was written.
        what: of which things, for the error.

    Example:
        >>> parse_count("200", "steps")
        200
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not int(text):
        raise NotationError.at(text, 0, f"expected a number of {what}, at least 1, found {text!r}")
    return int(text)


def writable(name: str) -> str:
    """The name of a file that can be written, so that nobody works for a minute and then finds that it cannot.

    Args:
        name: of the file.

    Example:
        >>> writable("nowhere/report.html")
        Traceback (most recent call last):
        ...
        shardwise.errors.LayoutError: cannot write nowhere/report.html: there is no folder nowhere
          hint: name a file in a folder that you may write to
    """
    path = Path(name)
    problem = ""
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "it may not be written"
    if problem:
        raise LayoutError(f"cannot write {name}: {problem}", hint="name a file in a folder that you may write to")
    return name
