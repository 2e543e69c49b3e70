"""Draws from sequential CPU generators: the stream of the global tensor, of which the blocks of this process are kept.

The stream is drawn in chunks. Numbers that no block needs are skipped: many at once by a jump of the generator's state,
which has a constant cost, and fewer by drawing words. So the time of a draw depends on the local part and the number of
its gaps, not on the global tensor, and the memory is that of the local part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.layout import Block
from shardwise.rng.block_geometry import Extent, count_below, extents_of, index_of, indices_between, is_run
from shardwise.rng.mt19937_jump import Origin, jumps_exactly
from shardwise.rng.random_fill import Draw
from shardwise.torch_private import OpOverload, dispatch_mode_count

__all__ = ["JUMP", "can_jump", "draw", "is_sequential", "words_of"]

BLOCK = 1 << 16  # elements drawn at a time
# torch draws normal numbers in groups of 16, and redraws an incomplete last group: no block may be smaller.
ALIGNED = 16
JUMP = 1 << 19  # words that take as long to draw as a jump, which was measured: 0.7 ms
CALIBRATED = 1 << 12  # elements drawn to learn how many words an element takes


def draw(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The blocks. The generator advances as after a draw of the global tensor."""
    parts = [torch.empty(block.shape, dtype=wanted.dtype) for block in blocks]
    if wanted.contiguous and len(blocks) == 1 and blocks[0].shape == wanted.shape:
        wanted.op(parts[0], *wanted.numbers, generator=generator)
        return parts
    total = math.prod(wanted.shape)
    kept = [_Part(part.view(-1), extents_of(wanted.shape, b), total) for part, b in zip(parts, blocks, strict=True)]
    scratch = _memory(min(total, BLOCK + ALIGNED), wanted.dtype, wanted.contiguous)
    gaps = _Gaps(wanted, total, generator) if total - sum(part.numel() for part in parts) >= BLOCK else None
    begin = 0
    while begin < total:
        if gaps is not None and (found := gaps.end_of(kept, begin)) - begin >= BLOCK:
            gaps.skip(begin, found)
            begin = found
            continue
        end = begin + BLOCK if total - begin >= BLOCK + ALIGNED else total
        if gaps is not None:
            end = gaps.start_of(kept, begin, end)
        drawn = wanted.op(scratch[: end - begin], *wanted.numbers, generator=generator)
        for part in kept:
            if part.following < end:
                part.keep(drawn, begin, end)
        begin = end
    return parts


class _Part:
    """A block, of which the first elements are drawn.

    Args:
        values: its elements in one dim.
        extents: its dims in the global tensor.
        total: the number of elements of the global tensor.
    """

    __slots__ = ("_count", "_extents", "_total", "_values", "following")

    def __init__(self, values: torch.Tensor, extents: tuple[Extent, ...], total: int) -> None:
        self._values = values
        self._extents = extents
        self._total = total
        self._count = 0
        self.following = self._index(0)  # the global index of the next element; `total` after the last

    def _index(self, element: int) -> int:
        return index_of(self._extents, element) if element < self._values.numel() else self._total

    def around(self, index: int) -> tuple[int, int]:
        """The end of the elements before a global index, and the element that follows them."""
        count = count_below(self._extents, index)
        return (self._index(count - 1) + 1 if count else 0), self._index(count)

    def keep(self, drawn: torch.Tensor, begin: int, end: int) -> None:
        """Take the elements from the numbers `begin` to `end` of the stream."""
        low, high = self._count, count_below(self._extents, end)
        if is_run(self._extents):
            first = self.following - begin
            self._values[low:high] = drawn[first : first + high - low]
        else:
            self._values[low:high] = drawn[indices_between(self._extents, low, high) - begin]
        self._count, self.following = high, self._index(high)


class _Gaps:
    """The numbers of the stream that no block needs. Those of the last group are drawn, since torch may redraw some.

    Args:
        wanted: the draw of the global tensor.
        total: the number of its elements.
        generator: that of the draw.
    """

    def __init__(self, wanted: Draw, total: int, generator: torch.Generator | None) -> None:
        self._generator = torch.default_generator if generator is None else generator
        self._jumps = can_jump(self._generator)
        self._words = words_of(self._generator, wanted.op, wanted.numbers, wanted.dtype, wanted.contiguous)
        last = total if total % ALIGNED == 0 else max(total - total % ALIGNED - ALIGNED, 0)
        self._last = last if self._words else 0
        self._origin: tuple[Origin, int] | None = None
        self._skipped = torch.empty(BLOCK // 2, dtype=torch.float64)

    def end_of(self, kept: Sequence[_Part], begin: int) -> int:
        """The end of the gap that begins here, in complete groups."""
        following = min((part.following for part in kept), default=self._last)
        return min(following - following % ALIGNED, self._last)

    def start_of(self, kept: Sequence[_Part], begin: int, end: int) -> int:
        """The start of the gap that contains the end of a chunk, in complete groups; `end` if there is none."""
        around = [(begin, self._last), *(part.around(end) for part in kept)]
        start = max(before for before, _ in around)
        start += -start % ALIGNED
        following = min(after for _, after in around)
        return start if following - start >= BLOCK else end

    def skip(self, begin: int, end: int) -> None:
        """Advance the generator over these numbers of the stream."""
        words = (end - begin) * self._words
        if self._jumps and words >= JUMP:
            if self._origin is None:
                self._origin = Origin(self._generator), begin
            origin, start = self._origin
            origin.jump(self._generator, (end - start) * self._words)
            return
        for at in range(0, words // 2, len(self._skipped)):
            self._skipped[: words // 2 - at].uniform_(generator=self._generator)  # two words for each number


def can_jump(generator: torch.Generator) -> bool:
    """Whether a draw may set the state of a generator.

    Modes must see all that changes the state. torch refuses a generator of another device when it draws.
    """
    return not dispatch_mode_count() and generator.device.type == "cpu" and jumps_exactly()


def words_of(
    generator: torch.Generator, op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype, contiguous: bool = True
) -> int:
    """The number of words that a fill takes for each element now; 0 if it varies.

    Example:
        >>> words_of(torch.Generator(), torch.ops.aten.uniform_.default, (0.0, 1.0), torch.float64)
        2
    """
    keeps_normal = (Origin(generator).keeps_normal,) if can_jump(generator) else (False, True)
    words = {_words(op, numbers, dtype, contiguous, each) for each in keeps_normal}
    return words.pop() if len(words) == 1 else 0


@functools.lru_cache(maxsize=256)
def _words(op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype, contiguous: bool, keeps_normal: bool) -> int:
    """The number of generator words for each element; 0 if it varies, or if the generator caches numbers.

    Args:
        op: the fill.
        numbers: its arguments.
        dtype: of the tensor that is filled.
        contiguous: whether the tensor is contiguous.
        keeps_normal: whether the generator already caches a normal number.
    """

    def seeded() -> torch.Generator:
        torch.empty(int(keeps_normal)).normal_(generator=generator.manual_seed(0))
        return generator

    generator = torch.Generator()
    op(_memory(CALIBRATED, dtype, contiguous), *numbers, generator=seeded())
    after = generator.get_state()
    for words in (1, 2):
        torch.empty(CALIBRATED * words // 2, dtype=torch.float64).uniform_(generator=seeded())  # two for each number
        if torch.equal(after, generator.get_state()):
            return words
    return 0


def _memory(count: int, dtype: torch.dtype, contiguous: bool) -> torch.Tensor:
    """Memory for a chunk. torch draws normal numbers differently for non-contiguous memory."""
    return torch.empty(count, dtype=dtype) if contiguous else torch.empty(2 * count, dtype=dtype)[::2]


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
