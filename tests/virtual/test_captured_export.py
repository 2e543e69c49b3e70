"""Captured inference programs as `torch.export` programs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.virtual.exported_programs import compare, exported


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11, in its own loading
def test_an_exported_program_on_virtual_ranks() -> None:
    found = compare(sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    assert "model.up.weight.rank1" in found
    assert not any("c10d" in name for name in found)  # virtual ranks exchange by copies


def mesh_and_weight() -> tuple[Any, Any]:
    mesh = sw.init_device_mesh("cpu", (2,))
    return mesh, torch.nn.Parameter(sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0)]))


def backward(x: Any, weight: Any) -> Any:
    loss = (x @ weight).sum()
    loss.backward()
    return loss.detach()


REFUSED = {
    "sets gradients": backward,
    "draws random numbers": lambda x, weight: torch.nn.functional.dropout(x, 0.5),
    "writes to a tensor that it is given": lambda x, weight: x.add_(1).detach(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_programs_that_change_something_are_refused(what: str) -> None:
    mesh, weight = mesh_and_weight()
    step = captured(lambda x: REFUSED[what](x, weight))
    x = sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0)])
    for _ in range(4):
        weight.grad = None
        step(x)
    with pytest.raises(UnsupportedError, match=what):
        step.export()


def test_there_must_be_a_program() -> None:
    with pytest.raises(UnsupportedError, match="no program yet"):
        captured(lambda x: x).export()


def test_an_exported_program_of_one_rank_of_a_large_world() -> None:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        loaded, _ = exported(sw.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)))
        nodes = [str(node.target) for node in loaded.graph.nodes if node.op == "call_function"]
        assert any("_c10d_functional.all_reduce" in name for name in nodes)
        found = loaded.module()(torch.rand(4, 8), torch.rand(1, 3))
        assert found["gathered"].shape == (4, 12)  # the values of other ranks do not exist
    finally:
        dist.destroy_process_group()
