"""A layout as HTML, for notebooks. The values of tensors are not read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardwise.core.spec import DTensorSpec

__all__ = ["escaped", "spec_html"]

MOST_RANKS = 16


def escaped(text: str) -> str:
    """Text escaped for HTML. The module `html` would import a table of all entities.

    Example:
        >>> escaped("a < b & c")
        'a &lt; b &amp; c'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def spec_html(spec: DTensorSpec, text: str) -> str:
    """The layout, the indices of each rank, and `text` in a section that can be unfolded.

    Args:
        spec: the layout.
        text: the printed form of the tensor.

    Example:
        >>> from shardwise.core.mesh import DeviceMesh
        >>> from shardwise.core.placement import Shard
        >>> from shardwise.core.spec import TensorMeta
        >>> spec = DTensorSpec(DeviceMesh("cpu", [0, 1]), [Shard(0)], TensorMeta((3,)))
        >>> "<td>0:2</td>" in spec_html(spec, "")
        True
    """
    mesh = spec.mesh
    coordinates = list(itertools.islice(itertools.product(*map(range, mesh.shape)), MOST_RANKS))
    heading = "".join(f"<th>{escaped(mesh.axis_name(axis))}</th>" for axis in range(mesh.ndim))
    rows = "".join(f"<tr>{_cells((*map(str, c), _local_indices(spec, c)))}</tr>" for c in coordinates)
    left = mesh.size() - len(coordinates)
    more = f"<p>and {left:,} more ranks</p>" if left else ""
    return (
        f"<div><b>DTensor</b> <code>{escaped(str(spec))}</code> on <code>{escaped(str(mesh))}</code>"
        f"<table><thead><tr>{heading}<th>holds</th></tr></thead><tbody>{rows}</tbody></table>{more}"
        f"<details><summary>local values</summary><pre>{escaped(text)}</pre></details></div>"
    )


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{text}</td>" for text in texts)


def _local_indices(spec: DTensorSpec, coordinate: tuple[int, ...]) -> str:
    """The local indices of each dim: `0:4, 8:16`."""
    dims = [
        " and ".join(f"{run.start}:{run.start + run.length}" for run in runs) for runs in spec.block(coordinate).runs
    ]
    return ", ".join(dims) or "a number"
