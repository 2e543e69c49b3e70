"""One parameter of a data parallel module: how it is stored between steps, and the tensor that computes in its place.

Stored it is a DTensor parameter over the data axes and those of tensor parallelism. Forward and backward see a leaf
that stands for the gathered parameter: a plain tensor, or a DTensor. All leaves of a parameter share one memory, which
comes and goes without autograd noticing. Moves nothing between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError, MeshError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.virtual import RankTensor
from shardwise.parallel.flat import Slot
from shardwise.tensor import DTensor, dtensor_of

__all__ = ["ManagedParameter", "Owner"]

Owner = tuple[nn.Module, str]
MARK = "_shardwise_managed"


class ManagedParameter:
    """A parameter, the modules that hold it, its shard and the leaves that compute for it.

    Args:
        parameter: as it is now: plain, or a DTensor of tensor parallelism.
        owners: who holds it; several where it is tied.
        name: for messages.
        data_mesh: the data axes; the last one shards, those before it replicate.
        dim: the dim to shard, None to keep it replicated.
    """

    def __init__(
        self, parameter: nn.Parameter, owners: list[Owner], name: str, data_mesh: DeviceMesh, dim: int | None
    ) -> None:
        if hasattr(parameter, MARK):
            raise UnsupportedError(
                f"{name} is tied to {getattr(parameter, MARK)}, which belongs to another fully sharded module",
                hint="wrap the modules that share a parameter together: fully_shard([first, second])",
            )
        self.name, self.owners, self.data_mesh = name, owners, data_mesh
        self.origin = _origin(parameter, data_mesh, name)
        meta = TensorMeta(parameter.shape, dtype=parameter.dtype)
        self.slot = _slot(self.origin, meta, data_mesh, dim, name)
        self.stored = self._store(parameter)
        self._given = parameter
        self.whole: torch.Tensor | None = None  # the memory of the leaves
        self.storages: list[tuple[torch.UntypedStorage, int, torch.Tensor]] = []  # those that come and go, how large
        self.leaves: dict[DeviceMesh | None, nn.Parameter] = {}

    @property
    def spec(self) -> DTensorSpec:
        """How the parameter is stored; the dtype is that of the parameter when it was given."""
        return self.slot.spec

    @property
    def is_sharded(self) -> bool:
        """Whether it must be gathered before use."""
        return self.slot.axis is not None

    def _store(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter: every rank keeps its block of what it holds."""
        mesh, fabric = self.spec.mesh, fabric_of(self.spec.mesh)
        local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        if mesh.fabric != "dry" and local.device.type not in (mesh.device_type, "meta"):
            local = local.to(mesh.device_type)
        if mesh.fabric == "virtual" and not isinstance(local, RankTensor):
            kept = fabric.build(mesh, lambda coordinate: self.slot.cut(local, coordinate))
        elif isinstance(parameter, DTensor) or mesh.fabric == "virtual":
            kept = fabric.map(mesh, lambda coordinate, tensor: self.slot.cut(tensor, coordinate), local)
        else:
            kept = fabric.build(mesh, lambda coordinate: self.slot.cut(local, coordinate))
        stored = nn.Parameter(dtensor_of(self.spec, kept), requires_grad=parameter.requires_grad)
        for key, value in parameter.__dict__.items():
            if key not in ("_local_tensor", "_spec", "_is_param"):
                setattr(stored, key, value)
        return stored

    # ---------------------------------------------------------------- what the modules hold

    def install(self) -> None:
        """Put the stored parameter in the place of the one that was given."""
        setattr(self._given, MARK, self.name)
        del self._given
        self.register(self.stored)

    def register(self, tensor: nn.Parameter) -> None:
        """Let every owner hold `tensor` as its parameter."""
        for module, name in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = tensor
            else:  # who watches for parameters keeps a list of them (nn.LSTM)
                setattr(module, name, tensor)

    def refresh(self) -> None:
        """Take over a stored parameter that was put in the place of ours (by `load_state_dict(assign=True)`, ...)."""
        module, name = self.owners[0]
        held = module._parameters[name]
        if held is self.stored:
            return
        same = isinstance(held, DTensor) and held._spec.with_dtype(self.spec.tensor_meta.dtype) is self.spec
        if not same or held is None:
            given = held._spec if isinstance(held, DTensor) else type(held).__name__
            raise LayoutError(
                f"{self.name} was replaced by {given}, but the module stores it as {self.spec}",
                hint="copy values into the parameter, or assign a DTensor of that layout",
            )
        self.stored = held  # pyright: ignore[reportAttributeAccessIssue]  # a Parameter by its mark
        self.register(self.stored)

    # ---------------------------------------------------------------- leaves

    def prepare(self, dtype: torch.dtype) -> None:
        """Have memory to compute with, of this dtype. What is replicated computes with the stored memory itself."""
        if not self.is_sharded and dtype is self.stored.dtype:
            if self.whole is not self.stored._local_tensor:  # pyright: ignore[reportAttributeAccessIssue]
                self.whole = self.stored._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
                self.leaves.clear()
        elif self.whole is None or self.whole.dtype is not dtype or self.whole.device != self.stored.device:
            mesh, device = self.spec.mesh, self.stored.device
            self.whole = fabric_of(mesh).build(
                mesh,
                lambda coordinate: torch.empty(self.slot.gathered_shape(coordinate), dtype=dtype, device=device),
            )
            tensors = [tensor for _, tensor in fabric_of(mesh).parts(mesh, self.whole)]
            self.storages = [(t.untyped_storage(), t.numel() * t.element_size(), t) for t in tensors]
            self.leaves.clear()

    def leaf(
        self, compute_mesh: DeviceMesh | None, came: Callable[[DeviceMesh | None, int], None], index: int
    ) -> nn.Parameter:
        """The leaf that computes: on `compute_mesh`, or with None as the parameter was before it was stored.

        `came(compute_mesh, index)` is called when it has got a gradient.
        """
        found = self.leaves.get(compute_mesh)
        if found is None:
            found = self._make_leaf(compute_mesh)
            self.leaves[compute_mesh] = found
        if found.requires_grad is not self.stored.requires_grad:
            found.requires_grad_(self.stored.requires_grad)
        if found.requires_grad and not found._post_accumulate_grad_hooks:  # pyright: ignore[reportAttributeAccessIssue]
            found.register_post_accumulate_grad_hook(lambda _: came(compute_mesh, index))
        return found

    def _make_leaf(self, compute_mesh: DeviceMesh | None) -> nn.Parameter:
        assert self.whole is not None
        spec = self.origin if compute_mesh is None else self._seen_on(compute_mesh)
        if spec is not None:
            made: torch.Tensor = dtensor_of(spec.with_dtype(self.whole.dtype), self.whole)
        elif isinstance(self.whole, RankTensor):
            made = self.whole
        else:
            made = self.whole.data  # counts versions of its own, so that gathering again is no change to autograd
        return nn.Parameter(made, requires_grad=self.stored.requires_grad)

    def _seen_on(self, mesh: DeviceMesh) -> DTensorSpec:
        """How the gathered parameter lies on the mesh of the inputs."""
        placements: list[Placement] = [Replicate()] * mesh.ndim
        dim_axes: list[tuple[int, ...]] = [()] * self.spec.ndim
        if self.origin is not None:
            there = {grid: axis for axis, grid in enumerate(mesh.axes)}
            missing = [a for a, grid in enumerate(self.origin.mesh.axes) if grid not in there]
            if missing or mesh.root is not self.origin.mesh.root:
                raise MeshError(
                    f"{self.name} lies on {self.origin.mesh}, which is no part of the inputs' {mesh}",
                    hint="give inputs on the mesh that the parameters were distributed on",
                )
            to = [there[grid] for grid in self.origin.mesh.axes]
            for axis, placement in enumerate(self.origin.placements):
                placements[to[axis]] = placement
            dim_axes = [tuple(to[axis] for axis in axes) for axes in self.origin.dim_axes]
        return DTensorSpec.from_dim_axes(mesh, tuple(placements), self.spec.tensor_meta, dim_axes)


def _origin(parameter: nn.Parameter, data_mesh: DeviceMesh, name: str) -> DTensorSpec | None:
    """How a parameter lies apart from the data axes; None where it is plain."""
    if not isinstance(parameter, DTensor):
        return None
    spec = parameter._spec
    if spec.mesh.root is not data_mesh.root:
        raise MeshError(
            f"{name} lies on {spec.mesh}, which is not of one grid with {data_mesh}",
            hint='cut both out of one mesh: world["tp"] for tensor parallelism, world["dp"] for data parallelism',
        )
    kept = [axis for axis, grid in enumerate(spec.mesh.axes) if grid not in data_mesh.axes]
    for axis in set(range(spec.mesh.ndim)) - set(kept):
        if not isinstance(spec.placements[axis], Replicate):
            raise LayoutError(
                f"{name} is {spec}: already split on the data axis {spec.mesh.axis_name(axis)!r}",
                hint="leave it replicated there; the data axes are split here",
            )
    if spec.partial_axes:
        raise LayoutError(f"{name} is {spec}: a sum that is not added up", hint="redistribute it to Replicate() first")
    if not kept:
        return None
    mesh = spec.mesh._select(tuple(spec.mesh.axes[a] for a in kept), tuple(spec.mesh.axis_name(a) for a in kept))
    to = {axis: new for new, axis in enumerate(kept)}
    dim_axes = [tuple(to[axis] for axis in axes) for axes in spec.dim_axes]
    meta = TensorMeta(spec.shape, dtype=spec.tensor_meta.dtype)
    return DTensorSpec.from_dim_axes(mesh, tuple(spec.placements[a] for a in kept), meta, dim_axes)


def _slot(origin: DTensorSpec | None, meta: TensorMeta, data_mesh: DeviceMesh, dim: int | None, name: str) -> Slot:
    """Where the parameter is stored: the data axes split what tensor parallelism has left, as the minor ones."""
    if dim is not None and not -len(meta.shape) <= dim < len(meta.shape):
        raise LayoutError(
            f"{name} of shape {tuple(meta.shape)} has no dim {dim} to shard",
            hint="give a scalar parameter the shape (1,)" if not meta.shape else "choose one with shard_placement_fn",
        )
    own = [] if origin is None else list(zip(origin.mesh.axes, _names(origin.mesh), strict=True))
    ours = list(zip(data_mesh.axes, _names(data_mesh), strict=True))
    if any(set(a) & set(b) for a, _ in own for b, _ in ours):
        raise MeshError(f"{name} lies on axes that are part of the data axes {data_mesh}", hint="use other axes")
    axes = sorted([*own, *ours])
    mesh = data_mesh._select(tuple(grid for grid, _ in axes), tuple(axis_name for _, axis_name in axes))
    at = {grid: axis for axis, (grid, _) in enumerate(axes)}
    placements: list[Placement] = [Replicate()] * mesh.ndim
    dim_axes: list[tuple[int, ...]] = [()] * len(meta.shape)
    if origin is not None:
        for grid, placement in zip(origin.mesh.axes, origin.placements, strict=True):
            placements[at[grid]] = placement
        dim_axes = [tuple(at[origin.mesh.axes[axis]] for axis in of_dim) for of_dim in origin.dim_axes]
    if dim is None:
        return Slot(DTensorSpec.from_dim_axes(mesh, tuple(placements), meta, dim_axes), None, 0)
    dim %= len(meta.shape)
    sharding = at[data_mesh.axes[-1]]
    placements[sharding] = Shard(dim)
    dim_axes[dim] = (*dim_axes[dim], sharding)
    return Slot(DTensorSpec.from_dim_axes(mesh, tuple(placements), meta, dim_axes), sharding, dim)


def _names(mesh: DeviceMesh) -> Iterable[str]:
    return [mesh.axis_name(axis) for axis in range(mesh.ndim)]
