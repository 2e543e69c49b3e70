"""Gradients that wait for a reduction: `zero_grad()` drops them, and an optimizer does not step without them.

On one device these gradients are in `.grad`. Here a backward inside `no_sync()` keeps them apart until a later one
reduces them. torch's functions are wrapped when a program first leaves gradients to a later backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.core.tracing import is_dynamo_compiling
from shardwise.optimizer_hook import before_step
from shardwise.parallel.data_parallel.schedule import forget_waiting_gradients, refuse_waiting_gradients

__all__ = ["follow_waiting_gradients"]


@functools.cache
def follow_waiting_gradients() -> None:
    """Let `zero_grad()` and `step()` take account of gradients that wait for a reduction."""
    nn.Module.zero_grad = _dropping(nn.Module.zero_grad, lambda module: [*module.parameters()])
    torch.optim.Optimizer.zero_grad = _dropping(torch.optim.Optimizer.zero_grad, _stepped)
    before_step.insert(0, _before_step)  # before gradients are communicated


def _dropping(zero_grad: Callable[..., None], parameters: Callable[[Any], list[torch.Tensor]]) -> Callable[..., None]:
    @functools.wraps(zero_grad)
    def dropping(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_dynamo_compiling():
            forget_waiting_gradients(parameters(self))
        zero_grad(self, *args, **kwargs)

    return dropping


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    refuse_waiting_gradients(_stepped(optimizer))
