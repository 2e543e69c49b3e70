"""Plain tensors among DTensors are assumed replicated. Their gradients are plain; processes compare their values.

Tensors of the user and those that an operator made inside are treated alike: the same on every rank, or an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.mesh import DeviceMesh
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.signature import Executor, Hook, Wrapping
from shardwise.errors import AgreementError, PlainTensorError
from shardwise.events import user_line
from shardwise.fabric.base import fabric_of
from shardwise.fabric.collective_log import argument_name
from shardwise.fabric.rank_tensor import is_of_ranks, parts_of
from shardwise.fabric.shared_writes import agree
from shardwise.local import stored_zeros
from shardwise.schema import OpInfo, Slot

__all__ = ["note_locals", "replicated_operand", "with_plain_operands"]


def with_plain_operands(
    run: Executor, info: OpInfo, found: Sequence[tuple[Slot, Any]], mesh: DeviceMesh, wrapping: Wrapping
) -> Executor:
    """`run`, some of whose operands are plain tensors.

    Nothing is done inside a decomposed operator, whose own operands have been checked.
    """
    tensor_class, hooks, name = wrapping.tensor_class, wrapping.gradient_hooks, str(info.op)
    plain = [slot for slot, tensor in found if not isinstance(tensor, tensor_class)]
    # if a plain tensor is written to, the result is plain, and so is the gradient of the operands
    into_plain = any(slot.name in info.writes for slot in plain)
    laid_out = [slot for slot, tensor in found if isinstance(tensor, tensor_class)] if into_plain else []
    if modes.plain_policy() == "refuse" and is_tracing() and not modes.is_nested():
        _refuse_traced(info, found, tensor_class)
    verified = modes.plain_policy() != "replicate"
    check = fabric_of(mesh).plain_check(mesh) if verified else None
    lockstep = verified and fabric_of(mesh).many_ranks
    names = [slot.name if slot.item is None else f"{slot.name}[{slot.item}]" for slot in plain]

    def run_with_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        operands = [slot.get(args, kwargs) for slot in plain]
        if any(operand._is_zerotensor() for operand in operands):
            args, kwargs = _with_stored_zeros(args, kwargs, plain, operands)
        if modes.is_nested():
            return run(args, kwargs)
        if check is not None:
            check(name, list(zip(names, operands, strict=True)))
        elif lockstep:
            _check_ranks(name, names, operands)
        if torch.is_grad_enabled():
            for operand in operands:
                if operand.requires_grad:
                    _hook_once(operand, hooks.of_ranks if is_of_ranks(operand) else hooks.of_plain)
            for slot in laid_out:
                operand = slot.get(args, kwargs)
                if operand.requires_grad:
                    _hook_once(operand, _gradient_on(mesh, tensor_class))
        return run(args, kwargs)

    return run_with_plain


def note_locals(error: Exception, tensor_class: Any, found: Sequence[tuple[Slot, Any]]) -> None:
    """Add to the error of a call that a plain operand looks like a rank's part: the result of `to_local`."""
    specs = [tensor._spec for _, tensor in found if isinstance(tensor, tensor_class)]
    for slot, tensor in found:
        if isinstance(tensor, tensor_class):
            continue
        for spec in specs:
            if tensor.shape != spec.shape and tensor.shape == spec.local_shape([0] * spec.mesh.ndim):
                error.add_note(
                    f"argument {argument_name(slot.name, tensor)} is a plain torch.Tensor of shape "
                    f"{tuple(tensor.shape)}, which is taken as a global tensor. It has the shape of a local of {spec}: "
                    "DTensor.from_local(tensor, mesh, placements) makes a DTensor of locals"
                )
                break


def _with_stored_zeros(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], plain: Sequence[Slot], operands: Sequence[torch.Tensor]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The call with memory for zero tensors that have none: undefined tangents of forward mode.

    torch allocates it before an operator runs, but not inside `__torch_dispatch__`, where kernels would read it.
    """
    new_args, new_kwargs = list(args), dict(kwargs)
    for slot, operand in zip(plain, operands, strict=True):
        slot.put(new_args, new_kwargs, stored_zeros(operand))
    return tuple(new_args), new_kwargs


def _refuse_traced(info: OpInfo, found: Sequence[tuple[Slot, Any]], tensor_class: Any) -> None:
    """Raise in traced code: the program's calls are not visible there, so torch's own tensors are refused too."""
    for slot, tensor in found:
        if not isinstance(tensor, tensor_class) and tensor.numel() != 1:
            raise PlainTensorError(
                f"{info.op}: argument {argument_name(slot.name, tensor)} is a plain torch.Tensor of shape "
                f"{tuple(tensor.shape)} among "
                "DTensors, and plain tensors are refused here",
                hint="call inside plain_tensors('verify') if it is torch's own, or the same on every rank",
            )


def _check_ranks(op: str, names: Sequence[str], operands: Sequence[torch.Tensor]) -> None:
    """Compare the locals of virtual ranks, which correspond to plain tensors of processes."""
    for name, operand in zip(names, operands, strict=True):
        first, *others = parts_of(operand)
        differs = [rank for rank, other in enumerate(others, start=1) if not agree(first, other)]
        if differs:
            raise AgreementError(
                f"{op} at {user_line()}: argument {argument_name(name, operand)} is a plain torch.Tensor on "
                f"each rank among DTensors, and ranks 0 and {differs[0]} do not have the same",
                hint="DTensor.from_local(tensor, mesh, placements) if each rank holds a part of a tensor",
            )


# ---------------------------------------------------------------- gradients


def _hook_once(tensor: torch.Tensor, hook: Hook) -> None:
    """Register `hook` for gradients of a tensor. On a leaf it stays for all later backward passes."""
    hooks = tensor._backward_hooks
    if tensor.grad_fn is not None or not hooks or hook not in hooks.values():
        tensor.register_hook(hook)


@functools.cache
def _gradient_on(mesh: DeviceMesh, tensor_class: Any) -> Hook:
    """The gradient of a DTensor, of a result that is a plain tensor: the same on every rank."""

    @torch.utils.hooks.unserializable_hook
    def laid_out_gradient(grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, tensor_class):
            return grad
        return replicated_operand(tensor_class, grad, mesh, "backward", "gradient")

    return laid_out_gradient


def replicated_operand(tensor_class: Any, tensor: torch.Tensor, mesh: DeviceMesh, op: str, name: str) -> torch.Tensor:
    """A plain tensor as a replicated DTensor."""
    if modes.plain_policy() != "replicate":
        check = fabric_of(mesh).plain_check(mesh)
        if check is not None:
            check(op, [(name, tensor)])
        _check_ranks(op, [name], [tensor])
    return tensor_class.from_local(tensor, mesh, None)
