"""The parameters of a module as DTensors: distributed once, still tied, remapped to a larger mesh in forward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from shardwise.api import distribute_tensor, parameter_like, replicate_rest
from shardwise.compilers import never_traced
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta, checked_placements
from shardwise.errors import AgreementError, LayoutError, MeshError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.rank_tensor import is_of_ranks
from shardwise.fabric.shared_writes import check_agreement
from shardwise.tensor import DTensor, is_dtensor

__all__ = [
    "check_parameters",
    "keep_one_gradient",
    "laid_out",
    "lay_out",
    "remap_parameters",
    "restore_parameters",
    "update_ties",
]

_MADE = "_shardwise_made"  # on a distributed parameter: a weak reference to the DTensor
_OWN = "_shardwise_own"  # on a module that runs on a larger mesh: its own parameters and buffers, to put back
_ONE = "_shardwise_one"  # on a plain parameter with a hook that keeps one gradient


# ---------------------------------------------------------------- before anything is changed


def check_parameters(
    module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh, who: str, known: dict[int, Placement]
) -> None:
    """Raise if a parameter cannot have its layout. `known`: the layouts of the plan, by identity of parameters."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is None and parametrize.is_parametrized(module, name):
            parameter = _computed(module, name)
        if parameter is None:
            continue
        if isinstance(parameter, DTensor) and parameter._spec.mesh is not mesh:
            raise MeshError(
                f"{who}: its {name} is already on {parameter._spec.mesh}, not on {mesh}",
                hint="apply the plan first, and put parameters on a larger mesh afterwards",
            )
        try:
            (wanted,) = DTensorSpec(mesh, (placement,), TensorMeta.of(parameter)).placements
        except LayoutError as error:
            raise LayoutError(f"{who}: its {name}: {error.problem}", hint=error.hint) from None
        before = known.setdefault(id(parameter), wanted) if name in module._parameters else wanted
        if before is not wanted:
            raise LayoutError(
                f"{who}: its {name} is tied to another module's; the plan lays it out as {before} there and as "
                f"{wanted} here",
                hint="choose styles that agree, as RowwiseParallel for nn.Embedding and ColwiseParallel for nn.Linear",
            )


# ---------------------------------------------------------------- laying out


def lay_out(
    module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh, src_data_rank: int | None
) -> None:
    """Make the named parameters of a module DTensors on `mesh`. Shared parameters stay shared."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            module._parameters[name] = laid_out(parameter, mesh, placement, src_data_rank)
        elif parametrize.is_parametrized(module, name):
            _lay_out_originals(module, name, placement, mesh, src_data_rank)


def _lay_out_originals(
    module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh, src_data_rank: int | None
) -> None:
    """Make DTensors of the tensors that a parametrization computes from.

    Tensors that have the dim to shard are sharded along it, others are replicated. The value is that of one device in
    any layout; in this one a rank has the inputs of its own part.
    """
    shape = _computed(module, name).shape
    (wanted,) = checked_placements((placement,), mesh, len(shape))
    originals = _parametrization(module, name)
    for owner in originals.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                fits = isinstance(wanted, Shard) and parameter.shape[wanted.dim : wanted.dim + 1] == (
                    shape[wanted.dim],
                )
                own = wanted if fits and parameter.dim() == len(shape) else Replicate()
                owner._parameters[key] = laid_out(parameter, mesh, own, src_data_rank)
    replicate_rest(originals, mesh, src_data_rank)


def _parametrization(module: nn.Module, name: str) -> nn.Module:
    found: Any = module.parametrizations
    return found[name]


@torch.no_grad()
def _computed(module: nn.Module, name: str) -> Any:
    """The tensor that a parametrization computes. In training some change their buffers when they are called."""
    originals = _parametrization(module, name)
    training = {each: each.training for each in originals.modules()}
    originals.eval()
    try:
        return getattr(module, name)
    finally:
        for each, was in training.items():
            each.training = was


def laid_out(
    parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement | tuple[Placement, ...], src_data_rank: int | None
) -> nn.Parameter:
    """The parameter as a DTensor; if it was distributed before, the same DTensor."""
    wanted = DTensorSpec(mesh, placement, TensorMeta.of(parameter))
    if isinstance(parameter, DTensor):
        if parameter._spec.placements == wanted.placements:
            return parameter
        own: Any = parameter.detach()
        tensor = own.redistribute(placements=wanted.placements)
    else:
        made = became(parameter)
        if made is not None and made._spec.mesh is mesh:
            return laid_out(made, mesh, placement, src_data_rank)
        tensor = distribute_tensor(parameter.detach(), mesh, wanted.placements, src_data_rank=src_data_rank)
    new = parameter_like(parameter, tensor)
    setattr(parameter, _MADE, weakref.ref(new))
    return new


def became(parameter: torch.Tensor) -> Any:
    """The DTensor that a plan made of a plain parameter, if it still exists."""
    reference = getattr(parameter, _MADE, None)
    return None if reference is None else reference()


def update_ties(module: nn.Module) -> None:
    """Give the new parameter also to modules outside of the plan that share it."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            made = None if parameter is None else became(parameter)
            if made is not None:
                owner._parameters[name] = made


def keep_one_gradient(parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """Plain parameters beside a plan, on a virtual mesh: one tensor and one gradient represent all ranks."""
    if not fabric_of(mesh).many_ranks:
        return
    for name, parameter in parameters:
        is_plain = not isinstance(parameter, DTensor) and not is_of_ranks(parameter)
        if parameter.requires_grad and is_plain and not hasattr(parameter, _ONE):
            parameter.register_hook(functools.partial(_one_gradient, name))
            setattr(parameter, _ONE, True)


def _one_gradient(name: str, gradient: torch.Tensor) -> torch.Tensor:
    if not is_of_ranks(gradient):
        return gradient
    check_agreement(gradient.tensors, functools.partial(_differing_gradients, name))
    return gradient.tensors[0]


def _differing_gradients(name: str, rank: int) -> AgreementError:
    return AgreementError(
        f"{name}: a plain parameter beside a plan is one tensor for all virtual ranks, but their gradients differ",
        hint="ranks have different parts of the input: give the module a style, such as SequenceParallel",
    )


# ---------------------------------------------------------------- while the module runs


def remap_parameters(module: nn.Module, mesh: DeviceMesh, larger: DeviceMesh, *, submodules: bool = True) -> None:
    """Remap parameters and buffers on `mesh` to a larger mesh, replicated along its other axes.

    `restore_parameters` undoes it. Gradients are summed over the other axes. In-place writes to a buffer change the
    module's own. With `submodules=False` only tensors of the module itself are remapped.
    """
    own: list[tuple[dict[str, Any], str, Any, Any]] = []
    for owner in module.modules() if submodules else (module,):
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if is_dtensor(tensor) and tensor._spec.mesh == mesh:
                    own.append((table, name, tensor, _remapped(tensor, larger)))
    for table, name, _, remapped in own:
        table[name] = remapped
    if own:
        setattr(module, _OWN, own)  # not through its dict, which Dynamo of torch 2.11 does not know


def _remapped(tensor: Any, larger: DeviceMesh) -> Any:
    spec = tensor._spec.remapped(larger)
    return DTensor.from_local(
        tensor.to_local(), larger, spec.placements, shape=spec.shape, stride=spec.tensor_meta.stride
    )


def restore_parameters(module: nn.Module) -> None:
    """Restore the module's own parameters and buffers; a buffer that was replaced keeps its new value."""
    own = getattr(module, _OWN, None)
    if own is None:
        return
    for table, name, tensor, remapped in own:
        now = table.get(name)
        if now is remapped or isinstance(tensor, nn.Parameter):
            table[name] = tensor
        elif is_dtensor(now) and now._spec.mesh == remapped._spec.mesh:
            spec = tensor._spec.remapped(now._spec.mesh)
            local = now.redistribute(placements=spec.placements).to_local()
            table[name] = DTensor.from_local(local, tensor._spec.mesh, tensor._spec.placements)
    delattr(module, _OWN)


never_traced(
    remap_parameters, restore_parameters
)  # by themselves, after a graph break: Dynamo cannot guard a mesh that is an argument
