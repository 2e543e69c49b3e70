"""Layers of experts as models write them, on top of `shardwise.moe`, and the same layers by a loop over experts.

Routers of Mixtral (softmax of the chosen), Qwen3-MoE (the chosen of a softmax, divided by their sum), Llama 4 (one
expert, whose input is scaled by a sigmoid) and DeepSeek-V3 (sigmoids, groups of experts, a bias that keeps experts
equally busy and is no parameter, shared experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.parallel import ExpertParallel, parallelize_module

WIDTH, HIDDEN, TOKENS, STEPS = 8, 16, 48, 10


class Case(NamedTuple):
    """A router, the number of experts and of choices, and whether most tokens want the same few experts."""

    router: str
    experts: int
    choices: int
    skewed: bool = False


CASES = (
    Case("mixtral", 8, 2),
    Case("mixtral", 6, 2, skewed=True),
    Case("qwen3", 64, 8),
    Case("qwen3", 13, 8, skewed=True),
    Case("llama4", 4, 1),
    Case("llama4", 10, 1, skewed=True),
    Case("deepseek", 16, 4),
    Case("deepseek", 64, 8, skewed=True),
)


def mixtral(scores: Any, choices: int, bias: Any) -> tuple[Any, Any]:
    """The largest scores, and their softmax."""
    chosen, ids = scores.topk(choices)
    return chosen.softmax(-1), ids


def qwen3(scores: Any, choices: int, bias: Any) -> tuple[Any, Any]:
    """The largest of a softmax over all, divided by their sum."""
    chosen, ids = scores.softmax(-1).topk(choices)
    return chosen / chosen.sum(-1, keepdim=True), ids


def llama4(scores: Any, choices: int, bias: Any) -> tuple[Any, Any]:
    """The sigmoid of the largest score."""
    chosen, ids = scores.topk(choices)
    return chosen.sigmoid(), ids


def deepseek(scores: Any, choices: int, bias: Any) -> tuple[Any, Any]:
    """Sigmoids, chosen with a bias among the best two of four groups of experts."""
    chances = scores.sigmoid()
    biased = chances + bias
    groups = biased.view(len(scores), 4, -1)
    best = groups.topk(2)[0].sum(-1).topk(2)[1]
    open_ = torch.zeros_like(groups[:, :, 0]).scatter(1, best, 1.0).unsqueeze(-1).expand_as(groups)
    ids = biased.masked_fill(open_.reshape(biased.shape) == 0, float("-inf")).topk(choices)[1]
    chosen = chances.gather(1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


ROUTERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "mixtral": mixtral, "qwen3": qwen3, "llama4": llama4, "deepseek": deepseek,
}  # fmt: skip


class Experts(nn.Module):
    """A router, gated experts, and a shared expert. `looped`: by a loop over experts, on one device."""

    bias: torch.Tensor

    def __init__(self, case: Case, looped: bool) -> None:
        super().__init__()
        self.case, self.looped = case, looped
        self.router = nn.Linear(WIDTH, case.experts, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.randn(case.experts, WIDTH, HIDDEN) / 3)
        self.up = nn.Parameter(torch.randn(case.experts, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(case.experts, HIDDEN, WIDTH) / 4)
        self.register_buffer("bias", torch.zeros(case.experts))
        if case.skewed:
            with torch.no_grad():
                self.bias[: case.choices + 1] = 4.0  # most tokens go to the experts of the first ranks

    def forward(self, x: Any) -> Any:
        scores = self.router(x)
        if self.case.router != "deepseek":
            scores = scores + self.bias
        weights, ids = ROUTERS[self.case.router](scores, self.case.choices, self.bias)
        y, counts = (self._looped if self.looped else self._dispatched)(x, weights, ids)
        if self.training and self.case.router == "deepseek":
            with torch.no_grad():
                busy = counts.to(self.bias.dtype)
                self.bias.add_((busy.mean() - busy).sign(), alpha=0.05)
        fractions = counts / (self.case.choices * len(x))  # a loss that keeps experts busy
        return x + y + self.shared(x), self.case.experts * (fractions * scores.softmax(-1).mean(0)).sum()

    def _dispatched(self, x: Any, weights: Any, ids: Any) -> tuple[Any, Any]:
        rows, back = sw.moe.dispatch(x, ids, self.case.experts, axis="ep")
        before = self.case.router == "llama4"
        if before:
            rows = rows * back.weights_of_rows(weights).unsqueeze(1)
        hidden = F.silu(F.grouped_mm(rows, self.gate, offs=back.offs)) * F.grouped_mm(rows, self.up, offs=back.offs)
        return back(F.grouped_mm(hidden, self.down, offs=back.offs), None if before else weights), back.counts

    def _looped(self, x: Any, weights: Any, ids: Any) -> tuple[Any, Any]:
        y = torch.zeros_like(x)
        before = self.case.router == "llama4"
        for expert in range(self.case.experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows, factor = x[token], weights[token, choice].unsqueeze(1)
            rows = rows * factor if before else rows
            made = (F.silu(rows @ self.gate[expert]) * (rows @ self.up[expert])) @ self.down[expert]
            y = y.index_add(0, token, made if before else made * factor)
        return y, torch.bincount(ids.flatten(), minlength=self.case.experts)


def trained(model: Any, x: Any) -> list[torch.Tensor]:
    """Ten steps: the losses, then the parameters and the bias."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        y, balance = model(x)
        loss = (y - 1).square().mean() + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [*losses, *[p.detach() for p in model.parameters()], model.bias]
    return [value.full_tensor() if isinstance(value, sw.DTensor) else value for value in found]


def on_one_device(case: Case) -> list[torch.Tensor]:
    """By a loop over experts."""
    torch.manual_seed(1)
    return trained(Experts(case, looped=True), torch.randn(TOKENS, WIDTH))


def on_mesh(case: Case, shape: Sequence[int], names: Sequence[str]) -> list[torch.Tensor]:
    """The experts sharded by a plan, tokens over all axes but that of tensor parallelism."""
    mesh = sw.init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    torch.manual_seed(1)
    model, x = Experts(case, looped=False), torch.randn(TOKENS, WIDTH)
    tp = {"tp_mesh": mesh["tp"], "tp_dims": {"gate": 2, "up": 2, "down": 1}} if "tp" in names else {}
    parallelize_module(model, mesh["ep"] if len(shape) > 1 else mesh, ExpertParallel(**tp))
    rows = [sw.Replicate() if name == "tp" else sw.Shard(0) for name in names]
    return trained(model, sw.distribute_tensor(x, mesh, rows))


def check(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Equal within rounding."""
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, rtol=2e-4, atol=2e-5)
