"""States on one mesh and on another, for tests on virtual ranks and on processes."""

from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Two layers, a normalization whose buffers are plain, and uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 5, bias=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


def build(mesh: sw.DeviceMesh) -> dict[str, Any]:
    """A model, tensor parallel and fully sharded as far as the mesh has the axes, with all that trains it."""
    torch.manual_seed(3)
    model = Net()
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "dp" in names:
        sw.fully_shard(model, mesh["dp"] if len(names) > 1 else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "notes": {"seeds": [1, (2, 3)]}}


def train(state: dict[str, Any], mesh: sw.DeviceMesh, steps: int) -> list[float]:
    losses = []
    names = mesh.mesh_dim_names or ()
    for step in range(state["step"], state["step"] + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 7, generator=generator)
        placements = [sw.Shard(0) if name == "dp" else sw.Replicate() for name in names]
        given = sw.distribute_tensor(x, mesh, placements, src_data_rank=None)
        loss = state["model"](given).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["model"].seen.add_(1)
        losses.append(loss.detach())
    state["step"] += steps
    return [_number(loss) for loss in losses]


def _number(loss: Any) -> float:
    value = loss.full_tensor() if isinstance(loss, sw.DTensor) else loss
    return float(value.tensors[0] if isinstance(value, sw.RankTensor) else value)


def mesh_of(ranks: Any, *names: str) -> sw.DeviceMesh:
    return sw.DeviceMesh("cpu", ranks, mesh_dim_names=names)


# from, to: fewer, more, other ranks; other axes
MOVES = [
    (([0, 1, 2, 3], "dp"), ([0, 1, 2], "dp")),
    (([0, 1], "dp"), ([0, 1, 2, 3], "dp")),
    (([0, 1], "dp"), ([3, 2], "dp")),
    (([[0, 1], [2, 3]], "dp", "tp"), ([0, 1, 2], "dp")),
    (([0, 1, 2, 3], "dp"), ([[3, 1], [0, 2]], "dp", "tp")),
    (([[0, 1], [2, 3]], "dp", "tp"), ([1, 2], "tp")),
]
