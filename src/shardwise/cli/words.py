"""What people write on the command line, read into what the library means: meshes, layouts."""

from __future__ import annotations

import math
import re

import numpy as np

from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.spec import DTensorSpec
from shardwise.errors import NotationError

__all__ = ["parse_change", "parse_mesh"]

MOST_RANKS = 2**20


def parse_mesh(text: str, device_type: str = "cpu") -> DeviceMesh:
    """The mesh that `dp=2,tp=4` or, without names, `2x4` describes. It is of the dry fabric: no rank runs.

    Args:
        text: the axes with their sizes.
        device_type: "cpu" or "cuda".

    Example:
        >>> parse_mesh("dp=2,tp=4"), parse_mesh("2x4")
        (DeviceMesh(cpu dp=2 tp=4, dry), DeviceMesh(cpu 2 4, dry))
    """
    named = "=" in text
    names: list[str] = []
    sizes: list[int] = []
    at = 0
    for part in text.split("," if named else "x"):
        name, equals, size = part.partition("=") if named else ("", "", part)
        where = at + len(part) - len(part.lstrip())
        if named and (not equals or not name.strip().isidentifier()):
            raise NotationError.at(text, where, f"expected an axis such as dp=2, found {part.strip()!r}")
        if name.strip() in names:
            raise NotationError.at(text, where, f"axis {name.strip()} is named twice")
        value = at + len(name) + len(equals) + len(size) - len(size.lstrip())
        if not re.fullmatch(r"[0-9]{1,9}", size.strip()) or not int(size):
            problem = f"expected a number of ranks, found {size.strip()!r}"
            raise NotationError.at(text, value, problem, hint="a mesh is written dp=2,tp=4 or, without names, 2x4")
        sizes.append(int(size))
        if math.prod(sizes) > MOST_RANKS:
            raise NotationError.at(text, value, f"a mesh of more than {MOST_RANKS:,} ranks")
        names += [name.strip()] if named else []
        at += len(part) + 1
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names or None, fabric="dry")


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
