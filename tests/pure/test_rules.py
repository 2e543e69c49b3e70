"""Rules and the propagator, without any fabric.

Every row of a rule is carried out by hand on plain tensors: operands are cut as the row says, the operator runs on each
part, and the parts of the results, put together again, are what one device gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import MaskPartial, Partial, Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.plan.propagate import OpSchema, OutputSharding, ShardingPropagator
from shardwise.rules.engine import Factors, Row, candidates, factors_of, parse
from shardwise.rules.pointwise import keeps_order, keeps_sums
from shardwise.rules.registry import Call, Rule, find_rule
from shardwise.rules.statistics import local_vector_norm
from shardwise.schema import OpInfo, load_rules
from tests.pure.strategies import composite

aten = torch.ops.aten
R = Replicate()
load_rules()


class Sample(NamedTuple):
    """One call of an operator: plain tensors and values."""

    op: Any
    args: tuple[Any, ...]

    def __repr__(self) -> str:
        return str(self.op)


def numbers(*shape: int) -> torch.Tensor:
    """Different numbers of both signs, none near zero, the same each time."""
    values = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).mul(0.7).sin().mul(3)
    return (values + values.sign() * 0.1).reshape(shape)


def samples() -> Iterator[Sample]:
    x, y, v, m = numbers(5, 4), numbers(5, 4).cos(), numbers(4), numbers(4, 6)
    batch, other = numbers(3, 5, 4), numbers(3, 4, 2)
    for op in (aten.neg, aten.exp, aten.relu, aten.tanh, aten.abs, aten.isnan, aten.clone):
        yield Sample(op.default, (x,))
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default):
        yield Sample(op, (x, y))
        yield Sample(op, (batch, v))
    yield Sample(aten.add.Scalar, (x, 2.0))
    yield Sample(aten.mul.Tensor, (x, 2.0))
    yield Sample(aten.where.self, (x > 0, x, y))
    yield Sample(aten.mm.default, (x, m))
    yield Sample(aten.bmm.default, (batch, other))
    yield Sample(aten.addmm.default, (numbers(6), x, m))
    yield Sample(aten.mv.default, (x, v))
    yield Sample(aten.dot.default, (v, numbers(4).cos()))
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
        yield Sample(op, (x, [0]))
        yield Sample(op, (batch, [0, 2], True))
    yield Sample(aten.sum.default, (batch,))
    yield Sample(aten.prod.dim_int, (x, 1))
    yield Sample(aten.any.dim, (x > 0, 0))
    yield Sample(aten.permute.default, (batch, [2, 0, 1]))
    yield Sample(aten.transpose.int, (batch, 0, 2))
    yield Sample(aten.t.default, (x,))
    yield Sample(aten.unsqueeze.default, (x, 1))
    yield Sample(aten.squeeze.dim, (x.unsqueeze(1), 1))
    yield Sample(aten.expand.default, (x.unsqueeze(0), [3, 5, 4]))
    yield Sample(aten.cat.default, ([x, y], 1))
    yield Sample(aten.stack.default, ([x, y], 0))
    yield Sample(aten._softmax.default, (x, 1, False))
    yield Sample(aten._log_softmax.default, (batch, 2, False))
    yield Sample(aten.native_layer_norm.default, (batch, [4], v, None, 1e-5))
    yield Sample(aten.tril.default, (batch,))
    yield Sample(aten.cumsum.default, (x, 0))
    yield Sample(aten.sort.default, (x, 1))
    yield Sample(aten.topk.default, (x, 2, 1))
    yield Sample(aten.gather.default, (x, 1, torch.tensor([[0, 1], [3, 2], [1, 1], [0, 0], [2, 3]])))
    yield Sample(aten.index_select.default, (x, 0, torch.tensor([3, 0, 4])))
    yield Sample(aten.linalg_inv_ex.default, (numbers(3, 4, 4) + 9 * torch.eye(4, dtype=torch.float64),))
    yield Sample(aten._fft_c2c.default, (batch.to(torch.complex128), [2], 0, True))
    yield Sample(aten.tanh_backward.default, (x, y))
    yield Sample(aten._softmax_backward_data.default, (x, y.softmax(1), 1, torch.float64))
    yield Sample(aten.threshold_backward.default, (x, y, 0))
    table, bags = numbers(7, 4), torch.tensor([0, 2, 2, 5, 6, 1])
    offsets, bag_of_each = torch.tensor([0, 2, 4]), torch.tensor([0, 0, 1, 1, 2, 2])
    yield Sample(aten.embedding.default, (table, bags))
    yield Sample(aten.embedding_dense_backward.default, (numbers(6, 4), bags, 7, -1, False))
    gradients = numbers(3, 4)
    yield Sample(
        aten._embedding_bag_per_sample_weights_backward.default, (gradients, table, bags, offsets, bag_of_each, 0)
    )


SAMPLES = list(samples())


class Case(NamedTuple):
    """A sample with its rule and the result of one device."""

    call: Call
    rule: Rule
    factors: Factors
    operands: list[torch.Tensor]
    results: list[torch.Tensor]


def case_of(sample: Sample) -> Case | None:
    """None where the rule looks at all axes at once, or does not speak for the call."""
    rule = find_rule(sample.op)
    assert rule is not None, f"{sample.op} has no rule"
    results = [t for t in _leaves(sample.op(*sample.args)) if isinstance(t, torch.Tensor)]
    arguments = OpInfo.of(sample.op).bind(_replaced(sample.args, TensorMeta.of), {})
    operands = [t for t in _leaves(sample.args) if isinstance(t, torch.Tensor)]
    call = Call(sample.op, arguments, tuple(map(TensorMeta.of, operands)), tuple(map(TensorMeta.of, results)))
    factors = None if rule.layouts is not None else rule.factors(call)
    return None if factors is None else Case(call, rule, factors, operands, results)


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list | tuple) else [value]


def _replaced(value: Any, change: Any) -> Any:
    """A nested value with its tensors changed, in order."""
    if isinstance(value, list | tuple):
        return type(value)(_replaced(part, change) for part in value)
    return change(value) if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------- rows by hand


def cut(tensor: torch.Tensor, placement: Placement, ranks: int) -> list[torch.Tensor]:
    """Each rank's part of a tensor: chunks, equal copies, or parts that are not zero and add up to it."""
    match placement:
        case Shard(dim=dim):
            chunks = list(tensor.chunk(ranks, dim))
            return chunks + [tensor.narrow(dim, 0, 0)] * (ranks - len(chunks))
        case MaskPartial():
            owner = torch.arange(tensor.numel()).reshape(tensor.shape) % ranks
            return [torch.where(owner == rank, tensor, torch.zeros_like(tensor)) for rank in range(ranks)]
        case Partial(reduce_op="sum" | "avg" as kind):
            noise = [numbers(*tensor.shape).mul(rank + 1).to(tensor.dtype) for rank in range(ranks - 1)]
            return [*noise, tensor * (ranks if kind == "avg" else 1) - sum(noise)]
        case Partial(reduce_op="product"):
            noise = [numbers(*tensor.shape).mul(rank + 1).to(tensor.dtype) for rank in range(ranks - 1)]
            return [*noise, tensor / math.prod(noise, start=torch.ones_like(tensor))]
        case Partial(reduce_op="max" | "min" as kind):
            owner = torch.arange(tensor.numel()).reshape(tensor.shape) % ranks
            away = -1 if kind == "max" else 1
            return [torch.where(owner == rank, tensor, tensor + away * (rank + 1)) for rank in range(ranks)]
        case _:
            assert placement is R, f"no way to cut {placement}"
            return [tensor] * ranks


def joined(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The tensor of which ranks have these parts."""
    match placement:
        case Shard(dim=dim):
            return torch.cat(list(parts), dim)
        case Partial(reduce_op=reduce_op):
            stacked = torch.stack(list(parts))
            by_name = {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin}
            return by_name[reduce_op](0) if reduce_op in by_name else stacked.prod(0)
        case _:
            for part in parts[1:]:
                assert torch.equal(part, parts[0]), "replicas differ"
            return parts[0]


def fits(case: Case, row: Row, ranks: int) -> bool:
    """Whether the row is for calls on locals alone, and its shards are as the factors ask."""
    for dims, placement, tensor in zip(case.factors.operands, row.inputs, case.operands, strict=True):
        if isinstance(placement, Shard):
            factor, size = dims[placement.dim], tensor.shape[placement.dim]
            if factor in case.factors.exchanged or (factor in case.factors.even and size % ranks):
                return False
            if factor in case.factors.nonempty and len(torch.empty(size).chunk(ranks)) < ranks:
                return False
    return True


def spec_of(mesh: DeviceMesh, placement: Placement, meta: TensorMeta) -> DTensorSpec:
    return DTensorSpec(mesh, (placement,), meta)


def run_row(case: Case, row: Row, sample: Sample, ranks: int) -> list[list[torch.Tensor]]:
    """Each rank's results."""
    mesh = DeviceMesh("cpu", np.arange(ranks), fabric="virtual")
    inputs = [spec_of(mesh, p, meta) for p, meta in zip(row.inputs, case.call.operands, strict=True)]
    outputs = [spec_of(mesh, p, meta) for p, meta in zip(row.outputs, case.call.results, strict=True)]
    parts = [cut(tensor, placement, ranks) for tensor, placement in zip(case.operands, row.inputs, strict=True)]
    found = []
    for rank in range(ranks):
        at = iter(range(len(parts)))
        args = list(_replaced(sample.args, lambda _, at=at, rank=rank: parts[next(at)][rank]))
        localize = case.rule.localize
        named = {} if localize is None else dict(localize(case.call, inputs, outputs, (rank,)))
        for position, argument in enumerate(sample.op._schema.arguments[: len(args)]):
            args[position] = named.pop(argument.name, args[position])
        run = case.rule.local_op or sample.op
        found.append([t for t in _leaves(run(*args, **named)) if isinstance(t, torch.Tensor)])
    return found


# A rule allows further rows where an operand has such a placement already.
GIVEN = (Partial(), Partial("avg"), Partial("min"), Partial("max"), Partial("product"), MaskPartial())


def rows_of(factors: Factors) -> list[Row]:
    """The rows of a rule for operands with every kind of Partial."""
    return list(dict.fromkeys(row for given in GIVEN for row in candidates(factors, (given,))))


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rows_give_what_one_device_gives(sample: Sample, ranks: int) -> None:
    case = case_of(sample)
    if case is None:
        pytest.skip("the rule looks at all axes at once")
    for row in rows_of(case.factors):
        if not fits(case, row, ranks):
            continue
        by_rank = run_row(case, row, sample, ranks)
        for i, (expected, placement) in enumerate(zip(case.results, row.outputs, strict=True)):
            got = joined([results[i] for results in by_rank], placement)
            torch.testing.assert_close(got, expected, msg=lambda text, row=row: f"{sample.op}, {row}: {text}")


def test_a_wrong_row_is_found() -> None:
    sample = Sample(aten.mm.default, (numbers(4, 6), numbers(6, 4)))
    case = case_of(sample)
    assert case is not None
    wrong = Row((Shard(1), Shard(0)), (Partial("max"),))
    by_rank = run_row(case, wrong, sample, 2)
    assert not torch.allclose(joined([results[0] for results in by_rank], wrong.outputs[0]), case.results[0])


def test_samples_cover_kinds_of_rows() -> None:
    """Shards, sums, masks and replicas come up, and most samples have rows that shard something."""
    rows = [row for sample in SAMPLES if (case := case_of(sample)) is not None for row in rows_of(case.factors)]
    given = {placement for row in rows for placement in row.inputs}
    assert given >= {R, Shard(0), Shard(1), *GIVEN}
    assert sum(any(isinstance(p, Shard) for p in row.inputs) for row in rows) > 100


# ---------------------------------------------------------------- which rows there are

# By operator, the rows of its first sample: `S0,R->S0`. One that is missing costs communication, and no value is wrong.
ROWS = {
    aten.neg: "M->M P(avg)->P(avg) P(max)->P(min) P(min)->P(max) P->P R->R S0->S0 S1->S1",
    aten.exp: "P(max)->P(max) P(min)->P(min) R->R S0->S0 S1->S1",
    aten.relu: "M->M P(max)->P(max) P(min)->P(min) R->R S0->S0 S1->S1",
    aten.abs: "M->M R->R S0->S0 S1->S1",
    aten.add: "M,M->P P(avg),P(avg)->P(avg) P,P->P R,R->R S0,S0->S0 S1,S1->S1",
    aten.mul: "M,R->M P(avg),R->P(avg) P,R->P R,M->M R,P(avg)->P(avg) R,P->P R,R->R S0,S0->S0 S1,S1->S1",
    aten.div: "M,R->M P(avg),R->P(avg) P,R->P R,R->R S0,S0->S0 S1,S1->S1",
    aten.maximum: "P(max),P(max)->P(max) P(max),R->P(max) R,P(max)->P(max) R,R->R S0,S0->S0 S1,S1->S1",
    aten.where: "R,M,M->M R,P(avg),P(avg)->P(avg) R,P,P->P R,R,R->R S0,S0,S0->S0 S1,S1,S1->S1",
    aten.mm: "M,R->P P(avg),R->P(avg) P,R->P R,M->P R,P(avg)->P(avg) R,P->P R,R->R R,S1->S1 S0,R->S0 S1,S0->P",
    aten.addmm: "M,M,R->P M,R,M->P P(avg),P(avg),R->P(avg) P(avg),R,P(avg)->P(avg) P,P,R->P P,R,P->P P,S1,S0->P "
    "R,R,R->R R,S0,R->S0 S0,R,S1->S1",
    aten.sum: "M->P P(avg)->P(avg) P->P R->R S0->P S1->S0",
    aten.mean: "M->P P(avg)->P(avg) P->P R->R S0->P S1->S0",
    aten.amax: "P(max)->P(max) R->R S0->P(max) S1->S0",
    aten.prod: "P(product)->P(product) R->R S0->S0 S1->P(product)",
    aten.any: "P(max)->P(max) R->R S0->P(max) S1->S0",
    aten.t: "M->M P(avg)->P(avg) P(max)->P(max) P(min)->P(min) P(product)->P(product) P->P R->R S0->S1 S1->S0",
    aten._softmax: "R->R S0->S0",
    aten.native_layer_norm: "R,R->R,R,R S0,R->S0,S0,S0 S1,R->S1,S1,S1",
    aten.cumsum: "M->P P(avg)->P(avg) P->P R->R S1->S1",
    aten.sort: "R->R,R S0->S0,S0",
    aten.gather: "M,R->M P(avg),R->P(avg) P,R->P R,R->R R,S1->S1 S0,S0->S0 S1,R->M",
    aten.linalg_inv_ex: "R->R,R S0->S0,S0",
    aten._softmax_backward_data: "M,R->P P(avg),R->P(avg) P,R->P R,R->R S0,S0->S0",
    aten.embedding: "M,R->P P(avg),R->P(avg) P,R->P R,R->R R,S0->S0 S0,R->M S1,R->S1",
    aten.embedding_dense_backward: "M,R->P P(avg),R->P(avg) P,R->P R,R->R S0,S0->P S1,R->S1",
    aten._embedding_bag_per_sample_weights_backward: "M,R,R,R,R->P P(avg),R,R,R,R->P(avg) P,R,R,R,R->P R,M,R,R,R->P "
    "R,P(avg),R,R,R->P(avg) R,P,R,R,R->P R,R,R,R,R->R S1,S1,R,R,R->P",
}


@pytest.mark.parametrize("packet", ROWS, ids=str)
def test_rows_of_an_operator(packet: Any) -> None:
    case = case_of(next(sample for sample in SAMPLES if sample.op.overloadpacket is packet))
    assert case is not None
    short = lambda placements: ",".join(placement.short for placement in placements)  # noqa: E731
    assert {f"{short(row.inputs)}->{short(row.outputs)}" for row in rows_of(case.factors)} == set(ROWS[packet].split())


def test_a_dim_of_size_one_is_no_factor_of_a_larger_one() -> None:
    factors = factors_of(parse("..., ... -> ..."), [(5, 4), (1, 4)], [(5, 4)])
    assert factors.operands == (("...1", "...0"), (None, "...0"))
    assert factors.results == (("...1", "...0"),)


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
i32, i64, c64, b8 = torch.int32, torch.int64, torch.complex64, torch.bool


@pytest.mark.parametrize(
    ("before", "after", "sums", "order"),
    [
        (f32, f32, True, True), (f32, f64, True, True), (bf16, f32, True, True), (f32, bf16, False, False),
        (f16, bf16, False, False), (i32, i64, True, True), (i64, i32, False, False), (i64, f32, False, True),
        (f32, i64, False, False), (f32, c64, True, False), (c64, f32, False, False), (b8, i64, False, True),
        (i64, b8, False, False), (b8, b8, True, True),
    ],
)  # fmt: skip
def test_casts_that_a_partial_passes(before: torch.dtype, after: torch.dtype, sums: bool, order: bool) -> None:
    assert (keeps_sums(before, after), keeps_order(before, after)) == (sums, order)


def test_sums_of_different_dtypes_pass_only_if_each_may_be_cast() -> None:
    def partials(*dtypes: torch.dtype) -> int:
        case = case_of(Sample(aten.add.Tensor, tuple(numbers(5, 4).to(dtype) for dtype in dtypes)))
        assert case is not None
        return sum(row.inputs == (Partial(), Partial()) for row in rows_of(case.factors))

    assert [partials(f32, f32), partials(f32, f64), partials(f32, i64), partials(i64, f32)] == [1, 1, 0, 0]


@pytest.mark.parametrize("order", [2, 1, math.inf, -math.inf, -1])
@pytest.mark.parametrize(("shape", "dims"), [((0, 4), [0, 1]), ((0, 4), [0]), ((0, 4), [1]), ((4, 0), [0])])
def test_the_norm_of_an_empty_shard_changes_no_other(shape: Any, dims: list[int], order: float) -> None:
    found = local_vector_norm(torch.empty(shape), order, dims)
    assert found.shape == torch.empty(shape).sum(dims).shape
    assert (found == (0 if order >= 0 else math.inf)).all()


# ---------------------------------------------------------------- the propagator


OPERATORS = [
    (aten.add.Tensor, [(6, 4), (6, 4)], [(6, 4)]),
    (aten.mul.Tensor, [(3, 6, 4), (4,)], [(3, 6, 4)]),
    (aten.mm.default, [(6, 8), (8, 4)], [(6, 4)]),
    (aten.addmm.default, [(4,), (6, 8), (8, 4)], [(6, 4)]),
    (aten.bmm.default, [(4, 6, 8), (4, 8, 5)], [(4, 6, 5)]),
    (aten.exp.default, [(6, 4)], [(6, 4)]),
    (aten.t.default, [(6, 4)], [(4, 6)]),
]
MESHES = [DeviceMesh("cpu", np.arange(math.prod(s)).reshape(s), fabric="virtual") for s in [(4,), (2, 2), (2, 3)]]


def placements(ndim: int) -> st.SearchStrategy[Placement]:
    return st.sampled_from([R, Partial(), *map(Shard, range(ndim))])


@composite
def calls(draw: st.DrawFn) -> tuple[OpSchema, tuple[TensorMeta, ...]]:
    op, operands, results = draw(st.sampled_from(OPERATORS))
    mesh = draw(st.sampled_from(MESHES))
    metas = [TensorMeta(shape, None, torch.float32) for shape in operands]
    specs = tuple(
        DTensorSpec(mesh, tuple(draw(placements(len(meta.shape))) for _ in range(mesh.ndim)), meta) for meta in metas
    )
    names = [argument.name for argument in op._schema.arguments]
    arguments = {**OpInfo.of(op).bind(specs, {}), **dict(zip(names, specs, strict=False))}
    return OpSchema(op, arguments, specs), tuple(TensorMeta(shape, None, torch.float32) for shape in results)


def rows_taken(sharding: OutputSharding) -> list[Row]:
    """By axis, how operands and results lie."""
    axes = range(sharding.inputs[0].mesh.ndim)
    lie = lambda specs, axis: tuple(spec.placements[axis] for spec in specs)  # noqa: E731
    return [Row(lie(sharding.inputs, axis), lie(sharding.outputs, axis)) for axis in axes]


@given(calls())
@settings(max_examples=60)
def test_layouts_are_rows_of_the_rule(call: tuple[OpSchema, tuple[TensorMeta, ...]]) -> None:
    schema, results = call
    sharding = ShardingPropagator().propagate(schema, results)
    assert sharding is not None
    assert sharding.factors is not None
    for axis, row in enumerate(rows_taken(sharding)):
        lies = [spec.placements[axis] for spec in schema.specs]
        assert row in candidates(sharding.factors, lies), f"{row} is no row of {schema.op}"
    assert [spec.shape for spec in sharding.outputs] == [meta.shape for meta in results]


@given(calls())
@settings(max_examples=60)
def test_layouts_that_fit_stay(call: tuple[OpSchema, tuple[TensorMeta, ...]]) -> None:
    schema, results = call
    chosen = ShardingPropagator().propagate(schema, results)
    assert chosen is not None
    arguments = {name: _moved(value, schema.specs, chosen.inputs) for name, value in schema.arguments.items()}
    again = ShardingPropagator().propagate(OpSchema(schema.op, arguments, chosen.inputs), results)
    assert again is not None
    assert again.inputs == chosen.inputs
    assert again.outputs == chosen.outputs


def _moved(value: Any, before: Sequence[DTensorSpec], after: Sequence[DTensorSpec]) -> Any:
    return next((new for old, new in zip(before, after, strict=True) if value is old), value)


@given(calls())
@settings(max_examples=60)
def test_nothing_moves_where_a_row_fits(call: tuple[OpSchema, tuple[TensorMeta, ...]]) -> None:
    schema, results = call
    assume(schema.mesh.ndim == 1)
    chosen = ShardingPropagator().propagate(schema, results)
    assert chosen is not None
    assert chosen.factors is not None
    lies = tuple(spec.placements[0] for spec in schema.specs)
    if any(row.inputs == lies for row in candidates(chosen.factors, lies)):
        assert chosen.inputs == schema.specs


@pytest.mark.parametrize(
    ("left", "right", "lies", "expected"),
    [
        ((4096, 64), (64, 64), (Shard(0), Shard(0)), Row((Shard(0), R), (Shard(0),))),  # the small operand is gathered
        ((64, 64), (64, 4096), (Shard(1), Shard(1)), Row((R, Shard(1)), (Shard(1),))),
        ((64, 4096), (4096, 64), (Shard(1), R), Row((Shard(1), Shard(0)), (Partial(),))),  # slicing is free
        ((4096, 64), (64, 4096), (Partial(), R), Row((Partial(), R), (Partial(),))),  # linear: it waits
    ],
)
def test_the_cheapest_row_of_a_product_is_taken(left: Any, right: Any, lies: Any, expected: Row) -> None:
    metas = [TensorMeta(shape, None, torch.float32) for shape in (left, right)]
    specs = tuple(DTensorSpec(MESHES[0], (p,), meta) for p, meta in zip(lies, metas, strict=True))
    result = TensorMeta((left[0], right[1]), None, torch.float32)
    schema = OpSchema(aten.mm.default, {"self": specs[0], "mat2": specs[1]}, specs)
    sharding = ShardingPropagator().propagate(schema, (result,))
    assert sharding is not None
    assert rows_taken(sharding) == [expected]


@given(calls())
@settings(max_examples=60)
def test_pinned_operands_keep_their_layout(call: tuple[OpSchema, tuple[TensorMeta, ...]]) -> None:
    schema, results = call
    assume(schema.specs[0].shape == results[0].shape)
    sharding = ShardingPropagator().propagate(schema, results, pinned=(0,))
    if sharding is not None:
        assert sharding.inputs[0] is schema.specs[0]
        assert sharding.outputs[0].placements == schema.specs[0].placements


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("op", "operands", "results"), OPERATORS, ids=[str(op) for op, *_ in OPERATORS])
def test_replicated_operands_stay(mesh: DeviceMesh, op: Any, operands: Any, results: Any) -> None:
    specs = tuple(DTensorSpec(mesh, (R,) * mesh.ndim, TensorMeta(s, None, torch.float32)) for s in operands)
    metas = tuple(TensorMeta(s, None, torch.float32) for s in results)
    sharding = ShardingPropagator().propagate(OpSchema(op, OpInfo.of(op).bind(specs, {}), specs), metas)
    assert sharding is not None
    assert sharding.inputs == specs
    assert {p for spec in sharding.outputs for p in spec.placements} == {R}


def test_an_operator_without_a_rule_has_no_layout() -> None:
    spec = DTensorSpec(MESHES[0], (R,), TensorMeta((4, 4), None, torch.float32))
    op = aten._linalg_eigvals.default if find_rule(aten._linalg_eigvals.default) is None else aten.to_sparse.default
    assert find_rule(op) is None
    assert ShardingPropagator().propagate(OpSchema(op, {"self": spec}, (spec,)), (spec.tensor_meta,)) is None


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rows_are_listed_once(sample: Sample) -> None:
    case = case_of(sample)
    rows = () if case is None else candidates(case.factors)
    assert len(set(rows)) == len(rows)
