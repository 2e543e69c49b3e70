"""A model and a step that are captured, saved and loaded, on virtual ranks and on processes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw


class Layers(nn.Module):
    """A feed-forward block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(self.norm(x)).relu())


def made(mesh: sw.DeviceMesh, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model under tensor parallelism, its optimizer, and a training step."""
    torch.manual_seed(seed)
    plan = {"up": sw.parallel.ColwiseParallel(), "down": sw.parallel.RowwiseParallel()}
    model = sw.parallel.parallelize_module(Layers(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def train(x: Any, scale: float) -> Any:
        loss = (model(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "scale": scale}

    return model, optimizer, train


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, sw.DTensor) else p.detach() for p in model.parameters()]


def train_saved(folder: Path, mesh: sw.DeviceMesh) -> None:
    """Save a step, load it for another model with other values, and compare with that model's own steps."""
    model, optimizer, train = made(mesh)
    step = sw.captured(train)
    x = torch.randn(4, 8)
    for _ in range(4):
        step(x, 2.0)
    step.save(folder, model=model, optimizer=optimizer)
    other, other_optimizer, _ = made(mesh, seed=1)
    peer, peer_optimizer, peer_train = made(mesh, seed=1)
    for each, at in ((other, other_optimizer), (peer, peer_optimizer)):  # states are made by a first step
        each(x).sum().backward()
        at.step()
        at.zero_grad()
    loaded = sw.load_captured(folder, model=other, optimizer=other_optimizer)
    for call in range(3):
        x = torch.randn(4, 8)
        other_optimizer.param_groups[0]["lr"] = peer_optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)
        found, wanted = loaded(x, 2.0), peer_train(x, 2.0)
        assert torch.equal(found["loss"].detach(), wanted["loss"].detach())
        assert found["scale"] == 2.0
        assert all(map(torch.equal, whole(other), whole(peer)))
        assert all(p.grad is None for p in other.parameters())
    assert loaded.source().count("\n") == step.source().count("\n")
    assert loaded.explain().memory.curve == step.explain().memory.curve
    assert loaded.explain().by_line == step.explain().by_line
