"""Operators that make a tensor from another's size, or overwrite all of one: no value is read, so nothing is moved.

A result with as many dims as the tensor has its layout, with Replicate for Partial axes (each rank has the value) and
for dims of another size; any other is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import AnyShard, Partial, Placement, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.engine import Factors
from shardwise.rules.pointwise import EXTREMA, KINDS, alike, broadcast
from shardwise.rules.registry import Call, layout_rule, rule

aten = torch.ops.aten
REPLICATE = Replicate()
Layouts = tuple[tuple[DTensorSpec, ...], tuple[DTensorSpec, ...]]


def like(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout of a new tensor made from another: that of the other in dims of its size, else replicated."""
    if len(meta.shape) != len(spec.shape):
        return DTensorSpec.from_dim_axes(spec.mesh, (REPLICATE,) * spec.mesh.ndim, meta, ((),) * len(meta.shape))
    same = [a == b for a, b in zip(meta.shape, spec.shape, strict=True)]
    placements: tuple[Placement, ...] = tuple(
        p if isinstance(p, AnyShard) and same[p.dim] else REPLICATE for p in spec.placements
    )
    axes = tuple(axes if kept else () for axes, kept in zip(spec.dim_axes, same, strict=True))
    return DTensorSpec.from_dim_axes(spec.mesh, placements, meta, axes)


@layout_rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
def like_first(call: Call, specs: Sequence[DTensorSpec]) -> Layouts:
    """A new tensor of the size of another."""
    return tuple(specs), (like(specs[0], call.results[0]),)


def local_sizes(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local size, and the local strides if the call has strides."""
    size = outputs[0].local_shape(coordinate)
    if call.get("stride") is None or outputs[0].is_replicated:
        return {"size": list(size)}
    return {"size": list(size), "stride": list(dense_strides(size, like=call["stride"]))}


layout_rule(
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.new_empty_strided.default, localize=local_sizes,
)(like_first)  # fmt: skip


# ---------------------------------------------------------------- overwriting all of a tensor


def overwritten(call: Call, kinds: Sequence[Partial]) -> Factors:
    """The factors of an operator that writes one number everywhere. `kinds` are Partials that reduce it to itself."""
    stays = alike(len(call.operands), (0,), len(call.results), kinds)
    return Factors(*broadcast(call), rows=stays)


@rule(aten.zero.default, aten.zero_.default)
def zero(call: Call) -> Factors:
    """Zeros are any reduction of zeros."""
    return overwritten(call, KINDS)


@rule(aten.fill_.Scalar, aten.fill_.Tensor)
def fill_in_place(call: Call) -> Factors:
    """The same number on every rank is its own extremum."""
    return overwritten(call, EXTREMA)


@layout_rule(aten.fill.Scalar)
def fill(call: Call, specs: Sequence[DTensorSpec]) -> Layouts:
    """A number in every element; the old values are not read."""
    return tuple(specs), (like(specs[0], call.results[0]),)


@layout_rule(aten.fill.Tensor)
def fill_tensor(call: Call, specs: Sequence[DTensorSpec]) -> Layouts:
    """The value of a scalar tensor in every element; the old values are not read."""
    value = like(specs[1], specs[1].tensor_meta)
    return (specs[0], value), (like(specs[0], call.results[0]),)
