"""A model with dense layers on one view of a world and experts on another, against one device."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

WIDTH, EXPERTS, TOKENS = 8, 4, 16


class Experts(nn.Module):
    """Every expert sees every token, weighted by its gate. `view`: where the experts lie; None on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH) / 4)

    def forward(self, x: Any, gates: Any) -> Any:
        hidden = F.gelu(x @ self.weight + self.bias)
        return (hidden * gates.t().unsqueeze(-1)).sum(0)


class Model(nn.Module):
    """A dense layer, experts and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.dense: sw.DeviceMesh | None = None
        self.sparse: sw.DeviceMesh | None = None

    def forward(self, x: Any) -> Any:
        hidden = x + self.second(F.gelu(self.first(x)))
        gates = self.gate(hidden).softmax(-1)
        if self.dense is None or self.sparse is None:
            return hidden + self.experts(hidden, gates)
        given = [each.redistribute(self.sparse, [Shard(0), Replicate()]) for each in (hidden, gates)]
        return hidden + self.experts(*given).redistribute(self.dense, hidden.placements)


def laid_out(model: Any, world: sw.DeviceMesh, sharded: bool) -> None:
    """Dense layers over dp x tp, experts over efsdp x ep; with `sharded`, FSDP of both on their own views."""
    dense, sparse = world.view(dp=-1, tp=2), world.view(efsdp=2, ep=-1)
    model.dense, model.sparse = dense, sparse
    parallelize_module(model, dense["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    experts = model.experts
    for name, parameter in list(experts.named_parameters()):
        mesh, placements = (sparse["ep"], [Shard(0)]) if sharded else (sparse, [Replicate(), Shard(0)])
        placed = sw.distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(placed))
    if sharded:
        fully_shard(experts, mesh=sparse["efsdp"])
        fully_shard(model, mesh=dense["dp"])
    else:
        for name, parameter in list(model.gate.named_parameters()):
            placed = sw.distribute_tensor(parameter.detach(), dense, [Replicate(), Replicate()], src_data_rank=None)
            model.gate.register_parameter(name, nn.Parameter(placed))


def train(ranks: int, sharded: bool, steps: int = 3) -> None:
    """Losses, norms and parameters after some steps are those of one device."""
    world = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("world",))
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    laid_out(model, world, sharded)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (plain, model)]
    for _ in range(steps):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
        results = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            given: Any = x
            if each.dense is not None:
                given = sw.distribute_tensor(x, each.dense, [Shard(0), Replicate()], src_data_rank=None)
            optimizer.zero_grad()
            loss = each(given).square().mean()
            loss.backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            results.append([whole(loss.detach()), whole(norm)])
        for want, have in zip(*results, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)
    for (name, want), have in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            whole(have), want.detach(), rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def whole(tensor: Any) -> torch.Tensor:
    """The values, on one device."""
    return tensor.full_tensor().detach() if isinstance(tensor, sw.DTensor) else tensor.detach()
