"""Negative log-likelihood with sharded classes: each rank contributes the targets of its classes."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.decompose.layout_helpers import as_result, reduced
from shardwise.rules.loss import (
    MEAN,
    NONE,
    SUM,
)
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    """The losses of the targets are reduced: scores are not gathered."""
    if scores.dim() == 1 and target.dim() == 1:
        target = target[0]
    losses, weights = torch.ops.shardwise.pick_class.default(scores, target, weight, ignore_index)
    if reduction == NONE:
        return as_result(losses, scores.dtype), torch.zeros((), dtype=scores.dtype, device=scores.device)
    if reduction == SUM:
        return as_result(losses.sum(), scores.dtype), as_result(weights.sum(), scores.dtype)
    # without weights the number of counted targets follows from the targets: no communication is needed
    counted = (target != ignore_index).to(weights.dtype) if weight is None else weights
    total = reduced(counted.sum())
    loss = losses.sum() / total
    return as_result(loss, scores.dtype), as_result(total, scores.dtype)


@decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: Any, scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:
    """The gradient of each target's score, without communication of scores."""
    if scores.dim() == 1 and target.dim() == 1:
        target = target[0]
    value = grad / reduced(total_weight) if reduction == MEAN else grad
    return torch.ops.shardwise.place_class.default(value, scores, target, weight, ignore_index)
