"""Fully sharded steps with AdamW at 8 to 4,096 ranks, beside torch's: processor time and calls of one process.

On torch's fake process group, so nothing is communicated. From 512 ranks on, some parameters have fewer rows than there
are ranks. Each number of ranks runs both libraries interleaved and prints the ratio.

What is asked for is the host time of the library. So process groups return at once from collectives, on both sides:
the fake group would make one copy for each rank in an all-gather, which from 512 ranks on is most of the time of both.
The ratio with these copies is printed beside it, and the collectives and bytes of a step on both sides.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from bench.counting import Moved, calls, fake_world, unperformed_collectives
from bench.figures import figure, point
from bench.timing import compare

RANKS = (8, 64, 512, 2048, 4096)
WIDTH, BLOCKS, ROWS, LIMIT = 512, 4, 4, 0.8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def training_step(fully_shard: Any, mesh: Any, width: int = WIDTH, **options: Any) -> Callable[[], None]:
    """One step of a model of which each block and the root are sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    for block in model.children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, width)

    def run() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def moved(step: Callable[[], None]) -> Moved:
    """Collectives that a step asks for, and bytes that a rank receives in them."""
    with unperformed_collectives() as asked:
        step()
    return asked.moved


def main() -> None:
    torch.set_num_threads(1)  # threads that wait for each other count as processor time
    for ranks in RANKS:
        with fake_world(ranks):
            sides = {
                "shardwise": training_step(sw.fully_shard, sw.init_device_mesh("cpu", (ranks,))),
                "torch": training_step(theirs.fully_shard, init_device_mesh("cpu", (ranks,))),
            }
            for step in sides.values():
                step()
            title = f"processor time of forward, backward and AdamW on {ranks} ranks, {BLOCKS} blocks of width {WIDTH}"
            with unperformed_collectives():
                times = compare(sides, number=2, repeat=25, title=title, clock=time.process_time)
                counts = {name: calls(step, of_c=True) for name, step in sides.items()}
            compare(sides, number=2, repeat=5, title="  the same with the fake group's copies", clock=time.process_time)
            communicated = {name: moved(step) for name, step in sides.items()}
            assert communicated["shardwise"] == communicated["torch"], f"they do not do the same: {communicated}"
            for name in sides:
                print(
                    f"  a step of {name}: {counts[name]} calls, {communicated[name].collectives} collectives, "
                    f"{communicated[name].received / 1e6:.1f} MB received"
                )
            for name, peer in (("Shardwise", "shardwise"), ("FSDP2", "torch")):
                point("step_time", name, ranks, times[peer].median / 1e3)
            ratio = times["shardwise"].median / times["torch"].median
            print("  " + figure(f"fully_shard step of FSDP2's, {ranks} ranks", ratio, LIMIT))


if __name__ == "__main__":
    main()
