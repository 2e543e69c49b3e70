"""The autograd functions of DTensors: from locals, to locals, and between layouts.

Each is differentiated by the others, so that derivatives of any order are functions of DTensors too. `source`, `spec`,
`gradient` and `target` are layouts as a transformed function sees them: without the dims of vmap. In forward mode a
result shares the memory of an operand's tangent where it shares that of the operand, as for views of plain tensors: a
write in place then changes both or neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.core.layout import dense_strides
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.views import materialize
from shardwise.errors import PlainTensorError
from shardwise.fabric.base import fabric_of, fabrics
from shardwise.fabric.routes import bound_route
from shardwise.fabric.shared_writes import is_traced
from shardwise.local import stored_zeros
from shardwise.plan.propagate import replicated_spec
from shardwise.tensor.gradient_layouts import (
    addends_spec,
    gradient_spec,
    needs_parts,
    refuse_parts,
    share_of_gradient,
    tangent_spec,
    transposed_spec,
)
from shardwise.tensor.laid_out import LaidOutTensor, dtensor_of, is_dtensor
from shardwise.tensor.moves import cast, moved_to
from shardwise.tensor.ranks import apply_function, on_every_rank, wants_derivatives
from shardwise.tensor.versions import with_version_of
from shardwise.transforms import alive, innermost, is_wrapped, with_batch_dim

__all__ = [
    "FromLocal",
    "Redistribute",
    "ToLocal",
    "as_dtensor",
    "as_local",
    "laid_out_gradient",
    "moved",
    "writable_local",
]

# A DTensor, or a wrapper around one inside a function that torch.func transforms.
AnyDTensor = Any


def moved(
    tensor: AnyDTensor,
    target: DTensorSpec,
    async_op: bool = False,
    backward_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> AnyDTensor:
    """`tensor` in the layout `target`, whatever its own, with derivatives; its dtype is kept."""
    spec = tensor._spec
    if spec.tensor_meta is not target.tensor_meta:
        target = target.with_meta(spec.tensor_meta)
    if wants_derivatives(tensor):
        if spec is target and backward_dtype is None:
            return tensor
        return apply_function(Redistribute, tensor, spec, target, async_op, backward_dtype, max_bytes)
    return moved_to(tensor, target, async_op, max_bytes)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> AnyDTensor:
    """The DTensor of a local, with derivatives; the gradient of the local is the local of `gradient`."""
    if wants_derivatives(local):
        return apply_function(FromLocal, local, spec, gradient)
    return dtensor_of(spec, local)


def as_local(tensor: AnyDTensor, gradient: DTensorSpec) -> torch.Tensor:
    """The local of a DTensor, with derivatives; the ranks' gradients of it have the layout `gradient`."""
    if wants_derivatives(tensor):
        return apply_function(ToLocal, tensor, tensor._spec, gradient)
    return tensor._local_tensor


def writable_local(tensor: LaidOutTensor) -> torch.Tensor:
    """The local of a tensor, for users who may write to it."""
    if tensor._spec.is_lazy:
        materialize(tensor)
    return tensor._local_tensor


def laid_out_gradient(grad: torch.Tensor, spec: DTensorSpec) -> AnyDTensor:
    """The gradient or tangent of a tensor of this spec. Some of torch's formulas make plain zeros."""
    if is_dtensor(grad):
        return grad
    if not is_traced(grad) and not is_wrapped(grad) and bool(grad.any()):
        raise PlainTensorError(
            f"the gradient of {spec} is a plain torch.Tensor of shape {tuple(grad.shape)}",
            hint="distribute_tensor(gradient, mesh, placements) before you give it to backward()",
        )
    target = replicated_spec(spec.mesh, TensorMeta.of(grad))
    if is_wrapped(grad):
        is_virtual = fabric_of(spec.mesh).many_ranks
        return as_dtensor(on_every_rank(grad, spec.mesh.grid_size) if is_virtual else grad, target, target)
    zeros = stored_zeros(grad)
    return dtensor_of(target, fabric_of(spec.mesh).build(spec.mesh, lambda coordinate: zeros.clone()))


def _with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    return spec if spec.tensor_meta.dtype is dtype else spec.with_dtype(dtype)


def _reduced_local(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The reduction of the ranks' addends, on each rank, with derivatives."""
    reduced = moved(as_dtensor(part, spec, gradient_spec(spec)), spec.reduced())
    return as_local(reduced, addends_spec(spec))


class FromLocal(torch.autograd.Function):
    """A local as a DTensor. If the reduction is not a sum, each rank's part has a weight in derivatives."""

    @staticmethod
    def forward(local: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> AnyDTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return with_version_of(local, dtensor_of(spec, stored_zeros(local).detach()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        local, ctx.spec, ctx.gradient = inputs
        ctx.set_materialize_grads(False)
        if needs_parts(ctx.spec):
            ctx.save_for_backward(local)
            ctx.save_for_forward(local)

    @staticmethod
    def backward(ctx: Any, grad: AnyDTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        grad = laid_out_gradient(grad, ctx.spec)
        addends = addends_spec(ctx.spec, ctx.gradient)
        own = as_local(moved(grad, ctx.gradient), _with_dtype(addends, grad.dtype))
        return _weighted(ctx, own, addends), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        addends = addends_spec(ctx.spec, ctx.spec)  # the tangent of an average is the average of the tangents
        return as_dtensor(_weighted(ctx, tangent, addends), addends, ctx.gradient)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], local: Any, spec: DTensorSpec, gradient: DTensorSpec) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim = in_dims[0]
        shape = list(spec.shape)
        shape.insert(dim, info.batch_size)
        meta = TensorMeta(shape, dense_strides(shape, like=local.stride()), local.dtype)
        return as_dtensor(local, with_batch_dim(spec, dim, meta), with_batch_dim(gradient, dim, meta)), dim


def _weighted(ctx: Any, own: torch.Tensor, addends: DTensorSpec) -> torch.Tensor:
    """This rank's share of a gradient, or its addend to a tangent."""
    part = alive(ctx.saved_tensors[0]) if needs_parts(ctx.spec) else None
    return share_of_gradient(part, ctx.spec, addends, own, _reduced_local)


class ToLocal(torch.autograd.Function):
    """The local of a DTensor."""

    @staticmethod
    def forward(tensor: LaidOutTensor, spec: DTensorSpec, gradient: DTensorSpec) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return with_version_of(tensor, writable_local(tensor).detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.spec, ctx.gradient = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        refuse_parts(ctx.spec)
        own: Any = grad
        fabric = fabrics[ctx.spec.mesh.fabric]
        if fabric.many_ranks and not fabric.is_local(innermost(own)):
            own = on_every_rank(own, ctx.spec.mesh.grid_size)  # of a plain tensor that the ranks' values were added to
        for axis in ctx.spec.partial_axes:
            if ctx.spec.placements[axis].is_partial("avg") and not ctx.gradient.placements[axis].is_partial("avg"):
                own = torch.ops.aten.mul.Scalar(own, ctx.spec.mesh.shape[axis])
        spec, gradient = (_with_dtype(s, own.dtype) for s in (ctx.gradient, transposed_spec(ctx.spec, ctx.gradient)))
        return as_dtensor(own, spec, gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: AnyDTensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_parts(ctx.spec)
        tangent = laid_out_gradient(tangent, ctx.spec)
        if ctx.spec is (spec := tangent._spec):
            return as_local(tangent, ctx.gradient)
        own = as_local(moved(tangent, tangent_spec(ctx.spec)), ctx.gradient)
        constant = [dim for dim in ctx.spec.broadcast if dim in spec.broadcast]
        return _stored_once(own, constant) if constant else own

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: Any, spec: DTensorSpec, gradient: DTensorSpec) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim, meta = in_dims[0], tensor._spec.tensor_meta
        tensor = moved(tensor, with_batch_dim(spec, dim, meta))
        return as_local(tensor, with_batch_dim(gradient, dim, tensor._spec.tensor_meta)), dim


def _stored_once(local: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A local that is constant along `dims`, with broadcast dims: torch wants the strides of a value in its tangent."""
    one = local
    for dim in dims:
        one = one.narrow(dim, 0, 1)
    return one.clone().expand_as(local)


class Redistribute(torch.autograd.Function):
    """A DTensor in another layout; its gradient is redistributed back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        tensor: AnyDTensor,
        source: DTensorSpec,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        max_bytes: int | None,
    ) -> AnyDTensor:
        found = moved_to(tensor, target, async_op, max_bytes)
        if target.tensor_meta.is_symbolic:  # sizes of backward are fixed now: a compiler counts symbolic ones here
            bound_route(gradient_spec(target), gradient_spec(source), max_bytes)
        return tensor.view_as(tensor) if found is tensor else found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.source, ctx.target, ctx.async_op, ctx.backward_dtype, ctx.max_bytes = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: AnyDTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, None, None, None
        source = gradient_spec(ctx.source)
        if not isinstance(grad, LaidOutTensor):
            grad = laid_out_gradient(grad, ctx.target)
        if ctx.backward_dtype is not None and grad.dtype is not ctx.backward_dtype:
            grad = cast(grad, ctx.backward_dtype)
        found = moved(grad, source, ctx.async_op, None, ctx.max_bytes)
        if found.dtype is not source.tensor_meta.dtype:
            found = cast(found, source.tensor_meta.dtype)
        return found, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: AnyDTensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tangent, dtype = laid_out_gradient(tangent, ctx.source), ctx.target.tensor_meta.dtype
        if ctx.source is ctx.target:  # the value is a view of the operand
            return tangent.view_as(tangent)
        tangent = tangent if tangent.dtype is dtype else cast(tangent, dtype)
        found = moved(tangent, tangent_spec(ctx.target), ctx.async_op, None, ctx.max_bytes)
        return tangent.clone() if found is tangent else found

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any,
        in_dims: tuple[Any, ...],
        tensor: Any,
        source: DTensorSpec,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        max_bytes: int | None,
    ) -> Any:
        dim, spec = in_dims[0], tensor._spec
        meta = spec.tensor_meta
        if meta.dtype is not target.tensor_meta.dtype:
            meta = TensorMeta(meta.shape, meta.stride, target.tensor_meta.dtype)
        target = with_batch_dim(target, dim, meta, spec)
        return apply_function(Redistribute, tensor, spec, target, async_op, backward_dtype, max_bytes), dim


never_traced(
    *(
        getattr(function, name)
        for function in (FromLocal, ToLocal, Redistribute)
        for name in ("forward", "setup_context", "backward", "jvp")
    )
)
