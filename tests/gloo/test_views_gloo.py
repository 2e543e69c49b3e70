"""Views of one world on processes: dense layers on one of them, experts on another."""

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from tests.view_programs import train


def between_views() -> None:
    world = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense, sparse = world.view(dp=2, tp=2), world.view(ep=4)
    x = torch.arange(32.0).reshape(8, 4)
    laid = sw.distribute_tensor(x, dense, [Shard(0), Shard(0)]).requires_grad_()
    with sw.debug.CommDebugMode() as comm:
        moved = laid.redistribute(sparse, [Shard(0)])
    assert comm.get_total_counts() == 0
    (moved.redistribute(dense, [Replicate(), Shard(1)]) * 2).sum().backward()
    assert laid.grad is not None
    assert torch.equal(laid.grad.full_tensor(), torch.full_like(x, 2.0))
    assert torch.equal(moved.full_tensor(), x)


def training(sharded: bool) -> None:
    train(4, sharded)


def test_what_every_rank_has_already_is_not_sent(gloo4):
    gloo4.run(between_views)


@pytest.mark.parametrize("sharded", [False, True], ids=["plan", "fully_shard"])
def test_dense_layers_on_one_view_and_experts_on_another(gloo4, sharded):
    gloo4.run(training, sharded)
