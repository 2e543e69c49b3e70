"""Mixtures of experts in bfloat16: a router whose logits are nearly equal may choose other experts after other sums.

Where the choice is the one of plain torch, gradients agree to the rounding of bfloat16.
"""

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.models.architectures import ARCHITECTURES, missing


class Routing:
    """`torch.topk` that notes what it chooses, and chooses what it is told."""

    def __init__(self, told: list[torch.Tensor] | None = None) -> None:
        self.chosen: list[torch.Tensor] = []
        self.told = told
        self.topk = torch.topk

    def __call__(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.topk(values, *args, **kwargs)
        chosen: Any = found[1]
        self.chosen.append(chosen.full_tensor() if isinstance(chosen, sw.DTensor) else chosen)
        if self.told is None:
            return found
        indices = self.told[len(self.chosen) - 1]
        return torch.return_types.topk((values.gather(-1, indices), indices))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_gradients_with_the_routing_of_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = ARCHITECTURES[name]
    if reason := missing(architecture.library):
        pytest.skip(reason)
    plain, batch = architecture.model().bfloat16(), architecture.batch()
    routing = Routing()
    monkeypatch.setattr(torch, "topk", routing)
    architecture.loss(plain, batch).backward()
    assert routing.chosen

    mesh = sw.init_device_mesh("cpu", (4,))
    ours = sw.distribute_module(sw.hf.parallelize(architecture.model().bfloat16(), mesh, "tp"), mesh)
    told = Routing(routing.chosen)
    told.topk = routing.topk
    monkeypatch.setattr(torch, "topk", told)
    architecture.loss(ours, {k: sw.distribute_tensor(v, mesh, [sw.Replicate()]) for k, v in batch.items()}).backward()

    pairs = list(zip(routing.chosen, told.chosen, strict=True))
    flips = sum(int((a.sort(-1)[0] != b.sort(-1)[0]).any(-1).sum()) for a, b in pairs)
    assert flips <= 0.05 * sum(a.shape[:-1].numel() for a, _ in pairs)
    for (path, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            grad: Any = mine.grad
            difference = (grad.full_tensor().float() - theirs.grad.float()).norm() / theirs.grad.float().norm()
            assert difference < 0.05, path
