"""The memory of a fully sharded step of a model with seven billion parameters, on a dry run, against arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Shard
from shardwise.fabric.target_kernels import WORKSPACE

RANKS, LAYERS, WIDTH, HIDDEN, VOCABULARY, HEADS, TOKENS = 64, 32, 4096, 11008, 32000, 32, 512
FLOAT = 4


class Block(nn.Module):
    """A block of Llama's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def arithmetic() -> tuple[int, int]:
    """Bytes between steps and at the peak, on each of the ranks. Every rank has one sequence."""
    layer = FLOAT * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * WIDTH)
    table = FLOAT * VOCABULARY * WIDTH
    shards = (LAYERS * layer + 2 * table + FLOAT * WIDTH) // RANKS
    # parameters, the two moments of Adam, and the workspaces of matrix products in forward and in backward
    between = shards + 2 * shards + 2 * WORKSPACE
    # What a layer saves on a GPU, where norms and attention are fused: its input and the stream after attention; the
    # result of each norm; q, k, v; what was attended to. Then gate, silu, up and their product.
    rows = TOKENS * FLOAT
    activations = rows * (WIDTH * (2 + 2 + 3 + 1) + HIDDEN * 4)
    # The peak is in the backward of the last layer: the outermost module keeps both tables, and has the gradient of
    # one; the other layers' activations wait; the layer has its gradients and the flat buffer that reduces them, and
    # the layer before it is on its way in another.
    peak = between + (LAYERS - 1) * activations + 2 * table + table + 3 * layer
    return between, peak


def test_the_peak_of_a_step_is_as_computed() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (RANKS,), mesh_dim_names=("dp",))
        with torch.device("meta"):
            model = Llama()
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 6.7
        for layer in model.layers:
            sw.fully_shard(layer, mesh)
        sw.fully_shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = sw.zeros(RANKS, TOKENS, dtype=torch.int64, device_mesh=mesh, placements=[Shard(0)])
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # the moments of Adam are there from the first step on
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        between, peak = arithmetic()
        assert run.live_bytes == pytest.approx(between, rel=0.001)
        assert run.peak_bytes == pytest.approx(peak, rel=0.02)
        counts = Counter(run.collectives)
        assert (counts["all_gather"], counts["reduce_scatter"]) == (2 * LAYERS + 1, LAYERS + 1)
