"""Equal values are one object: by whatever way, on whatever thread they are made."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shardwise.core.intern import Interned, pool_size
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import REDUCE_OPS, MaskPartial, Partial, Replicate, Shard, StridedShard, Zigzag
from shardwise.core.spec import DTensorSpec, ShardOrderEntry, TensorMeta
from shardwise.errors import LayoutError
from tests.pure.strategies import any_meshes, specs


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"), fabric="virtual")


def spec() -> DTensorSpec:
    return DTensorSpec(mesh(), [Shard(0), Shard(0)], TensorMeta((8, 32)), [(0, ("tp", "dp"))])


MAKERS: dict[str, Callable[[], Interned]] = {
    "Shard": lambda: Shard(3),
    "Shard from the end": lambda: Shard(-1),
    "StridedShard": lambda: StridedShard(1, 4),
    "Zigzag": lambda: Zigzag(1),
    "Zigzag of blocks": lambda: Zigzag(1, blocks=[1, 0, 3, 2], split_factor=2),
    "Replicate": Replicate,
    **{f"Partial {op}": lambda op=op: Partial(op) for op in REDUCE_OPS},
    "MaskPartial": MaskPartial,
    "mesh": mesh,
    "mesh without names": lambda: DeviceMesh("cpu", [5, 3, 9], fabric="virtual"),
    "slice": lambda: mesh()["tp"],
    "slice of two": lambda: mesh()["tp", "dp"],
    "flattened": lambda: mesh().flatten(name="world"),
    "meta": lambda: TensorMeta((2, 0, 3), dtype=torch.bfloat16),
    "meta with strides": lambda: TensorMeta((2, 3), (1, 2)),
    "spec": spec,
    "spec on a slice": lambda: DTensorSpec(mesh()["dp"], [Partial("max")], TensorMeta(())),
}
every_value = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


# ---------------------------------------------------------------- one object for one value


@every_value
def test_equal_is_identical(make: Callable[[], Interned]) -> None:
    assert make() is make()


@every_value
def test_hash_is_that_of_the_pointer(make: Callable[[], Interned]) -> None:
    value = make()
    assert type(value).__hash__ is object.__hash__
    assert value == make()
    assert value != object()
    assert hash(value) == object.__hash__(value)


@every_value
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_identity(make: Callable[[], Interned], protocol: int) -> None:
    value = make()
    assert pickle.loads(pickle.dumps(value, protocol)) is value


@every_value
def test_pickle_makes_the_value_anew(make: Callable[[], Interned]) -> None:
    """Also where the value is not alive any more, as in another process."""
    stored, shown = pickle.dumps(make()), repr(make())
    again = pickle.loads(stored)
    assert repr(again) == shown
    assert again is make()


@every_value
def test_copies_are_the_same_object(make: Callable[[], Interned]) -> None:
    value = make()
    assert copy.copy(value) is value
    assert copy.deepcopy(value) is value
    assert copy.deepcopy({"nested": [value]})["nested"][0] is value


@settings(max_examples=50)
@given(specs())
def test_any_spec_survives_pickle_and_copy(spec: DTensorSpec) -> None:
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert copy.deepcopy(spec) is spec
    assert DTensorSpec(spec.mesh, list(spec.placements), spec.tensor_meta, dict(spec.shard_order)) is spec
    assert DTensorSpec.from_dim_axes(spec.mesh, spec.placements, spec.tensor_meta, spec.dim_axes) is spec
    assert spec.with_placements(spec.placements, spec.shard_order) is spec
    assert spec.with_dtype(torch.int8).with_dtype(spec.tensor_meta.dtype) is spec


@given(any_meshes())
def test_any_mesh_survives_pickle_and_copy(mesh: DeviceMesh) -> None:
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert copy.deepcopy(mesh) is mesh


def test_different_values_are_different_objects() -> None:
    values = [make() for make in MAKERS.values()]
    assert len({id(value) for value in values}) == len(values)
    assert Shard(0) != StridedShard(0, 1)
    assert MaskPartial() != Partial("sum")
    assert TensorMeta((2, 3)) != TensorMeta((2, 3), dtype=torch.float64)
    assert TensorMeta((2, 3)) != TensorMeta((2, 3), (1, 2))


# ---------------------------------------------------------------- equal arguments in several notations


def test_integers_of_numpy_and_torch_are_integers() -> None:
    for integer in (np.int64(1), np.uint8(1), torch.tensor(1)):
        assert Shard(integer) is Shard(1)
        assert type(Shard(integer).dim) is int
        assert StridedShard(integer, integer) is StridedShard(1, 1)
    fresh = Shard(np.int32(71))
    assert type(fresh.dim) is int


@pytest.mark.parametrize("wrong", [True, False, 1.0, "0", None, np.float64(1), np.True_])
def test_what_is_no_integer_is_refused(wrong: Any) -> None:
    # the types are checked before the body in tests; what a user gets is the body's own message
    new_shard, new_strided = inspect.unwrap(Shard.__new__), inspect.unwrap(StridedShard.__new__)
    with pytest.raises(LayoutError, match="Shard needs an integer dim"):
        new_shard(Shard, wrong)
    with pytest.raises(LayoutError, match="StridedShard needs an integer dim"):
        new_strided(StridedShard, wrong, 2)
    with pytest.raises(LayoutError, match="StridedShard needs an integer split_factor"):
        new_strided(StridedShard, 0, wrong)


def test_a_refused_value_leaves_the_right_one_alone() -> None:
    with pytest.raises(LayoutError):
        Shard(True)
    assert repr(Shard(1)) == "Shard(1)"


def test_metas_from_lists_sizes_and_tensors() -> None:
    meta = TensorMeta((2, 3))
    assert TensorMeta([2, 3]) is meta
    assert TensorMeta(torch.Size((2, 3)), [3, 1], torch.float32) is meta
    assert TensorMeta.of(torch.empty(2, 3)) is meta


def test_metas_hold_python_integers() -> None:
    meta = TensorMeta((np.int64(1237), np.int64(2)), (np.int64(2), np.int64(1)))
    assert {type(n) for n in (*meta.shape, *meta.stride)} == {int}
    assert meta is TensorMeta((1237, 2)) is TensorMeta(torch.tensor([1237, 2]), torch.tensor([2, 1]))


def test_meshes_from_lists_ranges_arrays_and_tensors() -> None:
    given = [[4, 5], [6, 7]]
    expected = DeviceMesh("cpu", given, fabric="virtual")
    for ranks in (np.array(given), np.array(given, dtype=np.uint8), torch.tensor(given), torch.tensor(given).int()):
        assert DeviceMesh("cpu", ranks, fabric="virtual") is expected
    assert DeviceMesh("cpu", range(3), fabric="virtual") is DeviceMesh("cpu", [0, 1, 2], fabric="virtual")
    assert DeviceMesh("cpu", 3, fabric="virtual") is DeviceMesh("cpu", [3], fabric="virtual")


def test_a_mesh_does_not_follow_its_array() -> None:
    ranks = torch.tensor([3, 1, 2])
    mesh = DeviceMesh("cpu", ranks, fabric="virtual")
    ranks[0] = 7
    assert mesh.coordinate_of(3) == (0,)
    assert mesh is DeviceMesh("cpu", [3, 1, 2], fabric="virtual")


def test_one_selection_by_many_ways() -> None:
    whole = DeviceMesh(
        "cpu", np.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), fabric="virtual"
    )  # fmt: skip
    assert whole["dp", "cp", "tp"] is whole
    assert whole["tp", "dp", "cp"]["dp", "cp", "tp"] is whole
    assert whole["dp", "tp"]["tp"] is whole["tp"]
    assert whole["tp"].root is whole
    assert whole.flatten(["tp"]) is whole["tp"]
    assert whole.flatten(["dp", "cp"]) is whole["dp", "cp"].flatten()
    assert whole.flatten(["dp", "cp"]) is not whole.flatten(["cp", "dp"])
    assert whole.flatten(["dp", "cp"], name="a") is not whole.flatten(["dp", "cp"], name="b")


def test_one_order_by_many_ways() -> None:
    placements, meta = [Shard(0), Shard(0)], TensorMeta((8, 32))
    for order in (
        {0: (1, 0)},
        [(0, ("tp", "dp"))],
        [(0, [-1, -2])],
        (ShardOrderEntry(0, (1, 0)),),
        iter([(0, (1, 0))]),
        [(np.int64(0), (1, 0))],
    ):
        assert DTensorSpec(mesh(), placements, meta, order) is spec()
    default = DTensorSpec(mesh(), placements, meta)
    assert DTensorSpec(mesh(), placements, meta, []) is default
    assert DTensorSpec(mesh(), placements, meta, [(0, ("dp", "tp"))]) is default


# ---------------------------------------------------------------- immutable


@every_value
def test_attributes_cannot_be_set_or_deleted(make: Callable[[], Interned]) -> None:
    value = make()
    for name in (*value._fields, "anything"):
        with pytest.raises(AttributeError, match=f"{type(value).__name__} is immutable.*{name}"):
            setattr(value, name, 0)
        with pytest.raises(AttributeError, match=f"{type(value).__name__} is immutable.*{name}"):
            delattr(value, name)
    assert make() is value


@every_value
def test_values_have_no_dictionary(make: Callable[[], Interned]) -> None:
    assert not hasattr(make(), "__dict__")


def test_arrays_of_a_mesh_cannot_be_written() -> None:
    for table in (mesh().coordinates, mesh().groups((0,))):
        with pytest.raises(ValueError, match="read-only"):
            table[0, 0] = 9


# ---------------------------------------------------------------- threads and memory


@pytest.fixture
def eager_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_threads_that_make_a_value_at_once_get_one_object() -> None:
    count, rounds = 8, 40
    barrier = threading.Barrier(count)
    made: list[list[tuple[Interned, ...]]] = [[] for _ in range(count)]

    def work(mine: list[tuple[Interned, ...]]) -> None:
        for i in range(rounds):
            barrier.wait(timeout=30)
            grid = DeviceMesh("cpu", [[1000 + i, 7], [8, 9]], mesh_dim_names=("a", "b"), fabric="virtual")
            meta = TensorMeta((1000 + i, 2))
            placement = Shard(1000 + i)
            whole = DTensorSpec(grid, [Shard(0), Partial()], meta)
            mine.append((grid, grid["b"], grid.flatten(), meta, placement, whole))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [len(mine) for mine in made] == [rounds] * count
    for in_one_round in zip(*made, strict=True):
        for same in zip(*in_one_round, strict=True):
            assert len({id(value) for value in same}) == 1


@pytest.mark.usefixtures("eager_switching")
def test_threads_that_make_and_drop_a_value() -> None:
    """A referenced value is the only one of its kind; a dropped one leaves no entry that could be mistaken for it."""
    wrong: list[str] = []

    def work() -> None:
        for _ in range(300):
            held = Shard(5001)
            if Shard(5001) is not held or held.dim != 5001 or held.short != "S5001":
                wrong.append(repr(held))
            del held

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong


def test_the_pool_shrinks_when_values_are_dropped() -> None:
    gc.collect()
    before = pool_size()
    held = [
        DTensorSpec(DeviceMesh("cpu", [2000 + i, 1], fabric="virtual"), [Shard(0)], TensorMeta((3000 + i,)))
        for i in range(50)
    ]
    assert all(one.block((1,)) and one.mesh.coordinate_of(1) and one.mesh.groups((0,)).size for one in held)
    assert pool_size() >= before + 150
    del held
    gc.collect()
    assert pool_size() <= before + 1  # Shard(0) may be new
