"""The data axes of a mesh: the arguments of `fully_shard` and `replicate`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.mesh import DeviceMesh, current_mesh
from shardwise.errors import MeshError
from shardwise.fabric.world import as_mesh, init_device_mesh

__all__ = ["DataParallelMeshDims", "axes_within", "data_axes", "has_all_data_axes"]


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh `fully_shard` shards parameters over, and which it replicates them over.

    Args:
        shard: the axis that shards, or several that shard as one.
        replicate: the axis that replicates, or several that replicate as one.

    Example:
        >>> import torch, shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> dims = DataParallelMeshDims(shard="dp")
        >>> sw.parallel.fully_shard(torch.nn.Linear(4, 4), mesh, dp_mesh_dims=dims).weight.spec
        f32[4,4] dp:S0
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: name an axis to shard over, or one to replicate over")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes that shard."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes that replicate."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def data_axes(mesh: Any, dims: DataParallelMeshDims | None = None) -> DeviceMesh:
    """The data axes that were given: the last one shards, one before it replicates. All processes by default."""
    if mesh is None and current_mesh() is None and dist.is_initialized():
        device = torch.accelerator.current_accelerator()
        mesh = init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))
    ours = as_mesh(mesh)
    if dims is not None:
        parts = [names for names in (dims.replicate_names, dims.shard_names) if names]
        joined = [ours[names].flatten(name="_".join(names)) for names in parts]
        axes = tuple(part.axes[0] for part in joined)
        if len({g for axis in axes for g in axis}) != sum(map(len, axes)):
            raise MeshError(f"{dims} names an axis twice", hint="name an axis either in shard or in replicate")
        return ours._select(axes, tuple(part.axis_name(0) for part in joined))
    return ours


def axes_within(mesh: DeviceMesh, data_mesh: DeviceMesh) -> set[int]:
    """The axes of `mesh` that are data axes, or parts of one: `dp` and `cp` of a flattened `dp_cp`.

    Empty if `mesh` is of another grid.
    """
    if mesh.root is not data_mesh.root:
        return set()
    return {axis for axis, grid in enumerate(mesh.axes) if any(set(grid) <= set(data) for data in data_mesh.axes)}


def has_all_data_axes(mesh: DeviceMesh, data_mesh: DeviceMesh) -> bool:
    """Whether every data axis is an axis of `mesh`, or consists of several of its axes."""
    found = {grid for axis in axes_within(mesh, data_mesh) for grid in mesh.axes[axis]}
    return {grid for data in data_mesh.axes for grid in data} <= found
