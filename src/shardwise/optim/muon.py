"""Muon for distributed parameters: momentum in shards, Newton-Schulz of each matrix once, by its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.optim.matrix_owners import by_matrix
from shardwise.torch_private import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    muon_learning_rate,
)

__all__ = ["Muon", "newton_schulz", "newton_schulz_cost"]


def newton_schulz(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """A stack of matrices, each orthogonalized by the quintic iteration of `torch.optim.Muon`, in bfloat16.

    Products are batched, on the shorter side; each matrix is scaled by its own norm, computed as torch computes it.

    Example:
        >>> found = newton_schulz(torch.eye(2).expand(3, 2, 2) * 5, (3.4445, -4.775, 2.0315), 5, 1e-7)
        >>> found.shape, found.dtype
        (torch.Size([3, 2, 2]), torch.bfloat16)
    """
    linear, cubic, quintic = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16)
    x = x.mT if tall else x
    norms = torch.stack([matrix.norm() for matrix in x.unbind()])
    x = x / norms.clamp(min=eps).view(-1, 1, 1)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, polynomial, x, beta=linear)
    return x.mT if tall else x


def newton_schulz_cost(shape: torch.Size) -> float:
    """The multiplications of one step for a matrix of this shape: a Gram matrix, its square, and a product with it.

    Example:
        >>> newton_schulz_cost(torch.Size((8, 2)))
        72.0
    """
    short, long = sorted(shape)
    return float(2 * short * short * long + short**3)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, with the same arguments and state, and the same values as on one device.

    Momentum and parameters stay in their layouts. Each matrix is orthogonalized once in the mesh: ranks send their
    parts of the updates to owners in bfloat16, the dtype of Newton-Schulz, and get the results back. The work is
    balanced over the ranks by its multiplications, and an owner computes its matrices of one shape as a batch.
    `torch.optim.Muon` itself also gives the right values on DTensors, but communicates in each product.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> weight = torch.nn.Parameter(sw.ones(4, 6, device_mesh=mesh, placements=[sw.Shard(0)]))
        >>> optimizer = Muon([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.spec
        f32[4,6] S0
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure` computes the loss again, with gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        momenta: list[torch.Tensor] = []
        if self._init_group(group, parameters, gradients, momenta):
            raise ValueError("Muon: complex parameters are not supported")
        if not parameters:
            return
        momentum, rate = group["momentum"], float(group["lr"])
        foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta

        def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
            return newton_schulz(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])

        found = by_matrix(orthogonalized, updates, dtype=torch.bfloat16, cost=newton_schulz_cost, batched=True)
        foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        by_rate: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # matrices of one shape have one rate
        for parameter, update in zip(parameters, found, strict=True):
            adjusted = muon_learning_rate(rate, group["adjust_lr_fn"], parameter.shape)
            alike = by_rate.setdefault(adjusted, ([], []))
            alike[0].append(parameter)
            alike[1].append(update)
        for adjusted, (targets, added) in by_rate.items():
            foreach_add_(targets, added, alpha=-adjusted)
