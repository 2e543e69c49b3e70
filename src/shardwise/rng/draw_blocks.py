"""Chooses how the blocks of a random fill are drawn, with the numbers of one device.

On CPU from the sequential stream, on CUDA by element index, or from the indexed generator if the user selects it.
If none of these reproduces the device's numbers, the global tensor is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.core.layout import Block
from shardwise.rng import cpu_stream, indexed_generator
from shardwise.rng.block_geometry import extents_of, indices_between
from shardwise.rng.cuda import philox_fill
from shardwise.rng.random_fill import Draw

__all__ = ["default_generator", "draw_blocks"]


def default_generator(device: torch.device) -> torch.Generator:
    """The default generator of a device.

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
    """The blocks of a global tensor of random numbers. The generator ends in the state of a draw on one device."""
    if by_index:
        return indexed_generator.draw(wanted, blocks, generator)
    if philox_fill.reproduces(wanted):
        return philox_fill.draw(wanted, blocks, generator or default_generator(wanted.device))
    if wanted.device.type == "cpu" and cpu_stream.is_sequential(wanted.op, wanted.numbers, wanted.dtype):
        return cpu_stream.draw(wanted, blocks, generator)
    return _draw_global(wanted, blocks, generator)


def _draw_global(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """Draw the global tensor and keep the blocks: correct on every device, at the cost of the global tensor."""
    drawn = torch.empty(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    flat = wanted.op(drawn, *wanted.numbers, generator=generator).view(-1)
    parts = []
    for block in blocks:
        indices = indices_between(extents_of(wanted.shape, block), 0, math.prod(block.shape), wanted.device)
        parts.append(flat[indices].view(block.shape))
    return parts
