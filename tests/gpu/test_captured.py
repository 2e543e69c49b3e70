"""Captured steps on a GPU: kernels that add in no fixed order, data and tensor parallel modules on virtual ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 64)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def losses_of(way: str, captured: bool) -> list[float]:
    """The losses of five steps in bfloat16, with flash attention, whose backward has no fixed order."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = nn.Sequential(nn.Embedding(512, 128), Block(), Block(), nn.Linear(128, 512)).to(torch.bfloat16)
    mesh = sw.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    if way != "fsdp":
        columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
        for block in model[1:3]:
            parallelize_module(block, mesh["tp"], {"[qkv]": columns, "out": rows})
    if way == "tp":
        sw.distribute_module(model, mesh)
    else:
        for module in (*model, model):
            sw.fully_shard(module, mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Any, targets: Any) -> Any:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = sw.captured(step) if captured else step
    found = []
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        text = torch.randint(512, (4, 257), generator=generator).cuda()
        given = [
            sw.distribute_tensor(part, mesh, [sw.Shard(0), sw.Replicate()]) for part in (text[:, :-1], text[:, 1:])
        ]
        found.append(float(run(*given).full_tensor()))
    if captured:
        assert run.programs  # pyright: ignore[reportFunctionMemberAccess]
    return found


def test_steps_with_flash_attention() -> None:
    for way in ("fsdp", "tp", "both"):
        eager, ours = losses_of(way, captured=False), losses_of(way, captured=True)
        assert max(abs(a - b) for a, b in zip(eager, ours, strict=True)) < 2e-2, (way, eager, ours)
