"""`sw.optim.Muon` with virtual ranks on one GPU, against `torch.optim.Muon`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

DEVICE = "cuda"
SHAPES = ((192, 64), (64, 64), (256, 64), (64, 256)) * 3
LAYOUTS: tuple[tuple[tuple[int, ...], list[Any]], ...] = (
    ((8,), [Shard(0)]), ((2, 4), [Shard(0), Shard(1)]), ((3,), [Shard(1)]), ((2, 2), [Replicate(), Shard(0)]),
)  # fmt: skip


def test_twenty_steps_beside_torch() -> None:
    """Products of a batch may round otherwise than those of one matrix: parameters differ by the steps' rounding."""
    for shape, placements in LAYOUTS:
        mesh = sw.init_device_mesh(DEVICE, shape)
        torch.manual_seed(0)
        plain = [nn.Parameter(torch.randn(size, device=DEVICE)) for size in SHAPES]
        laid: list[Any] = [nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placements)) for p in plain]
        begin = [p.detach().clone() for p in plain]
        theirs, ours = torch.optim.Muon(plain, lr=0.05), sw.optim.Muon(laid, lr=0.05)
        for _ in range(20):
            for parameter, mine in zip(plain, laid, strict=True):
                parameter.grad = torch.randn_like(parameter)
                mine.grad = sw.distribute_tensor(parameter.grad, mesh, placements)
            theirs.step()
            ours.step()
        for start, parameter, mine in zip(begin, plain, laid, strict=True):
            moved = (parameter.detach() - start).norm()
            off = (mine.full_tensor() - parameter.detach()).norm()
            assert off <= 1e-2 * moved, f"{shape} {placements} {tuple(start.shape)}: {float(off / moved)}"
