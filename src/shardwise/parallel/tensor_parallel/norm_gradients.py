"""Partial gradients of small parameters, reduced at the end of backward in one collective.

Each rank has a part of the sequence, so its gradient of a norm's weight is one addend of the sum. Otherwise an
optimizer would reduce them one by one, at each read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import nn

from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.flat_buffer import alike
from shardwise.fabric.base import of_one_rank
from shardwise.parallel.tensor_parallel.value_layouts import redistributed_as_one
from shardwise.tensor import DTensor
from shardwise.torch_private import current_autograd_node, queue_callback

__all__ = ["add_up", "add_up_after_backward"]

_WATCHED = "_shardwise_added_up"  # on a parameter whose gradient is added up
_lock = threading.Lock()
_waiting: dict[int, nn.Parameter] = of_one_rank({})  # parameters that this backward has reached


def add_up_after_backward(parameters: Iterable[nn.Parameter]) -> None:
    """Reduce the gradients of these parameters at the end of every backward."""
    for parameter in parameters:
        if parameter.requires_grad and not hasattr(parameter, _WATCHED):
            parameter.register_hook(_about_to_reach)
            parameter.register_post_accumulate_grad_hook(_reached)
            setattr(parameter, _WATCHED, True)


@torch.no_grad()
def _about_to_reach(gradient: torch.Tensor) -> None:
    """Make a gradient of an earlier backward Partial again, without communication, so that sums are added locally."""
    # of the running node: `Module.to` refuses parameters that have weak references, as a hook of its own would need
    parameter = getattr(current_autograd_node(), "variable", None)
    earlier = None if parameter is None else parameter.grad
    if parameter is None or not isinstance(earlier, DTensor) or not isinstance(gradient, DTensor):
        return
    if _is_plain_sum(gradient._spec) and earlier._spec is gradient._spec.reduced():
        parameter.grad = earlier.redistribute(placements=gradient._spec.placements)


def _reached(parameter: torch.Tensor) -> None:
    with _lock:
        _waiting[id(parameter)] = parameter  # pyright: ignore[reportArgumentType]
    # for each parameter, since a failed backward may have left some; all but the first find nothing to do
    queue_callback(_add_up_waiting)


def _add_up_waiting() -> None:
    with _lock:
        parameters = list(_waiting.values())
        _waiting.clear()
    if parameters:
        add_up(parameters)


@torch.no_grad()
def add_up(parameters: Iterable[torch.Tensor]) -> None:
    """Reduce the gradients that are Partial: those of one mesh, layout and dtype in one collective."""
    sums = [(p, p.grad) for p in parameters if isinstance(p.grad, DTensor) and _is_plain_sum(p.grad._spec)]
    for positions in alike({at: gradient._spec for at, (_, gradient) in enumerate(sums)}):
        members, gradients = zip(*(sums[at] for at in positions), strict=True)
        replicated = (Replicate(),) * gradients[0]._spec.mesh.ndim
        for parameter, total in zip(members, redistributed_as_one(gradients, replicated), strict=True):
            parameter.grad = total


def _is_plain_sum(spec: DTensorSpec) -> bool:
    """Whether a layout is a Partial sum on some axes and replicated on the others, as a flat buffer needs it."""
    kinds = {type(p) for p in spec.placements}
    return (
        Partial in kinds
        and kinds <= {Partial, Replicate}
        and all(p.is_partial("sum") for p in spec.placements if isinstance(p, Partial))
    )
