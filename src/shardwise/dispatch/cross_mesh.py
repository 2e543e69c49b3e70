"""Operands on different meshes: remapped to one of them if that is unambiguous; lists, mesh by mesh.

A tensor on a slice of a mesh may differ from slice to slice. One on a larger mesh that is replicated along the other
axes is the same in every slice, so it can be remapped. The reverse is not possible, except for a single replicated
number, which is a constant. Nothing is moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.operands import reduced_first
from shardwise.dispatch.signature import Executor, Wrapping
from shardwise.errors import MeshError
from shardwise.fabric.collective_log import parameter_note
from shardwise.plan.propagate import replicated_spec
from shardwise.schema import OpInfo, Slot

__all__ = ["on_one_mesh"]


def remapped_to(spec: DTensorSpec, mesh: DeviceMesh) -> DTensorSpec | None:
    """The layout of a tensor on another mesh of the same ranks, if it is well defined there."""
    if spec.mesh.root is not mesh.root:
        return _remapped_to_view(spec, mesh)
    own, there = spec.mesh.axes, mesh.axes
    lost = [axis for axis, size in enumerate(spec.mesh.shape) if size > 1 and own[axis] not in there]
    if not all(isinstance(spec.placements[axis], Replicate) for axis in lost):
        return None
    gained = [axis for axis, size in enumerate(mesh.shape) if size > 1 and there[axis] not in own]
    constant = math.prod(spec.shape) == 1 and spec.is_replicated
    return spec.remapped(mesh) if constant or not gained else None


def _remapped_to_view(spec: DTensorSpec, mesh: DeviceMesh) -> DTensorSpec | None:
    """The layout of a replicated tensor on another view of a world: it is the same on all ranks of the world.

    A tensor on a slice may differ from slice to slice, except a single number, which is a constant.
    """
    own = spec.mesh
    alike = (own.device_type, own.fabric, own.grid_ranks) == (mesh.device_type, mesh.fabric, mesh.grid_ranks)
    one_value = own.size() == own.grid_size or math.prod(spec.shape) == 1
    return replicated_spec(mesh, spec.tensor_meta) if alike and spec.is_replicated and one_value else None


def on_one_mesh(wrapping: Wrapping, info: OpInfo, found: Sequence[tuple[Slot, Any]]) -> Executor:
    """The executor of a call whose operands are on several meshes."""
    laid_out = [(slot, tensor._spec) for slot, tensor in found if isinstance(tensor, wrapping.tensor_class)]
    meshes = list(dict.fromkeys(spec.mesh for _, spec in laid_out))
    by_item = info.op._schema.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))
    if by_item and len({spec.mesh for slot, spec in laid_out if slot.name == info.names[0]}) > 1:
        return _mesh_by_mesh(info)
    for mesh in sorted(meshes, key=lambda mesh: mesh.ndim):
        remapped = [(slot, spec, remapped_to(spec, mesh)) for slot, spec in laid_out]
        if all(new is spec or (new is not None and slot.name not in info.writes) for slot, spec, new in remapped):
            return _on_remapped(
                wrapping, info, [(slot, new) for slot, spec, new in remapped if new is not None and new is not spec]
            )
    waiting = [slot for slot, spec in laid_out if spec.partial_axes and slot.name not in info.writes]
    if waiting:
        return reduced_first(info, wrapping, waiting)
    sliced = any(mesh.size() != mesh.grid_size for mesh in meshes)
    tensors = [tensor for _, tensor in found if isinstance(tensor, wrapping.tensor_class)]
    shown = ", ".join(f"{tensor._spec}{parameter_note(tensor)}" for tensor in tensors)
    raise MeshError(
        f"{info.op}: the operands are on different meshes: {shown}, on {', '.join(map(str, meshes))}",
        hint="tensors on a slice of a mesh may differ between slices; combine them with tensors that are "
        "Replicate() along the other axes, or build both on one mesh"
        if sliced
        else "redistribute them to one mesh first, with redistribute(mesh, placements)",
    )


def _on_remapped(wrapping: Wrapping, info: OpInfo, remapped: Sequence[tuple[Slot, DTensorSpec]]) -> Executor:
    wraps = [(slot, wrapping.wrapper(spec)) for slot, spec in remapped]

    def run_remapped(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, wrap in wraps:
            tensor = slot.get(args, kwargs)
            if tensor.requires_grad:
                raise MeshError(
                    f"{info.op}: argument {slot.name!r} needs a gradient, and is on {tensor._spec.mesh}, unlike the "
                    "others: whether gradients of the slices must be summed is not known",
                    hint="move the operands to one mesh first, by to_local() and from_local() with grad_placements",
                )
            slot.put(new_args, new_kwargs, wrap(tensor._local_tensor))
        return info.op(*new_args, **new_kwargs)

    return run_remapped


def _mesh_by_mesh(info: OpInfo) -> Executor:
    """Operators on lists of tensors, item by item: those of one mesh together."""

    def run_mesh_by_mesh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first = args[0]
        groups: dict[DeviceMesh | None, list[int]] = {}
        for index, tensor in enumerate(first):
            spec = getattr(tensor, "_spec", None)
            groups.setdefault(spec and spec.mesh, []).append(index)

        def part(value: Any, chosen: Sequence[int]) -> Any:
            split = isinstance(value, list | tuple) and len(value) == len(first)
            return [value[index] for index in chosen] if split else value

        results: list[Any] = [None] * len(first)
        for chosen in groups.values():
            given = info.op(*(part(a, chosen) for a in args), **{k: part(v, chosen) for k, v in kwargs.items()})
            for index, result in zip(chosen, given or (), strict=False):
                results[index] = result
        return results if info.returns and "Tensor" in info.returns[0] else None

    return run_mesh_by_mesh
