"""Gradients that every rank has a part of, of small parameters: added up at the end of backward, all in one collective.

Each rank sees a part of the sequence, so its gradient of a norm's weight is a part of the sum. Left as they are, an
optimizer would add them up one by one, and each time that it reads one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.tensor import DTensor

__all__ = ["add_up", "add_up_after_backward", "added_up"]

_WATCHED = "_shardwise_added_up"  # on a parameter whose gradient is added up
_lock = threading.Lock()
_waiting: dict[int, nn.Parameter] = {}  # parameters that this backward has reached


def add_up_after_backward(parameters: Iterable[nn.Parameter]) -> None:
    """From now on a backward ends with whole gradients of these parameters."""
    for parameter in parameters:
        if parameter.requires_grad and not hasattr(parameter, _WATCHED):
            parameter.register_post_accumulate_grad_hook(_reached)
            setattr(parameter, _WATCHED, True)


def _reached(parameter: torch.Tensor) -> None:
    with _lock:
        _waiting[id(parameter)] = parameter  # pyright: ignore[reportArgumentType]
    # for each parameter, since a backward that failed may have left some behind; all but the first find nothing to do
    Variable._execution_engine.queue_callback(_add_up_waiting)  # pyright: ignore[reportAttributeAccessIssue]


def _add_up_waiting() -> None:
    with _lock:
        parameters = list(_waiting.values())
        _waiting.clear()
    if parameters:
        add_up(parameters)


@torch.no_grad()
def add_up(parameters: Iterable[torch.Tensor]) -> None:
    """Make the gradients that lie as parts of a sum whole: those of one mesh, layout and dtype in one collective."""
    listed = list(parameters)
    for parameter, whole in zip(listed, added_up([parameter.grad for parameter in listed]), strict=True):
        if whole is not parameter.grad:
            parameter.grad = whole


def added_up(gradients: Sequence[Any], keep: Sequence[int] = ()) -> list[Any]:
    """The same of gradients themselves. Sums over the axes in `keep` are left; anything else is as it was."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for at, gradient in enumerate(gradients):
        if isinstance(gradient, DTensor) and _is_plain_sum(gradient._spec):
            spec = gradient._spec
            groups.setdefault((spec.mesh, spec.placements, spec.tensor_meta.dtype), []).append(at)
    found = list(gradients)
    for positions in groups.values():
        for at, whole in zip(positions, _added_up_together([gradients[at] for at in positions], keep), strict=True):
            found[at] = whole
    return found


def _is_plain_sum(spec: DTensorSpec) -> bool:
    """Sums on some axes, and replicated on the others: only then locals can stand side by side."""
    kinds = {type(p) for p in spec.placements}
    return (
        Partial in kinds
        and kinds <= {Partial, Replicate}
        and all(p.is_partial("sum") for p in spec.placements if isinstance(p, Partial))
    )


def _added_up_together(gradients: Sequence[DTensor], keep: Sequence[int]) -> Sequence[DTensor]:
    mesh, placements = gradients[0]._spec.mesh, gradients[0]._spec.placements
    target = tuple([p if axis in keep else Replicate() for axis, p in enumerate(placements)])
    if target == placements:
        return gradients
    parts = torch.cat([gradient._local_tensor.reshape(-1) for gradient in gradients])
    total = DTensor.from_local(parts, mesh, placements).redistribute(placements=target)._local_tensor
    pieces = total.split([gradient.numel() for gradient in gradients])
    return [
        DTensor.from_local(
            piece.view(gradient.shape), mesh, target, shape=gradient.shape, stride=gradient._spec.tensor_meta.stride
        )
        for gradient, piece in zip(gradients, pieces, strict=True)
    ]
