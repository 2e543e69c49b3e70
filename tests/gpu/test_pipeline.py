"""Pipelines with virtual ranks on one GPU: every schedule against one device, and backward in two parts."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.pipelines.split_backward import input_gradients

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev")


class Layers(nn.Module):
    """Shared weights, broadcasting, a norm, attention, and a part that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.LayerNorm(32)
        self.scale = nn.Parameter(torch.randn(32))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x)) * self.scale
        h = h + self.attention(h, h, h, need_weights=False)[0]
        again: torch.Tensor = checkpoint(lambda t: self.b(torch.tanh(self.a(t))), h, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return h + nn.functional.linear(again, self.b.weight)


def test_backward_in_two_parts() -> None:
    torch.manual_seed(0)
    one = Layers().cuda()
    two = copy.deepcopy(one)
    for _ in range(3):
        x = torch.randn(4, 16, 32, device="cuda", requires_grad=True)
        y = x.detach().clone().requires_grad_()
        gradient = torch.randn(4, 16, 32, device="cuda")
        one(x).backward(gradient)
        (found,), rest = input_gradients([two(y)], [gradient], [y])
        rest.run()
        torch.testing.assert_close(found, x.grad, rtol=1e-5, atol=1e-5)
    for (name, have), want in zip(two.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(
            have.grad, want.grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_every_schedule_on_two_ranks_of_two() -> None:
    for schedule in SCHEDULES:
        mesh = sw.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
        each = 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)).cuda() for _ in range(2 * each)]
        plain = copy.deepcopy(stages)
        pipe = sw.pipeline(
            stages, mesh["pp"], schedule=schedule, stages_per_rank=each, microbatches=4,
            parallelize=lambda stage, mesh, number: sw.fully_shard(stage, mesh),
        )  # fmt: skip
        x, y = torch.randn(16, 32, device="cuda"), torch.randn(16, 32, device="cuda")
        given, wanted = (
            sw.distribute_tensor(value, stage, [sw.Shard(0)])
            for value, stage in ((x, pipe.meshes[0]), (y, pipe.meshes[-1]))
        )
        loss = pipe.step(given, wanted, nn.functional.mse_loss)
        h = x
        for stage in plain:
            h = stage(h)
        expected = nn.functional.mse_loss(h, y)
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected.detach(), rtol=1e-5, atol=1e-5)
        for number, stage in pipe.stages.items():
            for have, want in zip(stage.parameters(), plain[number].parameters(), strict=True):
                assert isinstance(have.grad, sw.DTensor), schedule
                torch.testing.assert_close(have.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-5)
