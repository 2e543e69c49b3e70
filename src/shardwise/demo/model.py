"""The demo's transformer in plain PyTorch, and the function that parallelizes it on a mesh.

The demo prints the source of `spread`, so its lines are short.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["Transformer", "spread"]


class Attention(nn.Module):
    """Causal attention. The number of heads follows from the queries: a rank may have a part of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def split(self, x: Tensor) -> Tensor:
        """Split features into heads, and move the heads before the sequence."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two layers with a hidden width of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """Attention and feed-forward layers, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A character-level language model: logits of the next character at each position.

    Example:
        >>> model = Transformer(characters=64, width=32, heads=4, blocks=1, longest=8)
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(self, characters: int, width: int, heads: int, blocks: int, longest: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(longest, width)
        with torch.no_grad():
            self.places.weight.copy_(waves(longest, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, texts: Tensor) -> Tensor:
        x = self.characters(texts) + self.places(torch.ones_like(texts).cumsum(1) - 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def waves(longest: int, width: int) -> Tensor:
    """Sinusoidal position encodings: a shift by one position is a rotation.

    Example:
        >>> waves(3, 2)
        tensor([[ 0.0000,  1.0000],
                [ 0.8415,  0.5403],
                [ 0.9093, -0.4161]])
    """
    angles = torch.outer(torch.arange(longest), 1000.0 ** (-torch.arange(0, width, 2) / width))
    return torch.cat((angles.sin(), angles.cos()), -1)


def spread(model: Any, mesh: sw.DeviceMesh) -> Any:
    part, full = sw.Shard(1), sw.Replicate()  # of each sequence
    columns = ColwiseParallel(use_local_output=False)
    rows = RowwiseParallel(output_layouts=part, use_local_output=False)
    gather = PrepareModuleInput(input_layouts=part, desired_input_layouts=full)
    plan = {
        "characters": rows,
        "places": rows,
        "blocks.*.*_norm": SequenceParallel(),
        "blocks.*.attention": gather,
        "blocks.*.attention.[qkv]*": columns,
        "blocks.*.attention.out": rows,
        "blocks.*.feed_forward": gather,
        "blocks.*.feed_forward.up": columns,
        "blocks.*.feed_forward.down": rows,
        "norm": SequenceParallel(),
        "head": columns,
    }
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        sw.fully_shard(block, mesh["dp"])
    return sw.fully_shard(model, mesh["dp"])
