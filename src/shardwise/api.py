"""distribute_tensor: a whole tensor laid out over a mesh. Each rank receives its own block only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compilers import traceable
from shardwise.core.layout import Run
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError, MeshError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.fabric.world import as_mesh
from shardwise.tensor import DTensor, _make

__all__ = ["cut_block", "distribute_tensor", "mesh_or_error"]

Coordinate = tuple[int, ...]


@traceable
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A whole tensor laid out over a mesh; each rank is sent its block only.

    Args:
        tensor: the whole tensor. All ranks pass one of the same shape; the values are those of the source rank.
        device_mesh: the mesh.
        placements: how to lay it out; replicated by default.
        src_data_rank: whose values count, as a rank of the mesh. None: every rank cuts its block out of its own
            tensor, and nothing is moved. Inside torch.compile it must be None.
        shard_order: which axis splits a dim first, where it is not the order of the mesh.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (3,))
        >>> x = distribute_tensor(torch.arange(7), mesh, [sw.Shard(0)])
        >>> [t.tolist() for t in x.to_local().tensors]
        [[0, 1, 2], [3, 4, 5], [6]]
    """
    mesh = mesh_or_error(device_mesh)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh is not mesh:
            raise MeshError(f"the tensor is a DTensor on {tensor.device_mesh} already", hint="use redistribute(...)")
        if placements is not None and DTensorSpec(mesh, placements, tensor._spec.tensor_meta) is not tensor._spec:
            raise LayoutError(f"the tensor is a DTensor already: {tensor._spec}", hint="use redistribute(...)")
        return tensor
    placements = (Replicate(),) * mesh.ndim if placements is None else placements
    spec = DTensorSpec(mesh, placements, TensorMeta(tensor.shape, _dense(tensor), tensor.dtype), shard_order)
    whole = spec.reduced()
    source = tensor.detach().resolve_conj().resolve_neg()
    if mesh.fabric != "dry" and source.device.type != mesh.device_type and source.device.type != "meta":
        source = source.to(mesh.device_type)
    local = fabric_of(mesh).scatter(mesh, lambda coordinate: cut_block(source, whole, coordinate), src_data_rank)
    if whole is not spec:
        local = bound_route(whole, spec).run(local)
    made = _make(spec, local)
    if tensor.is_leaf and tensor.requires_grad:
        made.requires_grad_()
    return made


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def cut_block(tensor: torch.Tensor, spec: DTensorSpec, coordinate: Coordinate) -> torch.Tensor:
    """A copy of the block that the rank at `coordinate` holds of a whole tensor."""
    for dim, runs in enumerate(spec.block(coordinate).runs):
        if runs != (Run(0, spec.shape[dim]),):
            parts = [tensor.narrow(dim, min(run.start, spec.shape[dim]), run.length) for run in runs]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor.clone()


def mesh_or_error(device_mesh: Any) -> DeviceMesh:
    """The mesh that was given; there is no default one."""
    if device_mesh is not None:
        return as_mesh(device_mesh)
    raise MeshError("no mesh was given", hint='make one: mesh = shardwise.init_device_mesh("cpu", (4,))')
