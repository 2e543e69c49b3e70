"""States on another mesh, live and through a checkpoint: training goes on with the losses of one that did not move."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.remeshing import MOVES, build, mesh_of, train


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("live", [True, False])
def test_training_goes_on(move: Any, live: bool, tmp_path: Path) -> None:
    old, new = (mesh_of(*where) for where in move)
    wanted = train(build(old), old, 6)
    state = build(old)
    losses = train(state, old, 3)
    if not live:
        sw.checkpoint.save(state, tmp_path / "step-3")
    given: Any = state if live else tmp_path / "step-3"
    moved = sw.remesh(given, new, into=build(new))
    assert moved["step"] == 3
    assert moved["model"].seen.tolist() == [3.0] * 3
    assert moved["scheduler"].last_epoch == 3
    assert moved["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]
    for have, want in zip(moved["model"].parameters(), state["model"].parameters(), strict=True):
        assert set(have.device_mesh.root.grid_ranks) <= set(new.grid_ranks)
        assert torch.equal(have.full_tensor(), want.full_tensor())
    losses += train(moved, new, 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_a_nested_state_without_objects_needs_no_into() -> None:
    old, new = mesh_of([[0, 1], [2, 3]], "dp", "tp"), mesh_of([5, 4, 1], "tp")
    weight = torch.arange(20.0).reshape(5, 4)
    state = {
        "a": {"w": sw.distribute_tensor(weight, old, [sw.Shard(0), sw.Shard(1)]), "plain": torch.ones(2)},
        "list": [sw.distribute_tensor(weight[0], old, [sw.Replicate(), sw.Shard(0)]), ("text", None, 1.5)],
    }
    moved = sw.remesh(state, new, {"list/0": [sw.Replicate()]})
    assert str(moved["a"]["w"].spec) == "f32[5,4] tp:S1"
    assert moved["a"]["w"].device_mesh is new
    assert torch.equal(moved["a"]["w"].full_tensor(), weight)
    assert str(moved["list"][0].spec) == "f32[4] tp:R"
    assert moved["list"][1] == ("text", None, 1.5)
    assert torch.equal(moved["a"]["plain"], torch.ones(2))
    assert state["a"]["w"].device_mesh is old
    low = sw.remesh(state, new, dtype=torch.bfloat16)
    assert low["a"]["w"].dtype is torch.bfloat16


def test_a_single_module_or_tensor() -> None:
    old, new = mesh_of([0, 1], "dp"), mesh_of([0, 1, 2], "dp")
    first, second = (sw.fully_shard(nn.Linear(5, 4), mesh) for mesh in (old, new))
    assert sw.remesh(first, new, into=second) is second
    assert torch.equal(first.weight.full_tensor(), second.weight.full_tensor())
    tensor = sw.remesh(first.weight, new)
    assert tensor.device_mesh is new


def test_a_plain_tensor_becomes_a_dtensor_and_back() -> None:
    old, new = mesh_of([0, 1], "dp"), mesh_of([2, 0, 1], "dp")
    weight = torch.arange(15.0).reshape(5, 3)
    state = {"a": sw.distribute_tensor(weight, old, [sw.Shard(0)]), "b": weight + 1}
    into = {"a": torch.zeros(5, 3), "b": sw.zeros(5, 3, device_mesh=new, placements=[sw.Shard(1)])}
    sw.remesh(state, new, into=into)
    assert torch.equal(into["a"], weight)
    assert torch.equal(into["b"].full_tensor(), weight + 1)


def test_from_a_checkpoint_with_layouts(tmp_path: Path) -> None:
    old, new = mesh_of([0, 1, 2, 3], "dp"), mesh_of([[0, 1, 2]], "dp", "tp")
    weight = torch.randn(7, 6)
    state = {"m": {"w": sw.distribute_tensor(weight, old, [sw.Shard(0)])}, "n": torch.arange(3), "step": (4, "x")}
    sw.checkpoint.save(state, tmp_path / "c")
    moved = sw.remesh(
        tmp_path / "c", new, {"m/*": [sw.Replicate(), sw.Shard(1)], "n": [sw.Replicate()] * 2}, dtype=torch.float64
    )
    assert str(moved["m"]["w"].spec) == "f64[7,6] dp:R tp:S1"
    assert torch.equal(moved["m"]["w"].full_tensor(), weight.double())
    assert moved["n"].full_tensor().tolist() == [0, 1, 2]
    assert moved["step"] == (4, "x")
    with pytest.raises(sw.LayoutError, match="has no layouts"):
        sw.remesh(tmp_path / "c", new)


def test_what_cannot_be_is_refused() -> None:
    old, new = mesh_of([0, 1], "dp"), mesh_of([0, 1, 2], "dp")
    state = build(old)
    with pytest.raises(sw.LayoutError, match=r"'model' is a .*Net, which must be built"):
        sw.remesh(state, new)
    with pytest.raises(sw.LayoutError, match="no DTensor"):
        sw.remesh({"a": torch.ones(2)}, new)
    train(state, old, 1)
    with pytest.raises(sw.LayoutError, match=r"`into` is another state: it lacks step"):
        sw.remesh(state, new, into={key: value for key, value in build(new).items() if key != "step"})
    with pytest.raises(sw.LayoutError, match="is not on the ranks of"):
        sw.remesh(state, new, into=build(mesh_of([3, 4], "dp")))
    w = sw.zeros(4, 4, device_mesh=old, placements=[sw.Shard(0)])
    with pytest.raises(sw.LayoutError, match=r"'w' has the shape \(4, 4\), and in `into` it is \(4, 5\)"):
        sw.remesh({"w": w}, new, into={"w": sw.zeros(4, 5, device_mesh=new, placements=[sw.Shard(0)])})


def test_batches_depend_on_the_step_alone() -> None:
    epochs = [torch.cat([sw.batch_indices(step, 4, 12, seed=5) for step in range(n, n + 3)]).tolist() for n in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    before = torch.get_rng_state()
    assert torch.equal(sw.batch_indices(7, 5, 12, seed=5), sw.batch_indices(7, 5, 12, seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    across = torch.cat([sw.batch_indices(step, 5, 12) for step in range(12)])
    assert [sorted(part.tolist()) for part in across.split(12)] == [list(range(12))] * 5
    assert sw.batch_indices(0, 30, 12, shuffle=False).tolist() == [i % 12 for i in range(30)]
    assert sw.batch_indices(0, 12, 12, seed=1).tolist() != sw.batch_indices(0, 12, 12, seed=2).tolist()
    with pytest.raises(sw.LayoutError, match="step -1"):
        sw.batch_indices(-1, 2, 3)
