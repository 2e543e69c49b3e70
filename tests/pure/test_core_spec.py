"""Specs: their printed form, normalization, refused arguments and error messages."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import (
    REDUCE_OPS,
    MaskPartial,
    Owned,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
    as_placement,
)
from shardwise.core.spec import DTYPE_NAMES, DTensorSpec, ShardOrderEntry, TensorMeta, checked_placements, dtype_name
from shardwise.errors import LayoutError, MeshError, ShardwiseError
from tests.pure.strategies import axes_by_dim, specs

R = Replicate()
MESH = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), fabric="virtual")
UNNAMED = DeviceMesh("cpu", [[0, 1], [2, 3]], fabric="virtual")
CUBE = DeviceMesh("cpu", np.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), fabric="virtual")


def spec(placements: Any, shape: tuple[int, ...] = (8, 32), order: Any = None, mesh: DeviceMesh = MESH) -> DTensorSpec:
    return DTensorSpec(mesh, placements, TensorMeta(shape), order)


# ---------------------------------------------------------------- how it prints


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (spec([Shard(0), R]), "f32[8,32] dp:S0 tp:R"),
        (spec([Shard(0), Shard(0)]), "f32[8,32] dp:S0 tp:S0"),
        (spec([Shard(0), Shard(0)], order=[(0, ("dp", "tp"))]), "f32[8,32] dp:S0 tp:S0"),
        (spec([Shard(0), Shard(0)], order=[(0, ("tp", "dp"))]), "f32[8,32] dp:S0 tp:S0 order 0:tp>dp"),
        (spec([Shard(0), Shard(1)], order=[(1, ("tp",))]), "f32[8,32] dp:S0 tp:S1"),
        (spec([StridedShard(1, 4), Partial("max")]), "f32[8,32] dp:S1/4 tp:P(max)"),
        (spec([Zigzag(1), Zigzag(0, split_factor=2)]), "f32[8,32] dp:Z1 tp:Z0/2"),
        (spec([Partial(), MaskPartial()]), "f32[8,32] dp:P tp:M"),
        (spec([Partial("avg"), R], ()), "f32[] dp:P(avg) tp:R"),
        (spec([Shard(0), R], (0, 1)), "f32[0,1] dp:S0 tp:R"),
        (spec([Shard(0), R], mesh=UNNAMED), "f32[8,32] S0 R"),
        (spec([Shard(0), Shard(0)], order=[(0, (1, 0))], mesh=UNNAMED), "f32[8,32] S0 S0 order 0:1>0"),
        (
            spec([Shard(1)] * 3, order={1: ("tp", "dp", "cp")}, mesh=CUBE),
            "f32[8,32] dp:S1 cp:S1 tp:S1 order 1:tp>dp>cp",
        ),
        (spec([R], mesh=MESH["tp"]), "f32[8,32] tp:R"),
        (spec([Shard(0)], mesh=MESH.flatten()), "f32[8,32] dp_tp:S0"),
    ],
)
def test_repr(made: DTensorSpec, shown: str) -> None:
    assert repr(made) == shown
    assert made.layout == shown.split("] ")[1]


def test_orders_of_two_dims() -> None:
    mesh = DeviceMesh("cpu", np.arange(16).reshape(2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d"), fabric="virtual")
    made = spec([Shard(0), Shard(1), Shard(0), Shard(1)], order={1: ("d", "b"), 0: ("c", "a")}, mesh=mesh)
    assert made.layout == "a:S0 b:S1 c:S0 d:S1 order 0:c>a order 1:d>b"
    assert made.shard_order == (ShardOrderEntry(0, (2, 0)), ShardOrderEntry(1, (3, 1)))


def test_every_dtype_has_a_name_of_its_own() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len({dtype_name(dtype) for dtype in every}) == len(every)
    assert set(DTYPE_NAMES) <= every
    assert dtype_name(torch.uint16) == "uint16"


# ---------------------------------------------------------------- what follows from it


@settings(max_examples=50)
@given(specs())
def test_what_a_spec_knows(spec: DTensorSpec) -> None:
    assert spec.shape is spec.tensor_meta.shape
    assert spec.ndim == len(spec.shape) == len(spec.dim_axes)
    found = axes_by_dim(spec.placements)
    assert [sorted(axes) for axes in spec.dim_axes] == [found.get(dim, []) for dim in range(spec.ndim)]
    assert spec.shard_order == tuple((dim, axes) for dim, axes in enumerate(spec.dim_axes) if axes)
    assert spec.partial_axes == tuple(a for a, p in enumerate(spec.placements) if p.is_partial())
    assert spec.is_replicated == all(p.is_replicate() for p in spec.placements)
    for axis, placement in enumerate(spec.placements):
        rows = 1 if isinstance(placement, Ragged | Owned) else None
        assert spec.rows(axis) == (placement.split_factor if isinstance(placement, StridedShard | Zigzag) else rows)


@given(specs())
def test_dims_counted_from_the_end_are_the_same_dims(spec: DTensorSpec) -> None:
    def from_the_end(placement: Placement) -> Placement:
        if isinstance(placement, StridedShard):
            return StridedShard(placement.dim - spec.ndim, placement.split_factor)
        if isinstance(placement, Zigzag):
            return Zigzag(placement.dim - spec.ndim, placement.blocks, placement.split_factor)
        return Shard(placement.dim - spec.ndim) if isinstance(placement, Shard) else placement

    again = [from_the_end(placement) for placement in spec.placements]
    assert DTensorSpec(spec.mesh, again, spec.tensor_meta, spec.shard_order) is spec


def test_dims_of_the_order_counted_from_the_end() -> None:
    expected = spec([Shard(1), Shard(1)], (8, 32, 4), [(1, ("tp", "dp"))])
    assert spec([Shard(1), Shard(1)], (8, 32, 4), [(-2, ("tp", "dp"))]) is expected


def test_the_last_dim_of_the_order_is_that_of_the_tensor() -> None:
    with pytest.raises(LayoutError, match="the shard order says"):
        spec([Shard(0), Shard(0)], (8, 32, 4), [(-1, ("tp", "dp"))])


def test_an_order_may_say_that_a_dim_is_not_split() -> None:
    assert spec([R, R], order=[(0, ())]) is spec([R, R])


@pytest.mark.parametrize("dim", [2, 7, -3])
def test_an_order_of_a_dim_that_is_not_there(dim: int) -> None:
    with pytest.raises(LayoutError, match=f"dim {dim}"):
        spec([Shard(0), Shard(0)], order=[(dim, ())])


def test_the_same_with_something_changed() -> None:
    made = spec([Shard(0), Shard(0)], order=[(0, ("tp", "dp"))])
    assert repr(made.with_dtype(torch.bool)) == "b8[8,32] dp:S0 tp:S0 order 0:tp>dp"
    assert repr(made.with_meta(TensorMeta((3, 3)))) == "f32[3,3] dp:S0 tp:S0 order 0:tp>dp"
    assert repr(made.with_placements([R, Shard(-1)])) == "f32[8,32] dp:R tp:S1"
    assert repr(made.with_placements([R], mesh=MESH["dp"])) == "f32[8,32] dp:R"


def test_meta() -> None:
    meta = TensorMeta((2, 3, 4), dtype=torch.float16)
    assert (meta.stride, meta.nbytes, repr(meta)) == ((12, 4, 1), 48, "f16[2,3,4]")
    assert (TensorMeta(()).nbytes, TensorMeta((5, 0)).nbytes) == (4, 0)


# ---------------------------------------------------------------- placements


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_partial_of_every_operation(op: str) -> None:
    placement = Partial(op)
    assert (placement.reduce_op, repr(placement)) == (op, f"Partial({op})")
    assert [placement.is_partial(other) for other in REDUCE_OPS] == [op == other for other in REDUCE_OPS]
    assert placement.linear == (op in ("sum", "avg"))
    assert not placement.is_shard()
    assert not placement.is_replicate()


def test_what_placements_say_they_are() -> None:
    assert [p.is_shard() for p in (Shard(0), StridedShard(0, 2), R, Partial())] == [True, False, False, False]
    assert (Shard(1).is_shard(1), Shard(1).is_shard(0)) == (True, False)
    assert R.is_replicate()
    assert MaskPartial().is_partial("sum")
    assert MaskPartial().linear


def test_placements_of_torch_are_taken() -> None:
    import torch.distributed.tensor as theirs
    from torch.distributed.tensor.placement_types import _StridedShard

    assert as_placement(theirs.Shard(2)) is Shard(2)
    assert as_placement(theirs.Replicate()) is R
    assert as_placement(_StridedShard(1, split_factor=3)) is StridedShard(1, 3)
    for op in REDUCE_OPS:
        assert as_placement(theirs.Partial(op)) is Partial(op)
    assert spec([theirs.Shard(-1), theirs.Partial()]) is spec([Shard(1), Partial()])
    assert spec([theirs.Replicate(), Shard(0)]) is spec([R, Shard(0)])
    with pytest.raises(LayoutError, match="Partial\\('premul_sum'\\): unknown reduction"):
        as_placement(theirs.Partial("premul_sum"))


def test_the_mask_of_torch_is_refused() -> None:
    from torch.distributed.tensor.placement_types import _MaskPartial

    with pytest.raises(LayoutError, match=r"mask-partial.*\n  hint: redistribute"):
        as_placement(_MaskPartial())


# ---------------------------------------------------------------- refused arguments, and messages


@pytest.mark.parametrize(
    ("ask", "kind", "problem", "hint"),
    [
        (lambda: spec([Shard(2), R]), LayoutError, "Shard(2) on axis 'dp': the tensor has dims 0 to 1", "its 2 dims"),
        (lambda: spec([R, Shard(-3)]), LayoutError, "Shard(-3) on axis 'tp'", "its 2 dims"),
        (lambda: spec([R, StridedShard(2, 4)]), LayoutError, "StridedShard(2, split_factor=4) on axis 'tp'", "2 dims"),
        (lambda: spec([R, Shard(5)], mesh=UNNAMED), LayoutError, "Shard(5) on axis '1'", "its 2 dims"),
        (lambda: spec([Shard(0), R], ()), LayoutError, "Shard(0) on axis 'dp': a 0-d tensor has no", "Replicate()"),
        (lambda: spec([R, Shard(-1)], ()), LayoutError, "Shard(-1) on axis 'tp': a 0-d tensor", "Replicate()"),
        (lambda: spec([R]), LayoutError, "1 placements [Replicate()] for DeviceMesh(cpu dp=2 tp=2", "each axis"),
        (lambda: spec([R, R, R]), LayoutError, "3 placements", "one placement for each axis"),
        (lambda: spec([]), LayoutError, "0 placements", "one placement for each axis"),
        (lambda: spec([R, 0]), LayoutError, "0 is not a placement", "use Shard(dim)"),
        (lambda: spec([R, "R"]), LayoutError, "'R' is not a placement", "use Shard(dim)"),
        (lambda: spec([R, Shard]), LayoutError, "is not a placement", "use Shard(dim)"),
        (lambda: Partial("mean"), LayoutError, "Partial('mean'): unknown reduction", "sum, avg, min, max, product"),
        (lambda: spec([Partial("sum"), Partial("max")]), LayoutError, "mix the reductions ['max', 'sum']", "reduce"),
        (lambda: spec([MaskPartial(), Partial("min")]), LayoutError, "mix the reductions ['min', 'sum']", "reduce one"),
        (
            lambda: spec([Shard(0), Shard(0)], order=[(0, ("tp",))]),
            LayoutError, "dim 0 is split by ['tp'], the placements [Shard(0), Shard(0)] split it by ['dp', 'tp']", "",
        ),
        (lambda: spec([Shard(0), R], order=[(0, ("dp", "tp"))]), LayoutError, "split it by ['dp']", "exactly the axes"),
        (lambda: spec([Shard(0), R], order=[(1, ("dp",))]), LayoutError, "dim 1 is split by ['dp']", "exactly"),
        (lambda: spec([Shard(0)] * 2, order=[(0, (0, 0))]), LayoutError, "split by ['dp', 'dp']", "exactly the axes"),
        (lambda: spec([Shard(0)] * 2, order=[(9, (0, 1))]), LayoutError, "dim 9 is split by", "exactly the axes"),
        (lambda: spec([Shard(0)] * 2, order=[(9, (0, 1))]), LayoutError, "the tensor has dims 0 to 1", "exactly"),
        (lambda: spec([R, R], (), [(0, ("dp",))]), LayoutError, "a 0-d tensor has no dims", "exactly the axes"),
        (lambda: spec([Shard(0)] * 2, order=[(0, (0, 1)), (-2, (1, 0))]), LayoutError, "dim -2 twice", "one entry"),
        (lambda: spec([R, R], order=[(0, ()), (0, ())]), LayoutError, "names dim 0 twice", "one entry"),
        (lambda: spec(Shard(0)), LayoutError, "1 placements [Shard(0)] for", "one placement for each axis"),
        (lambda: TensorMeta((2, -1)), LayoutError, "(2, -1) is not a shape", "from 0"),
        (lambda: TensorMeta((2, 3), (1,)), LayoutError, "strides (1,) for shape (2, 3)", "one stride for each dim"),
        (lambda: spec([R, R], order=[(0, ("dp",))]), LayoutError, "split it by []", "exactly the axes"),
        (lambda: spec([Shard(0)] * 2, order=[(0, ("tp", "pp"))]), MeshError, "has no axis 'pp'", "it has dp, tp"),
        (lambda: spec([Shard(0)] * 2, order=[(0, (0, 2))]), MeshError, "has no axis 2", "it has 2 axes"),
    ],
)  # fmt: skip
def test_what_is_refused(ask: Any, kind: type[ShardwiseError], problem: str, hint: str) -> None:
    with pytest.raises(kind) as caught:
        ask()
    assert type(caught.value) is kind
    assert problem in caught.value.problem
    assert caught.value.hint is not None
    assert hint in caught.value.hint
    assert str(caught.value) == f"{caught.value.problem}\n  hint: {caught.value.hint}"


@pytest.mark.parametrize("factor", [0, -2])
def test_a_split_factor_counts_rows(factor: int) -> None:
    with pytest.raises(LayoutError, match=f"split_factor of at least 1, got {factor}\n  hint: it counts the rows"):
        StridedShard(0, factor)


def test_sum_and_avg_may_stand_together() -> None:
    assert spec([Partial("sum"), Partial("avg")]).layout == "dp:P tp:P(avg)"
    assert spec([MaskPartial(), Partial("avg")]).partial_axes == (0, 1)


@pytest.mark.parametrize("given", [(5,), ((2, "a"),), ((2.0,),), ((2,), (1.5,)), ((2,), 1)])
def test_shapes_that_are_no_integers(given: tuple[Any, ...]) -> None:
    # as below: the body's own message
    with pytest.raises(LayoutError, match="is not a shape\n  hint: as in"):
        inspect.unwrap(TensorMeta.__new__)(TensorMeta, *given)


def test_placements_that_are_no_list() -> None:
    # the types are checked before the body in tests; what a user gets is the body's own message
    with pytest.raises(LayoutError, match="5 is not a list of placements\n  hint: as in"):
        inspect.unwrap(checked_placements)(5, MESH, 2)
