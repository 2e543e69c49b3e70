"""How gradients lie, and what share of one belongs to a part that was reduced. Knows specs and locals, not DTensors.

What a move does to gradients is the table `GRADIENT_OF`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard, norm_order
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.routes import bound_route

__all__ = ["GRADIENT_OF", "gradient_spec", "gradient_spec_as", "share_of_gradient"]

# How the gradient of a tensor lies, for each way that the tensor itself may lie on an axis. The gradient of a value is
# one value: where the tensor is a sum of what the ranks hold, each of them gets the same gradient.
GRADIENT_OF: dict[type[Placement], Callable[[Any], Placement]] = {
    Shard: lambda placement: placement,
    StridedShard: lambda placement: placement,
    Replicate: lambda placement: placement,
    Partial: lambda placement: Replicate(),
    MaskPartial: lambda placement: Replicate(),
}


@functools.lru_cache(maxsize=4096)
def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """How the gradient of a tensor of this spec lies."""
    if not spec.partial_axes:
        return spec.materialized()
    placements = tuple(GRADIENT_OF[type(p)](p) for p in spec.placements)
    return DTensorSpec.from_dim_axes(spec.mesh, placements, spec.tensor_meta, spec.dim_axes)


def gradient_spec_as(spec: DTensorSpec, given: Sequence[Any] | None) -> DTensorSpec:
    """The spec of a gradient: as the user says, or as the table has it."""
    if given is None:
        return gradient_spec(spec)
    chosen = DTensorSpec(spec.mesh, given, spec.tensor_meta)
    # dims that the same axes split are split in the same order
    order = [entry for entry in spec.shard_order if sorted(entry.axes) == sorted(chosen.dim_axes[entry.dim])]
    return chosen if not order else DTensorSpec(spec.mesh, given, spec.tensor_meta, order)


def share_of_gradient(part: torch.Tensor, spec: DTensorSpec, gradient: torch.Tensor) -> torch.Tensor:
    """What of the gradient of a reduced value belongs to the part that this rank gave to the reduction."""
    for axis in spec.partial_axes:
        op = spec.placements[axis].reduce_op  # pyright: ignore[reportAttributeAccessIssue]
        if op == "avg":
            gradient = gradient / spec.mesh.shape[axis]
    ops = {spec.placements[axis].reduce_op for axis in spec.partial_axes}  # pyright: ignore[reportAttributeAccessIssue]
    if ops & {"min", "max"}:
        value = bound_route(spec, spec.reduced()).run(part)
        chosen = (part == value).to(gradient.dtype)
        return gradient * chosen / _summed(chosen, spec)
    if "product" in ops:
        return gradient * _product_of_others(part, spec)
    order = norm_order(next(iter(ops)))
    if order is not None:
        norm = bound_route(spec, spec.reduced()).run(part)
        return torch.where(norm == 0, torch.zeros_like(norm), gradient * (part / norm).pow(order - 1))
    return gradient


def _summed(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The sum of what the ranks hold, over the axes on which a tensor of this spec is Partial of any kind."""
    sums = tuple(Partial() if isinstance(p, Partial) else p for p in spec.placements)
    counted = DTensorSpec.from_dim_axes(spec.mesh, sums, spec.with_dtype(part.dtype).tensor_meta, spec.dim_axes)
    return bound_route(counted, counted.reduced()).run(part)


def _product_of_others(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The product of what the other ranks hold; right where some of it is zero."""
    zero = part == 0
    zeros = _summed(zero.to(torch.int64), spec)
    nonzero = torch.where(zero, torch.ones_like(part), part)
    product = bound_route(spec, spec.reduced()).run(nonzero)
    others = zeros - zero.to(torch.int64)
    return torch.where(others > 0, torch.zeros_like(part), product / nonzero)
