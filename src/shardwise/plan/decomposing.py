"""Whether an operator is decomposed into small reductions, or run by its rule on redistributed operands.

Compares the seconds of the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.core.placement import AnyShard
from shardwise.core.spec import DTensorSpec
from shardwise.plan.cost import all_reduce_bytes, current_cost_model
from shardwise.plan.propagate import OutputSharding
from shardwise.plan.route import DTensorRedistributePlanner, Route

__all__ = ["worth_decomposing"]


def worth_decomposing(
    sharding: OutputSharding, specs: Sequence[DTensorSpec], routes: Sequence[Route], reductions: int | None
) -> bool:
    """Whether the redistribution for the rule takes longer than the reductions of the decomposition.

    Args:
        sharding: the layouts that the rule needs, axis by axis.
        specs: the current layouts of the operands.
        routes: the routes of the operands to the layouts of the rule.
        reductions: the small reductions of the decomposition, along dims that must not be sharded; None if they are
            not known, and the decomposition is taken.
    """
    if not any(route.collectives for route in routes):
        return False
    # a symbolic size is not fixed if nothing moves along its dim
    if reductions is None or any(spec.tensor_meta.is_symbolic for spec in specs):
        return True
    sizes = [math.prod(spec.shape) for spec in specs]
    # the last of the largest: gradients precede their tensors, and get their layout
    main = len(sizes) - 1 - sizes[::-1].index(max(sizes))
    split = _split_wrongly(sharding, main, specs[main])
    return bool(split) and sum(route.seconds for route in routes) > _seconds(specs, main, split, reductions)


def _split_wrongly(sharding: OutputSharding, operand: int, spec: DTensorSpec) -> dict[int, int]:
    """The axes that split an operand along dims that must not be sharded, each with the dim."""
    factors = sharding.factors
    if factors is None:
        return {}
    allowed = [
        name is not None and name not in factors.unsharded | factors.barred for name in factors.operands[operand]
    ]
    shards = ((axis, p) for axis, p in enumerate(spec.placements) if isinstance(p, AnyShard))
    return {axis: placement.dim for axis, placement in shards if not allowed[placement.dim]}


def _seconds(specs: Sequence[DTensorSpec], main: int, split: Mapping[int, int], reductions: int) -> float:
    """Reductions of one element for each row of an operand, after all operands of its shape get its layout, reduced."""
    planner, spec, reduced = DTensorRedistributePlanner(), specs[main], specs[main].reduced()
    alike = [other for other in specs if other.shape == spec.shape]
    seconds = sum(planner.plan(other, reduced.with_meta(other.tensor_meta)).seconds for other in alike)
    local = reduced.local_shape((0,) * spec.mesh.ndim)
    row = math.prod(local[dim] for dim in set(split.values()))
    members = math.prod(spec.mesh.shape[axis] for axis in split)
    received = all_reduce_bytes(members, reduced.local_bytes / max(row, 1))
    return seconds + reductions * current_cost_model().seconds(spec.mesh, tuple(split), received)
