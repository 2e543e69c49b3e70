"""Gradients take the layout of their parameters before an optimizer steps, and with them the state made of them.

The gradient of a replicated parameter may be a sum that is not reduced yet. An optimizer that keeps a copy of it
(`momentum_buffer`) would keep the layout too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import modes
from shardwise.tensor import DTensor

__all__ = ["align_gradients", "install"]


@torch.no_grad()
def align_gradients(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Redistribute the gradients of DTensor parameters that have another layout than these. Not in strict mode.

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
    if modes.is_strict():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
                continue
            have, goal = grad._spec, parameter._spec
            differs = have.placements != goal.placements or have.dim_axes != goal.dim_axes
            if differs and have.mesh is goal.mesh:
                parameter.grad = grad.redistribute(placements=goal.placements, shard_order=goal.shard_order)


def install() -> None:
    """From now on every optimizer does so before it steps."""
    register_optimizer_step_pre_hook(align_gradients)
