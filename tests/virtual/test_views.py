"""Views of one world: tensors on different meshes over the same ranks in one program."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Partial, Ragged, Replicate, Shard
from tests.view_programs import train, whole

S0, S1, R = Shard(0), Shard(1), Replicate()


@pytest.fixture
def world() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (8,), mesh_dim_names=("world",))


# ---------------------------------------------------------------- meshes


def test_a_view_is_the_mesh_of_its_axes(world: sw.DeviceMesh) -> None:
    dense = world.view(dp=4, tp=2)
    assert dense is sw.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    assert dense.view(efsdp=-1, ep=4) is world.view(efsdp=2, ep=4)
    assert dense.view(world=8) is world
    assert [dense.coordinate_of(rank) for rank in (1, 6)] == [(0, 1), (3, 0)]


def test_a_view_keeps_the_order_of_the_ranks() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    turned = mesh["b", "a"]
    assert turned.view(c=6).mesh.tolist() == turned.mesh.flatten().tolist()
    some = sw.DeviceMesh("cpu", [5, 1, 7, 2])
    assert some.view(a=2, b=2).mesh.tolist() == [[5, 1], [7, 2]]


@pytest.mark.parametrize("axes", [{}, {"a": 3}, {"a": 8, "b": 0}, {"a": -1, "b": -1}, {"a": -2, "b": -4}, {"a": 16}])
def test_what_is_no_view(world: sw.DeviceMesh, axes: dict[str, int]) -> None:
    with pytest.raises(sw.MeshError, match="no view of"):
        world.view(**axes)


def test_a_slice_has_no_view(world: sw.DeviceMesh) -> None:
    with pytest.raises(sw.MeshError, match="is a slice of a larger mesh"):
        world.view(dp=4, tp=2)["dp"].view(a=2, b=2)


# ---------------------------------------------------------------- redistribution


def random_layout(rng: random.Random, mesh: sw.DeviceMesh, shape: tuple[int, ...]) -> list[sw.Placement]:
    kinds: list[sw.Placement] = [R, *[Shard(dim) for dim in range(len(shape))]]
    placed = [rng.choice(kinds) for _ in mesh.shape]
    if rng.random() < 0.4:
        axis, dim = rng.randrange(mesh.ndim), rng.randrange(len(shape))
        ranks = mesh.shape[axis]
        cuts = [0, *sorted(rng.choices(range(shape[dim] + 1), k=ranks - 1)), shape[dim]]
        placed = [R if isinstance(p, Shard) and p.dim == dim else p for p in placed]
        placed[axis] = Ragged(dim, [high - low for low, high in itertools.pairwise(cuts)])
    return placed


@pytest.mark.parametrize("seed", range(3))
def test_random_layouts_of_two_views_become_each_other(world: sw.DeviceMesh, seed: int) -> None:
    rng = random.Random(seed)
    views = [world, world.view(dp=4, tp=2), world.view(efsdp=2, ep=4), world.view(a=2, b=2, c=2)]
    for _ in range(25):
        one, other = rng.sample(views, 2)
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        x, weights = torch.randn(2, *shape, dtype=torch.float64).unbind()
        laid = sw.distribute_tensor(x, one, random_layout(rng, one, shape)).requires_grad_()
        moved = laid.redistribute(other, random_layout(rng, other, shape))
        assert torch.equal(moved.full_tensor(), x)
        moved.backward(sw.distribute_tensor(weights, other, random_layout(rng, other, shape)))
        assert laid.grad is not None
        assert laid.grad.device_mesh is one
        assert torch.equal(laid.grad.full_tensor(), weights)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([S0, R], ([S0, S0, R], {"a": 2, "b": 2, "c": 2})),
        ([S0, S1], ([S0, S0, S1], {"a": 2, "b": 2, "c": 2})),
        ([R, R], ([S0, S1], {"efsdp": 2, "ep": 4})),
        ([R, S0], ([R, S0], {"all": 4, "tp": 2})),
        ([S0, R], ([S0, S1], {"x": 4, "y": 2})),
        ([S0, S0], ([S0], {"flat": 8})),
    ],
)
def test_what_every_rank_has_already_is_not_sent(
    world: sw.DeviceMesh, before: list[Any], after: tuple[list[Any], dict[str, int]]
) -> None:
    x = torch.randn(8, 16)
    laid = sw.distribute_tensor(x, world.view(dp=4, tp=2), before)
    with sw.debug.CommDebugMode() as comm:
        moved = laid.redistribute(world.view(**after[1]), after[0])
    assert comm.get_total_counts() == 0
    assert torch.equal(moved.full_tensor(), x)
    moved.add_(1)  # memory of its own
    assert torch.equal(laid.full_tensor(), x)


def test_uneven_blocks_that_differ_are_sent(world: sw.DeviceMesh) -> None:
    """Four parts of ten indices are not two parts of two parts."""
    laid = sw.distribute_tensor(torch.arange(10.0), world.view(dp=4, tp=2), [S0, R])
    with sw.debug.CommDebugMode() as comm:
        moved = laid.redistribute(world.view(a=2, b=2, c=2), [S0, S0, R])
    assert comm.get_total_counts() == 1
    assert torch.equal(moved.full_tensor(), torch.arange(10.0))


# ---------------------------------------------------------------- lists


def parameters_on_views(world: sw.DeviceMesh, values: list[torch.Tensor]) -> list[nn.Parameter]:
    dense, sparse = world.view(dp=4, tp=2), world.view(efsdp=2, ep=4)
    places = [
        (dense, [S0, S1]),
        (sparse, [S1, S0]),
        (dense, [R, S0]),
        (sparse, [R, R]),
        (world, [Ragged(0, [2] * 3 + [0] * 5)]),
    ]
    return [
        nn.Parameter(sw.distribute_tensor(value, mesh, placed))
        for value, (mesh, placed) in zip(values, places, strict=True)
    ]


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_clipping_and_optimizers(world: sw.DeviceMesh, way: dict[str, bool]) -> None:
    values = [torch.randn(8, 6), torch.randn(8, 4), torch.randn(6), torch.randn(3, 5), torch.randn(6, 2)]
    plain, laid = [nn.Parameter(value.clone()) for value in values], parameters_on_views(world, values)
    norms: list[list[torch.Tensor]] = []
    for parameters in (plain, laid):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **way)
        norms.append([])
        for _ in range(3):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter**3).sum().backward()
            norms[-1].append(whole(torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=way.get("foreach"))))
            optimizer.step()
    torch.testing.assert_close(norms[1], norms[0])
    for want, have in zip(plain, laid, strict=True):
        torch.testing.assert_close(whole(have), want.detach())


@pytest.mark.parametrize("foreach", [True, False])
def test_infinity_on_one_view_skips_the_step_of_all(world: sw.DeviceMesh, foreach: bool) -> None:
    values = [torch.ones(8, 6), torch.ones(8, 4), torch.ones(6), torch.ones(3, 5), torch.ones(6, 2)]
    laid = parameters_on_views(world, values)
    optimizer = torch.optim.SGD(laid, lr=1.0, foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, expected in ((2.0, -1.0), (float("inf"), -1.0), (1.0, -2.0)):
        optimizer.zero_grad()
        for number, parameter in enumerate(laid):
            scaler.scale((parameter * (factor if number == 1 else min(factor, 2.0))).sum()).backward()  # pyright: ignore[reportAttributeAccessIssue]
        scaler.step(optimizer)
        scaler.update()
        for parameter in laid:
            assert torch.equal(whole(parameter), torch.full(parameter.shape, expected))
    assert scaler.get_scale() == 2.0


def test_checkpoints_from_one_view_to_another(world: sw.DeviceMesh, tmp_path: Path) -> None:
    values = [torch.randn(8, 6), torch.randn(8, 4), torch.randn(6), torch.randn(3, 5), torch.randn(6, 2)]
    state = dict(zip("abcde", (p.detach() for p in parameters_on_views(world, values)), strict=True))
    sw.checkpoint.save(state, tmp_path / "saved")
    other = dict(
        zip("bacde", (p.detach() for p in parameters_on_views(world, [values[1], values[0], *values[2:]])), strict=True)
    )
    for tensor in other.values():
        tensor.zero_()
    sw.checkpoint.load(other, tmp_path / "saved")
    for name, value in zip("abcde", values, strict=True):
        assert torch.equal(other[name].full_tensor(), value)


def test_a_replicated_tensor_is_one_on_every_view(world: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.arange(16.0).reshape(8, 2), world.view(dp=4, tp=2), [S0, R])
    row = sw.distribute_tensor(torch.ones(2), world.view(efsdp=2, ep=4), [R, R])
    assert torch.equal((x + row).full_tensor(), x.full_tensor() + 1)
    sharded = sw.distribute_tensor(torch.ones(2), world.view(efsdp=2, ep=4), [S0, R])
    with pytest.raises(sw.MeshError, match="different meshes"):
        _ = x + sharded
    waiting = sw.distribute_tensor(torch.ones(()), world.view(efsdp=2, ep=4), [Partial(), R])
    assert torch.equal((x * waiting).full_tensor(), x.full_tensor())  # reduced first


# ---------------------------------------------------------------- a model


@pytest.mark.parametrize("sharded", [False, True], ids=["plan", "fully_shard"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_dense_layers_on_one_view_and_experts_on_another(ranks: int, sharded: bool) -> None:
    train(ranks, sharded)
