"""Redistributes a value to a layout on the mesh of a style.

The mesh of a style has one axis, and a value may be on a larger mesh that has this axis too, for example a batch that
is sharded over a data-parallel axis. Then only the placement on the axis of the style changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compilers import traceable
from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, Placement
from shardwise.core.spec import DTensorSpec, TensorMeta, checked_placements
from shardwise.dispatch.flat_buffer import FlatBuffer
from shardwise.errors import MeshError
from shardwise.tensor import AnyDTensor, DTensor, dtensor_of, is_dtensor
from shardwise.torch_private import tree_map_only

__all__ = ["in_layout", "in_layouts", "local_of", "redistributed_as_one"]

MAX_TARGETS = 4096
_targets: BoundedCache[tuple[DTensorSpec, DeviceMesh, Placement], DTensorSpec] = BoundedCache(MAX_TARGETS)


def in_layout(value: Any, mesh: DeviceMesh, given: Placement, wanted: Placement, *, async_op: bool = False) -> Any:
    """A tensor as a DTensor in the layout `wanted` along the axis of `mesh`; other values unchanged.

    Args:
        value: a DTensor, or the local of one on each rank.
        mesh: the mesh of the style.
        given: the layout of the locals, if the value is not a DTensor.
        wanted: the new layout.
        async_op: leave the collective in flight until the value is used.
    """
    return _tensor_in_layout(value, mesh, given, wanted, async_op) if isinstance(value, torch.Tensor) else value


@traceable
def _tensor_in_layout(
    value: torch.Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement, async_op: bool
) -> AnyDTensor:
    if not is_dtensor(value):
        value = DTensor.from_local(value, mesh, (given,))
    target = target_of(value._spec, mesh, wanted)
    if target is value._spec:
        return value
    return value.redistribute(placements=target.placements, shard_order=_order_of(target), async_op=async_op)


def in_layouts(tree: Any, mesh: DeviceMesh, given: Placement, wanted: Placement) -> Any:
    """`in_layout` for every tensor in a tuple, list or dict."""
    if isinstance(tree, torch.Tensor):
        return in_layout(tree, mesh, given, wanted)
    return tree_map_only(torch.Tensor, lambda tensor: in_layout(tensor, mesh, given, wanted), tree)


def local_of(tree: Any, mesh: DeviceMesh) -> Any:
    """The locals of tensors on `mesh`. Those on a larger mesh are unchanged: their locals would be ambiguous."""

    def local(tensor: Any) -> torch.Tensor:
        # "==" and not "is": torch 2.11 compares identities of proxies of the meshes while it traces
        return tensor.to_local() if is_dtensor(tensor) and tensor._spec.mesh == mesh else tensor

    return local(tree) if isinstance(tree, torch.Tensor) else tree_map_only(torch.Tensor, local, tree)


def target_of(spec: DTensorSpec, mesh: DeviceMesh, wanted: Placement) -> DTensorSpec:
    """The spec that differs from `spec` only along the axis of `mesh`."""
    key = (spec, mesh, wanted)
    found = _targets.get(key)
    if found is None:
        axis = spec.mesh.axis_of(mesh)
        if axis is None:
            raise MeshError(
                f"the batch is on {spec.mesh} as {spec}, and the model's plan is on {mesh}, which is not an axis of it",
                hint="put the batch on the mesh of the plan, or on a larger one that has it as a slice",
            )
        found = _targets.keep(key, _replaced(spec, axis, wanted))
    return found


def _replaced(spec: DTensorSpec, axis: int, wanted: Placement) -> DTensorSpec:
    """The same layout with another placement on one axis, which splits its new dim last."""
    placements = list(spec.placements)
    placements[axis] = wanted
    kept = checked_placements(placements, spec.mesh, spec.ndim)
    if kept == spec.placements:
        return spec
    dim_axes = [tuple(a for a in axes if a != axis) for axes in spec.dim_axes]
    if isinstance(own := kept[axis], AnyShard):
        dim_axes[own.dim] += (axis,)
    return DTensorSpec.from_dim_axes(spec.mesh, kept, spec.tensor_meta, dim_axes)


def _order_of(spec: DTensorSpec) -> Any:
    """The shard order of a spec where it is not the order of the mesh."""
    return spec.shard_order if any(list(axes) != sorted(axes) for _, axes in spec.shard_order) else None


def redistributed_as_one(tensors: Sequence[DTensor], placements: Sequence[Placement]) -> list[DTensor]:
    """Redistribute tensors of one mesh, layout and dtype as one flat buffer. Neither layout is sharded."""
    buffer = FlatBuffer.of([tensor._spec for tensor in tensors])
    joined = dtensor_of(buffer.spec, buffer.joined(tensor._local_tensor for tensor in tensors))
    parts = buffer.parts(joined.redistribute(placements=placements)._local_tensor)
    return [
        dtensor_of(DTensorSpec(joined.device_mesh, placements, TensorMeta(shape, dtype=joined.dtype)), part)
        for shape, part in zip(buffer.shapes, parts, strict=True)
    ]
