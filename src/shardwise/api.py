"""What users call: distribute_tensor and the factories.

Each rank makes or receives its own block only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.layout import Run
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError, MeshError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.fabric.world import as_mesh
from shardwise.tensor import DTensor, _make

__all__ = ["distribute_tensor", "empty", "full", "ones", "zeros"]

Coordinate = tuple[int, ...]


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
            tensor, and nothing is moved.
        shard_order: which axis splits a dim first, where it is not the order of the mesh.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (3,))
        >>> x = distribute_tensor(torch.arange(7), mesh, [sw.Shard(0)])
        >>> [t.tolist() for t in x.to_local().tensors]
        [[0, 1, 2], [3, 4, 5], [6]]
    """
    mesh = _mesh_or_default(device_mesh)
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
    made = _make(local, spec)
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


def _mesh_or_default(device_mesh: Any) -> DeviceMesh:
    if device_mesh is not None:
        return as_mesh(device_mesh)
    raise MeshError("no mesh was given", hint='make one: mesh = shardwise.init_device_mesh("cpu", (4,))')


# ---------------------------------------------------------------- factories


def _factory(
    fill: Callable[[Coordinate, tuple[int, ...], torch.device | None], torch.Tensor],
    size: Sequence[Any],
    dtype: torch.dtype,
    requires_grad: bool,
    device_mesh: Any,
    placements: Sequence[Any] | None,
    shard_order: Sequence[Any] | None,
) -> DTensor:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = size[0]
    mesh = _mesh_or_default(device_mesh)
    placements = (Replicate(),) * mesh.ndim if placements is None else placements
    spec = DTensorSpec(mesh, placements, TensorMeta(size, dtype=dtype), shard_order)
    whole = spec.reduced()
    device = torch.device("meta" if mesh.fabric == "dry" else mesh.device_type)
    local = fabric_of(mesh).build(mesh, lambda c: fill(c, whole.local_shape(c), device))
    if whole is not spec:  # a Partial tensor of ones has the value one, not one for each rank
        local = bound_route(whole, spec).run(local)
    made = _make(local, spec)
    if requires_grad:
        made.requires_grad_()
    return made


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor of zeros; each rank makes its block only.

    Example:
        >>> import shardwise as sw
        >>> zeros(4, 2, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).spec
        f32[4,2] S0
    """
    return full(
        size, 0, dtype=dtype or torch.get_default_dtype(), requires_grad=requires_grad, device_mesh=device_mesh,
        placements=placements, shard_order=shard_order,
    )  # fmt: skip


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor of ones; each rank makes its block only.

    Example:
        >>> import shardwise as sw
        >>> ones(3, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Partial()]).full_tensor()
        tensor([1., 1., 1.])
    """
    return full(
        size, 1, dtype=dtype or torch.get_default_dtype(), requires_grad=requires_grad, device_mesh=device_mesh,
        placements=placements, shard_order=shard_order,
    )  # fmt: skip


def full(
    size: Sequence[Any],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor filled with a value; each rank makes its block only.

    Example:
        >>> import shardwise as sw
        >>> full((2, 2), 7, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(1)]).full_tensor()
        tensor([[7, 7],
                [7, 7]])
    """
    kind = dtype or torch.full((), fill_value, device="meta").dtype
    return _factory(
        lambda coordinate, shape, device: torch.full(shape, fill_value, dtype=kind, device=device),
        size, kind, requires_grad, device_mesh, placements, shard_order,
    )  # fmt: skip


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor with nothing written to it; each rank makes its block only.

    Example:
        >>> import shardwise as sw
        >>> empty(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).shape
        torch.Size([4])
    """
    kind = dtype or torch.get_default_dtype()
    return _factory(
        lambda coordinate, shape, device: torch.empty(shape, dtype=kind, device=device),
        size, kind, requires_grad, device_mesh, placements, shard_order,
    )  # fmt: skip
