"""Who draws: on CPU the stream of the whole tensor, and the indexed generator where the user asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.layout import Block
from shardwise.rng import indexed, stream, whole
from shardwise.rng.draw import Draw

__all__ = ["draw_blocks"]


def draw_blocks(
    wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None, by_index: bool
) -> list[torch.Tensor]:
    """The part of each block of a whole tensor of random numbers; the generator is left as one device leaves it."""
    if by_index:
        return indexed.draw(wanted, blocks, generator)
    if wanted.device.type == "cpu" and stream.is_sequential(wanted.op, wanted.numbers, wanted.dtype):
        return stream.draw(wanted, blocks, generator)
    return whole.draw(wanted, blocks, generator)
