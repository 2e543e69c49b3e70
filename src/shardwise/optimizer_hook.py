"""Gradients get the layout of their parameters before an optimizer steps, and so does state that is made from them.

An optimizer that was made before its model was sharded has parameters that no module has: its step is refused.

The gradient of a replicated parameter may still be Partial. An optimizer that copies it (`momentum_buffer`) would copy
the layout too.

torch's global hooks are registered once. Its table of hooks must not change while another thread steps an optimizer.
Parts of the library that need the steps for a while add their functions to `before_step` and `after_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import modes
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.flat_buffer import FlatBuffer, alike
from shardwise.errors import LayoutError
from shardwise.tensor import DTensor, dtensor_of
from shardwise.tensor.dtensor import REPLACED

__all__ = ["StepHook", "after_step", "align_gradients", "before_step", "install"]

StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]  # of an optimizer and the arguments of its step


@torch.no_grad()
def align_gradients(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Redistribute gradients whose layout differs from that of their DTensor parameter. In strict mode nothing moves.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> weight = torch.nn.Parameter(sw.ones(4, device_mesh=mesh))
        >>> (weight * sw.ones(2, 4, device_mesh=mesh, placements=[sw.Shard(0)])).sum().backward()
        >>> weight.grad.spec
        f32[4] P
        >>> align_gradients(torch.optim.SGD([weight]))
        >>> weight.grad.spec
        f32[4] R
    """
    found: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if getattr(parameter, REPLACED, None) is not None and parameter.requires_grad:  # a step changes no others
                raise _replaced(optimizer, parameter)
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and _differs(grad._spec, parameter._spec):
                found.append(parameter)
    if modes.is_strict():
        return
    sums = {at: p.grad._spec for at, p in enumerate(found) if p._spec.is_replicated and not any(p.grad._spec.dim_axes)}
    for positions in alike(sums):
        _reduce_as_one([found[at] for at in positions])
    for parameter in found:
        if _differs(parameter.grad._spec, goal := parameter._spec):
            parameter.grad = parameter.grad.redistribute(placements=goal.placements, shard_order=goal.shard_order)


def _replaced(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> LayoutError:
    """The error of a parameter that no module has: no gradient has reached it since it was replaced."""
    return LayoutError(
        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that the model no longer "
        f"has: {getattr(parameter, REPLACED)} has replaced it, so this step would not train the model",
        hint="make the optimizer after the model is sharded",
    )


def _differs(have: DTensorSpec, goal: DTensorSpec) -> bool:
    return have.mesh is goal.mesh and (have.placements != goal.placements or have.dim_axes != goal.dim_axes)


def _reduce_as_one(parameters: list[Any]) -> None:
    """Reduce gradients of one layout in one collective."""
    buffer = FlatBuffer.of([parameter.grad._spec for parameter in parameters])
    joined = dtensor_of(buffer.spec, buffer.joined(parameter.grad._local_tensor for parameter in parameters))
    total = joined.redistribute(placements=[Replicate()] * joined.device_mesh.ndim)
    for parameter, part in zip(parameters, buffer.parts(total._local_tensor), strict=True):
        parameter.grad = dtensor_of(parameter._spec.with_dtype(part.dtype), part)


before_step: list[StepHook] = [align_gradients]
after_step: list[StepHook] = []


@functools.cache
def install() -> None:
    """Let `before_step` and `after_step` be called around the steps of all optimizers."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for hook in tuple(before_step):
        hook(optimizer, args, kwargs)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for hook in tuple(after_step):
        hook(optimizer, args, kwargs)
