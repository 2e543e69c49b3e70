"""Tensors into a layer that runs on locals, and out of it: moved and unwrapped in one step, and wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.rules.embedding import local_rows, missing_rows
from shardwise.tensor import (
    DTensor,
    apply_function,
    as_dtensor,
    as_local,
    dtensor_of,
    gradient_spec,
    moved,
    transposed_spec,
)
from shardwise.transforms import alive

__all__ = ["from_layer", "rows_here", "to_layer"]

Specs = Sequence[DTensorSpec]


def to_layer(targets: Specs, gradients: Specs, tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The locals of tensors, each moved to a spec; `gradients` are the layouts of the ranks' gradients of them."""
    if torch.is_grad_enabled():
        graded = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        if len(graded) == len(tensors):
            return apply_function(_ToLayer, targets, gradients, *tensors)
        if graded:
            chosen = [[items[i] for i in graded] for items in (targets, gradients, tensors)]
            found = dict(zip(graded, apply_function(_ToLayer, chosen[0], chosen[1], *chosen[2]), strict=True))
            return [found[i] if i in found else _local(t, targets[i]) for i, t in enumerate(tensors)]
    return [_local(tensor, target) for tensor, target in zip(tensors, targets, strict=True)]


def _local(tensor: DTensor, target: DTensorSpec) -> torch.Tensor:
    return _moved(tensor._local_tensor, tensor._spec, target)


def from_layer(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, *, to_local: bool) -> torch.Tensor:
    """The result of a layer, in the layout `source`, moved to `target`: a DTensor, or the local of one."""
    if to_local and source is target:
        return local
    if torch.is_grad_enabled() and local.requires_grad:
        return apply_function(_FromLayer, alive(local), source, target, to_local)
    moved = _moved(local, source, target)
    return moved if to_local else dtensor_of(target, moved)


def rows_here(table: DTensorSpec, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the row of the local table, and whether the row is missing there."""
    fabric, rows = fabric_of(table.mesh), table.shape[0]

    def missing(coordinate: Sequence[int], local: torch.Tensor) -> torch.Tensor:
        return missing_rows(local, table.global_offset(coordinate)[0], table.local_shape(coordinate)[0], rows)

    def row(coordinate: Sequence[int], local: torch.Tensor, is_missing: torch.Tensor) -> torch.Tensor:
        return local_rows(local, is_missing, table.global_offset(coordinate)[0])

    elsewhere = fabric.map(table.mesh, missing, tokens)
    return fabric.map(table.mesh, row, tokens, elsewhere), elsewhere


def _moved(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """A local in the layout `source`, moved; itself if the layouts are the same."""
    if source is target:
        return local
    bound = bound_route(source, target)
    if bound.communicates:
        modes.check_decomposing(bound.route)
    return bound.run(local)


def _wrapped(grad: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> DTensor:
    """The gradient of a local as a DTensor, with derivatives; its own gradient has the layout `gradient`."""
    if grad.dtype is not spec.tensor_meta.dtype:
        spec, gradient = spec.with_dtype(grad.dtype), gradient.with_dtype(grad.dtype)
    return as_dtensor(grad, spec, gradient) if grad.requires_grad else dtensor_of(spec, grad)


class _ToLayer(torch.autograd.Function):
    """Several DTensors, each moved, as locals."""

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
                continue
            total_gradient = _wrapped(grad, spec, transposed_spec(target, spec))
            # a Partial stays one: the tensor before may have more addends
            found.append(total_gradient if source is target else moved(total_gradient, gradient_spec(source)))
        return tuple(found)


class _FromLayer(torch.autograd.Function):
    """A local as a DTensor, moved; or the local of that."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, to_local: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.source, ctx.target, ctx.to_local = source, target, to_local
        found = _moved(local, source, target)
        if to_local:
            return found
        return dtensor_of(target, local.detach() if found is local else found)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source, target = gradient_spec(ctx.source), gradient_spec(ctx.target)
        if ctx.to_local:
            grad = _wrapped(grad, target, transposed_spec(ctx.target, target))
        own = moved(grad, source)
        if not own.requires_grad:
            return own._local_tensor, None, None, None
        addends = ctx.source if grad.dtype is ctx.source.tensor_meta.dtype else ctx.source.with_dtype(grad.dtype)
        return as_local(own, addends), None, None, None
