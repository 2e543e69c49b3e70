"""distribute_tensor and distribute_module: global tensors over a mesh; each rank receives only its block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.compilers import traceable
from shardwise.core.layout import full_block
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError, MeshError, UnsupportedError
from shardwise.events import tensor_entered
from shardwise.fabric.base import fabric_of
from shardwise.fabric.block_copies import slicer
from shardwise.fabric.routes import bound_route, scatter
from shardwise.fabric.world import as_mesh
from shardwise.tensor import AnyDTensor, DTensor, dtensor_of, is_dtensor
from shardwise.tensor.dtensor import REMEMBERED, REPLACED
from shardwise.tensor.from_local import not_a_tensor
from shardwise.transforms import alive, is_wrapped, outside_transforms, without_derivatives

__all__ = [
    "cut_block",
    "distribute_module",
    "distribute_tensor",
    "mark_replaced",
    "parameter_like",
    "parameters_of",
    "replicate_rest",
    "users_hooks",
]


@traceable
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Sequence[Any] | None = None,
) -> AnyDTensor:
    """Distribute a global tensor over a mesh; each rank receives only its block.

    Args:
        tensor: the global tensor. All ranks pass one of the same shape; the values are those of the source rank.
        device_mesh: the mesh.
        placements: how to lay it out; replicated by default.
        src_data_rank: the rank of the mesh whose values are used. None: every rank takes its block from its own tensor,
            without communication. It must be None inside torch.compile, and on process groups for an argument of a
            function that torch.func transforms.
        shard_order: which axis splits a dim first, if it is not the order of the mesh.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (3,))
        >>> x = distribute_tensor(torch.arange(7), mesh, [sw.Shard(0)])
        >>> [t.tolist() for t in x.to_local().tensors]
        [[0, 1, 2], [3, 4, 5], [6]]
    """
    mesh = as_mesh(device_mesh)
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor("distribute_tensor", tensor)
    if is_dtensor(tensor):
        if tensor.device_mesh is not mesh:
            raise MeshError(f"the tensor is a DTensor on {tensor.device_mesh} already", hint="use redistribute(...)")
        if placements is not None and DTensorSpec(mesh, placements, tensor._spec.tensor_meta) is not tensor._spec:
            raise LayoutError(f"the tensor is a DTensor already: {tensor._spec}", hint="use redistribute(...)")
        return tensor
    placements = (Replicate(),) * mesh.ndim if placements is None else placements
    if is_wrapped(tensor := without_derivatives(alive(tensor))):
        return _distribute_transformed(tensor, mesh, placements, src_data_rank, shard_order)
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        raise UnsupportedError(
            "distribute_tensor of a computed tensor: gradients would not reach its inputs",
            hint="DTensor.from_local(tensor, mesh).redistribute(placements=...) keeps them; detach() drops them",
        )
    with outside_transforms("distribute_tensor"):
        return _distribute(tensor, mesh, placements, src_data_rank, shard_order)


def _distribute(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    src_data_rank: int | None,
    shard_order: Sequence[Any] | None,
) -> DTensor:
    spec = DTensorSpec(mesh, placements, TensorMeta.of(tensor).dense(), shard_order)
    reduced = spec.reduced()
    source = tensor.detach().resolve_conj().resolve_neg()
    if fabric_of(mesh).has_values and source.device.type != mesh.device_type and source.device.type != "meta":
        source = source.to(mesh.device_type)
    sender = None if source.is_meta else src_data_rank  # meta tensors have no values to send
    local = scatter(reduced, lambda coordinate: cut_block(source, reduced, coordinate), sender)
    if reduced is not spec:
        local = bound_route(reduced, spec).run(local)
    made = dtensor_of(spec, local)
    if tensor_entered:
        tensor_entered.notify(made)
    if tensor.is_leaf and tensor.requires_grad:
        made.requires_grad_()
    return made


def _distribute_transformed(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    src_data_rank: int | None,
    shard_order: Sequence[Any] | None,
) -> AnyDTensor:
    """Inside a function that torch.func transforms: with derivatives, each rank from its own tensor."""
    if src_data_rank is not None and fabric_of(mesh).one_rank:
        raise UnsupportedError(
            "distribute_tensor inside a function that torch.func transforms cannot send the values of one rank",
            hint="pass src_data_rank=None, so that every rank takes its own; or make the DTensor outside",
        )
    return DTensor.from_local(tensor, mesh).redistribute(placements=placements, shard_order=shard_order)


def cut_block(tensor: torch.Tensor, spec: DTensorSpec, coordinate: Coordinate) -> torch.Tensor:
    """A copy of the block of a global tensor that belongs to the rank at `coordinate`."""
    return slicer(full_block(spec.shape), spec.block(coordinate))(tensor)


# ---------------------------------------------------------------- modules


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module DTensors, in place, and set layouts for its inputs and outputs.

    Args:
        module: the module.
        device_mesh: the mesh.
        partition_fn: called as `(name, submodule, mesh)` for the module (its name is "") and each submodule, to make
            parameters DTensors in any layout. Others are replicated over the mesh; DTensors are not changed.
        input_fn: called as `(module, inputs, mesh)`, or without the module if it takes two arguments, before each
            forward; its return value replaces the inputs.
        output_fn: called as `(module, outputs, mesh)`, or without the module, after each forward; its return value is
            the output.

    Returns:
        The module.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> linear = distribute_module(
        ...     nn.Linear(8, 16),
        ...     mesh,
        ...     input_fn=lambda module, inputs, mesh: sw.distribute_tensor(inputs[0], mesh, [sw.Shard(0)]),
        ...     output_fn=lambda module, output, mesh: output.full_tensor(),
        ... )
        >>> linear.weight.spec, linear(torch.ones(12, 8)).shape
        (f32[16,8] R, torch.Size([12, 16]))
    """
    mesh = as_mesh(device_mesh)
    before = parameters_of("distribute_module", module)
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    replicate_rest(module, mesh)
    mark_replaced("distribute_module", before, module)
    if input_fn is not None:
        module.register_forward_pre_hook(partial(_call_input_fn, function=_of_three(input_fn, "input_fn"), mesh=mesh))
    if output_fn is not None:
        module.register_forward_hook(partial(_call_output_fn, function=_of_three(output_fn, "output_fn"), mesh=mesh))
    return module


def _of_three(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` as a function of a module, values and a mesh."""
    given = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in given):
        return function
    count = sum(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in given)
    if count not in (2, 3):
        raise LayoutError(
            f"distribute_module: {name} takes {count} arguments", hint="it is called with (module, values, mesh)"
        )
    return function if count == 3 else partial(_without_module, function)


def _without_module(function: Callable[..., Any], module: nn.Module, values: Any, mesh: DeviceMesh) -> Any:
    return function(values, mesh)


def _call_input_fn(module: nn.Module, inputs: Any, *, function: Callable[..., Any], mesh: DeviceMesh) -> Any:
    return function(module, inputs, mesh)


def _call_output_fn(module: nn.Module, inputs: Any, outputs: Any, *, function: Callable[..., Any], mesh: Any) -> Any:
    return function(module, outputs, mesh)


def replicate_rest(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Replicate the parameters and buffers that are not DTensors yet. Shared ones stay shared."""
    made: dict[int, Any] = {}

    def replicated(tensor: torch.Tensor | None) -> Any:
        if tensor is None or isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in made:
            distributed = distribute_tensor(tensor.detach(), mesh, src_data_rank=src_data_rank)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = parameter_like(tensor, distributed) if is_parameter else distributed
        return made[id(tensor)]

    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                tensors[name] = replicated(tensor)


# ---------------------------------------------------------------- parameters that were replaced


def parameter_like(parameter: nn.Parameter, data: Any) -> nn.Parameter:
    """The DTensor `data` as a parameter that replaces another: with what users gave that one, also hooks.

    Example:
        >>> import shardwise as sw
        >>> before = nn.Parameter(torch.ones(2))
        >>> before.rate = 0.1
        >>> parameter_like(before, sw.ones(2, device_mesh=sw.init_device_mesh("cpu", (2,)))).rate
        0.1
    """
    on_gradient = users_hooks(parameter._backward_hooks)
    on_total = users_hooks(parameter._post_accumulate_grad_hooks)
    made = nn.Parameter(data, requires_grad=parameter.requires_grad or bool(on_gradient or on_total))
    for key, value in vars(parameter).items():
        if key not in _OF_DTENSORS:
            setattr(made, key, value)
    for hook in on_gradient:
        made.register_hook(hook)
    for hook in on_total:
        made.register_post_accumulate_grad_hook(hook)
    made.requires_grad_(parameter.requires_grad)  # a frozen one keeps its hooks, but takes no new ones
    return made


_OF_DTENSORS = ("_local_tensor", "_spec", "_is_param", *REMEMBERED)  # attributes of one tensor


def users_hooks(hooks: Mapping[int, Callable[..., Any]] | None) -> list[Callable[..., Any]]:
    """The hooks of a parameter, without those of this library."""
    found = list((hooks or {}).values())
    return [hook for hook in found if not _module_of(hook).startswith("shardwise.")]


def _module_of(hook: Any) -> str:
    return getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""


def parameters_of(who: str, *modules: nn.Module) -> list[nn.Parameter]:
    """The parameters of modules, before the function `who` replaces some. Refuses what is not a module."""
    for module in modules:
        if not isinstance(module, nn.Module):
            raise LayoutError(
                f"{who} takes a torch.nn.Module, not a {type(module).__name__}",
                hint="pass the module itself; for a tensor use distribute_tensor(tensor, mesh, placements)",
            )
    return [parameter for module in modules for parameter in module.parameters()]


def mark_replaced(who: str, before: list[nn.Parameter], *modules: nn.Module) -> None:
    """Mark the parameters that modules no longer have. An optimizer that was made before still has them.

    A gradient that reaches a marked parameter removes the mark: a module outside of these still uses it.
    """
    kept = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    for parameter in kept.values():
        _unmark(parameter)
    for parameter in before:
        if id(parameter) not in kept:
            setattr(parameter, REPLACED, who)
            if parameter.is_leaf and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_unmark)


def _unmark(parameter: torch.Tensor) -> None:
    vars(parameter).pop(REPLACED, None)
