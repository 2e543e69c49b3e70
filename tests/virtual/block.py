"""A block of a transformer's MLP, column- and row-parallel, whose communication can be counted by hand."""

from pathlib import Path

import torch
from torch import nn

import shardwise as sw

ROWS, WIDTH, HIDDEN = 8, 16, 32


class Mlp(nn.Module):
    """Two linear layers; the first is split by columns, the second by rows, so that its result is a sum."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, placed(mesh, sw.Shard(dim))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden)


class Block(nn.Module):
    """Sequence-parallel around the layers: gathered before them, and summed where an operator needs the sum."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.mlp = Mlp(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.redistribute(placements=placed(self.mesh, sw.Replicate()))  # LINE gather
        y = self.mlp(x)
        return torch.tanh(y)  # LINE tanh


def placed(mesh: sw.DeviceMesh, last: sw.Placement) -> list[sw.Placement]:
    """Replicated on all axes but the last."""
    return [*[sw.Replicate()] * (mesh.ndim - 1), last]


def batch(mesh: sw.DeviceMesh) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH)
    return sw.distribute_tensor(x, mesh, placed(mesh, sw.Shard(0))).requires_grad_()


def train(block: Block, x: torch.Tensor) -> None:
    loss = block(x).sum()
    loss.backward()  # LINE backward


def line_of(mark: str) -> int:
    """The line of this file that ends with a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, start=1) if line.endswith(f"# LINE {mark}")]
    return found
