"""Data parallel and fully sharded modules on real processes: the numbers of one device, and collectives in flight."""

import copy
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.gloo.processes import ProcessPool
from tests.transformer import (
    Transformer,
    assert_same,
    assert_trains_as_one_device,
    batch,
    loss_of,
    shard_all,
    tensor_parallel,
)


def own_rows(tensor: torch.Tensor, mesh: sw.DeviceMesh) -> torch.Tensor:
    return tensor.chunk(mesh.size())[mesh.mesh.flatten().tolist().index(mesh.get_rank())]


def trains_like_one_device() -> str:
    line = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    hybrid = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "dp"))
    world = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = [sw.Shard(0), sw.Replicate()]
    for mesh in (line, hybrid):  # each rank its own batch
        assert_trains_as_one_device(
            lambda model, mesh=mesh: shard_all(model, mesh),
            lambda t, mesh=mesh: own_rows(t, mesh),
            dropout=0.0,
            steps=10 if mesh is line else 2,
        )
    assert_trains_as_one_device(  # a global batch, with dropout
        lambda model: shard_all(model, line),
        lambda t: sw.distribute_tensor(t, line, [sw.Shard(0)]),
        dropout=0.2,
        steps=2,
    )
    assert_trains_as_one_device(
        lambda model: shard_all(model, world["dp"]),
        lambda t: sw.distribute_tensor(t, world, rows),
        dropout=0.2,
        steps=2,
        prepare=lambda model: tensor_parallel(model, world["tp"]),
    )
    assert_trains_as_one_device(
        lambda model: sw.replicate(model, line, bucket_cap_mb=0.002), lambda t: own_rows(t, line), dropout=0.0, steps=2
    )
    return "done"


def test_training(gloo4: ProcessPool) -> None:
    assert gloo4.run(trains_like_one_device, timeout=120) == ["done"] * 4


def is_in_flight(state: Any) -> bool:
    gathered = state.groups[0].current
    return gathered is not None and gathered.is_in_flight


def runs_ahead() -> list[bool]:
    """In the second step the next block is in flight while one computes, and gradients while backward goes on."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model: Any = shard_all(Transformer(3), mesh)
    tokens, targets = (own_rows(t, mesh) for t in batch(0))
    seen: list[bool] = []
    for _ in range(2):
        seen.clear()
        handles = [
            model.blocks[at].register_forward_pre_hook(
                lambda *_, at=at: seen.append(is_in_flight(model.blocks[at + 1]._state))
            )
            for at in range(2)
        ]
        handles.append(
            model.blocks[0].register_full_backward_pre_hook(
                lambda *_: seen.append(sum(len(state.reductions) for state in model._states()) == 1)
            )
        )
        loss_of(model(tokens), targets).backward()
        for handle in handles:
            handle.remove()
    return seen


def starts_from_the_first_rank() -> bool:
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(mesh.get_rank())
    layer = sw.replicate(nn.Linear(3, 3), mesh)
    torch.manual_seed(0)
    return torch.equal(layer.weight.to_local(), nn.Linear(3, 3).weight)


def is_made_shard_by_shard() -> bool:
    mesh = sw.init_device_mesh("cpu", (4,))
    with torch.device("meta"):
        model = Transformer()
    shard_all(model, mesh)
    torch.manual_seed(3)
    model.to_empty(device="cpu")
    _reset(model)
    reference = copy.deepcopy(Transformer())
    torch.manual_seed(3)
    _reset(reference)
    assert_same(model, reference, lambda parameter: parameter.detach(), 0)
    return all(p.to_local().shape[0] == -(-p.shape[0] // 4) for p in model.parameters() if p.shape[0] % 4 == 0)


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]


def test_what_runs_ahead_and_how_it_starts(gloo4: ProcessPool) -> None:
    assert gloo4.run(runs_ahead) == [[True] * 3] * 4
    assert gloo4.run(starts_from_the_first_rank) == [True] * 4
    assert gloo4.run(is_made_shard_by_shard) == [True] * 4
