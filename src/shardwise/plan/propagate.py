"""ShardingPropagator: from an operator and the layouts of its operands to the layouts in which it runs.

First a candidate that needs no communication on every axis; else axis by axis by the cost model. Linear in the number
of axes. Runs nothing but the operator's shape function on meta tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.layout import Segment, misfit
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, MaskPartial, Partial, Placement, Ragged, Replicate, Shard, norm_order
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import specialized
from shardwise.plan.cost import CostModel, all_gather_bytes, all_reduce_bytes, all_to_all_bytes, current_cost_model
from shardwise.plan.halo import HaloExchange, halo_exchange, halo_rows
from shardwise.plan.route import DTensorRedistributePlanner
from shardwise.plan.step import OwnerExchange, RowExchange
from shardwise.rules.engine import Factors, OwnerRow, Row, candidates
from shardwise.rules.registry import Call, Halo, Rule, find_rule
from shardwise.torch_private import OpOverload

__all__ = ["OpSchema", "OutputSharding", "ShardingPropagator"]

REPLICATE = Replicate()
MAX_FITTING = 4096
# Layouts of results for layouts of operands that need no communication at any size. By mesh, factors and layouts.
_fitting: BoundedCache[tuple[Any, ...], tuple[tuple[tuple[Placement, ...], Any], ...]] = BoundedCache(MAX_FITTING)
# A scattered sum is gathered again later, or its gradient is: a reduce-scatter is charged for both.
GATHERED_AGAIN = 2.0
# Penalty in seconds for splitting a dim of symbolic size into unequal parts: the size would have to be fixed.
UNEVEN = 1e9


@dataclass(frozen=True, slots=True)
class OpSchema:
    """One call: the operator, its arguments by name with specs for the tensors, and the specs in order."""

    op: OpOverload
    arguments: Mapping[str, Any]
    specs: tuple[DTensorSpec, ...]
    rule: Rule | None = None  # of the operator, if it is known already

    @property
    def mesh(self) -> DeviceMesh:
        return self.specs[0].mesh

    def call(self, results: tuple[TensorMeta, ...]) -> Call:
        """The call as an argument of rules."""
        named = {
            name: value.tensor_meta
            if value.__class__ is DTensorSpec
            else _metas(value)
            if isinstance(value, list | tuple)
            else value
            for name, value in self.arguments.items()
        }
        return Call(self.op, named, tuple([spec.tensor_meta for spec in self.specs]), results)


@dataclass(frozen=True, slots=True)
class OutputSharding:
    """The layouts of operands and results, and the rows of the rule that they come from.

    `exchange` replaces the operator: an exchange of rows if a dim whose indices change remains sharded, or by owner.
    `halo` are the exchanges around the operator if a window slides over a sharded dim. `algorithm` names the rule's
    algorithm, "" for the operator itself on locals.
    """

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec, ...]
    call: Call
    rule: Rule
    exchange: RowExchange | OwnerExchange | None = None
    halo: HaloExchange | None = None
    algorithm: str = ""

    @property
    def factors(self) -> Factors | None:
        """The factors of the rule; None for rules that consider all axes at once."""
        return None if self.rule.layouts is not None else self.rule.factors_by(self.algorithm, self.call)

    @property
    def exchanges(self) -> tuple[RowExchange, ...]:
        """All row exchanges, instead of the operator and around it."""
        around = () if self.halo is None else (*self.halo.before, *self.halo.after)
        instead = (self.exchange,) if isinstance(self.exchange, RowExchange) else ()
        return (*instead, *(step for steps in around for step in steps))


def _metas(values: Sequence[Any]) -> tuple[Any, ...]:
    """A list of tensors or numbers as a rule sees it."""
    return tuple([value.tensor_meta if value.__class__ is DTensorSpec else value for value in values])


class ShardingPropagator:
    """Chooses layouts for operators. Its only state is the cost model.

    Args:
        cost_model: the current one if not given.
        by_owner: whether items may be exchanged by owner. A graph cannot: sizes depend on values.
    """

    def __init__(self, cost_model: CostModel | None = None, by_owner: bool = True) -> None:
        self._cost_model = cost_model
        self.by_owner = by_owner

    @functools.cached_property
    def cost_model(self) -> CostModel:
        """The cost model; used only if something has to move."""
        return self._cost_model or current_cost_model()

    def propagate(
        self, schema: OpSchema, results: tuple[TensorMeta, ...], pinned: tuple[int, ...] = (), algorithm: str = ""
    ) -> OutputSharding | None:
        """The layouts of operands and results, or None if no rule covers the call.

        Args:
            schema: the call.
            results: shape, stride and dtype of each result, as the operator gives them on one device.
            pinned: operands that are written to: they and the results must keep their layout.
            algorithm: the rule's algorithm to use.
        """
        rule = schema.rule or find_rule(schema.op)
        if rule is None:
            return None
        call = schema.call(results)
        if rule.layouts is not None:
            laid_out = rule.layouts(call, schema.specs)
            if laid_out is None or any(laid_out[0][i] is not schema.specs[i] for i in pinned):
                return None
            return OutputSharding(*laid_out, call, rule)
        factors = rule.factors_by(algorithm, call) if algorithm else rule.factors(call)
        if factors is None:
            return None
        found = self._by_factors(schema, call, rule, factors, pinned)
        return found if found is None or not algorithm else replace(found, algorithm=algorithm)

    def _by_factors(
        self, schema: OpSchema, call: Call, rule: Rule, factors: Factors, pinned: tuple[int, ...]
    ) -> OutputSharding | None:
        """Rows for every axis; factors that would give a rank a shard that it cannot use are not sharded."""
        specs = schema.specs
        layouts = (specs[0].mesh, factors, pinned, *[(spec.placements, spec.dim_axes) for spec in specs])
        known = _fitting.get(layouts)
        if known is not None:
            outputs = tuple(
                DTensorSpec.from_dim_axes(specs[0].mesh, placements, meta, axes)
                for meta, (placements, axes) in zip(call.results, known, strict=True)
            )
            return OutputSharding(specs, outputs, call, rule)
        if factors.exchanged and any(spec.tensor_meta.is_symbolic for spec in specs):
            factors = _not_exchanged(factors, factors.exchanged)  # missing rows are computed in numbers
        if factors.owned and (not self.by_owner or any(spec.tensor_meta.is_symbolic for spec in specs)):
            factors = replace(factors, owned=())
        sharded = bool(factors.exchanged) and _splits_exchanged(factors, specs)
        halo = rule.halo(call) if rule.halo is not None and sharded else None
        if halo is not None:
            return self._with_halos_or_without(schema, call, rule, factors, pinned, halo)
        if rule.halo is not None:
            factors = _not_exchanged(factors, factors.exchanged)
        laid_out = self._laid_out(schema, call, rule, factors, pinned)
        plain = laid_out is not None and laid_out[0].inputs == specs and laid_out[0].exchange is None
        if laid_out is not None and plain and not (factors.even or factors.nonempty or sharded):
            _fitting.keep(layouts, tuple((out.placements, out.dim_axes) for out in laid_out[0].outputs))
        return None if laid_out is None else laid_out[0]

    def _with_halos_or_without(
        self, schema: OpSchema, call: Call, rule: Rule, factors: Factors, pinned: tuple[int, ...], halo: Halo
    ) -> OutputSharding | None:
        """Windows slide over sharded dims, or these are gathered: whichever takes less time."""
        found = [
            self._laid_out(schema, call, rule, factors, pinned, halo),
            self._laid_out(schema, call, rule, _not_exchanged(factors, factors.exchanged), pinned),
        ]
        possible = [laid_out for laid_out in found if laid_out is not None]
        return min(possible, key=lambda laid_out: self._seconds(schema.specs, *laid_out))[0] if possible else None

    def _seconds(self, specs: Sequence[DTensorSpec], sharding: OutputSharding, rows: Sequence[Row]) -> float:
        """Seconds to move operands, to exchange halos, and to reduce Partial results."""
        planner, results = DTensorRedistributePlanner(self.cost_model), sharding.call.results
        moved = sum(planner.plan(have, want).seconds for have, want in zip(specs, sharding.inputs, strict=True))
        chosen = dict(enumerate(rows))
        owed = [self.owed(specs[0].mesh, results, axis, row, _without(chosen, axis)) for axis, row in chosen.items()]
        return moved + sum(owed) + (0.0 if sharding.halo is None else sharding.halo.seconds)

    def _laid_out(
        self,
        schema: OpSchema,
        call: Call,
        rule: Rule,
        factors: Factors,
        pinned: tuple[int, ...],
        halo: Halo | None = None,
    ) -> tuple[OutputSharding, list[Row]] | None:
        """Rows for every axis, and the layouts that follow. Factors are narrowed until the rows fit together."""
        specs = schema.specs
        replicated_axes: frozenset[int] = frozenset()
        while True:
            rows = self._choose(schema.specs, call.results, factors, pinned, replicated_axes, halo)
            if rows is None:
                return None
            clashing = _clashing(rows)
            if clashing is not None:
                replicated_axes |= {clashing}
                continue
            order = _factor_order(specs, factors, rows, pinned)
            misfits = _misfits(specs, call.results, factors, rows, order)
            if misfits:
                factors = replace(factors, plain=factors.plain | misfits)
                continue
            inputs, outputs = _lay_out(specs, call.results, factors, rows, order)
            unfit = _unfit(factors, inputs, order) if factors.even or factors.nonempty else None
            if unfit:
                factors = replace(factors, barred=factors.barred | unfit)
                continue
            owned = [axis for axis, row in enumerate(rows) if any(row is other.row for other in factors.owned)]
            if owned:
                by_owner = _owner_exchange(factors, rows, owned, inputs, outputs)
                if by_owner is None or any(inputs[i] is not specs[i] for i in pinned):
                    factors = replace(factors, owned=())
                    continue
                return OutputSharding(inputs, outputs, call, rule, by_owner), rows
            names = _exchanged(factors, inputs, outputs, halo) if factors.exchanged else []
            narrower = _narrower_exchange(factors, rows, names, (*inputs, *outputs), halo) if names else None
            if narrower is not None:
                factors = narrower
                continue
            # a changed order of axes would move an operand that is written to
            if any(inputs[i] is not specs[i] for i in pinned):
                return None
            if halo is not None:
                halos = halo_exchange(halo, factors, inputs, outputs)
                return OutputSharding(inputs, outputs, call, rule, halo=halos), rows
            exchange = _row_exchange(call, rule, factors, names[0], inputs, outputs) if names else None
            return OutputSharding(inputs, outputs, call, rule, exchange), rows

    def _choose(
        self,
        specs: Sequence[DTensorSpec],
        results: Sequence[TensorMeta],
        factors: Factors,
        pinned: tuple[int, ...],
        replicated_axes: frozenset[int],
        halo: Halo | None,
    ) -> list[Row] | None:
        """The row of each axis: first of axes on which nothing moves, then of the others by cost."""
        known: dict[tuple[Placement, ...], Sequence[Row]] = {}
        chosen: dict[int, Row] = {}
        moving: dict[int, Sequence[Row]] = {}
        for axis in range(specs[0].mesh.ndim):
            given = tuple(spec.placements[axis] for spec in specs)
            rows = known.get(given)
            if rows is None:
                rows = candidates(factors, given)
                if pinned:
                    rows = [row for row in rows if _keeps(row, given, pinned)]
                known[given] = rows
            if axis in replicated_axes:
                rows = [row for row in rows if not any(isinstance(p, Partial) for p in (*row.inputs, *row.outputs))]
            if not rows and not factors.owned:
                return None
            fitting = [row for row in rows if row.inputs == given]
            if not fitting:
                owned = [other.row for other in factors.owned if specs[0].mesh.shape[axis] > 1]
                moving[axis] = [*rows, *(row for row in owned if not pinned or _keeps(row, given, pinned))]
            elif len(fitting) > 1 and factors.exchanged and _is_little(specs[0], results[0], given[0]):
                chosen[axis] = fitting[-1]
            else:
                chosen[axis] = fitting[0]
        held = [spec.local_bytes for spec in specs] if moving else []
        for axis, rows in moving.items():
            cheapest = self._cheapest(specs, results, axis, held, rows, chosen, factors, halo)
            if cheapest is None:
                return None
            chosen[axis] = cheapest
        return [chosen[axis] for axis in range(specs[0].mesh.ndim)]

    def _cheapest(
        self,
        specs: Sequence[DTensorSpec],
        results: Sequence[TensorMeta],
        axis: int,
        held: Sequence[int],
        rows: Sequence[Row],
        chosen: Mapping[int, Row],
        factors: Factors,
        halo: Halo | None,
    ) -> Row | None:
        """The cheapest row of an axis; if something must move, including the reduction of its results."""
        if not rows:
            return None
        costs = [self.row_cost(specs, axis, held, row) for row in rows]
        for owned in factors.owned:
            if owned.row in rows:
                at = rows.index(owned.row)
                more = self._by_owner(specs, results, axis, held, owned)
                costs[at] = (costs[at][0] + more, *costs[at][1:])
        least = min(costs)[0]
        if math.isinf(least):
            return None
        owed = [
            self.owed(specs[0].mesh, results, axis, row, chosen)
            + self._exchanging(specs, axis, held, row, factors, halo)
            if least
            else 0.0
            for row in rows
        ]
        totals = [(cost[0] + later, *cost) for cost, later in zip(costs, owed, strict=True)]
        return rows[totals.index(min(totals))]

    def _exchanging(
        self,
        specs: Sequence[DTensorSpec],
        axis: int,
        held: Sequence[int],
        row: Row,
        factors: Factors,
        halo: Halo | None,
    ) -> float:
        """Seconds to exchange rows of operands that are sharded along a dim whose indices change."""
        mesh, received = specs[0].mesh, []
        for i, (dims, p, size) in enumerate(zip(factors.operands, row.inputs, held, strict=True)):
            if isinstance(p, AnyShard) and dims[p.dim] in factors.exchanged:
                longest = max(specs[i].largest_local_shape[p.dim], 1)
                received.append(size if halo is None else min(halo_rows(halo, dims[p.dim]) / longest, 1.0) * size)
        return self.cost_model.seconds(mesh, (axis,), sum(received)) if received and mesh.shape[axis] > 1 else 0.0

    def _by_owner(
        self,
        specs: Sequence[DTensorSpec],
        results: Sequence[TensorMeta],
        axis: int,
        held: Sequence[int],
        owned: OwnerRow,
    ) -> float:
        """Seconds of an exchange by owner, of sizes and then of items, if every rank owns equally many of them."""
        mesh = specs[0].mesh
        metas = [results[i].hinted() for i in owned.received]
        returned = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in metas) / mesh.shape[axis]
        sent = sum(
            held[i] / (1 if isinstance(specs[i].placements[axis], AnyShard) else mesh.shape[axis]) for i in owned.sent
        )
        return owned.rounds * self.cost_model.seconds(mesh, (axis,), 0) + self.cost_model.seconds(
            mesh, (axis,), sent + returned
        )

    def owed(
        self, mesh: DeviceMesh, results: Sequence[TensorMeta], axis: int, row: Row, others: Mapping[int, Row]
    ) -> float:
        """Seconds to reduce the Partial results of a row of an axis, with the rows of other axes as far as known."""
        seconds = 0.0
        for i, placement in enumerate(row.outputs):
            if isinstance(placement, Partial):
                sharding = [mesh.shape[a] for a, other in others.items() if isinstance(other.outputs[i], AnyShard)]
                meta = results[i].hinted()
                held = math.prod(meta.shape) * meta.dtype.itemsize / math.prod(sharding)
                received = _received(placement, REPLICATE, mesh.shape[axis], held)
                seconds += self.cost_model.seconds(mesh, (axis,), received) if received else 0.0
        return seconds

    def row_cost(
        self, specs: Sequence[DTensorSpec], axis: int, held: Sequence[int], row: Row
    ) -> tuple[float, int, int]:
        """Seconds to redistribute the operands for a row, the bytes on a rank afterwards, and its number of drawbacks.

        Drawbacks are operands that become Partial, and shards that are empty on some ranks.

        Args:
            specs: the current layouts of the operands.
            axis: the axis that the row is for.
            held: the local bytes of each operand.
            row: the row.
        """
        given = [spec.placements[axis] for spec in specs]
        seconds = 0.0
        left = against = 0
        for spec, size, have, want in zip(specs, held, given, row.inputs, strict=True):
            if have is not want:
                if spec.tensor_meta.is_symbolic and _splits_unevenly(want, spec, axis):
                    seconds += UNEVEN
                if _leaves_empty(want, spec, axis):  # saves nothing: one rank holds as much as if it were replicated
                    want = REPLICATE
                    against += 1
                received = _received(have, want, spec.mesh.shape[axis], size, want in spec.placements)
                if received:
                    taken = self.cost_model.seconds(spec.mesh, (axis,), received * _padding(want, spec, axis))
                    scattered = isinstance(have, Partial) and isinstance(want, AnyShard)
                    seconds += taken * GATHERED_AGAIN if scattered else taken
            if isinstance(want, Replicate | Partial):
                left += size
                against += have is not want and isinstance(want, Partial)
        return seconds, left, against


def _narrower_exchange(
    factors: Factors, rows: Sequence[Row], names: Sequence[str], specs: Sequence[DTensorSpec], halo: Halo | None
) -> Factors | None:
    """Factors without an exchange of rows that cannot be executed; None if it can.

    Args:
        factors: the rule.
        rows: the chosen row of each axis.
        names: the factors along which ranks would exchange rows.
        specs: the layouts of operands and results.
        halo: if a window slides over the dims.
    """
    if len(names) > 1 and halo is None:  # one dim at a time
        return _not_exchanged(factors, frozenset(names[1:]))
    if any(spec.is_strided for spec in specs):  # arrays do not express runs
        return _not_exchanged(factors, factors.exchanged)
    if factors.reduce and any(_contributes(row) for row in rows):  # not both for one dim
        return replace(factors, reduce={})
    return None


def _not_exchanged(factors: Factors, names: frozenset[str]) -> Factors:
    """The same factors, except that dims of these must not be sharded or contribute as a mask."""
    if names <= factors.reduce.keys():
        results = tuple(tuple(None if name in names else name for name in dims) for dims in factors.results)
        return replace(factors, results=results, exchanged=factors.exchanged - names)
    return replace(factors, unsharded=factors.unsharded | names, exchanged=factors.exchanged - names)


def _splits_exchanged(factors: Factors, specs: Sequence[DTensorSpec]) -> bool:
    """Whether an operand is sharded along a dim whose indices change: then the choice depends on sizes."""
    pairs = zip(factors.operands, specs, strict=True)
    return any(name in factors.exchanged and spec.dim_axes[d] for dims, spec in pairs for d, name in enumerate(dims))


def _exchanged(
    factors: Factors, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], halo: Halo | None
) -> list[str]:
    """The factors whose indices change and that shard results; with halos also those that shard operands."""
    pairs = [*zip(factors.results, outputs, strict=True)]
    if halo is not None:
        pairs += zip(factors.operands, inputs, strict=True)
    found = {
        name for dims, spec in pairs for d, name in enumerate(dims) if name in factors.exchanged and spec.dim_axes[d]
    }
    return sorted(name for name in found if name is not None)


def _without(rows: Mapping[int, Row], axis: int) -> dict[int, Row]:
    return {other: row for other, row in rows.items() if other != axis}


def _contributes(row: Row) -> bool:
    """Whether a row of one axis uses a sharded dim as a mask."""
    return isinstance(row.inputs[0], AnyShard) and isinstance(row.outputs[0], MaskPartial)


def _is_little(spec: DTensorSpec, result: TensorMeta, placement: Placement) -> bool:
    """Whether a result to which ranks contribute is at most twice as large as the local part of an operand."""
    parts = (
        math.prod(spec.mesh.shape[a] for a in spec.dim_axes[placement.dim]) if isinstance(placement, AnyShard) else 1
    )
    return math.prod(result.hinted().shape) * parts <= 2 * math.prod(spec.tensor_meta.hinted().shape)


def _row_exchange(
    call: Call,
    rule: Rule,
    factors: Factors,
    name: str,
    inputs: tuple[DTensorSpec, ...],
    outputs: tuple[DTensorSpec, ...],
) -> RowExchange:
    """The row exchange if the dims of a factor remain sharded."""
    assert rule.rows is not None, f"the rule of {call.op} exchanges rows and does not say which"
    dim = factors.results[0].index(name)
    rows = rule.rows(call, dim)
    over = outputs[0].dim_axes[dim]
    segments = tuple([Segment(*specialized(segment)) for segment in rows.segments])  # which ranks send depends on them
    return RowExchange(inputs[0], outputs[0], inputs, outputs, dim, segments, over, rows.adds)


def _owner_exchange(
    factors: Factors,
    rows: Sequence[Row],
    owned: Sequence[int],
    inputs: tuple[DTensorSpec, ...],
    outputs: tuple[DTensorSpec, ...],
) -> OwnerExchange | None:
    """The exchange over these axes; None unless exactly these axes split all operands, in one order."""
    (chosen, *others) = [next(o for o in factors.owned if o.row is rows[axis]) for axis in owned]
    placement = (*chosen.row.inputs, *chosen.row.outputs)[chosen.table]
    table = (*inputs, *outputs)[chosen.table]
    assert isinstance(placement, Shard)
    over = table.dim_axes[placement.dim]
    if any(other is not chosen for other in others) or set(over) != set(owned):
        return None
    for spec in (*inputs, *outputs):
        orders = [tuple(axis for axis in axes if axis in over) for axes in spec.dim_axes]
        if spec.is_strided or any(order and order != over for order in orders):
            return None
    return OwnerExchange(table, outputs[0], placement.dim, over)


def _clashing(rows: Sequence[Row]) -> int | None:
    """The first axis whose reduction does not commute with that of an axis before it, in some operand or result."""
    for placements in zip(*((*row.inputs, *row.outputs) for row in rows), strict=True):
        seen: set[str] = set()
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                seen.add(placement.reduce_op)
                if len(seen) > 1 and not seen <= {"sum", "avg"}:
                    return axis
    return None


def _keeps(row: Row, given: tuple[Placement, ...], pinned: tuple[int, ...]) -> bool:
    """Whether a row keeps the layout of operands that are written to."""
    return all(row.inputs[i] is given[i] for i in pinned) and all(
        out is given[i] for out, i in zip(row.outputs, pinned, strict=False)
    )


def _padding(placement: Placement, spec: DTensorSpec, axis: int) -> float:
    """The ratio of the largest part of a dim to an equal part, if an axis splits it further."""
    if not isinstance(placement, AnyShard):
        return 1.0
    n = spec.mesh.shape[axis]
    parts = math.prod(spec.mesh.shape[a] for a in spec.dim_axes[placement.dim] if a != axis)
    held = math.ceil(spec.tensor_meta.hinted().shape[placement.dim] / parts)
    return n * math.ceil(held / n) / held if held else 1.0


def _splits_unevenly(placement: Placement, spec: DTensorSpec, axis: int) -> bool:
    """Whether a dim of symbolic size that is also sharded over this axis has unequal parts."""
    if not isinstance(placement, AnyShard) or isinstance(spec.shape[placement.dim], int):
        return False
    axes = {axis, *spec.dim_axes[placement.dim]}
    return spec.tensor_meta.hinted().shape[placement.dim] % math.prod(spec.mesh.shape[a] for a in axes) != 0


def _leaves_empty(placement: Placement, spec: DTensorSpec, axis: int) -> bool:
    """Whether a dim that is also sharded over this axis is too short for each rank to get a part."""
    if not isinstance(placement, AnyShard):
        return False
    axes = {axis, *spec.dim_axes[placement.dim]}
    return spec.tensor_meta.hinted().shape[placement.dim] < math.prod(spec.mesh.shape[a] for a in axes)


def _received(have: Placement, want: Placement, n: int, held: float, waits: bool = False) -> float:
    """Bytes that a rank receives when one axis of an operand changes; `waits`: another axis has that placement."""
    if isinstance(want, Partial) and norm_order(want.reduce_op) is not None and have is not want and not waits:
        return math.inf  # a norm loses the sign, so nothing else can become one
    if isinstance(want, Partial) and isinstance(have, AnyShard):
        return math.inf  # on an axis of one rank too: no row needs that
    if (
        n == 1
        or have is want
        or isinstance(have, Replicate)
        or (isinstance(have, MaskPartial) and want.is_partial("sum"))
    ):
        return 0.0
    if isinstance(want, Partial):
        return all_reduce_bytes(n, held)
    if isinstance(want, Replicate):
        return all_reduce_bytes(n, held) if isinstance(have, Partial) else all_gather_bytes(n, held)
    return all_to_all_bytes(n, held)  # also of a reduce-scatter into equal blocks


def _lay_out(
    specs: Sequence[DTensorSpec],
    results: Sequence[TensorMeta],
    factors: Factors,
    rows: Sequence[Row],
    order: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[DTensorSpec, ...], tuple[DTensorSpec, ...]]:
    """The specs of the chosen rows, with one order of axes for each factor."""
    mesh = specs[0].mesh
    inputs = tuple(
        _spec(mesh, spec.tensor_meta, dims, [row.inputs[i] for row in rows], order, spec.broadcast)
        for i, (spec, dims) in enumerate(zip(specs, factors.operands, strict=True))
    )
    outputs = tuple(
        _spec(mesh, meta, dims, [row.outputs[i] for row in rows], order)
        for i, (meta, dims) in enumerate(zip(results, factors.results, strict=True))
    )
    return inputs, outputs


def _misfits(
    specs: Sequence[DTensorSpec],
    results: Sequence[TensorMeta],
    factors: Factors,
    rows: Sequence[Row],
    order: Mapping[str, tuple[int, ...]],
) -> frozenset[str]:
    """The factors that a `Ragged` of the chosen rows cannot split, because another axis splits them before it."""
    if not any(isinstance(p, Ragged) for row in rows for p in (*row.inputs, *row.outputs)):
        return frozenset()
    mesh, found = specs[0].mesh, set[str]()
    shapes = [*[spec.tensor_meta.hinted().shape for spec in specs], *[meta.hinted().shape for meta in results]]
    placed = zip(*[(*row.inputs, *row.outputs) for row in rows], strict=True)
    for shape, dims, placements in zip(shapes, (*factors.operands, *factors.results), placed, strict=True):
        for dim, name in enumerate(dims):
            divisions = [
                p.division(mesh.shape[axis])
                for axis in order.get(name or "", ())
                if isinstance(p := placements[axis], AnyShard) and p.dim == dim
            ]
            if name is not None and misfit(shape[dim], divisions):
                found.add(name)
    return frozenset(found)


def _spec(
    mesh: DeviceMesh,
    meta: TensorMeta,
    dims: Sequence[str | None],
    placements: Sequence[Placement],
    order: Mapping[str, tuple[int, ...]],
    broadcast: tuple[int, ...] = (),
) -> DTensorSpec:
    axes: list[list[int]] = [[] for _ in meta.shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, AnyShard):
            axes[placement.dim].append(axis)
    ordered = []
    for dim, found in enumerate(axes):
        wanted = order.get(dims[dim] or "", ())
        ordered.append(tuple(found) if len(found) < 2 else tuple(sorted(found, key=lambda a: _rank_in(wanted, a))))
    return DTensorSpec.from_dim_axes(mesh, tuple(placements), meta, ordered, broadcast)


def _rank_in(order: tuple[int, ...], axis: int) -> int:
    return order.index(axis) if axis in order else len(order) + axis


def _factor_order(
    specs: Sequence[DTensorSpec], factors: Factors, rows: Sequence[Row], pinned: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The order of the axes that shard a factor: that of the largest operand, with new ones minor."""
    sharded: dict[str, list[int]] = {}
    for axis, row in enumerate(rows):
        for dims, placement in (
            *zip(factors.operands, row.inputs, strict=True),
            *zip(factors.results, row.outputs, strict=True),
        ):
            if isinstance(placement, AnyShard):
                name = dims[placement.dim]
                if name is not None and axis not in sharded.setdefault(name, []):
                    sharded[name].append(axis)
    order: dict[str, tuple[int, ...]] = {}
    for name, axes in sharded.items():
        kept: list[int] = []
        if len(axes) > 1:
            elements = [math.prod(spec.tensor_meta.hinted().shape) for spec in specs]
            for i in sorted(range(len(specs)), key=lambda i: (i not in pinned, -elements[i])):
                if name in factors.operands[i]:
                    have = specs[i].dim_axes[factors.operands[i].index(name)]
                    kept.extend(a for a in have if a in axes and a not in kept)
        order[name] = tuple(kept + [a for a in axes if a not in kept])
    return order


def _unfit(factors: Factors, inputs: Sequence[DTensorSpec], order: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The sharded factors whose shards are empty or unequal although the rule needs non-empty or equal ones."""
    constrained = {name for name in order if name in factors.even or name in factors.nonempty}
    unfit = set()
    for name in constrained:
        for spec, dims in zip(inputs, factors.operands, strict=True):
            if name in dims:
                dim = dims.index(name)
                parts = math.prod(spec.mesh.shape[a] for a in spec.dim_axes[dim])
                if (name in factors.even and spec.shape[dim] % parts) or _some_empty(spec, dim):
                    unfit.add(name)
    return frozenset(unfit)


def _some_empty(spec: DTensorSpec, dim: int) -> bool:
    """Whether some rank has an empty part of a dim. Nested splits may leave one empty in the middle."""
    if not spec.is_strided and isinstance(spec.shape[dim], int):
        return not spec.starts_and_lengths(dim, spec.mesh.coordinates)[1].all()
    ranges = [range(n) if axis in spec.dim_axes[dim] else (0,) for axis, n in enumerate(spec.mesh.shape)]
    return any(spec.local_shape(coordinate)[dim] == 0 for coordinate in itertools.product(*ranges))


def replicated_spec(mesh: DeviceMesh, meta: TensorMeta) -> DTensorSpec:
    """The spec of a replicated tensor."""
    return DTensorSpec.from_dim_axes(mesh, (REPLICATE,) * mesh.ndim, meta, ((),) * len(meta.shape))


def replicated(spec: DTensorSpec) -> DTensorSpec:
    """The same tensor, replicated."""
    return replicated_spec(spec.mesh, spec.tensor_meta)


def meta_tensor(meta: TensorMeta) -> torch.Tensor:
    """A tensor of this shape, stride and dtype without storage."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
