"""The whole tensor is drawn and a part of it kept: right on every device, at the cost of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.core.layout import Block
from shardwise.rng.draw import Draw
from shardwise.rng.geometry import extents_of, indices_between

__all__ = ["draw"]


def draw(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The part of each block."""
    whole = torch.empty(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    flat = wanted.op(whole, *wanted.numbers, generator=generator).view(-1)
    parts = []
    for block in blocks:
        indices = indices_between(extents_of(wanted.shape, block), 0, math.prod(block.shape), wanted.device)
        parts.append(flat[indices].view(block.shape))
    return parts
