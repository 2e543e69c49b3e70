"""Gathers that a captured program shares, on one rank of a fake world; values are compared in tests/gloo."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.capture import captured
from shardwise.capture.captured_report import CapturedReport
from shardwise.errors import UnsupportedError
from tests.transformer import Transformer, loss_of, shard_all

BLOCKS = 4


@pytest.fixture
def mesh() -> Iterator[sw.DeviceMesh]:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        yield sw.init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def report(mesh: sw.DeviceMesh, bound: int, steps: int = 1) -> CapturedReport:
    torch.manual_seed(0)
    model = Transformer(BLOCKS)
    shard_all(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(tokens: Any) -> None:
        for _ in range(steps):
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    step = captured(train, share_gathers=bound, verify=False)  # there are no values of other ranks
    tokens = torch.arange(24).reshape(4, 6) % 7
    for _ in range(3):
        step(tokens)
    return step.explain()


def test_parameters_are_gathered_once_where_memory_allows(mesh: sw.DeviceMesh) -> None:
    without, some, all_ = (report(mesh, bound) for bound in (0, 6000, 10**9))
    counts = [found.by_collective["all_gather"].collectives for found in (without, some, all_)]
    assert counts[0] == 2 * BLOCKS + 1
    assert counts[0] > counts[1] > counts[2] == BLOCKS + 1
    assert without.total.received > some.total.received > all_.total.received
    assert some.memory.peak <= without.memory.peak + 6000
    for found in (some, all_):
        assert found.by_collective["reduce_scatter"] == without.by_collective["reduce_scatter"]


def test_parameters_that_change_are_gathered_again(mesh: sw.DeviceMesh) -> None:
    once, twice = report(mesh, 10**9), report(mesh, 10**9, steps=2)
    assert twice.by_collective["all_gather"].collectives == 2 * once.by_collective["all_gather"].collectives


def test_ranks_with_other_collectives_raise(mesh: sw.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.fabric.c10d import C10dFabric

    def other(self: Any, mesh: Any, facts: Any, tensor: Any) -> list[Any]:
        return [facts, dict.fromkeys(facts, "something else")]

    monkeypatch.setattr(C10dFabric, "agree", other)
    with pytest.raises(UnsupportedError, match="would not issue the same collectives"):
        report(mesh, 10**9)
