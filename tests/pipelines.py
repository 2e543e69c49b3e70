"""Models and training in pipelines, against one device, for tests on virtual ranks and on processes."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, WIDTH, LENGTH = 24, 16, 6
STEPS = 10  # of training; on meshes of three axes fewer are enough in a suite


class Block(nn.Module):
    """A normalization and two linear layers around a function, added to their input."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def language_model(blocks: int, tied: bool, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH))
    for _ in range(blocks):
        model.append(Block(checkpointed))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    if tied:
        head.weight = model[0].weight  # pyright: ignore[reportAttributeAccessIssue]
    return model.append(head)


def loss_of(logits: Any, targets: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def one_device(model: nn.Sequential, rows: int, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of training on one device, and the parameters afterwards."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step, rows)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}


def lay_out(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
    """Tensor parallel blocks, fully sharded over the data axis."""
    for child in stage.children():
        if isinstance(child, Block):
            parallelize_module(child, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sw.fully_shard(stage, mesh["dp"])


def train(pipe: sw.Pipeline, rows: int, steps: int = STEPS) -> list[float]:
    """The losses of training a pipeline; on processes only the last stage has them."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = (placed(value, mesh) for value, mesh in zip(batch(step, rows), ends(pipe), strict=True))
        optimizer.zero_grad()
        loss = pipe.step(inputs, targets, loss_of)
        optimizer.step()
        if loss is not None:
            losses.append(float(loss.full_tensor() if isinstance(loss, sw.DTensor) else loss))
    return losses


def ends(pipe: sw.Pipeline) -> tuple[sw.DeviceMesh, sw.DeviceMesh]:
    return pipe.meshes[0], pipe.meshes[-1]


def placed(value: torch.Tensor, mesh: sw.DeviceMesh) -> Any:
    """A batch over the data axis of a stage, if it has one."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        return value
    placements = [sw.Shard(0) if name == "dp" else sw.Replicate() for name in mesh.mesh_dim_names or ()]
    return sw.distribute_tensor(value, mesh, placements, src_data_rank=None)


def whole(tensor: Any) -> torch.Tensor:
    """The global value of a parameter on any mesh."""
    if not isinstance(tensor, sw.DTensor):
        return tensor.detach()
    local = tensor.redistribute(placements=[sw.Replicate()] * tensor.device_mesh.ndim).to_local().detach()
    return local.tensors[0] if isinstance(local, sw.RankTensor) else local
