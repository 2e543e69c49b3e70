"""Routers of real models on several meshes: ten steps of training as by a loop over experts on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.expert_models import CASES, Case, check, on_mesh, on_one_device

MESHES = (((4,), ("ep",)), ((3,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2, 2), ("dp", "ep", "tp")))


@functools.cache
def wanted(case: Case) -> list[torch.Tensor]:
    return on_one_device(case)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh[0])))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.router}-{case.experts}")
def test_ten_steps_are_those_of_one_device(case: Case, mesh: Any) -> None:
    check(on_mesh(case, *mesh), wanted(case))


class Counting(nn.Module):
    """Two buffers: one is written to in forward, one is replaced."""

    seen: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 2, 2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.seen.add_(x.sum(0))
            self.last = x.sum(0)
        return x + self.seen


def test_buffers_keep_what_forward_writes_on_a_larger_mesh() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = parallelize_module(Counting(), mesh["ep"], ExpertParallel())
    x = torch.arange(16.0).view(8, 2)
    for turn in (1, 2):
        y: Any = model(sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(0)]))
        assert torch.equal(y.full_tensor(), x + turn * x.sum(0))
    found: tuple[Any, ...] = (model.seen, model.last)
    for buffer, wanted in zip(found, (2 * x.sum(0), x.sum(0)), strict=True):
        assert buffer.device_mesh == mesh["ep"]
        assert torch.equal(buffer.full_tensor(), wanted)
