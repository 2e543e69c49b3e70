"""Alternatives of a call: every row of each axis with its cost, and changes of one operand that move nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.core.placement import Placement
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError
from shardwise.plan.propagate import OpSchema, OutputSharding, ShardingPropagator
from shardwise.plan.route import DTensorRedistributePlanner, Route
from shardwise.plan.row_exchange import row_exchange_route
from shardwise.plan.step import OwnerExchange
from shardwise.rules.engine import Row, candidates
from shardwise.rules.registry import find_rule

__all__ = ["Candidate", "Change", "candidates_of", "changes_without_communication", "rule_text"]

MOST_NAMED = 8  # tensors of a list that are named
MAX_TRIED = 64  # layouts tried for one operand: all on meshes of few axes, bounded on others


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of one axis: placements of operands and results, and the seconds to redistribute the operands.

    `owed` are the seconds to reduce Partial results; they count too when rows that move something are compared.
    """

    axis: int
    row: Row
    seconds: float
    owed: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Change:
    """One operand in another layout, with which the operator moves nothing."""

    operand: int
    spec: DTensorSpec
    route: Route  # to redistribute the operand to this layout
    outputs: tuple[DTensorSpec, ...]


def rule_text(sharding: OutputSharding) -> str:
    """The rule of a call: its factors, and the row that was taken on each axis.

    Example:
        >>> from shardwise.core.mesh import DeviceMesh
        >>> from shardwise.core.placement import Replicate, Shard
        >>> from shardwise.rules import all
        >>> import torch
        >>> mesh, meta = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)), TensorMeta((4, 4))
        >>> specs = (DTensorSpec(mesh, [Replicate()], meta), DTensorSpec(mesh, [Shard(1)], meta))
        >>> schema = OpSchema(torch.ops.aten.mm.default, {"self": specs[0], "mat2": specs[1]}, specs)
        >>> rule_text(ShardingPropagator().propagate(schema, (meta,)))
        'mk,kn->mn; tp: R, S1 -> S1'
    """
    mesh = (sharding.inputs or sharding.outputs)[0].mesh
    rows = [
        f"{mesh.axis_name(axis)}: {_short(sharding.inputs, axis)} -> {_short(sharding.outputs, axis)}"
        for axis in range(mesh.ndim)
    ]
    factors = sharding.factors
    head = "" if factors is None else f"{_named(factors.operands)}->{_named(factors.results)}; "
    return head + "; ".join(rows)


def _named(tensors: Sequence[Sequence[str | None]]) -> str:
    """Factors in the notation of rules; long lists of tensors, which repeat, are shortened."""
    spell = "" if all(name is None or len(name) == 1 for dims in tensors for name in dims) else " "
    texts = [spell.join(name or "1" for name in dims) for dims in tensors[:MOST_NAMED]]
    return f",{spell}".join(texts) + (",..." if len(tensors) > MOST_NAMED else "")


def _short(specs: Sequence[DTensorSpec], axis: int) -> str:
    texts = [placement.short for placement in _on_axis(specs, axis)]
    return ", ".join(texts) if len(texts) <= MOST_NAMED else f"{', '.join(texts[:MOST_NAMED])}, ..."


def candidates_of(schema: OpSchema, sharding: OutputSharding) -> tuple[Candidate, ...]:
    """The rows that a rule allows on each axis, cheapest first; none for rules that look at all axes at once."""
    if sharding.rule.layouts is not None:
        return ()
    factors = sharding.factors
    if factors is None:
        return ()
    propagator = ShardingPropagator()
    held = [spec.local_bytes for spec in schema.specs]
    axes = range(schema.mesh.ndim)
    taken = {axis: Row(_on_axis(sharding.inputs, axis), _on_axis(sharding.outputs, axis)) for axis in axes}
    found: list[Candidate] = []
    for axis in axes:
        others = {other: row for other, row in taken.items() if other != axis}
        rows = [
            Candidate(
                axis,
                row,
                propagator.row_cost(schema.specs, axis, held, row)[0],
                propagator.owed(schema.mesh, sharding.call.results, axis, row, others),
                row == taken[axis],
            )
            for row in dict.fromkeys(candidates(factors, _on_axis(schema.specs, axis)))
        ]
        found += sorted(rows, key=lambda candidate: (not candidate.chosen, candidate.seconds + candidate.owed))
    return tuple(found)


def changes_without_communication(
    schema: OpSchema, results: tuple[TensorMeta, ...], pinned: tuple[int, ...] = ()
) -> tuple[Change, ...]:
    """Each layout of a single operand with which the operator moves nothing, cheapest to reach first.

    Args:
        schema: the call as it was.
        results: shape, stride and dtype of each result.
        pinned: operands that are written to; they keep their layout.
    """
    asked = ShardingPropagator().propagate(schema, results, pinned)
    found = [
        change
        for operand in range(len(schema.specs))
        if operand not in pinned
        for spec in dict.fromkeys([*_other_layouts(schema, results, operand), *_asked_for(asked, schema, operand)])
        if (change := _tried(schema, results, pinned, operand, spec)) is not None
    ]
    return tuple(sorted(found, key=lambda change: (change.route.seconds, _partials(change), change.operand)))


def _partials(change: Change) -> int:
    """The number of Partial results: these only postpone the communication."""
    return sum(len(spec.partial_axes) for spec in change.outputs)


def _asked_for(asked: OutputSharding | None, schema: OpSchema, operand: int) -> tuple[DTensorSpec, ...]:
    """The layout that the operator needs of an operand, if it is another one."""
    return () if asked is None or asked.inputs[operand] is schema.specs[operand] else (asked.inputs[operand],)


def _other_layouts(schema: OpSchema, results: tuple[TensorMeta, ...], operand: int) -> Iterator[DTensorSpec]:
    """Layouts of one operand for which, on every axis, some row has the other operands in their current layouts."""
    rule = find_rule(schema.op)
    factors = None if rule is None or rule.layouts is not None else rule.factors(schema.call(results))
    if factors is None:
        return
    spec = schema.specs[operand]
    allowed: list[list[Placement]] = []
    for axis in range(schema.mesh.ndim):
        given = _on_axis(schema.specs, axis)
        rows = candidates(factors, given)
        if any(all(map(_is_free, given, row.inputs)) for row in rows):  # nothing moves on this axis: it is unchanged
            allowed.append([spec.placements[axis]])
            continue
        others = [
            row.inputs[operand]
            for row in rows
            if all(_is_free(*pair) for i, pair in enumerate(zip(given, row.inputs, strict=True)) if i != operand)
        ]
        allowed.append(list(dict.fromkeys(others)))
    for placements in itertools.islice(itertools.product(*allowed), MAX_TRIED):
        try:
            other = spec.with_placements(placements)
        except LayoutError:  # reductions that do not mix
            continue
        if other is not spec:
            yield other


def _tried(
    schema: OpSchema, results: tuple[TensorMeta, ...], pinned: tuple[int, ...], operand: int, spec: DTensorSpec
) -> Change | None:
    """The change of one operand, if the operator then moves nothing and the layout can be reached."""
    specs = tuple(spec if i == operand else other for i, other in enumerate(schema.specs))
    sharding = ShardingPropagator().propagate(OpSchema(schema.op, schema.arguments, specs), results, pinned)
    planner = DTensorRedistributePlanner()
    if sharding is None or any(planner.plan(*pair).collectives for pair in zip(specs, sharding.inputs, strict=True)):
        return None
    by_owner = isinstance(sharding.exchange, OwnerExchange)
    if by_owner or any(row_exchange_route(step).collectives for step in sharding.exchanges):
        return None
    try:
        route = planner.plan(schema.specs[operand], spec)
    except LayoutError:  # only operators make a tensor Partial
        return None
    return Change(operand, spec, route, sharding.outputs)


def _is_free(have: Placement, want: Placement) -> bool:
    """Whether a row can use an operand without communication: in its layout, or a slice of it."""
    return have is want or (have.is_replicate() and not want.is_partial())


def _on_axis(specs: Sequence[DTensorSpec], axis: int) -> tuple[Placement, ...]:
    return tuple(spec.placements[axis] for spec in specs)
