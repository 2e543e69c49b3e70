"""Makes meshes and chooses their fabric: `init_device_mesh`, `virtual`, `as_mesh`.

Looks for a process group and torchrun's environment, so that the same program runs with and without them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardwise.core import mesh as mesh_module
from shardwise.core.mesh import DeviceMesh
from shardwise.core.mode_stack import mode_context
from shardwise.core.notation import parse_axes
from shardwise.errors import MeshError
from shardwise.fabric.c10d import c10d
from shardwise.fabric.dry import dry_run
from shardwise.fabric.virtual import virtual as _virtual_fabric

__all__ = ["as_mesh", "dry_run", "init_device_mesh", "is_main", "to_torch_mesh", "virtual"]


def _surrounding_fabric() -> str:
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return c10d.name if dist.is_initialized() or under_torchrun else _virtual_fabric.name


mesh_module.choose_fabric.append(_surrounding_fabric)


PRESET = "SHARDWISE_MESH"  # the environment variable with the mesh of programs that give no shape


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int] | None = None, *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh over all ranks.

    If a process group is up, or torchrun started this process, the ranks are processes; otherwise they are virtual
    ranks in this process. Inside `virtual()` or `dry_run()` those decide.

    On processes every rank must call it: the process groups of the axes are made at once.

    Without a shape, the environment variable SHARDWISE_MESH gives it (`dp=2,tp=4`, or `2x4` without names),
    which `shardwise run --mesh` sets; and without that, on processes, all of them along one axis.

    Args:
        device_type: "cpu" or "cuda".
        mesh_shape: the number of ranks along each axis.
        mesh_dim_names: a name for each axis.

    Example:
        >>> init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        DeviceMesh(cpu dp=2 tp=4, virtual)
    """
    device_type = mesh_module.checked_device_type(device_type)
    fabric = mesh_module.chosen_fabric()
    if mesh_shape is None:
        mesh_shape, mesh_dim_names = _preset_axes(fabric, device_type, mesh_dim_names)
    shape = tuple(mesh_shape) if not isinstance(mesh_shape, int) else (mesh_shape,)
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise MeshError(f"{shape} is not the shape of a mesh", hint="give the number of ranks of each axis, at least 1")
    size = math.prod(shape)
    if fabric == c10d.name:
        _ensure_process_group(device_type)
        c10d.rank()  # in a new world, drops the state of the previous one
        world = dist.get_world_size()
        if size != world:
            raise MeshError(
                f"a mesh of shape {shape} needs {size} ranks, the world has {world}",
                hint="use a shape whose product is the number of processes, or DeviceMesh(device_type, ranks)",
            )
    ranks = torch.arange(size, device="cpu").reshape(shape)  # also where the default device is meta
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, fabric=fabric)
    if fabric == c10d.name:
        c10d.make_groups(mesh)
    return mesh


def _preset_axes(
    fabric: str, device_type: str, names: Sequence[str] | None
) -> tuple[tuple[int, ...], Sequence[str] | None]:
    """The shape and names of a mesh that was chosen outside the program."""
    preset = os.environ.get(PRESET)
    if preset:
        shape, preset_names = parse_axes(preset)
    elif fabric == c10d.name:
        _ensure_process_group(device_type)
        shape, preset_names = (dist.get_world_size(),), None
    else:
        raise MeshError(
            "a mesh of virtual ranks needs a shape",
            hint="give one, or start the program with `shardwise run --mesh dp=2,tp=4 script.py`",
        )
    if names is not None and preset_names is not None and tuple(names) != preset_names:
        raise MeshError(
            f"the program names the axes {', '.join(names)}, and {PRESET}={preset} names them otherwise",
            hint="name the same axes in the same order, or write sizes alone, as in 2x4",
        )
    return shape, names or preset_names


def _ensure_process_group(device_type: str) -> None:
    if dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


@mode_context
def virtual() -> Iterator[None]:
    """Meshes made inside, by this thread, have virtual ranks in this process, even under torchrun.

    Example:
        >>> with virtual():
        ...     mesh = init_device_mesh("cpu", (3,))
        >>> mesh.fabric
        'virtual'
    """
    with mesh_module.fabric_mode.holding(_virtual_fabric.name):
        yield


def is_main() -> bool:
    """Whether this process prints, logs and writes: rank 0 of the processes, or all virtual ranks.

    Example:
        >>> if is_main():
        ...     print("step 1")
        step 1
    """
    if mesh_module.chosen_fabric() != c10d.name:
        return True
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


_adopted: dict[int, tuple[TorchMesh, DeviceMesh]] = {}


def as_mesh(mesh: Any) -> DeviceMesh:
    """Our mesh for `mesh`: itself, or a torch DeviceMesh adopted once, whose process groups are reused.

    None means the mesh of the innermost `with mesh:`.

    Example:
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> as_mesh(mesh) is mesh
        True
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is None:
        mesh = mesh_module.current_mesh()
        if mesh is None:
            raise MeshError("no mesh was given", hint='make one: mesh = shardwise.init_device_mesh("cpu", (4,))')
        return mesh
    if not isinstance(mesh, TorchMesh):
        raise MeshError(f"{mesh!r} is not a DeviceMesh", hint="make one with shardwise.init_device_mesh(...)")
    known = _adopted.get(id(mesh))
    if known is not None and known[0] is mesh:
        return known[1]
    ours = _adopt(mesh)
    _adopted[id(mesh)] = (mesh, ours)
    return ours


def _adopt(mesh: TorchMesh) -> DeviceMesh:
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    names, root_names = mesh.mesh_dim_names, root.mesh_dim_names
    if root is not mesh and names and root_names and set(names) <= set(root_names):
        ours = as_mesh(root)[tuple(names)]
    else:
        ours = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names, fabric=c10d.name)
    if dist.is_initialized() and c10d.coordinate(ours) is not None:
        for axis in range(mesh.ndim):
            c10d.adopt(mesh.get_group(axis))
    return ours


def to_torch_mesh(mesh: DeviceMesh) -> TorchMesh:
    """A torch DeviceMesh over the same ranks. Needs a process group.

    Example:
        >>> to_torch_mesh(init_device_mesh("cpu", (2,)))
        Traceback (most recent call last):
        ...
        shardwise.errors.MeshError: DeviceMesh(cpu 2, virtual) has no torch counterpart: it is of the virtual fabric
          hint: torch meshes need a process group: start the program with torchrun
    """
    if mesh.fabric != c10d.name:
        raise MeshError(
            f"{mesh} has no torch counterpart: it is of the {mesh.fabric} fabric",
            hint="torch meshes need a process group: start the program with torchrun",
        )
    for theirs, ours in _adopted.values():
        if ours is mesh:
            return theirs
    if mesh.root is not mesh and mesh.mesh_dim_names and mesh.size() != mesh.grid_size:
        return to_torch_mesh(mesh.root)[mesh.mesh_dim_names]
    made = TorchMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    _adopted[id(made)] = (made, mesh)
    return made
