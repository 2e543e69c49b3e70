"""Computed gradients as addends of the sum over the data axes, without double counting.

Sums over other axes (of a norm's weight that tensor parallelism replicates) are reduced here, all of a bucket
in one collective. The reduction of the bucket sums over the data axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.flat_buffer import alike
from shardwise.fabric.base import fabrics
from shardwise.parallel.data_parallel.data_axes import axes_within
from shardwise.parallel.tensor_parallel.value_layouts import redistributed_as_one
from shardwise.tensor import DTensor

__all__ = ["parts_of_sums"]


def parts_of_sums(
    grads: Sequence[Any], specs: Sequence[DTensorSpec | None], data_mesh: DeviceMesh
) -> list[torch.Tensor]:
    """The local of each gradient as an addend of the sum over the data axes, on other axes in the layout of its leaf.

    Gradients of plain leaves, which have no spec, are such locals already. Gradients that are DTensors may have any
    layout.
    """
    fabric = fabrics[data_mesh.fabric]
    if not fabric.many_ranks and True not in [isinstance(grad, DTensor) for grad in grads]:
        return list(grads)
    grads = _summed_over_plan_axes(grads, specs, data_mesh)
    locals_ = []
    for grad, spec in zip(grads, specs, strict=True):
        if isinstance(grad, DTensor):
            grad = _part_of_sum(grad, spec, data_mesh)
        locals_.append(fabric.spread(data_mesh, grad) if fabric.many_ranks else grad)
    return locals_


def _summed_over_plan_axes(
    grads: Sequence[Any], specs: Sequence[DTensorSpec | None], data_mesh: DeviceMesh
) -> list[Any]:
    """Gradients that are Partial on other axes, reduced on each rank, in one buffer for each kind."""
    partial = {
        at: grad._spec
        for at, (grad, leaf) in enumerate(zip(grads, specs, strict=True))
        if isinstance(grad, DTensor) and leaf is not None and leaf.is_replicated and not any(grad._spec.dim_axes)
    }
    found = list(grads)
    for positions in alike(partial):
        spec = partial[positions[0]]
        placements, data = spec.placements, axes_within(spec.mesh, data_mesh)
        goal = tuple(p if axis in data or not p.is_partial() else Replicate() for axis, p in enumerate(placements))
        if goal == placements or len(positions) == 1:
            continue
        for at, total in zip(positions, redistributed_as_one([grads[at] for at in positions], goal), strict=True):
            found[at] = total
    return found


def _part_of_sum(grad: Any, leaf: Any, data_mesh: DeviceMesh) -> torch.Tensor:
    data = axes_within(grad._spec.mesh, data_mesh)
    for make_goal in (_reduced_spec, _made_partial):
        goal = make_goal(grad._spec, leaf, data)
        if goal is not grad._spec:
            grad = grad.redistribute(placements=goal.placements, shard_order=goal.shard_order)
    return grad._local_tensor


def _reduced_spec(have: DTensorSpec, leaf: DTensorSpec, data: set[int]) -> DTensorSpec:
    """The layout of the leaf, except that sums over data axes stay Partial for the reduction of the bucket."""
    placements = [
        placement if axis in data and placement.is_partial("sum") else wanted
        for axis, (placement, wanted) in enumerate(zip(have.placements, leaf.placements, strict=True))
    ]
    return DTensorSpec.from_dim_axes(have.mesh, tuple(placements), have.tensor_meta, leaf.dim_axes)


def _made_partial(have: DTensorSpec, leaf: DTensorSpec, data: set[int]) -> DTensorSpec:
    """The layout with every data axis Partial: one rank keeps a replicated value, the others have zeros."""
    placements = [
        Partial() if axis in data and not placement.is_partial("sum") else placement
        for axis, placement in enumerate(have.placements)
    ]
    return DTensorSpec.from_dim_axes(have.mesh, tuple(placements), have.tensor_meta, have.dim_axes)
