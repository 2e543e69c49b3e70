"""A trainer and a generator with weights of one model, for tests on virtual ranks and on processes."""

from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def synchronised_models(trainer_ranks: Any, generator_ranks: Any) -> tuple[Any, Any, sw.DeviceMesh, sw.DeviceMesh]:
    """A model that trains fully sharded and tensor parallel, and one that generates in bfloat16, tensor parallel."""
    trainer = sw.DeviceMesh("cpu", trainer_ranks, mesh_dim_names=("dp", "tp"))
    generator = sw.DeviceMesh("cpu", generator_ranks, mesh_dim_names=("tp",))
    made = []
    for mesh, dtype in ((trainer, torch.float32), (generator, torch.bfloat16)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 7)).to(dtype)
        parallelize_module(
            model, mesh["tp"] if mesh.ndim > 1 else mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        if mesh.ndim > 1:
            sw.fully_shard(model[0], mesh["dp"])
            sw.fully_shard(model, mesh["dp"])
        made.append(model)
    return *made, trainer, generator


def trained_once(model: Any, optimizer: Any, mesh: sw.DeviceMesh, step: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    batch = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Replicate()], src_data_rank=None)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
