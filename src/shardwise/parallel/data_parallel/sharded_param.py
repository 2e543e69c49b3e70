"""One parameter of a data parallel module: how it is stored between steps, and the tensor that computes in its place.

It is stored as a DTensor over the data axes and those of tensor parallelism. Forward and backward use a leaf on
gathered memory in its place: a plain tensor, or a DTensor. Issues no collective, except for tensors that a caller
substitutes for the parameter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.api import parameter_like
from shardwise.core.mesh import DeviceMesh, on_one_grid
from shardwise.core.placement import Partial, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError, MeshError, UnsupportedError
from shardwise.fabric.base import fabric_of, fabrics
from shardwise.fabric.rank_tensor import DATA_IS_COUNTED, map_parts
from shardwise.parallel.data_parallel.data_axes import axes_within
from shardwise.parallel.data_parallel.flat_params import ParamSlot
from shardwise.plan.propagate import replicated_spec
from shardwise.tensor import DTensor, dtensor_of
from shardwise.torch_private import current_graph_task, make_subclass

__all__ = ["MARK", "GatheredParameter", "Owner", "ParametersInBackward", "ShardedParameter", "computed_shape"]

Owner = tuple[nn.Module, str]
MARK = "_shardwise_managed"  # the attribute of a stored parameter with its name


class GatheredParameter(nn.Parameter):
    """A gathered parameter in plain memory. Its `data` shares its version counter, so that a write to it is noticed.

    Example:
        >>> leaf = make_subclass(GatheredParameter, torch.zeros(2))
        >>> _ = leaf.data.add_(1)
        >>> leaf._version
        1
    """

    is_gathered = True  # for recorders of operators, which treat it as a plain tensor

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)


class ParametersInBackward(dict[str, Any]):
    """The parameters of a module between forward and backward: a backward that reads one receives its leaf.

    Checkpointing recomputes parts of a forward in backward, without calling hooks. `leaves` has a function for each
    parameter that takes the current tensor of the module, and returns the leaf, or None to keep the tensor.
    """

    __slots__ = ("leaves",)
    leaves: dict[str, Callable[[Any], Any]]

    def between_steps(self) -> tuple[()]:
        """The state that a step depends on besides the parameters: none."""
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(dict.__getitem__(self, name), memo) for name in self}

    def __getitem__(self, name: str) -> Any:
        return self._in_backward(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._in_backward(name, super().get(name, default))

    def _in_backward(self, name: str, registered: Any) -> Any:
        leaf = self.leaves.get(name) if current_graph_task() != -1 else None
        found = None if leaf is None else leaf(registered)
        return registered if found is None else found


class ShardedParameter:
    """A parameter, the modules that own it, its shard, and the leaves that replace it in computations.

    Args:
        parameter: the current one: plain, or a DTensor of tensor parallelism.
        owners: the modules that own it; several if it is tied.
        name: for messages.
        data_mesh: the data axes; the last one shards, those before it replicate.
        placement: how it is sharded, None to keep it replicated.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        owners: list[Owner],
        name: str,
        data_mesh: DeviceMesh,
        placement: Shard | Ragged | None,
    ) -> None:
        if hasattr(parameter, MARK):
            raise UnsupportedError(
                f"{name} is tied to {getattr(parameter, MARK)}, which belongs to another fully sharded module",
                hint="wrap the modules that share a parameter together: fully_shard([first, second])",
            )
        self.name, self.owners = name, owners
        # recurrent layers also keep their parameters in a list
        self._is_listed = any("_flat_weights_names" in module.__dict__ for module, _ in owners)
        self.origin, on_grid, self.data_mesh = _origin(parameter, data_mesh, name)
        meta = TensorMeta(parameter.shape, dtype=parameter.dtype)
        self.slot = _slot(on_grid, meta, self.data_mesh, placement, name)
        self.spec = self.slot.spec  # the stored layout; the dtype is that of the original parameter
        self.stored = self._store(parameter)
        self._given: nn.Parameter | None = parameter
        self._leaf_specs: dict[DeviceMesh | None, DTensorSpec | None] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether it must be gathered before use."""
        return self.slot.axis is not None

    def _store(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter: every rank keeps its block."""
        mesh, fabric = self.spec.mesh, fabric_of(self.spec.mesh)
        local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        if fabric.has_values and local.device.type not in (mesh.device_type, "meta"):
            local = local.to(mesh.device_type)
        if isinstance(parameter, DTensor) or fabric.many_ranks:
            spread = fabric.spread(mesh, local) if fabric.many_ranks else local
            kept = fabric.map(mesh, lambda coordinate, tensor: self.slot.cut(tensor, coordinate), spread)
        else:
            kept = fabric.build(mesh, lambda coordinate: self.slot.cut(local, coordinate))
        return parameter_like(parameter, dtensor_of(self.spec, kept))

    # ---------------------------------------------------------------- the tensors of modules

    def install(self) -> None:
        """Put the stored parameter in place of the original one. Copied modules have theirs already."""
        given, self._given = self._given, None
        if given is not None:
            for parameter in (given, self.stored):
                setattr(parameter, MARK, self.name)
            self.register(self.stored)

    def copied(self, memo: dict[int, Any]) -> ShardedParameter:
        """The parameter of copied modules."""
        made = copy.copy(self)
        made.owners = [(copy.deepcopy(module, memo), name) for module, name in self.owners]
        made.stored = copy.deepcopy(self.stored, memo)
        setattr(made.stored, MARK, self.name)
        return made

    def register(self, tensor: torch.Tensor | None) -> None:
        """Register `tensor` as the parameter of every owner."""
        for module, name in self.owners:
            if tensor is None and name not in module._parameters:  # a library has moved it: pruning renames it
                continue
            module._parameters[name] = tensor  # pyright: ignore[reportArgumentType]
            if self._is_listed and name in (names := module.__dict__.get("_flat_weights_names", ())):
                module._flat_weights[names.index(name)] = tensor  # pyright: ignore[reportArgumentType, reportIndexIssue]

    def assign(self, registered: Any) -> None:
        """Store a parameter that was put in place of the stored one. One of another layout is refused."""
        if (
            not isinstance(registered, DTensor)
            or registered._spec.with_dtype(self.spec.tensor_meta.dtype) is not self.spec
        ):
            given = registered._spec if isinstance(registered, DTensor) else type(registered).__name__
            raise LayoutError(
                f"{self.name} was replaced by {given}, but the module stores it as {self.spec}",
                hint="copy values into the parameter, or assign a DTensor of that layout",
            )
        setattr(registered, MARK, self.name)
        self.stored = registered

    # ---------------------------------------------------------------- computing

    def leaf_spec(self, compute_mesh: DeviceMesh | None) -> DTensorSpec | None:
        """The layout of the gathered parameter on the mesh of the inputs; None if it is a plain tensor."""
        if compute_mesh not in self._leaf_specs:
            self._leaf_specs[compute_mesh] = self.origin if compute_mesh is None else self._remapped(compute_mesh)
        return self._leaf_specs[compute_mesh]

    def leaf(self, gathered: torch.Tensor, spec: DTensorSpec | None) -> Any:
        """A tensor on gathered memory that counts as an `nn.Parameter`; not yet connected to autograd."""
        if spec is not None:
            made: Any = dtensor_of(spec.with_dtype(gathered.dtype), gathered)
        elif fabrics[self.data_mesh.fabric].many_ranks:
            made = map_parts(lambda part: part, gathered)  # a separate local on this memory
            setattr(made, DATA_IS_COUNTED, True)  # as of a `GatheredParameter`
        else:
            return make_subclass(GatheredParameter, gathered)
        made._is_param = True  # makes isinstance(made, nn.Parameter) true
        return made

    def from_caller(self, given: Any, compute_mesh: DeviceMesh | None, dtype: torch.dtype) -> Any:
        """A tensor that a caller has substituted for the parameter (`functional_call`), to compute with.

        DTensors on the mesh of the stored parameter are gathered by operators that autograd records. Other tensors are
        used unchanged.
        """
        if not isinstance(given, DTensor) or given._spec.mesh is not self.spec.mesh:
            return given
        data = axes_within(self.spec.mesh, self.data_mesh)
        placements = [Replicate() if axis in data else p for axis, p in enumerate(self.spec.placements)]
        dim_axes = [tuple(axis for axis in axes if axis not in data) for axes in self.spec.dim_axes]
        goal = DTensorSpec.from_dim_axes(self.spec.mesh, tuple(placements), self.spec.tensor_meta, dim_axes)
        full = given.redistribute(placements=goal.placements, shard_order=goal.shard_order)
        full: Any = full if full.dtype is dtype else full.to(dtype)
        spec = self.leaf_spec(compute_mesh)
        if spec is not None and spec.mesh is self.spec.mesh:
            return full
        if compute_mesh is None:  # gradients are averaged over the ranks' losses, as for stored parameters
            average = [Partial("avg") if axis in data else p for axis, p in enumerate(placements)]
            local = full.to_local(grad_placements=average)
        else:
            local = full.to_local()
        if spec is None:
            return local
        return DTensor.from_local(local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.tensor_meta.stride)

    @torch.no_grad()
    def write_back(self, stored: Any, gathered: torch.Tensor) -> None:
        """Copy a write to the gathered parameter, the same on all ranks, to the stored one."""
        mesh = self.spec.mesh
        parts = fabric_of(mesh).parts
        for (coordinate, full), (_, kept) in zip(parts(mesh, gathered), parts(mesh, stored._local_tensor), strict=True):
            if kept.data_ptr() != full.data_ptr() or self.is_sharded:
                kept.copy_(self.slot.cut(full, coordinate))
        torch.autograd.graph.increment_version(stored)

    def _remapped(self, mesh: DeviceMesh) -> DTensorSpec:
        """The layout of the gathered parameter on the mesh of the inputs."""
        meta = self.spec.tensor_meta
        if self.origin is None:
            return replicated_spec(mesh, meta)
        if not set(self.origin.mesh.axes) <= set(mesh.axes) or mesh.root is not self.origin.mesh.root:
            raise MeshError(
                f"{self.name} is on {self.origin.mesh}, which is not part of the inputs' {mesh}",
                hint="give inputs on the mesh that the parameters were distributed on",
            )
        return self.origin.remapped(mesh, meta)


def _origin(
    parameter: nn.Parameter, data_mesh: DeviceMesh, name: str
) -> tuple[DTensorSpec | None, DTensorSpec | None, DeviceMesh]:
    """The layout of a parameter without the data axes, on its own mesh and on a common grid; the data axes on it.

    The layouts are None for a plain parameter.
    """
    if not isinstance(parameter, DTensor):
        return None, None, data_mesh
    spec = parameter._spec
    found = on_one_grid(spec.mesh, data_mesh)
    if found is None:
        raise MeshError(
            f"{name} is on {spec.mesh}, which is not of the same grid as {data_mesh}",
            hint='use slices of one mesh: world["tp"] for tensor parallelism, world["dp"] for data parallelism',
        )
    own, data = found
    replicated = axes_within(own, data)
    kept = [axis for axis in range(own.ndim) if axis not in replicated]
    for axis in sorted(replicated):
        if not isinstance(spec.placements[axis], Replicate):
            raise LayoutError(
                f"{name} is {spec}: already split on the data axis {spec.mesh.axis_name(axis)!r}",
                hint="replicate it on the data axes before fully_shard or replicate, which split it there",
            )
    if spec.partial_axes:
        raise LayoutError(
            f"{name} is {spec}: parameters must not be Partial", hint="redistribute it to Replicate() first"
        )
    if not kept:
        return None, None, data
    return _apart(spec, spec.mesh, kept), _apart(spec, own, kept), data


def _apart(spec: DTensorSpec, mesh: DeviceMesh, kept: Sequence[int]) -> DTensorSpec:
    """The layout on some axes of a mesh of the same axes as the spec's."""
    part = mesh._select(tuple(mesh.axes[a] for a in kept), tuple(mesh.axis_name(a) for a in kept))
    to = {axis: new for new, axis in enumerate(kept)}
    dim_axes = [tuple(to[axis] for axis in axes) for axes in spec.dim_axes]
    meta = TensorMeta(spec.shape, dtype=spec.tensor_meta.dtype)
    return DTensorSpec.from_dim_axes(part, tuple(spec.placements[a] for a in kept), meta, dim_axes)


def computed_shape(parameter: nn.Parameter, data_mesh: DeviceMesh, name: str) -> tuple[int, ...]:
    """The shape of the gathered parameter on a rank. Raises if it differs between ranks."""
    spec = _origin(parameter, data_mesh, name)[0]
    if spec is None:
        return tuple(parameter.shape)
    parts = [math.prod([spec.mesh.shape[axis] for axis in axes]) for axes in spec.dim_axes]
    if spec.is_strided or any(size % count for size, count in zip(spec.shape, parts, strict=True)):
        raise LayoutError(
            f"{name} is {spec}: granularity needs even shards of tensor parallelism",
            hint="choose sizes that tensor parallelism divides, or leave out granularity",
        )
    return tuple([size // count for size, count in zip(spec.shape, parts, strict=True)])


def _slot(
    origin: DTensorSpec | None, meta: TensorMeta, data_mesh: DeviceMesh, placement: Shard | Ragged | None, name: str
) -> ParamSlot:
    """The stored layout of the parameter: the data axes split the local of tensor parallelism, as the minor ones."""
    dim = None if placement is None else placement.dim
    if dim is not None and not -len(meta.shape) <= dim < len(meta.shape):
        raise LayoutError(
            f"{name} of shape {tuple(meta.shape)} has no dim {dim} to shard",
            hint="choose one with shard_placement_fn",
        )
    own = [] if origin is None else list(zip(origin.mesh.axes, _names(origin.mesh), strict=True))
    ours = list(zip(data_mesh.axes, _names(data_mesh), strict=True))
    if any(set(a) & set(b) for a, _ in own for b, _ in ours):
        raise MeshError(
            f"{name} is on axes that are part of the data axes {data_mesh}", hint="pass other axes as the mesh"
        )
    axes = sorted([*own, *ours])
    mesh = data_mesh._select(tuple(grid for grid, _ in axes), tuple(axis_name for _, axis_name in axes))
    spec = replicated_spec(mesh, meta) if origin is None else origin.remapped(mesh, meta)
    if dim is None or placement is None:
        return ParamSlot(spec, None, 0)
    dim %= len(meta.shape)
    sharding = mesh.axes.index(data_mesh.axes[-1])
    placements, dim_axes = list(spec.placements), list(spec.dim_axes)
    placements[sharding] = placement.on_dim(dim)
    dim_axes[dim] = (*dim_axes[dim], sharding)
    return ParamSlot(DTensorSpec.from_dim_axes(mesh, tuple(placements), meta, dim_axes), sharding, dim)


def _names(mesh: DeviceMesh) -> Iterable[str]:
    return [mesh.axis_name(axis) for axis in range(mesh.ndim)]
