"""A feed-forward network, tensor parallel: the first layer by columns, the second by rows, one sum between devices.

python examples/mlp.py                                   # four ranks inside this process
torchrun --nproc-per-node 4 examples/mlp.py              # real processes, the same file
"""

import copy
import os

import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None


def train(model: nn.Module, steps: int) -> list[float]:
    """The losses of learning to turn each row around."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16)
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", 4)),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    spread = parallelize_module(copy.deepcopy(alone), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    say(f"on {mesh}")
    for name, parameter in spread.named_parameters():
        say(f"{name:9} {parameter.spec}")

    with sw.explain() as report:
        together = train(spread, 20)
    say(f"{report.total.collectives} collectives in 20 steps: {', '.join(report.by_collective)}")
    say("step   one device   spread")
    for step, losses in enumerate(zip(train(alone, 20), together, strict=True)):
        if step % 5 == 4:
            say(f"{step + 1:4}   {losses[0]:<10.6f}   {losses[1]:.6f}")


if __name__ == "__main__":
    main()
