"""CPU generators are sequential: the stream of the whole tensor is drawn in bounded blocks, and a part of it kept.

Costs the time of the whole tensor and the memory of one's own part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.core.layout import Block
from shardwise.rng.draw import Draw
from shardwise.rng.positions import Positions

__all__ = ["draw", "is_sequential"]

BLOCK = 1 << 16  # elements drawn at a time
# torch fills 16 normal numbers at a time, and the last 16 anew where they are not full: no block may be smaller.
ALIGNED = 16


def draw(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The part of each block. The generator goes on as if the whole tensor had been drawn."""
    parts = [torch.empty(block.shape, dtype=wanted.dtype) for block in blocks]
    if wanted.contiguous and len(blocks) == 1 and blocks[0].shape == wanted.shape:
        wanted.op(parts[0], *wanted.numbers, generator=generator)
        return parts
    kept = [(part.view(-1), Positions(wanted.shape, block)) for part, block in zip(parts, blocks, strict=True)]
    total = math.prod(wanted.shape)
    scratch = _scratch(wanted, min(total, BLOCK + ALIGNED))
    for begin, end in _spans(total):
        drawn = wanted.op(scratch[: end - begin], *wanted.numbers, generator=generator)
        for part, positions in kept:
            low, high = positions.before(begin), positions.before(end)
            if low == high:
                continue
            if positions.is_run:
                first = int(positions.starts) + low - begin
                part[low:high] = drawn[first : first + high - low]
            else:
                part[low:high] = drawn[positions.between(low, high) - begin]
    return parts


def _scratch(wanted: Draw, count: int) -> torch.Tensor:
    """Room for a block. torch draws normal numbers in another way where memory is not contiguous."""
    if wanted.contiguous:
        return torch.empty(count, dtype=wanted.dtype)
    return torch.empty(2 * count, dtype=wanted.dtype)[::2]


def _spans(total: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the blocks of a stream; the last has at least ALIGNED elements, if there are that many."""
    begin = 0
    while total - begin >= BLOCK + ALIGNED:
        yield begin, begin + BLOCK
        begin += BLOCK
    if begin < total:
        yield begin, total


@functools.lru_cache(maxsize=256)
def is_sequential(op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether this build of torch draws the elements one after the other, so that two halves make the whole.

    Some builds draw a seed for each call, and the elements from that.
    """
    whole, halves = torch.empty(2 * ALIGNED, dtype=dtype), torch.empty(2 * ALIGNED, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    op(whole, *numbers, generator=generator)
    generator.manual_seed(0)
    for half in halves.chunk(2):
        op(half, *numbers, generator=generator)
    return torch.equal(torch.nan_to_num(whole), torch.nan_to_num(halves))
