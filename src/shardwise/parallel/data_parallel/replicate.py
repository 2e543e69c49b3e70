"""replicate: data parallel modules. Every rank keeps all parameters; gradients are reduced in buckets.

The public interface of the engine for parameters that are stored replicated, so that nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.api import mark_replaced, parameters_of
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import MeshError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.parallel.data_parallel.asked_gradients import wrap_autograd
from shardwise.parallel.data_parallel.data_axes import data_axes
from shardwise.parallel.data_parallel.data_parallel_module import DataParallelModule
from shardwise.parallel.data_parallel.flat_params import FlatLayout
from shardwise.parallel.data_parallel.module_tree import STATE, owned_parameters, subclass_with
from shardwise.parallel.data_parallel.param_group import ParameterGroup, alike, rank_by_rank
from shardwise.parallel.data_parallel.precision import MixedPrecisionPolicy
from shardwise.parallel.data_parallel.schedule import ModuleState
from shardwise.parallel.data_parallel.sharded_param import ShardedParameter
from shardwise.tensor import dtensor_of

__all__ = ["ReplicateModule", "replicate"]


class ReplicateModule(DataParallelModule):
    """The methods that `replicate` adds to a module.

    Example:
        >>> import shardwise as sw
        >>> module = replicate(nn.Linear(4, 4), sw.init_device_mesh("cpu", (2,)))
        >>> isinstance(module, ReplicateModule), type(module).__name__
        (True, 'Linear')
    """

    _shown_as = "Replicate"


def replicate(
    module: nn.Module,
    mesh: Any = None,
    *,
    bucket_cap_mb: float = 25.0,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device_mesh: Any = None,
) -> Any:
    """Make a module data parallel: gradients are reduced over the mesh while backward runs. Changes it in place.

    Every rank starts with the parameters of the first. Between steps each parameter is a DTensor, replicated over the
    data axes. As for `fully_shard`, inputs are plain tensors, and gradients are averaged; or DTensors over the data
    axes, and everything is as on one device.

    Args:
        module: the module.
        mesh: the data axes. A slice of a larger mesh (`world["dp"]`) composes with tensor parallelism on its other
            axes. By default all processes of an initialized process group.
        bucket_cap_mb: gradients are reduced in buckets of about this many megabytes.
        mp_policy: dtypes to compute, reduce and return in.
        ignored_params: parameters to leave alone.
        device_mesh: another name for `mesh`.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        >>> model = replicate(nn.Linear(4, 1, bias=False), mesh)
        >>> batches = sw.RankTensor([torch.ones(1, 4), 3 * torch.ones(1, 4)])
        >>> model(batches).sum().backward()
        >>> model.weight.grad.spec, model.weight.grad.full_tensor()
        (f32[1,4] dp:R, tensor([[2., 2., 2., 2.]]))
    """
    if mesh is not None and device_mesh is not None:
        raise MeshError("replicate: both mesh and device_mesh are given", hint="pass only one; they are the same")
    before = parameters_of("replicate", module)
    data_mesh = data_axes(mesh if mesh is not None else device_mesh)
    if hasattr(module, STATE):
        raise UnsupportedError(
            f"the {type(module).__name__} is data parallel already", hint="call fully_shard or replicate once"
        )
    policy = mp_policy or MixedPrecisionPolicy()
    managed = [
        ShardedParameter(parameter, owners, name, data_mesh, None)
        for name, parameter, owners in owned_parameters([module], ignored_params or ())
    ]
    wrap_autograd()
    state = ModuleState([module], policy, reshard_after_forward=False)
    for group in alike(managed):
        _broadcast(group, data_mesh)
        buckets = _buckets(group, bucket_cap_mb * 2**20)
        own = policy if group[0].stored.is_floating_point() else MixedPrecisionPolicy()
        state.groups.append(ParameterGroup(group, data_mesh, own, buckets, state))
    for part in _parts(module):
        state.serve(part)
    mark_replaced("replicate", before, module)
    subclass_with(module, ReplicateModule)
    return module


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; in place of containers, their children."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _parts(child)
        elif not hasattr(child, STATE):
            yield child


def _buckets(group: Sequence[ShardedParameter], cap: float) -> list[list[int]]:
    """Buckets of at most `cap` bytes, in the reverse order of the parameters, about the order of their gradients."""
    buckets: list[list[int]] = []
    room = 0.0
    for index in reversed(range(len(group))):
        size = group[index].slot.size * group[index].stored.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = cap
        buckets[-1].append(index)
        room -= size
    return buckets


@torch.no_grad()
def _broadcast(group: Sequence[ShardedParameter], mesh: DeviceMesh) -> None:
    """Broadcast the value of the first rank along the data axes, as a sum with zeros on all other ranks."""
    if any(parameter.stored.is_meta for parameter in group):
        return
    layout = FlatLayout([parameter.slot for parameter in group])
    fabric = fabric_of(mesh)
    dtype = group[0].stored.dtype
    locals_: list[Any] = [parameter.stored._local_tensor for parameter in group]  # pyright: ignore[reportAttributeAccessIssue]

    def first(coordinate: tuple[int, ...], *tensors: torch.Tensor) -> torch.Tensor:
        row = layout.joined(tensors, dtype)
        return row.zero_() if any(coordinate) else row

    spec = DTensorSpec(mesh, [Partial()] * mesh.ndim, TensorMeta((layout.total,), dtype=dtype))
    flat = dtensor_of(spec, fabric.map(mesh, first, *locals_)).redistribute(placements=[Replicate()] * mesh.ndim)
    for row, coordinates, *kept in rank_by_rank(mesh, layout, flat._local_tensor, *locals_):
        for tensor, block in zip(kept, layout.blocks(row, coordinates), strict=True):
            tensor.copy_(block)
