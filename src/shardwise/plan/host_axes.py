"""Mesh axes that cross hosts, split in two: hosts, and the ranks of a host. Routes over both use the fast links first.

A mesh with one axis over all ranks has no axis inside a host, so that no route could reduce there before it crosses
the slower links. On the split mesh the planner finds such routes as on any other mesh of unequal links.
"""

from __future__ import annotations

from functools import lru_cache

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec
from shardwise.plan.cost import HostLinks

__all__ = ["SplitMesh", "on_split_mesh", "split_by_hosts"]

EXACT = ("sum", "avg", "min", "max", "product")  # reductions of reductions are the reduction


class SplitMesh:
    """A mesh whose axes are parts of those of another one.

    Args:
        mesh: the split mesh.
        parts: for each axis of the other mesh, the axes of the split one, major first.
    """

    __slots__ = ("mesh", "parts")

    def __init__(self, mesh: DeviceMesh, parts: tuple[tuple[int, ...], ...]) -> None:
        self.mesh, self.parts = mesh, parts


@lru_cache(maxsize=256)
def split_by_hosts(mesh: DeviceMesh, hosts: HostLinks) -> SplitMesh | None:
    """The mesh with every axis split that has several ranks of several hosts; None if there is no such axis.

    Example:
        >>> from shardwise.plan.cost import Link
        >>> hosts = HostLinks(4, Link(0, 1), Link(0, 2), Link(0, 2))
        >>> split = split_by_hosts(DeviceMesh("cpu", range(8), mesh_dim_names=("dp",)), hosts)
        >>> split.mesh, split.parts
        (DeviceMesh(cpu dp.hosts=2 dp.ranks=4, virtual), ((0, 1),))
    """
    grid, axes, names = list(mesh.grid_shape), list(mesh.axes), [mesh.axis_name(a) for a in range(mesh.ndim)]
    parts: list[tuple[int, ...]] = [(axis,) for axis in range(mesh.ndim)]
    for axis in reversed(range(mesh.ndim)):
        inside = _ranks_inside(mesh, axis, hosts) if len(mesh.axes[axis]) == 1 else 1
        if inside in (1, mesh.shape[axis]):
            continue
        (at,) = mesh.axes[axis]
        grid[at : at + 1] = [mesh.shape[axis] // inside, inside]
        axes = [tuple([g + (g > at) for g in own]) for own in axes]
        axes[axis : axis + 1] = [(at,), (at + 1,)]
        names[axis : axis + 1] = [f"{names[axis]}.hosts", f"{names[axis]}.ranks"]
        parts = [*parts[:axis], (axis, axis + 1), *[tuple([a + 1 for a in own]) for own in parts[axis + 1 :]]]
    if len(names) == mesh.ndim:
        return None
    return SplitMesh(mesh._over(tuple(grid), tuple(axes), tuple(names)), tuple(parts))


def _ranks_inside(mesh: DeviceMesh, axis: int, hosts: HostLinks) -> int:
    """The largest number of neighbours along an axis that are always on one host."""
    size = mesh.shape[axis]
    lines = hosts.hosts(mesh)[mesh.groups((axis,))]
    for inside in range(size, 1, -1):
        if size % inside == 0:
            blocks = lines.reshape(-1, inside)
            if (blocks == blocks[:, :1]).all():
                return inside
    return 1


def on_split_mesh(spec: DTensorSpec, split: SplitMesh) -> DTensorSpec | None:
    """The same local tensors as a layout on the split mesh; None if it has no such layout, as with uneven shards."""
    if spec.broadcast or spec.is_strided or spec.tensor_meta.is_symbolic or 0 in spec.shape:
        return None
    placements: list[Placement] = []
    for placement, parts in zip(spec.placements, split.parts, strict=True):
        if len(parts) > 1 and not (
            type(placement) in (Replicate, Shard) or (type(placement) is Partial and placement.reduce_op in EXACT)
        ):
            return None
        placements += [placement] * len(parts)
    dims: list[tuple[int, ...]] = []
    for size, axes in zip(spec.shape, spec.dim_axes, strict=True):
        count = 1
        for axis in axes:
            count *= spec.mesh.shape[axis]
        if size % count and any(len(split.parts[axis]) > 1 for axis in axes):
            return None
        dims.append(tuple([part for axis in axes for part in split.parts[axis]]))
    return DTensorSpec.from_dim_axes(split.mesh, tuple(placements), spec.tensor_meta, dims)
