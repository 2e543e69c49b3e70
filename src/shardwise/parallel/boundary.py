"""The way of tensors into a layer that runs on locals, and out of it: moved and unwrapped in one step, and wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.tensor import DTensor, _make, _moved, _redistributed, gradient_spec

__all__ = ["from_layer", "to_layer"]

Specs = Sequence[DTensorSpec]


def to_layer(targets: Specs, gradients: Specs, tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The locals of tensors, each moved to a spec; `gradients` say what the ranks' gradients of them are together."""
    if torch.is_grad_enabled():
        graded = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        if len(graded) == len(tensors):
            return _ToLayer.apply(targets, gradients, *tensors)
        if graded:
            chosen = [[items[i] for i in graded] for items in (targets, gradients, tensors)]
            found = dict(zip(graded, _ToLayer.apply(chosen[0], chosen[1], *chosen[2]), strict=True))
            return [found[i] if i in found else _local(t, targets[i]) for i, t in enumerate(tensors)]
    return [_local(tensor, target) for tensor, target in zip(tensors, targets, strict=True)]


def from_layer(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, *, to_local: bool) -> torch.Tensor:
    """What a layer has computed, which lies as `source`, moved to `target`: a DTensor, or the local of one."""
    if to_local and source is target:
        return local
    if torch.is_grad_enabled() and local.requires_grad:
        return _FromLayer.apply(local, source, target, to_local)
    made = _moved(_make(source, local), target, False, None)
    return made._local_tensor if to_local else made


def _local(tensor: DTensor, target: DTensorSpec) -> torch.Tensor:
    return tensor._local_tensor if tensor._spec is target else _moved(tensor, target, False, None)._local_tensor


def _wrapped(grad: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return _make(spec if grad.dtype is spec.tensor_meta.dtype else spec.with_dtype(grad.dtype), grad)


class _ToLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: Specs, gradients: Specs, *tensors: DTensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.targets, ctx.gradients = targets, gradients
        ctx.sources = [tensor._spec for tensor in tensors]
        return tuple([_local(t, target).detach() for t, target in zip(tensors, targets, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: list[Any] = [None, None]
        for grad, spec, source, target in zip(grads, ctx.gradients, ctx.sources, ctx.targets, strict=True):
            if grad is None:
                found.append(None)
            elif source is target:  # a sum of parts stays one: what comes before it may have others to add
                found.append(_wrapped(grad, spec))
            else:
                found.append(_redistributed(_wrapped(grad, spec), gradient_spec(source)))
        return tuple(found)


class _FromLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, to_local: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.source, ctx.target, ctx.to_local = source, target, to_local
        made = _moved(_make(source, local.detach()), target, False, None)
        return made._local_tensor if to_local else made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.to_local:
            grad = _wrapped(grad, gradient_spec(ctx.target))
        return _redistributed(grad, gradient_spec(ctx.source))._local_tensor, None, None, None
