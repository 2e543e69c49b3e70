"""Who draws: on CPU the stream of the whole tensor, on CUDA each element by its index, as one device would.

The indexed generator where the user asks for it; the whole tensor where nothing else gives one device's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.layout import Block
from shardwise.rng import indexed, philox, stream, whole
from shardwise.rng.draw import Draw

__all__ = ["default_generator", "draw_blocks"]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a device draws from where none is given.

    Example:
        >>> default_generator(torch.device("cpu")) is torch.default_generator
        True
    """
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def draw_blocks(
    wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None, by_index: bool
) -> list[torch.Tensor]:
    """The part of each block of a whole tensor of random numbers; the generator is left as one device leaves it."""
    if by_index:
        return indexed.draw(wanted, blocks, generator)
    if philox.reproduces(wanted):
        return philox.draw(wanted, blocks, generator or default_generator(wanted.device))
    if wanted.device.type == "cpu" and stream.is_sequential(wanted.op, wanted.numbers, wanted.dtype):
        return stream.draw(wanted, blocks, generator)
    return whole.draw(wanted, blocks, generator)
