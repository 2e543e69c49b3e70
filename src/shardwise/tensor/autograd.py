"""From and to locals and between layouts where gradients are wanted: the gradient goes the way back."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.core.placement import Partial
from shardwise.core.spec import DTensorSpec
from shardwise.tensor.dtensor import DTensor, cast, dtensor_of, moved_to, redistributed
from shardwise.tensor.gradients import gradient_spec, share_of_gradient

__all__ = ["FromLocal", "Redistribute", "ToLocal"]


class FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.spec, ctx.gradient = spec, gradient
        if any(not p.is_partial("sum") for p in spec.placements if isinstance(p, Partial)):
            ctx.save_for_backward(local)
        return dtensor_of(spec, local.view_as(local))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        local = redistributed(grad, ctx.gradient)._local_tensor
        if ctx.saved_tensors:
            local = share_of_gradient(ctx.saved_tensors[0], ctx.spec, local)
        return local, None, None


class ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: DTensorSpec) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.spec, ctx.gradient = tensor._spec, gradient
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for axis in ctx.spec.partial_axes:
            if ctx.spec.placements[axis].is_partial("avg"):
                grad = grad * ctx.spec.mesh.shape[axis]
        return dtensor_of(ctx.gradient.with_dtype(grad.dtype), grad), None


class Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        tensor: DTensor,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        max_bytes: int | None,
    ) -> DTensor:
        ctx.source, ctx.async_op, ctx.max_bytes = tensor._spec, async_op, max_bytes
        ctx.backward_dtype = backward_dtype
        moved = moved_to(tensor, target, async_op, max_bytes)
        return tensor.view_as(tensor) if moved is tensor else moved  # pyright: ignore[reportReturnType]

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source = gradient_spec(ctx.source)
        if ctx.backward_dtype is not None and grad.dtype is not ctx.backward_dtype:
            grad = cast(grad, ctx.backward_dtype)
        target = source.with_meta(grad._spec.tensor_meta)
        moved = moved_to(grad, target, ctx.async_op, ctx.max_bytes)
        if moved.dtype is not source.tensor_meta.dtype:
            moved = moved.to(source.tensor_meta.dtype)
        return moved, None, None, None, None


for _function in (FromLocal, ToLocal, Redistribute):
    never_traced(_function.forward, _function.backward)
