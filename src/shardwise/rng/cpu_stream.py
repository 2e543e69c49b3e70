"""Draws from sequential CPU generators: the stream of the global tensor is drawn in small blocks, and a part is kept.

Costs the time of the global tensor and the memory of the local part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.layout import Block
from shardwise.rng.block_geometry import Extent, count_below, extents_of, indices_between, is_run
from shardwise.rng.random_fill import Draw
from shardwise.torch_private import OpOverload

__all__ = ["draw", "is_sequential"]

aten = torch.ops.aten
BLOCK = 1 << 16  # elements drawn at a time
# torch draws normal numbers in groups of 16, and redraws an incomplete last group: no block may be smaller.
ALIGNED = 16
# Operators for which skipping numbers costs less than computing them.
SLOW = frozenset({aten.exponential_.default, aten.cauchy_.default, aten.geometric_.default, aten.bernoulli_.float})


def draw(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The blocks. The generator advances as after a draw of the global tensor."""
    parts = [torch.empty(block.shape, dtype=wanted.dtype) for block in blocks]
    if wanted.contiguous and len(blocks) == 1 and blocks[0].shape == wanted.shape:
        wanted.op(parts[0], *wanted.numbers, generator=generator)
        return parts
    kept = [(part.view(-1), extents_of(wanted.shape, block)) for part, block in zip(parts, blocks, strict=True)]
    total = math.prod(wanted.shape)
    scratch = _scratch(wanted, min(total, BLOCK + ALIGNED))
    words = _words(wanted.op, wanted.numbers, wanted.dtype) if wanted.op in SLOW else 0
    skipped = torch.empty(words * BLOCK)
    for begin, end in _spans(total):
        if words and end - begin == BLOCK and not any(_overlaps(e, begin, end) for _, e in kept):
            skipped.uniform_(generator=generator)
            continue
        drawn = wanted.op(scratch[: end - begin], *wanted.numbers, generator=generator)
        for part, extents in kept:
            low, high = count_below(extents, begin), count_below(extents, end)
            if low == high:
                continue
            if is_run(extents):
                first = extents[0].runs[0].start + low - begin
                part[low:high] = drawn[first : first + high - low]
            else:
                part[low:high] = drawn[indices_between(extents, low, high) - begin]
    return parts


def _overlaps(extents: tuple[Extent, ...], begin: int, end: int) -> bool:
    """Whether a block contains any of these numbers of the stream."""
    return count_below(extents, begin) < count_below(extents, end)


@functools.lru_cache(maxsize=256)
def _words(op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype) -> int:
    """The number of generator words for each element; 0 if it varies, or if the generator caches numbers."""
    generator = torch.Generator()
    op(torch.empty(2 * ALIGNED, dtype=dtype), *numbers, generator=generator.manual_seed(0))
    after = generator.get_state()
    for words in (1, 2):
        torch.empty(2 * ALIGNED * words).uniform_(generator=generator.manual_seed(0))  # one word for each float
        if torch.equal(after, generator.get_state()):
            return words
    return 0


def _scratch(wanted: Draw, count: int) -> torch.Tensor:
    """Memory for a block. torch draws normal numbers differently for non-contiguous memory."""
    if wanted.contiguous:
        return torch.empty(count, dtype=wanted.dtype)
    return torch.empty(2 * count, dtype=wanted.dtype)[::2]


def _spans(total: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of the blocks of a stream; the last has at least ALIGNED elements, if there are that many."""
    begin = 0
    while total - begin >= BLOCK + ALIGNED:
        yield begin, begin + BLOCK
        begin += BLOCK
    if begin < total:
        yield begin, total


@functools.lru_cache(maxsize=256)
def is_sequential(op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether this build of torch draws the elements in sequence, so that two halves equal one draw of both.

    Some builds draw a seed for each call, and the elements from the seed.
    """
    full, halves = torch.empty(2 * ALIGNED, dtype=dtype), torch.empty(2 * ALIGNED, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    op(full, *numbers, generator=generator)
    generator.manual_seed(0)
    for half in halves.chunk(2):
        op(half, *numbers, generator=generator)
    return torch.equal(torch.nan_to_num(full), torch.nan_to_num(halves))
