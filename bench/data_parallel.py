"""Fully sharded and data parallel steps: forward and backward of 4 blocks beside torch's and plain modules.

On torch's fake process group of 8 ranks, so that what is timed is the work of one process and no communication. Every
rank has its own plain batch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from bench.counting import fake_world
from bench.timing import compare

RANKS, WIDTH, HEADS, BLOCKS = 8, 64, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def made(wrap: Callable[[nn.Module], Any]) -> Any:
    torch.manual_seed(0)
    return wrap(nn.Sequential(*(Block() for _ in range(BLOCKS))))


def sharded(fully_shard: Any, mesh: Any) -> Callable[[nn.Module], Any]:
    def wrap(model: nn.Module) -> Any:
        for block in model.children():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


def step(model: Any, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return run


def main() -> None:
    with fake_world(RANKS):
        ours, peers = sw.init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (RANKS,))
        x = torch.randn(2, 16, WIDTH)
        models = {
            "shardwise fully_shard": made(sharded(sw.fully_shard, ours)),
            "shardwise replicate": made(lambda model: sw.replicate(model, ours)),
            "plain modules": made(lambda model: model),
            "torch fully_shard": made(sharded(theirs.fully_shard, peers)),
        }
        sides = {name: step(model, x) for name, model in models.items()}
        compare(sides, number=5, repeat=20, title=f"forward and backward, {BLOCKS} blocks of width {WIDTH}")


if __name__ == "__main__":
    main()
