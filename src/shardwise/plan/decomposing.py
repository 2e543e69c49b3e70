"""Whether an operator is computed from others: by small reductions, or by its rule with the operands moved.

Pure: seconds of the cost model on both sides. Runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.core.placement import AnyShard
from shardwise.core.spec import DTensorSpec
from shardwise.plan.cost import current_cost_model
from shardwise.plan.propagate import OutputSharding
from shardwise.plan.route import DTensorRedistributePlanner, Route

__all__ = ["worth_decomposing"]


def worth_decomposing(
    sharding: OutputSharding, specs: Sequence[DTensorSpec], routes: Sequence[Route], reductions: int | None
) -> bool:
    """Whether what a rule would move takes longer than what the decomposition does.

    Args:
        sharding: where operands must lie by the rule, which looks at one axis at a time.
        specs: where they lie.
        routes: what they would go through to get there.
        reductions: the small reductions of the decomposition, along dims that the rule wants whole; None where nothing
            is known of them, and the decomposition is taken.
    """
    if not any(route.collectives for route in routes):
        return False
    # a size of a compiler stays one where nothing is moved along its dim
    if reductions is None or any(spec.tensor_meta.is_symbolic for spec in specs):
        return True
    sizes = [math.prod(spec.shape) for spec in specs]
    # the last of the largest: gradients come before what they are the gradients of, and are laid out like it
    main = len(sizes) - 1 - sizes[::-1].index(max(sizes))
    split = _split_wrongly(sharding, main, specs[main])
    return bool(split) and sum(route.seconds for route in routes) > _seconds(specs, main, split, reductions)


def _split_wrongly(sharding: OutputSharding, operand: int, spec: DTensorSpec) -> dict[int, int]:
    """The axes that split an operand along dims that its rule wants whole, each with the dim."""
    factors = sharding.factors
    if factors is None:
        return {}
    allowed = [name is not None and name not in factors.whole | factors.barred for name in factors.operands[operand]]
    shards = ((axis, p) for axis, p in enumerate(spec.placements) if isinstance(p, AnyShard))
    return {axis: placement.dim for axis, placement in shards if not allowed[placement.dim]}


def _seconds(specs: Sequence[DTensorSpec], main: int, split: Mapping[int, int], reductions: int) -> float:
    """Reductions of one element for each row of an operand, after all of its shape are laid out like it, and whole."""
    planner, spec, settled = DTensorRedistributePlanner(), specs[main], specs[main].reduced()
    alike = [other for other in specs if other.shape == spec.shape]
    seconds = sum(planner.plan(other, settled.with_meta(other.tensor_meta)).seconds for other in alike)
    local = settled.local_shape((0,) * spec.mesh.ndim)
    row = math.prod(local[dim] for dim in set(split.values()))
    members = math.prod(spec.mesh.shape[axis] for axis in split)
    received = 2 * (members - 1) / members * settled.local_bytes / max(row, 1)
    return seconds + reductions * current_cost_model().seconds(spec.mesh, tuple(split), received)
