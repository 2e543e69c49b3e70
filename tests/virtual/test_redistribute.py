"""Any layout to any other on virtual ranks: values, gradients, two meshes, slices of a mesh, and refused calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import shardwise as sw
from shardwise import (
    DeviceMesh,
    DTensor,
    DTensorSpec,
    MaskPartial,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
)
from shardwise.core.placement import AnyShard
from shardwise.events import route_started
from shardwise.fabric.exchange_plan import traffic
from tests.pure.layouts import held, spec_pairs
from tests.pure.strategies import LAYOUT_KINDS
from tests.virtual.cases import EXCHANGES

Pair = tuple[DTensorSpec, DTensorSpec]
REDUCTIONS = ("sum", "avg", "min", "max", "product")


@pytest.fixture
def seen() -> Iterator[list[sw.Route]]:
    """The routes that communicated."""
    found: list[sw.Route] = []
    route_started.append(found.append)
    yield found
    route_started.remove(found.append)


def mesh_of(*shape: int, names: Sequence[str] | None = None) -> DeviceMesh:
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=names)


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)


def distributed(tensor: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return sw.distribute_tensor(tensor, spec.mesh, spec.placements, shard_order=spec.shard_order)


def to(tensor: DTensor, spec: DTensorSpec, **options: Any) -> DTensor:
    return tensor.redistribute(spec.mesh, spec.placements, shard_order=spec.shard_order, **options)


def assert_holds(tensor: DTensor, whole: torch.Tensor) -> None:
    """Each rank holds the block that the layout gives it; `held` says which, in its own way."""
    spec = tensor.spec
    for coordinate, part in zip(spec.mesh.coordinates.tolist(), tensor.to_local().tensors, strict=True):
        wanted = whole
        for dim, indices in enumerate(held(spec, coordinate)):
            wanted = wanted.index_select(dim, torch.tensor(indices, dtype=torch.int64))
        torch.testing.assert_close(part, wanted, rtol=0, atol=0)


# ---------------------------------------------------------------- who sends what to whom


@settings(max_examples=60)
@given(spec_pairs(source_kinds=LAYOUT_KINDS, target_kinds=LAYOUT_KINDS, two_meshes=True, max_ranks=8, max_ndim=3))
def test_what_one_rank_sends_another_expects(pair: Pair) -> None:
    before, after = pair
    ranks = sorted({*before.mesh.grid_ranks, *after.mesh.grid_ranks})
    having, wanting = (spec.mesh.coordinates_of(ranks) for spec in pair)
    each = [traffic(before, after, ranks, me, having, wanting) for me in range(len(ranks))]
    for me, other in itertools.product(range(len(ranks)), repeat=2):
        sent, expected = each[me].sends.of(other), each[other].receives.of(me)
        assert sent.shape.tolist() == expected.shape.tolist()
    for mine, want in zip(each, wanting.tolist(), strict=True):
        got = mine.receives.sizes.sum() + mine.kept_to.sizes.sum()
        assert mine.kept_from.shape.tolist() == mine.kept_to.shape.tolist()
        assert got == (0 if -1 in want else math.prod(after.local_shape(want)))


# ---------------------------------------------------------------- values and gradients


def check_values_and_gradients(source: DTensorSpec, target: DTensorSpec) -> None:
    x, weight = numbers(source.shape), numbers(source.shape)
    given_ = x.clone().requires_grad_()
    before = distributed(given_, source)
    after = to(before, target)
    for made, asked in ((before.spec, source), (after.spec, target)):
        assert (made.mesh, made.placements, made.shard_order) == (asked.mesh, asked.placements, asked.shard_order)
    if not target.partial_axes and not any(p.is_partial("avg") for p in source.placements):
        with torch.no_grad():
            assert_holds(after, x)
    whole = after.full_tensor()
    torch.testing.assert_close(whole, x, rtol=1e-14, atol=0)
    whole.backward(weight)
    assert before.grad is not None
    torch.testing.assert_close(before.grad.full_tensor(), weight, rtol=1e-14, atol=0)


@settings(max_examples=1000)
@given(spec_pairs(max_ranks=8))
def test_values_and_gradients_on_one_mesh(pair: Pair) -> None:
    check_values_and_gradients(*pair)


@settings(max_examples=250)
@given(spec_pairs(two_meshes=True, max_ranks=6, max_ndim=3))
def test_values_and_gradients_between_two_meshes(pair: Pair) -> None:
    check_values_and_gradients(*pair)


@settings(max_examples=100)
@given(spec_pairs(source_kinds=LAYOUT_KINDS, target_kinds=LAYOUT_KINDS))
def test_a_layout_is_where_its_spec_says(pair: Pair) -> None:
    source, target = pair
    x = torch.arange(float(source.tensor_meta.shape.numel()), dtype=torch.float64).reshape(source.shape)
    before = distributed(x, source)
    assert_holds(before, x)
    assert_holds(to(before, target), x)
    assert_holds(to(before, target, max_bytes=max(source.local_bytes, target.local_bytes)), x)


DTYPES = (torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), MaskPartial(), *map(Partial, REDUCTIONS)], ids=str)
def test_every_dtype(dtype: torch.dtype, placement: Any) -> None:
    if dtype.is_complex and placement.is_partial() and placement.reduce_op in ("min", "max"):
        pytest.skip("complex numbers have no order")
    mesh = mesh_of(2, 2)
    x = torch.randint(0, 9, (5, 3)).to(dtype)
    tensor = sw.distribute_tensor(x, mesh, [placement, placement])
    for target in ([Replicate(), Shard(1)], [Shard(0), Shard(0)]):
        moved = tensor.redistribute(placements=target)
        assert moved.dtype is dtype
        assert_holds(moved, x)


def test_what_moves_has_memory_of_its_own() -> None:
    mesh = mesh_of(2)
    for before, after in itertools.product([Replicate(), Shard(0), Partial("max")], [Replicate(), Shard(0), Shard(1)]):
        tensor = sw.distribute_tensor(torch.ones(4, 4), mesh, [before])
        moved = tensor.redistribute(placements=[after])
        if moved is not tensor:
            for part in moved.to_local().tensors:
                part.fill_(7)
            assert torch.equal(tensor.full_tensor(), torch.ones(4, 4))
            assert len({part.data_ptr() for part in moved.to_local().tensors}) == 2


def test_dtypes_on_the_way() -> None:
    x = numbers((4, 4), torch.float32).requires_grad_()
    tensor = sw.distribute_tensor(x, mesh_of(2), [Shard(0)])
    moved = tensor.redistribute(placements=[Shard(1)], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert moved.dtype is torch.bfloat16
    assert moved.to_local().tensors[0].dtype is torch.bfloat16
    torch.testing.assert_close(moved.full_tensor().detach(), x.detach().bfloat16(), rtol=0, atol=0)
    weight = torch.randn(4, 4).bfloat16()
    moved.full_tensor().backward(weight)
    assert tensor.grad.dtype is torch.float32
    torch.testing.assert_close(tensor.grad.full_tensor(), weight.float(), rtol=0, atol=0)


# ---------------------------------------------------------------- the table of gradients, against one device

SOURCES = (Shard(0), Shard(1), StridedShard(0, 2), Zigzag(0), Replicate(), MaskPartial(), *map(Partial, REDUCTIONS))
TARGETS = (Shard(0), Shard(1), StridedShard(1, 2), Zigzag(1), Replicate(), Partial(), Partial("avg"), MaskPartial())
REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "product": lambda stack: stack.prod(0),
}


def parts_for(spec: DTensorSpec) -> list[torch.Tensor]:
    """Parts that ranks may hold: anything where they are partial, with ties and zeros; the same where replicated."""
    whole = torch.randint(-1, 2, (*spec.mesh.shape, *spec.shape)).double()
    parts = []
    for coordinate in spec.mesh.coordinates.tolist():
        part = whole[tuple(i if spec.placements[a].is_partial() else 0 for a, i in enumerate(coordinate))]
        for dim, indices in enumerate(held(spec, coordinate)):
            part = part.index_select(dim, torch.tensor(indices, dtype=torch.int64))
        parts.append(part)
    return parts


def gradients_by_hand(spec: DTensorSpec, parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of each part of sum(weight * value), by plain torch: a reduction over a stack of leaves.

    Ranks along a replicated axis are replicas: each has the gradient as if it were the only one.
    """
    leaves = [part.clone().requires_grad_() for part in parts]
    coordinates = spec.mesh.coordinates.tolist()
    sharding = [axis for axis, p in enumerate(spec.placements) if isinstance(p, AnyShard)]
    replicated = [axis for axis, p in enumerate(spec.placements) if p.is_replicate()]
    loss = torch.zeros((), dtype=torch.float64)
    alike: dict[tuple[int, ...], list[int]] = {}
    for position, coordinate in enumerate(coordinates):
        alike.setdefault(tuple(coordinate[a] for a in (*sharding, *replicated)), []).append(position)
    for members in alike.values():
        value = reduced(spec, [(coordinates[i], leaves[i]) for i in members])
        block = weight
        for dim, indices in enumerate(held(spec, coordinates[members[0]])):
            block = block.index_select(dim, torch.tensor(indices, dtype=torch.int64))
        loss = loss + (value * block).sum()
    if loss.requires_grad:
        loss.backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def reduced(spec: DTensorSpec, parts: list[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """The reduction of parts over the partial axes; at once, or one after the other for sums and averages."""
    ops = {spec.placements[axis].reduce_op for axis in spec.partial_axes}
    if len(ops) <= 1:
        return REDUCE[ops.pop() if ops else "sum"](torch.stack([part for _, part in parts]))
    axis = spec.partial_axes[0]
    rest = DTensorSpec(
        spec.mesh, [Replicate() if a == axis else p for a, p in enumerate(spec.placements)], spec.tensor_meta
    )
    by_other: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for coordinate, part in parts:
        by_other.setdefault(tuple(i for a, i in enumerate(coordinate) if a != axis), []).append(part)
    op = REDUCE[spec.placements[axis].reduce_op]
    return reduced(rest, [([0, *key], op(torch.stack(group))) for key, group in by_other.items()])


def gradient_of_local(target: DTensorSpec, weight: torch.Tensor) -> RankTensor:
    """What each rank's own loss gives its part, for sum(weight * value)."""
    scale = 1.0
    for axis in target.partial_axes:
        scale /= target.mesh.shape[axis] if target.placements[axis].is_partial("avg") else 1
    grads = []
    for coordinate in target.mesh.coordinates.tolist():
        block = weight
        for dim, indices in enumerate(held(target, coordinate)):
            block = block.index_select(dim, torch.tensor(indices, dtype=torch.int64))
        grads.append(block * scale)
    return RankTensor(grads)


def check_gradient_of_parts(source: DTensorSpec, target: DTensorSpec) -> None:
    parts, weight = parts_for(source), torch.randn(source.shape, dtype=torch.float64)
    local = RankTensor(parts).requires_grad_()
    tensor = DTensor.from_local(
        local, source.mesh, source.placements, shape=source.shape, shard_order=source.shard_order
    )
    moved = to(tensor, target)
    if {target.placements[a].reduce_op for a in target.partial_axes} <= {"sum", "avg"}:
        moved.to_local().backward(gradient_of_local(target, weight))
    else:
        moved.full_tensor().backward(weight)
    for got, wanted in zip(local.grad.tensors, gradients_by_hand(source, parts, weight), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_gradient_of_parts_on_one_axis(source: Any) -> None:
    meta = sw.TensorMeta((5, 4), dtype=torch.float64)
    before = DTensorSpec(mesh_of(3), [source], meta)
    for target in (*TARGETS, Partial("min"), Partial("max"), Partial("product")):
        if not (target.is_partial() and isinstance(source, AnyShard)):
            check_gradient_of_parts(before, before.with_placements([target]))


@settings(max_examples=150)
@given(spec_pairs(max_axes=3, max_ndim=2, target_kinds=LAYOUT_KINDS))
def test_gradient_of_parts_on_several_axes(pair: Pair) -> None:
    check_gradient_of_parts(*pair)


def test_ties_share_a_gradient_evenly() -> None:
    local = RankTensor([torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0])]).requires_grad_()
    DTensor.from_local(local, mesh_of(3), [Partial("max")]).full_tensor().backward(torch.tensor([6.0, 8.0]))
    assert local.grad.tolist() == [[3.0, 4.0], [3.0, 0.0], [0.0, 4.0]]


def test_replicas_put_to_different_uses_say_so_by_grad_placements() -> None:
    x = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    tensor = sw.distribute_tensor(x, mesh_of(3), [Replicate()])
    uses = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    tensor.to_local(grad_placements=[Partial()]).backward(RankTensor(uses))
    torch.testing.assert_close(tensor.grad.full_tensor(), uses[0] + uses[1] + uses[2])


def test_full_tensor_honours_grad_placements() -> None:
    x = torch.randn(4, dtype=torch.float64).requires_grad_()
    tensor = sw.distribute_tensor(x, mesh_of(2), [Shard(0)])
    weight = torch.randn(4, dtype=torch.float64)
    tensor.full_tensor(grad_placements=[Partial("avg")]).backward(weight)
    torch.testing.assert_close(tensor.grad.full_tensor(), weight)
    tensor.grad = None
    tensor.full_tensor(grad_placements=[Partial()]).backward(weight)
    torch.testing.assert_close(tensor.grad.full_tensor(), 2 * weight)


@pytest.mark.parametrize("source", [Replicate(), Partial(), MaskPartial()], ids=str)
def test_from_local_honours_grad_placements(source: Any) -> None:
    """Asked for a partial gradient, the parts' gradients add up to the value's."""
    local = RankTensor([torch.ones(4, dtype=torch.float64)] * 3).requires_grad_()
    tensor = DTensor.from_local(local, mesh_of(3), [source], grad_placements=[Partial()])
    weight = torch.randn(4, dtype=torch.float64)
    tensor.redistribute(placements=[Replicate()]).full_tensor().backward(weight)
    torch.testing.assert_close(sum(local.grad.tensors), weight)


def test_a_plain_local_is_that_of_every_rank() -> None:
    local = torch.tensor([1.0, 2.0], requires_grad=True)
    tensor = DTensor.from_local(local, mesh_of(3), [Partial()])
    torch.testing.assert_close(tensor.full_tensor().detach(), torch.tensor([3.0, 6.0]))
    tensor.full_tensor().backward(torch.tensor([1.0, 10.0]))
    assert local.grad.tolist() == [1.0, 10.0]
    sharded = DTensor.from_local(local, mesh_of(3), [Shard(0)]).full_tensor()
    with pytest.raises(sw.AgreementError, match="their gradients differ"):
        sharded.backward(torch.arange(6.0))


# ---------------------------------------------------------------- two meshes


@pytest.mark.parametrize("name", EXCHANGES)
def test_between_meshes_of_one_world(name: str) -> None:
    (ranks, before), (other_ranks, after) = EXCHANGES[name]
    mesh, other = DeviceMesh("cpu", ranks), DeviceMesh("cpu", other_ranks)
    x, weight = numbers((5, 3)).requires_grad_(), numbers((5, 3))
    tensor = sw.distribute_tensor(x, mesh, before)
    moved = tensor.redistribute(other, after)
    assert moved.device_mesh is other
    assert len(moved.to_local().tensors) == other.size()
    torch.testing.assert_close(moved.full_tensor(), x, rtol=1e-14, atol=0)
    moved.full_tensor().backward(weight)
    assert tensor.grad.device_mesh is mesh
    torch.testing.assert_close(tensor.grad.full_tensor(), weight, rtol=1e-14, atol=0)
    if not moved.spec.partial_axes:
        with torch.no_grad():
            assert_holds(moved, moved.full_tensor())


def test_max_bytes_between_meshes() -> None:
    tensor = sw.distribute_tensor(torch.ones(4, 4), mesh_of(2, 2), [Shard(0), Shard(1)])
    assert torch.equal(tensor.redistribute(mesh_of(4), [Shard(0)], max_bytes=16).full_tensor(), torch.ones(4, 4))
    with pytest.raises(sw.MemoryBoundError) as refused:
        tensor.redistribute(mesh_of(4), [Shard(0)], max_bytes=15)
    assert refused.value.smallest == 16


# ---------------------------------------------------------------- slices of a mesh


def test_slices_of_a_mesh_stay_apart() -> None:
    root = mesh_of(2, 3, names=("dp", "tp"))
    parts = [torch.full((1, 4), float(rank)) for rank in range(6)]
    tensor = DTensor.from_local(RankTensor(parts), root["tp"], [Shard(0)])
    assert tensor.shape == (3, 4)
    for target in (Replicate(), Shard(1)):
        local = tensor.redistribute(placements=[target]).redistribute(placements=[Replicate()]).to_local()
        assert [part[:, 0].tolist() for part in local.tensors] == [[0.0, 1.0, 2.0]] * 3 + [[3.0, 4.0, 5.0]] * 3
    whole = tensor.full_tensor()
    assert isinstance(whole, RankTensor)
    assert [part[0, 0].item() for part in whole.tensors] == [0.0] * 3 + [3.0] * 3


def test_gradients_of_slices_stay_apart() -> None:
    root = mesh_of(2, 2, names=("dp", "tp"))
    local = RankTensor([torch.zeros(2, dtype=torch.float64) for _ in range(4)]).requires_grad_()
    whole = DTensor.from_local(local, root["dp"], [Partial()]).full_tensor()  # slices {0, 2} and {1, 3}
    whole.backward(RankTensor([torch.full((2,), float(i % 2 + 1), dtype=torch.float64) for i in range(4)]))
    assert local.grad.tolist() == [[1.0, 1.0], [2.0, 2.0]] * 2


def test_sums_in_slices_stay_apart() -> None:
    root = mesh_of(2, 2, names=("dp", "tp"))
    parts = RankTensor([torch.tensor([10.0**rank]) for rank in range(4)])
    sums = {name: DTensor.from_local(parts, root[name], [Partial()]).full_tensor().tolist() for name in ("dp", "tp")}
    assert sums["tp"] == [[11.0], [11.0], [1100.0], [1100.0]]
    assert sums["dp"] == [[101.0], [1010.0], [101.0], [1010.0]]


def test_flattened_axes_are_one_axis() -> None:
    root = mesh_of(2, 3, names=("dp", "tp"))
    x = torch.arange(7.0)
    for order in (("dp", "tp"), ("tp", "dp")):
        tensor = sw.distribute_tensor(x, root.flatten(order), [Shard(0)])
        assert torch.equal(tensor.redistribute(placements=[Replicate()]).full_tensor(), x)
        lengths = [len(part) for part in tensor.to_local().tensors]
        assert lengths == ([2, 2, 2, 1, 0, 0] if order == ("dp", "tp") else [2, 2, 0, 2, 1, 0])


# ---------------------------------------------------------------- refused before anything moves


def refusals() -> dict[str, tuple[type[Exception], str, Callable[[], object]]]:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    x = torch.ones(4, 4)

    def tensor(*placements: Any) -> DTensor:
        return sw.distribute_tensor(x, mesh, placements)

    sharded = tensor(Shard(0), Shard(1))
    with sw.dry_run():
        dry = sw.init_device_mesh("cpu", (2, 2))
    locals_ = [torch.ones(2, 2)] * 3 + [torch.ones(2, 1)]
    return {
        "too few placements": (
            sw.LayoutError, "1 placements .* 2 axes", lambda: sharded.redistribute(placements=[Shard(0)])),
        "too many placements": (
            sw.LayoutError, "3 placements .* 2 axes", lambda: sharded.redistribute(placements=[Shard(0)] * 3)),
        "too few for distribute_tensor": (
            sw.LayoutError, "1 placements .* 2 axes", lambda: sw.distribute_tensor(x, mesh, [Shard(0)])),
        "too few for from_local": (
            sw.LayoutError, "1 placements .* 2 axes", lambda: DTensor.from_local(x, mesh, [Shard(0)])),
        "too few for a factory": (
            sw.LayoutError, "1 placements .* 2 axes", lambda: sw.zeros(4, device_mesh=mesh, placements=[Shard(0)])),
        "no such dim": (
            sw.LayoutError, r"Shard\(2\) on axis 'tp': the tensor has dims 0 to 1",
            lambda: sharded.redistribute(placements=[Shard(0), Shard(2)])),
        "no such dim from the end": (
            sw.LayoutError, r"Shard\(-3\) on axis 'dp'", lambda: sw.distribute_tensor(x, mesh, [Shard(-3), Shard(0)])),
        "not a placement": (
            sw.LayoutError, "'S0' is not a placement", lambda: sharded.redistribute(placements=["S0", "R"])),
        "sharded to partial": (
            sw.LayoutError, r"axis 'dp' would change from Shard\(0\) to Partial\(sum\)",
            lambda: sharded.redistribute(placements=[Partial(), Shard(1)])),
        "two reductions": (
            sw.LayoutError, r"mix the reductions \['max', 'sum'\]",
            lambda: tensor(Partial(), Partial()).redistribute(placements=[Partial(), Partial("max")])),
        "another fabric": (sw.MeshError, "different fabrics", lambda: sharded.redistribute(dry, [Shard(0), Shard(1)])),
        "another device type": (
            sw.MeshError, "different device types",
            lambda: sharded.redistribute(DeviceMesh("cuda", [[0, 1], [2, 3]]), [Shard(0), Shard(1)])),
        "a slice from the root": (
            sw.MeshError, "is a slice of a larger mesh", lambda: sharded.redistribute(mesh["tp"], [Shard(0)])),
        "the root from a slice": (
            sw.MeshError, "is a slice of a larger mesh",
            lambda: DTensor.from_local(x, mesh["tp"], [Shard(0)]).redistribute(mesh, [Shard(0), Shard(1)])),
        "not a mesh": (sw.MeshError, "is not a DeviceMesh", lambda: sharded.redistribute("cpu", [Shard(0), Shard(1)])),
        "no mesh": (sw.MeshError, "no mesh was given", lambda: sw.distribute_tensor(x)),
        "a shape that does not fit": (
            sw.LayoutError, r"gave a local of shape \(2, 1\), but .* puts \(2, 2\) there",
            lambda: DTensor.from_local(RankTensor(locals_), mesh, [Shard(0), Shard(1)])),
        "a global shape that does not fit": (
            sw.LayoutError, r"rank at \(0, 0\) .* gave a local of shape \(2, 2\), but .* puts \(3, 2\) there",
            lambda: DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], shape=(5, 4))),
        "a stride without a shape": (
            sw.LayoutError, "stride= without shape=", lambda: DTensor.from_local(x, mesh, stride=(1, 4))),
        "too few ranks": (
            sw.LayoutError, "needs a local with one tensor for each of its 4 ranks, got 2",
            lambda: DTensor.from_local(RankTensor([x, x]), mesh)),
        "an order of other axes": (
            sw.LayoutError, "the shard order says that dim 0 is split by",
            lambda: sharded.redistribute(placements=[Shard(0), Shard(0)], shard_order=[(0, ("tp",))])),
        "a source outside": (
            sw.MeshError, "src_data_rank=4 is not in .*\n.*ranks 0 to 3",
            lambda: sw.distribute_tensor(x, mesh, [Shard(0), Shard(1)], src_data_rank=4)),
        "a source below": (
            sw.MeshError, "src_data_rank=-1 is not in", lambda: sw.distribute_tensor(x, mesh, src_data_rank=-1)),
        "a DTensor laid out anew": (
            sw.LayoutError, "is a DTensor already", lambda: sw.distribute_tensor(sharded, mesh, [Shard(1), Shard(0)])),
        "a DTensor on another mesh": (
            sw.MeshError, "is a DTensor on", lambda: sw.distribute_tensor(sharded, mesh_of(4), [Shard(1)])),
        "grad_placements that do not fit": (
            sw.LayoutError, "1 placements .* 2 axes",
            lambda: sw.zeros(4, requires_grad=True, device_mesh=mesh).to_local(grad_placements=[Partial()])),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_refused_before_anything_moves(name: str, seen: list[sw.Route]) -> None:
    kind, words, ask = refusals()[name]
    seen.clear()
    with pytest.raises(kind, match=words) as refused:
        ask()
    assert isinstance(refused.value, sw.ShardwiseError)
    assert refused.value.hint
    assert not seen


def test_an_impossible_bound_names_the_smallest(seen: list[sw.Route]) -> None:
    tensor = sw.distribute_tensor(torch.ones(8, 8), mesh_of(2, 2), [Shard(0), Shard(1)])
    for target in ([Replicate(), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
        with pytest.raises(sw.MemoryBoundError) as refused:
            tensor.redistribute(placements=target, max_bytes=1)
        smallest = refused.value.smallest
        with pytest.raises(sw.MemoryBoundError, match=f"smallest bound that would do is {smallest} bytes"):
            tensor.redistribute(placements=target, max_bytes=smallest - 1)
        assert not seen
        assert_holds(tensor.redistribute(placements=target, max_bytes=smallest), torch.ones(8, 8))
        seen.clear()


def test_only_routes_that_communicate_are_announced(seen: list[sw.Route]) -> None:
    tensor = sw.distribute_tensor(torch.ones(4, 4), mesh_of(2), [Replicate()])
    tensor.redistribute(placements=[Shard(0)])
    tensor.redistribute(placements=[Partial()])
    assert not seen
    moved = tensor.redistribute(placements=[Shard(0)]).redistribute(placements=[Shard(1)])
    assert [str(route) for route in seen] == ["f32[4,4] S0 -> S1: all-to-all dim 0 -> dim 1 over 0"]
    assert moved.redistribute(placements=[Shard(1)]) is moved
    assert len(seen) == 1
