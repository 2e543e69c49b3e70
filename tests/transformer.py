"""A small transformer for tests of parallel modules: embedding, blocks with dropout, norm, a tied or untied head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH = 11, 8, 20, 2, 6


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout after each."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Logits of the next token."""

    def __init__(self, blocks: int = 2, *, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
