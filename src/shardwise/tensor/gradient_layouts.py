"""Layouts of gradients, and the share of a gradient that belongs to one addend of a reduction.

The table `GRADIENT_OF` defines how a move transforms gradients. Uses specs and locals, not DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.placement import (
    MaskPartial,
    Owned,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
    norm_order,
)
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import UnsupportedError
from shardwise.fabric.routes import bound_route
from shardwise.tensor.ranks import apply_function
from shardwise.transforms import with_batch_dim

# by a number: of `x / n` forward mode takes n as a tensor, whose shape is that of one rank
_div = torch.ops.aten.div.Scalar

__all__ = [
    "GRADIENT_OF",
    "addends_spec",
    "gradient_spec",
    "gradient_spec_as",
    "gradient_spec_of_local",
    "needs_parts",
    "refuse_parts",
    "share_of_gradient",
    "tangent_spec",
    "transposed_spec",
]

# The placement of a gradient for each placement of the tensor. The gradient of a value is one value: if the tensor
# is a sum of the ranks' addends, each of them gets the same gradient.
GRADIENT_OF: dict[type[Placement], Callable[[Any], Placement]] = {
    Shard: lambda placement: placement,
    StridedShard: lambda placement: placement,
    Zigzag: lambda placement: placement,
    Ragged: lambda placement: placement,
    Owned: lambda placement: placement,
    Replicate: lambda placement: placement,
    Partial: lambda placement: Replicate(),
    MaskPartial: lambda placement: Replicate(),
}


# At most so many results are kept: given sizes may be met once and never again, and their specs with them.
_remembered = functools.lru_cache(maxsize=512)


@_remembered
def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """The layout of the gradient of a tensor of this spec."""
    if not spec.partial_axes:
        return spec.materialized()
    placements = tuple(GRADIENT_OF[type(p)](p) for p in spec.placements)
    return DTensorSpec.from_dim_axes(spec.mesh, placements, spec.tensor_meta, spec.dim_axes)


def gradient_spec_as(spec: DTensorSpec, given: Sequence[Any] | None) -> DTensorSpec:
    """The spec of a gradient: given by the user, or by the table."""
    if given is None:
        return gradient_spec(spec)
    chosen = DTensorSpec(spec.mesh, given, spec.tensor_meta)
    # dims that the same axes split are split in the same order
    order = [entry for entry in spec.shard_order if sorted(entry.axes) == sorted(chosen.dim_axes[entry.dim])]
    return chosen if not order else DTensorSpec(spec.mesh, given, spec.tensor_meta, order)


@_remembered
def gradient_spec_of_local(spec: DTensorSpec) -> DTensorSpec:
    """The layout of the ranks' gradients of the locals of a tensor, if the user gives none.

    The locals of a sum are its addends, and each has the gradient of the sum. Of an extreme each local is taken to
    change as the value does, so that their gradients add up to its own.
    """
    if all(p.linear for p in spec.placements if isinstance(p, Partial)):
        return gradient_spec(spec)
    return _with_partials(spec, lambda p: Replicate() if p.linear else Partial())


@_remembered
def addends_spec(spec: DTensorSpec, gradient: DTensorSpec | None = None) -> DTensorSpec:
    """The layout of the derivative of a reduced value with respect to its addends: a sum.

    If the user declared a gradient to be the average of the ranks' gradients, its derivatives are averages too.
    """
    if gradient is None or (mean := Partial("avg")) not in gradient.placements:
        return _with_partials(spec, lambda p: Partial())
    placements = tuple(
        (mean if p is g is mean else Partial()) if isinstance(p, Partial) else p
        for p, g in zip(spec.placements, gradient.placements, strict=True)
    )
    return DTensorSpec.from_dim_axes(spec.mesh, placements, spec.tensor_meta, spec.dim_axes)


@_remembered
def tangent_spec(spec: DTensorSpec) -> DTensorSpec:
    """The layout of the tangents of the locals of a tensor: the transpose of `gradient_spec_of_local`."""
    return _with_partials(spec, lambda p: p if p.linear else Replicate())


@_remembered
def transposed_spec(spec: DTensorSpec, gradient: DTensorSpec) -> DTensorSpec:
    """The layout of gradients of locals in the layout `gradient`, themselves gradients of locals of `spec`."""
    own, mean = addends_spec(tangent_spec(spec)).with_meta(gradient.tensor_meta), Partial("avg")
    placements = [
        (g if g is mean else Replicate()) if isinstance(g, Partial) else p
        for g, p in zip(gradient.placements, own.placements, strict=True)
    ]
    return DTensorSpec.from_dim_axes(gradient.mesh, tuple(placements), gradient.tensor_meta, own.dim_axes)


def _with_partials(spec: DTensorSpec, other: Callable[[Partial], Placement]) -> DTensorSpec:
    if not spec.partial_axes:
        return spec.materialized()
    placements = tuple(other(p) if isinstance(p, Partial) else p for p in spec.placements)
    return DTensorSpec.from_dim_axes(spec.mesh, placements, spec.tensor_meta, spec.dim_axes)


# ---------------------------------------------------------------- parts that were reduced


def needs_parts(spec: DTensorSpec) -> bool:
    """Whether the derivative of the reduction depends on the ranks' values."""
    return any(not p.linear for p in spec.placements if isinstance(p, Partial))


def refuse_parts(spec: DTensorSpec) -> None:
    """Raise if the local of a tensor is not a differentiable function of its value."""
    for placement in spec.placements:
        if isinstance(placement, Partial) and not placement.linear and placement.reduce_op not in ("min", "max"):
            raise UnsupportedError(
                f"the derivative of the local of a tensor that is {placement}: many locals have the same value",
                hint="redistribute(...) to Shard or Replicate before to_local()",
            )


Reduced = Callable[[torch.Tensor, DTensorSpec], torch.Tensor]


def share_of_gradient(
    part: torch.Tensor | None, spec: DTensorSpec, addends: DTensorSpec, gradient: torch.Tensor, reduced: Reduced
) -> torch.Tensor:
    """The share of the gradient of a reduced value that belongs to this rank's addend.

    Args:
        part: the addend of this rank; None if the reduction is linear.
        spec: how the parts make up the value.
        addends: how the shares make up the gradient.
        gradient: the gradient of the value, on each rank.
        reduced: reduces parts of a spec, with derivatives, and gives each rank the result.
    """
    for axis in spec.partial_axes:
        op = spec.placements[axis].reduce_op  # pyright: ignore[reportAttributeAccessIssue]
        if op == "avg" and not addends.placements[axis].is_partial("avg"):
            gradient = _div(gradient, spec.mesh.shape[axis])
    if part is None:
        return gradient
    ops = {spec.placements[axis].reduce_op for axis in spec.partial_axes}  # pyright: ignore[reportAttributeAccessIssue]
    if ops & {"min", "max"}:
        chosen = (part == reduced(part, spec)).to(gradient.dtype)
        return gradient * (chosen / reduced(chosen, addends_spec(spec).with_dtype(chosen.dtype)))
    if "product" in ops:
        return gradient * apply_function(ProductOfOthers, part, spec)
    (op,) = ops
    order = norm_order(op)
    assert order is not None, op
    norm = reduced(part, spec)
    zero = norm == 0
    weight = (part / norm.masked_fill(zero, 1)).pow(order - 1)
    return gradient * weight.masked_fill(zero, 0)


class ProductOfOthers(torch.autograd.Function):
    """The product of the other ranks' values; correct if some are zero. Its own derivatives are refused."""

    @staticmethod
    def forward(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        zero = part == 0
        counted = addends_spec(spec).with_dtype(torch.int64)
        zeros = bound_route(counted, counted.reduced()).run(zero.to(torch.int64))
        nonzero = torch.where(zero, torch.ones_like(part), part)
        product = bound_route(spec, spec.reduced()).run(nonzero)
        others = zeros - zero.to(torch.int64)
        return torch.where(others > 0, torch.zeros_like(part), product / nonzero)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _refuse_product()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refuse_product()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], part: Any, spec: DTensorSpec) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim = in_dims[0]
        shape = list(spec.shape)
        shape.insert(dim, info.batch_size)
        batched = with_batch_dim(spec, dim, TensorMeta(shape, dtype=spec.tensor_meta.dtype))
        return apply_function(ProductOfOthers, part, batched), dim


def _refuse_product() -> UnsupportedError:
    return UnsupportedError(
        "second derivatives through from_local with Partial(product)",
        hint="from_local(local.unsqueeze(0), mesh, [Shard(0)]).prod(0) has derivatives of any order",
    )
