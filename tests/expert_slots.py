"""A layer of experts with a capacity, without and with a compiler: for virtual ranks and for processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw

CASES: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((4,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2), ("ep", "tp")),
)  # fmt: skip


def given(mesh: sw.DeviceMesh, tokens: int, experts: int) -> list[Any]:
    """Tokens, the weights of a router, and those of experts, in bfloat16: torch compiles no other grouped products."""
    torch.manual_seed(experts)
    rows = [sw.Replicate() if name == "tp" else sw.Shard(0) for name in mesh.mesh_dim_names or ()]
    split = [sw.Shard(0) if name == "ep" else sw.Replicate() for name in mesh.mesh_dim_names or ()]
    whole = [sw.Replicate()] * mesh.ndim
    sizes = (((tokens, 8), rows), ((experts, 8), whole), ((experts, 8, 16), split), ((experts, 16, 8), split))
    made = [sw.distribute_tensor(torch.randn(n).bfloat16(), mesh, p, src_data_rank=None) for n, p in sizes]
    return [tensor.requires_grad_() for tensor in made]


def layer(x: Any, router: Any, up: Any, down: Any, choices: int, capacity: int, early: bool) -> tuple[Any, Any]:
    """The results, and how often experts were chosen; weights are given to `dispatch` (early) or to `back`."""
    weights, ids = F.linear(x, router).float().softmax(-1).topk(choices)
    rows, back = sw.moe.dispatch(x, ids, len(up), weights=weights if early else None, capacity=capacity)
    hidden = F.silu(F.grouped_mm(rows, up, offs=back.offs) * back.weights_of_rows(weights).unsqueeze(1).bfloat16())
    outputs = F.grouped_mm(hidden, down, offs=back.offs)
    return back(outputs) if early else back(outputs, weights), back.counts


def compiled_beside_eager(shape: Sequence[int], names: Sequence[str], uneven: bool) -> list[bool]:
    """Whether results, counts and gradients of one graph are those of eager code, bit by bit."""
    mesh = sw.init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    tokens, experts, choices, capacity = (14, 6, 1, 2) if uneven else (16, 8, 2, 3)
    tensors, found = given(mesh, tokens, experts), []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y, counts = run(*tensors, choices, capacity, len(names) > 1)
        grads = torch.autograd.grad(y.float().square().sum(), tensors)
        found.append([each.full_tensor() for each in (y, counts, *grads)])
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]
