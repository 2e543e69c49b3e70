"""What only real ranks can show of redistribution: every dtype over gloo, waiting, agreement, who takes part."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import DeviceMesh, DTensor, MaskPartial, Partial, Replicate, Shard, StridedShard, Zigzag
from shardwise.core.spec import default_shard_order
from shardwise.events import route_started
from shardwise.fabric import routes
from shardwise.fabric.c10d import c10d
from tests.gloo.processes import ProcessPool
from tests.virtual.cases import EXCHANGES
from tests.virtual.test_ragged import random_layout

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64,
)  # fmt: skip
GRIDS = (
    [0, 1, 2, 3],
    [3, 0, 2, 1],
    [[0, 1], [2, 3]],
    [[3, 0], [1, 2]],
    [[0, 1, 2, 3]],
    [[[0, 1]], [[2, 3]]],
    [1, 3, 0],
)


# ---------------------------------------------------------------- run on every rank


def random_placements(rng: random.Random, axes: int, ndim: int, dtype: torch.dtype, partial: bool) -> list[Any]:
    """Placements of all kinds; complex numbers have no minimum, and sums and averages may be combined."""
    ops = ["sum", "avg", "product"] if dtype.is_complex else ["sum", "avg", "min", "max", "product"]
    op = rng.choice(ops)
    found = []
    for _ in range(axes):
        choices: list[Any] = [Replicate()]
        if ndim:
            choices += [Shard(rng.randrange(ndim)), Shard(rng.randrange(-ndim, 0))]
            choices += [StridedShard(rng.randrange(ndim), rng.randint(1, 3)), Zigzag(rng.randrange(ndim))]
        if partial:
            choices += [Partial(op)]
        if partial and op in ("sum", "avg"):
            choices += [MaskPartial()]
        found.append(rng.choice(choices))
    return found


def ragged_layouts(count: int, seed: int) -> None:
    """Between layouts of given sizes, and back in backward."""
    rng = random.Random(seed)
    meshes = [sw.init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    for _ in range(count):
        mesh, shape = rng.choice(meshes), tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        before, after = random_layout(rng, mesh, shape), random_layout(rng, mesh, shape)
        laid = sw.distribute_tensor(x, mesh, before).requires_grad_()
        moved = laid.redistribute(placements=after) * 2
        assert torch.equal(moved.full_tensor(), 2 * x), (before, after)
        moved.backward(sw.distribute_tensor(x, mesh, random_layout(rng, mesh, shape)))
        assert laid.grad is not None
        assert torch.equal(laid.grad.full_tensor(), 2 * x), (before, after)  # pyright: ignore[reportAttributeAccessIssue]


def random_order(rng: random.Random, spec_placements: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    return [(dim, tuple(rng.sample(axes, len(axes)))) for dim, axes in default_shard_order(spec_placements)]


def normal(placements: Sequence[Any], ndim: int) -> list[Any]:
    return [Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements]


def fuzz(seed: int, count: int) -> int:
    """Random moves; every rank draws the same ones. Returns how many had a gradient."""
    rng = random.Random(seed)
    me = dist.get_rank()
    with_gradient = 0
    for case in range(count):
        mesh = DeviceMesh("cpu", rng.choice(GRIDS))
        shape = [rng.choice([0, 1, 2, 3, 4, 5, 7, 8]) for _ in range(rng.randint(0, 4))]
        dtype = rng.choice(DTYPES)
        torch.manual_seed(case)
        x = torch.randint(0, 4, shape).to(dtype)
        before = normal(random_placements(rng, mesh.ndim, len(shape), dtype, True), len(shape))
        after = normal(random_placements(rng, mesh.ndim, len(shape), dtype, False), len(shape))
        orders = random_order(rng, before), random_order(rng, after)
        source, waits = rng.randrange(mesh.size()), rng.random() < 0.5
        told = f"case {case}: {dtype} {shape} {mesh}: {before} {orders[0]} -> {after} {orders[1]}"
        sender = mesh.grid_ranks[source]
        tensor = sw.distribute_tensor(
            x if me == sender else torch.zeros_like(x), mesh, before, src_data_rank=source, shard_order=orders[0]
        )
        differentiable = dtype.is_floating_point or dtype.is_complex
        if differentiable:
            tensor.requires_grad_()
        moved = tensor.redistribute(placements=after, shard_order=orders[1], async_op=waits)
        whole = moved.full_tensor()
        inside = mesh.coordinate_of(me) is not None
        tolerance = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6  # an average over three is not exact
        if inside:
            assert whole.dtype is dtype, told
            torch.testing.assert_close(
                whole.detach(), x, rtol=tolerance, atol=0, msg=lambda m, told=told: f"{told}\n{m}"
            )
        if differentiable:
            with_gradient += 1
            weight = torch.randint(0, 4, shape).to(dtype)
            whole.backward(weight if inside else torch.zeros_like(whole))
            gradient = tensor.grad.full_tensor()
            if inside:
                torch.testing.assert_close(
                    gradient, weight, rtol=tolerance, atol=0, msg=lambda m, told=told: f"{told}\n{m}"
                )
    return with_gradient


REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "product": lambda stack: stack.prod(0),
}


def gradients_of_parts() -> None:
    """Each rank's part of a reduction has the gradient that the plain reduction over a stack gives it."""
    me = dist.get_rank()
    for op, reduce in REDUCE.items():
        for grid, placements in (([0, 1, 2, 3], [Partial(op)]), ([[3, 1], [2, 0]], [Partial(op), Partial(op)])):
            for target in (Replicate(), Shard(0), Shard(1)):
                mesh = DeviceMesh("cpu", grid)
                parts = torch.randint(-1, 2, (4, 5, 3)).double().requires_grad_()
                weight = torch.randn(5, 3, dtype=torch.float64)
                reduce(parts).backward(weight)
                assert parts.grad is not None
                local = parts[me].detach().clone().requires_grad_()
                tensor = DTensor.from_local(local, mesh, placements)
                tensor.redistribute(placements=[target] * mesh.ndim).full_tensor().backward(weight)
                told = f"{op} to {target}"
                torch.testing.assert_close(local.grad, parts.grad[me], msg=lambda m, told=told: f"{told}\n{m}")


def replicas_put_to_different_uses() -> torch.Tensor:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    tensor = sw.distribute_tensor(x, DeviceMesh("cpu", [0, 1, 2, 3]), [Replicate()])
    tensor.to_local(grad_placements=[Partial()]).backward(
        torch.full((3,), 10.0 ** dist.get_rank(), dtype=torch.float64)
    )
    return tensor.grad.full_tensor()


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """The routes whose last collective was left in flight, as they are waited for."""
    waited: list[str] = []
    original = routes.BoundRoute.start

    def start(self: routes.BoundRoute, local: torch.Tensor) -> Callable[[], torch.Tensor]:
        finish = original(self, local)

        def counted() -> torch.Tensor:
            waited.append(str(self.route))
            return finish()

        return counted

    with mock.patch.object(routes.BoundRoute, "start", start):
        yield waited


@contextlib.contextmanager
def nothing_moves(name: str) -> Iterator[None]:
    """No route that communicates is run inside, and nothing is sent from rank to rank."""
    seen: list[sw.Route] = []
    route_started.append(seen.append)
    try:
        with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError(name)):
            yield
    finally:
        route_started.clear()
    assert not seen, name


def wait_at_first_use() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    x = torch.arange(24.0).reshape(4, 6)
    tensor = sw.distribute_tensor(x, mesh, [Shard(0), Replicate()])
    uses: dict[str, Callable[[DTensor], Any]] = {
        "to_local": lambda t: t.to_local(),
        "full_tensor": lambda t: t.full_tensor(),
        "an operator": lambda t: t + t,
        "an operand": lambda t: tensor.redistribute(placements=[Shard(1), Replicate()]) + t,
        "another move": lambda t: t.redistribute(placements=[Replicate(), Shard(0)]),
        "repr": repr,
        "its local": lambda t: t._local_tensor,
    }
    for name, use in uses.items():
        with counted_waits() as waited:
            moved = tensor.redistribute(placements=[Shard(1), Replicate()], async_op=True)
            assert isinstance(moved, DTensor), name
            assert type(moved) is not DTensor, name
            assert (moved.shape, moved.placements) == ((4, 6), (Shard(1), Replicate())), name
            assert not waited, f"{name}: its shape and layout need no value"
            use(moved)
            assert type(moved) is DTensor, name
            assert len(waited) == 1, name
        assert torch.equal(moved.full_tensor(), x), name


def returns_before_others_begin() -> str:
    """Rank 0 is back from its call before rank 1 makes its own: a call that waits would wait for ever."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    tensor = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    tensor.full_tensor()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is back"])
    moved = tensor.redistribute(placements=[Replicate()], async_op=True)
    kind = type(moved).__name__
    if dist.get_rank() == 0:
        store.set("rank 0 is back", "yes")
    assert torch.equal(moved.to_local(), torch.arange(8.0))
    assert type(moved) is DTensor
    dist.barrier()
    store.delete_key("rank 0 is back") if dist.get_rank() == 0 else None
    return kind


def waits_in_backward() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    x = torch.arange(16.0).reshape(4, 4)
    tensor = sw.distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    with counted_waits() as waited:
        moved = tensor.redistribute(placements=[Shard(1)], async_op=True)
        assert type(moved) is not DTensor
        assert moved.requires_grad
        assert not waited
        local = moved.to_local()
        assert len(waited) == 1
        local.backward(torch.full_like(local, float(dist.get_rank())))
        gradient = tensor.grad.to_local()
        assert len(waited) == 2
        assert type(tensor.grad) is DTensor
    assert torch.equal(gradient, torch.arange(4.0).expand(1, 4))


def not_asynchronous_where_nothing_moves() -> str:
    tensor = sw.distribute_tensor(torch.arange(8.0), DeviceMesh("cpu", [0, 1, 2, 3]), [Replicate()])
    return type(tensor.redistribute(placements=[Shard(0)], async_op=True)).__name__


def refusals(mesh: DeviceMesh) -> dict[str, tuple[type[Exception], Callable[[], object]]]:
    x = torch.ones(4, 4)
    sharded = sw.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    DTensor.from_local(x, mesh)  # the same local with its strides given is another call
    with sw.virtual():
        elsewhere = sw.init_device_mesh("cpu", (2, 2))
    on_cuda = DeviceMesh("cuda", [[0, 1], [2, 3]])
    return {
        "number of placements": (sw.LayoutError, lambda: sharded.redistribute(placements=[Shard(0)])),
        "missing dim": (sw.LayoutError, lambda: sharded.redistribute(placements=[Shard(0), Shard(2)])),
        "partial": (sw.LayoutError, lambda: sharded.redistribute(placements=[Partial(), Replicate()])),
        "fabric": (sw.MeshError, lambda: sharded.redistribute(elsewhere, [Shard(0), Shard(1)])),
        "device type": (sw.MeshError, lambda: sharded.redistribute(on_cuda, [Shard(0), Shard(1)])),
        "slice": (sw.MeshError, lambda: sharded.redistribute(mesh["tp"], [Shard(0)])),
        "local shape": (
            sw.LayoutError, lambda: DTensor.from_local(x, mesh, [Shard(0), Shard(1)], shape=(4, 4))),
        "strides alone": (sw.LayoutError, lambda: DTensor.from_local(x, mesh, stride=(1, 4))),
        "source above": (sw.MeshError, lambda: sw.distribute_tensor(x, mesh, src_data_rank=4)),
        "source below": (sw.MeshError, lambda: sw.distribute_tensor(x, mesh, src_data_rank=-1)),
        "bound": (sw.MemoryBoundError, lambda: sharded.redistribute(max_bytes=63)),
    }  # fmt: skip


def refuse() -> dict[str, str]:
    """Each is refused on every rank, none of which has called a collective; then all go on."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    told = {}
    for name, (kind, ask) in refusals(mesh).items():
        with nothing_moves(name):
            try:
                ask()
            except kind as error:
                told[name] = str(error)
            else:
                raise AssertionError(f"{name} was not refused")
    tensor = sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.redistribute(max_bytes=64).full_tensor(), torch.ones(4, 4))
    return told


def disagree(about: str) -> str:
    """One rank redistributes another tensor. Returns the error of each rank, after which all continue."""
    odd = dist.get_rank() == 2
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    local = torch.ones(3 if odd and about == "shape" else 2, 4, dtype=torch.int64 if odd and about == "dtype" else None)
    placements = [Shard(1 if odd and about == "placements" else 0)]
    try:
        DTensor.from_local(local, mesh, placements, run_check=True)
    except sw.AgreementError as error:
        told = str(error)
    else:
        told = "nothing"
    assert DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=True).shape == (8, 4)
    return told


def agree_outside() -> None:
    """A rank outside the mesh is asked nothing."""
    DTensor.from_local(torch.ones(2, 4), DeviceMesh("cpu", [0, 2]), [Shard(0)], run_check=True)


def exchange(name: str, dtype: torch.dtype) -> None:
    (ranks, before), (other_ranks, after) = EXCHANGES[name]
    mesh, other = DeviceMesh("cpu", ranks), DeviceMesh("cpu", other_ranks)
    me = dist.get_rank()
    x, weight = torch.randint(1, 5, (5, 3)).to(dtype), torch.randint(1, 5, (5, 3)).to(dtype)
    tensor = sw.distribute_tensor(x, mesh, before)
    if dtype.is_floating_point:
        tensor.requires_grad_()
    moved = tensor.redistribute(other, after)
    assert moved.device_mesh is other
    whole = moved.full_tensor()
    inside = other.coordinate_of(me) is not None
    if inside:
        torch.testing.assert_close(whole.detach(), x)
        assert moved.to_local().shape == moved.spec.local_shape(other.coordinate_of(me))
    else:
        assert moved.to_local().numel() == 0
    assert moved.to_local().dtype is dtype or not inside
    if dtype.is_floating_point:
        whole.backward(weight if inside else torch.zeros_like(whole))
        assert tensor.grad.device_mesh is mesh
        gradient = tensor.grad.full_tensor()
        if mesh.coordinate_of(me) is not None:
            torch.testing.assert_close(gradient, weight)
        else:
            assert gradient.numel() == 0


def exchange_all() -> int:
    for name in EXCHANGES:
        for dtype in (torch.float64, torch.int64, torch.bfloat16):
            try:
                exchange(name, dtype)
            except Exception as error:
                raise AssertionError(f"{name}, {dtype}") from error
    return len(EXCHANGES)


def who_makes_groups_and_talks() -> tuple[int, int]:
    """How often this rank asked for a group while a tensor lay on two of the ranks, and how large its local was."""
    mesh = DeviceMesh("cpu", [1, 3])
    with mock.patch.object(c10d, "group_of", wraps=c10d.group_of) as asked:
        tensor = sw.distribute_tensor(torch.arange(6), mesh, [Shard(0)])
        moved = tensor.redistribute(placements=[Replicate()])
        local = moved.to_local()
    return asked.call_count, local.numel()


def slices_stay_apart() -> dict[str, list[float]]:
    root = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    mine = torch.tensor([10.0 ** dist.get_rank()])
    return {
        "tp gathered": DTensor.from_local(mine, root["tp"], [Shard(0)]).full_tensor().tolist(),
        "dp gathered": DTensor.from_local(mine, root["dp"], [Shard(0)]).full_tensor().tolist(),
        "tp summed": DTensor.from_local(mine, root["tp"], [Partial()]).full_tensor().tolist(),
        "dp summed": DTensor.from_local(mine, root["dp"], [Partial()]).redistribute(placements=[Shard(0)])
        .full_tensor().tolist(),
    }  # fmt: skip


def distribute_from(source: int | None) -> tuple[list[float], list[int]]:
    """This rank's block, and how many elements came and went. Every rank has values of its own."""
    moved: list[int] = []
    original = dist.batch_isend_irecv

    def spy(operations: list[Any]) -> Any:
        moved.extend(operation.tensor.numel() for operation in operations)
        return original(operations)

    x = torch.arange(8.0) + 100 * dist.get_rank()
    seen: list[sw.Route] = []
    route_started.append(seen.append)
    with mock.patch.object(dist, "batch_isend_irecv", spy):
        tensor = sw.distribute_tensor(x, DeviceMesh("cpu", [3, 2, 1, 0]), [Shard(0)], src_data_rank=source)
    route_started.clear()
    assert not seen
    return tensor.to_local().tolist(), moved


def count_new_groups() -> int:
    """Groups made by many moves over the same axes: over each of two, and over both in any order."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    routes._bound.clear()  # as in a new process: without groups, and without routes that are bound to them
    for group in {*c10d._groups.values()} - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    c10d._groups.clear()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        for size in (4, 8, 12):
            for order in ((0, 1), (1, 0)):
                tensor = sw.distribute_tensor(torch.arange(size), mesh, [Shard(0), Shard(0)], shard_order=[(0, order)])
                tensor.full_tensor()
                tensor.redistribute(placements=[Replicate(), Shard(0)])
                tensor.redistribute(placements=[Shard(0), Replicate()])
            tensor = sw.distribute_tensor(torch.ones(size), mesh, [Partial(), Partial()])
            tensor.redistribute(placements=[Replicate(), Partial()])
            tensor.redistribute(placements=[Partial(), Replicate()])
            tensor.redistribute(placements=[Replicate(), Replicate()])
    return made.call_count


# ---------------------------------------------------------------- the tests


def test_values_and_gradients_of_every_dtype(gloo4: ProcessPool) -> None:
    with_gradient = gloo4.run(fuzz, 0, 400, timeout=120)
    assert len(set(with_gradient)) == 1
    assert with_gradient[0] > 150


def test_gradients_of_parts(gloo4: ProcessPool) -> None:
    gloo4.run(gradients_of_parts)


def test_replicas_put_to_different_uses_say_so_by_grad_placements(gloo4: ProcessPool) -> None:
    for gradient in gloo4.run(replicas_put_to_different_uses):
        assert gradient.tolist() == [1111.0] * 3


def test_asynchronous_results_are_waited_for_at_first_use(gloo4: ProcessPool) -> None:
    gloo4.run(wait_at_first_use)


def test_an_asynchronous_call_returns_before_others_begin(gloo4: ProcessPool) -> None:
    assert len(set(gloo4.run(returns_before_others_begin, timeout=20))) == 1


def test_asynchronous_gradients_are_waited_for(gloo4: ProcessPool) -> None:
    gloo4.run(waits_in_backward)


def test_what_needs_no_communication_is_never_pending(gloo4: ProcessPool) -> None:
    assert gloo4.run(not_asynchronous_where_nothing_moves) == ["DTensor"] * 4


def test_refused_on_every_rank_before_anything_moves(gloo4: ProcessPool) -> None:
    told = gloo4.run(refuse)
    assert all("hint: " in error for rank in told for error in rank.values())
    assert "the smallest bound that would do is 64 bytes" in told[0]["bound"]
    # on whom a local shape does not fit is each rank's own affair; all else every rank says in the same words
    for name in set(told[0]) - {"local shape"}:
        assert len({rank[name] for rank in told}) == 1, name


@pytest.mark.parametrize("about", ["shape", "placements", "dtype"])
def test_disagreement_is_an_error_on_every_rank(gloo4: ProcessPool, about: str) -> None:
    told = gloo4.run(disagree, about, timeout=20)
    assert len(set(told)) == 1
    assert "do not mean the same tensor" in told[0]
    assert "rank 2: " in told[0]


def test_ranks_outside_a_mesh_are_asked_nothing(gloo4: ProcessPool) -> None:
    gloo4.run(agree_outside, timeout=20)


def test_between_meshes_of_one_world(gloo4: ProcessPool) -> None:
    assert gloo4.run(exchange_all) == [len(EXCHANGES)] * 4


def test_ranks_outside_hold_nothing_and_take_part_in_nothing(gloo4: ProcessPool) -> None:
    (asked0, held0), (asked1, held1), (asked2, held2), (asked3, held3) = gloo4.run(who_makes_groups_and_talks)
    assert (asked0, held0) == (asked2, held2) == (0, 0)
    assert asked1 == asked3 > 0
    assert held1 == held3 == 6


def test_slices_of_a_mesh_stay_apart(gloo4: ProcessPool) -> None:
    results = gloo4.run(slices_stay_apart)
    assert [r["tp gathered"] for r in results] == [[1.0, 10.0]] * 2 + [[100.0, 1000.0]] * 2
    assert [r["dp gathered"] for r in results] == [[1.0, 100.0], [10.0, 1000.0]] * 2
    assert [r["tp summed"] for r in results] == [[11.0]] * 2 + [[1100.0]] * 2
    assert [r["dp summed"] for r in results] == [[101.0], [1010.0]] * 2


@pytest.mark.parametrize("source", [0, 1, 3])
def test_values_are_those_of_the_source_and_each_rank_gets_its_block_only(gloo4: ProcessPool, source: int) -> None:
    results = gloo4.run(distribute_from, source)
    sender = [3, 2, 1, 0][source]
    for rank, (block, moved) in enumerate(results):
        first = 2 * (3 - rank)
        assert block == [100.0 * sender + first, 100.0 * sender + first + 1]
        assert moved == ([2, 2, 2] if rank == sender else [2])


def test_without_a_source_nothing_moves(gloo4: ProcessPool) -> None:
    for rank, (block, moved) in enumerate(gloo4.run(distribute_from, None)):
        assert block == [100.0 * rank + 2 * (3 - rank), 100.0 * rank + 2 * (3 - rank) + 1]
        assert moved == []


def test_groups_are_made_once(gloo4: ProcessPool) -> None:
    assert gloo4.run(count_new_groups) == [2] * 4


def drop_in_flight() -> bool:
    """Tensors whose collective is still in flight are dropped, with their sources; what comes after is right."""
    mesh = sw.init_device_mesh("cpu", (4,))
    gc.freeze()  # what other tests left is not looked through each time
    for step in range(20):
        x = sw.distribute_tensor(torch.full((4096, 16), float(step)), mesh, [sw.Shard(0)])
        pending = x.redistribute(placements=[sw.Replicate()], async_op=True)
        del x, pending
        gc.collect()
    gc.unfreeze()
    y = sw.distribute_tensor(torch.arange(64.0).reshape(16, 4), mesh, [sw.Shard(0)])
    return torch.equal(y.redistribute(placements=[sw.Shard(1)]).full_tensor(), torch.arange(64.0).reshape(16, 4))


def test_tensors_are_dropped_while_a_route_is_in_flight(gloo4: ProcessPool) -> None:
    assert gloo4.run(drop_in_flight) == [True] * 4


def test_ragged_layouts(gloo4):
    gloo4.run(ragged_layouts, 150, 0)
