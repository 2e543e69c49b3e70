"""Muon on real processes: one device's values."""

from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.virtual.test_optim import SHAPES


def steps_of_muon() -> list[torch.Tensor]:
    """The parameters after some steps, in two layouts."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    found: list[torch.Tensor] = []
    for placements in ([sw.Shard(0), sw.Shard(1)], [sw.Replicate(), sw.Shard(0)]):
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(size, generator=generator) for size in SHAPES]
        laid: list[Any] = [nn.Parameter(sw.distribute_tensor(x, mesh, placements)) for x in given]
        optimizer = sw.optim.Muon(laid, lr=0.1)
        for _ in range(20):
            for parameter in laid:
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = sw.distribute_tensor(grad, mesh, placements)
            optimizer.step()
        found += [parameter.full_tensor().detach() for parameter in laid]
    return found


def test_muon_is_that_of_one_device(gloo4):
    generator = torch.Generator().manual_seed(0)
    plain = [nn.Parameter(torch.randn(size, generator=generator)) for size in SHAPES]
    optimizer = torch.optim.Muon(plain, lr=0.1)
    for _ in range(20):
        for parameter in plain:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for found in gloo4.run(steps_of_muon, timeout=120):
        for mine, wanted in zip(found, plain * 2, strict=True):
            assert torch.equal(mine, wanted.detach())
