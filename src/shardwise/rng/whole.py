"""The whole tensor is drawn and a part of it kept: right on every device, at the cost of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.layout import Block
from shardwise.rng.draw import Draw
from shardwise.rng.positions import Positions

__all__ = ["draw"]


def draw(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The part of each block."""
    whole = torch.empty(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    flat = wanted.op(whole, *wanted.numbers, generator=generator).view(-1)
    parts = []
    for block in blocks:
        positions = Positions(wanted.shape, block)
        parts.append(flat[positions.between(0, positions.count, wanted.device)].view(block.shape))
    return parts
