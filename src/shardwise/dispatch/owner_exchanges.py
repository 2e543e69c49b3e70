"""Operators that look up, write or sort along a sharded dim: ranks exchange items with those that own them.

The rule's program replaces the operator. Sizes depend on values, so this is not for graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardwise import modes
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.operands import operand_mover
from shardwise.dispatch.signature import Executor, Signature, routes_between
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import announced
from shardwise.local import coordinates_here, in_order_of
from shardwise.plan.cost import current_cost_model
from shardwise.plan.propagate import OutputSharding
from shardwise.plan.route import Route, StepCost
from shardwise.plan.step import OwnerExchange
from shardwise.rules.owner_programs import Exchanging, OwnedPart

__all__ = ["exchanging_by_owner"]


def exchanging_by_owner(signature: Signature, sharding: OutputSharding, step: OwnerExchange) -> Executor:
    """The executor of a call by an exchange by owner."""
    info, mesh, program = signature.info, signature.mesh, sharding.rule.program
    assert program is not None, f"the rule of {info.op} exchanges by owner and has no program"
    fabric, places = fabric_of(mesh), {at: _place(step, at) for at in coordinates_here(mesh)}
    routes = routes_between(signature.specs, sharding.inputs)
    move_operands = operand_mover(signature, routes)
    route = _route(step, sharding)
    moving = [r.route for r in routes if r is not None and r.communicates] + [route]
    wraps = [signature.wrapping.wrapper(spec) for spec in sharding.outputs]
    strides = [spec.tensor_meta.stride for spec in sharding.outputs]

    def run_owner_program(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        modes.check_strict(info.op, moving)
        locals_ = move_operands(args, kwargs)
        announced(route)

        def start(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
            new_args, new_kwargs = list(args), dict(kwargs)
            for slot, local in zip(signature.slots, own, strict=True):
                slot.put(new_args, new_kwargs, local)
            return program(places[at], info.bind(tuple(new_args), new_kwargs))

        made = fabric.exchange_by_owner(step, start, locals_)
        if signature.pinned:
            (target,) = (locals_[i] for i in signature.pinned)
            fabric.map(mesh, lambda _, into, value: into.copy_(value), target, made[0])
            return info.bind(args, kwargs)[signature.slots[signature.pinned[0]].name]
        results = [wrap(in_order_of(local, stride)) for wrap, local, stride in zip(wraps, made, strides, strict=True)]
        return results[0] if info.returns == ("Tensor",) else tuple(results)

    return run_owner_program


def _place(step: OwnerExchange, at: Coordinate) -> OwnedPart:
    spec, dim = step.before, step.dim
    start, length = spec.starts_and_lengths(dim, np.array([at]))
    parts = tuple(spec.mesh.shape[axis] for axis in step.over)
    member = 0
    for axis in step.over:
        member = member * spec.mesh.shape[axis] + at[axis]
    return OwnedPart(dim, int(start[0]), int(length[0]), spec.shape[dim], parts, member)


def _route(step: OwnerExchange, sharding: OutputSharding) -> Route:
    """The exchange as listeners and strict mode see it, assuming that every rank owns equally many items."""
    factors = sharding.rule.factors(sharding.call)
    assert factors is not None
    specs = (*sharding.inputs, *sharding.outputs)
    owned = next(o for o in factors.owned if _is_laid_out(specs, (*o.row.inputs, *o.row.outputs), step.over[0]))
    moved = sum(sharding.inputs[i].local_bytes for i in owned.sent)
    moved += sum(sharding.outputs[i].local_bytes for i in owned.received)
    seconds = current_cost_model().seconds(step.before.mesh, step.over, moved / owned.rounds)
    cost = StepCost(moved / owned.rounds, seconds, step.after.local_bytes)
    return Route(step.before, step.after, (step,) * owned.rounds, (cost,) * owned.rounds)


def _is_laid_out(specs: tuple[DTensorSpec, ...], row: tuple[Any, ...], axis: int) -> bool:
    return all(spec.placements[axis] is placement for spec, placement in zip(specs, row, strict=True))
