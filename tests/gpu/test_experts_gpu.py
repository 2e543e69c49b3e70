"""Mixtures of experts with virtual ranks on one GPU: dispatch, grouped products and plans against one device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.parallel import ExpertParallel, parallelize_module

DEVICE = "cuda"
WIDTH, HIDDEN, TOKENS = 64, 128, 96
S0, R = Shard(0), Replicate()


def layer(x: Any, ids: Any, weights: Any, up: Any, down: Any, capacity: int | None, groups: int | None) -> Any:
    rows, back = sw.moe.dispatch(x, ids, len(up), capacity=capacity, groups=groups)
    made = F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=back.offs)), down, offs=back.offs)
    return rows, back(made, weights)


def given(experts: int, choices: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tokens, experts of tokens, weights, and the matrices of experts. The last expert has no tokens."""
    torch.manual_seed(experts + choices)
    sizes = ((TOKENS, WIDTH), (experts, WIDTH, HIDDEN), (experts, HIDDEN, WIDTH))
    x, up, down = (torch.randn(size, device=DEVICE, dtype=dtype) / 4 for size in sizes)
    weights, ids = torch.rand(TOKENS, experts - 1, device=DEVICE).topk(choices)
    return [x, ids, weights.to(dtype), up, down]


def near(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    difference = (mine.double() - theirs.double()).norm()
    assert difference <= tolerance * theirs.double().norm() + 1e-6, f"{what}: {float(difference)}"


def test_dispatch_and_grouped_products_beside_one_device() -> None:
    """Rows are bit-equal; results and gradients within the rounding of the dtype."""
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 2e-3)):  # products of float32 may use tf32
        for shape, names in (((4,), ("ep",)), ((2, 2), ("dp", "ep"))):
            for experts, choices, capacity in ((8, 1, None), (8, 2, None), (6, 2, None), (8, 2, 16), (16, 8, None)):
                mesh = sw.init_device_mesh(DEVICE, shape, mesh_dim_names=names)
                plain = given(experts, choices, dtype)
                of_experts = [S0 if name == "ep" else R for name in names]
                layouts = [[S0] * mesh.ndim] * 3 + [of_experts] * 2
                ours: list[Any] = [sw.distribute_tensor(t, mesh, p) for t, p in zip(plain, layouts, strict=True)]
                for tensor in (*plain, *ours):
                    tensor.requires_grad_(tensor.is_floating_point())
                rows, y = layer(*ours, capacity, None)
                wanted_rows, wanted = layer(*plain, capacity, mesh.size() if capacity else None)
                what = f"{dtype} {names} {experts} experts, top-{choices}, capacity {capacity}"
                assert torch.equal(rows.full_tensor(), wanted_rows), what
                near(y.full_tensor(), wanted, tolerance, what)
                leaves = [0, 2, 3, 4]
                found = torch.autograd.grad(y.float().square().sum(), [ours[at] for at in leaves])
                expected = torch.autograd.grad(wanted.float().square().sum(), [plain[at] for at in leaves])
                for at, mine, theirs in zip(leaves, found, expected, strict=True):
                    near(mine.full_tensor(), theirs, tolerance, f"{what}: gradient {at}")  # pyright: ignore[reportAttributeAccessIssue]


class Mixtral(nn.Module):
    """A block as Mixtral has it: the softmax of the largest scores, gated experts. `looped`: one expert at a time."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 11)

    def forward(self, x: Any) -> Any:
        tokens = x.flatten(0, 1)
        scores, ids = self.router(tokens).topk(2)
        weights = scores.softmax(-1)
        if not isinstance(tokens, sw.DTensor):
            return x + self.looped(tokens, ids, weights).view(x.shape)
        rows, back = sw.moe.dispatch(tokens, ids, len(self.up), axis="ep")
        gate, up = (F.grouped_mm(rows, matrix, offs=back.offs) for matrix in (self.gate, self.up))
        return x + back(F.grouped_mm(F.silu(gate) * up, self.down, offs=back.offs), weights).view(x.shape)

    def looped(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in range(len(self.up)):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows = x[token]
            made = (F.silu(rows @ self.gate[expert]) * (rows @ self.up[expert])) @ self.down[expert]
            y = y.index_add(0, token, made * weights[token, choice].unsqueeze(1))
        return y


def test_a_plan_trains_a_mixtral_block() -> None:
    """Five steps of float32 against a loop over experts; experts over ep, split over tp, tokens over dp and ep."""
    torch.manual_seed(0)
    plain = Mixtral().to(DEVICE)
    for shape, names in (((4,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2), ("ep", "tp"))):
        mesh = sw.init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        one, ours = copy.deepcopy(plain), copy.deepcopy(plain)
        tp = {"tp_mesh": mesh["tp"], "tp_dims": {"gate": 2, "up": 2, "down": 1}} if "tp" in names else {}
        parallelize_module(ours, mesh["ep"] if len(names) > 1 else mesh, ExpertParallel(**tp))
        losses: list[list[float]] = [[], []]
        x = torch.randn(8, 16, WIDTH, device=DEVICE)
        on_mesh = sw.distribute_tensor(x, mesh, [R if name == "tp" else S0 for name in names])
        for found, model, batch in zip(losses, (one, ours), (x, on_mesh), strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(5):
                loss: Any = (model(batch) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                value = loss.detach()
                found.append(float(value.full_tensor() if isinstance(value, sw.DTensor) else value))
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
        for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
            near(mine.full_tensor().detach(), theirs.detach(), 2e-3, f"{names} {name}")  # pyright: ignore[reportAttributeAccessIssue]


def test_with_a_capacity_the_host_waits_for_nothing() -> None:
    """And a compiled and a captured layer give the same values."""
    mesh = sw.init_device_mesh(DEVICE, (4,), mesh_dim_names=("ep",))
    ours: list[Any] = [sw.distribute_tensor(t, mesh, [S0]) for t in given(8, 2, torch.bfloat16)]

    def run(*tensors: Any) -> Any:
        return layer(*tensors, 16, None)[1]

    wanted = run(*ours)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(*ours)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchroniz" in str(one.message)]
    assert not waits, f"{len(waits)} waits: {waits[:1]}"
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*ours).full_tensor(), wanted.full_tensor())
    captured = sw.captured(run)
    for _ in range(2):
        assert torch.equal(captured(*ours).full_tensor(), wanted.full_tensor())
