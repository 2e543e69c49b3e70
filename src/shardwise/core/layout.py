"""The local part of a global dim at a coordinate: even, uneven, empty, nested, strided.

Integer arithmetic on the size of a dim and a list of cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = [
    "Block",
    "Cut",
    "Division",
    "EqualChunks",
    "Level",
    "Run",
    "Segment",
    "Window",
    "block_of",
    "blocks_of_parts",
    "chunk",
    "dense_strides",
    "equal_chunks",
    "full_block",
    "intersect",
    "longest",
    "misfit",
    "nested_chunk",
    "normalize_dim",
    "runs_of",
    "sizes_of_parts",
    "starts_of",
]  # fmt: skip


class Run(NamedTuple):
    """Consecutive indices of a dim."""

    start: int
    length: int


class Segment(NamedTuple):
    """Rows of a result that are rows of an operand: `result[at + i * stride] = operand[first + i * step]`, i < length.

    `operand` and `result` are positions among the operands and results of a call. `step` may be negative.
    """

    operand: int
    first: int
    result: int
    at: int
    length: int
    step: int = 1
    stride: int = 1


class Window(NamedTuple):
    """The rows of one tensor from which row i of another is computed: `first` to `last`, both shifted by `step * i`.

    In fractions of a row: `(step * i + first) // per` up to and including `(step * i + last) // per`. Rows outside of
    the tensor are padding.

    Example:
        >>> Window(-1, 1).over(4, 8)  # a kernel of three rows with a padding of one
        (3, 10)
    """

    first: int
    last: int
    step: int = 1
    per: int = 1

    def over(self, start: Any, length: Any) -> tuple[Any, Any]:
        """Start and length of the rows that `length` rows from `start` on need: integers, or arrays of them."""
        low = (self.step * start + self.first) // self.per
        high = (self.step * (start + length - 1) + self.last) // self.per + 1
        return low, (high - low) * (length > 0)


class Cut(NamedTuple):
    """One split of the remaining part of a dim into `parts`, of which `index` is kept.

    `rows` is None for an ordinary cut. Otherwise the remaining part consists of that many rows, and each row is split.
    With `blocks` a row is cut into as many blocks, and part `i` of `parts` consists of the i-th group of `blocks`,
    equally many in each, in the order of the row. `sizes` are those of the parts, or blocks, where they are given;
    `owner` is the part that has everything.
    """

    parts: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # hides tuple.index
    rows: int | None = None
    blocks: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    owner: int | None = None


class Division(NamedTuple):
    """How a dim is cut: a `Cut` without the index of the part that is kept."""

    parts: int
    rows: int | None = None
    blocks: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    owner: int | None = None

    def cut(self, index: int) -> Cut:
        """The cut that keeps the part of this index."""
        return Cut(self.parts, index, *self[1:])


class Block(NamedTuple):
    """The local part of one coordinate: for each dim its runs of global indices, concatenated in this order.

    `offset` is the first index in each dim; where a dim of the block is empty, the global size, as in torch.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]


def chunk(size: int, parts: int, index: int) -> Run:
    """Part `index` of `torch.chunk(size, parts)`; the last parts may be short or empty.

    Example:
        >>> [tuple(chunk(5, 4, i)) for i in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return Run(start, min(start + step, size) - start)


@lru_cache(maxsize=65536)
def runs_of(size: int, cuts: tuple[Cut, ...]) -> tuple[Run, ...]:
    """The runs of global indices that remain of a dim of `size` after `cuts`, major first. Never empty.

    Example:
        >>> runs_of(10, (Cut(2, 1),))
        (Run(start=5, length=5),)
        >>> runs_of(10, (Cut(2, 0, rows=2),))  # two rows of five, each split in two
        (Run(start=0, length=3), Run(start=5, length=3))
        >>> runs_of(8, (Cut(2, 0, rows=1, blocks=(0, 3, 1, 2)),))  # the first and the last of four blocks
        (Run(start=0, length=2), Run(start=6, length=2))
        >>> runs_of(8, (Cut(3, 2, rows=1, sizes=(5, 0, 3)),))
        (Run(start=5, length=3),)
    """
    runs: tuple[Run, ...] = (Run(0, size),)
    for cut in cuts:
        length = _length(runs)
        if cut.rows is None:
            wanted = [chunk(length, cut.parts, cut.index)]
        else:
            rows = (chunk(length, cut.rows, row) for row in range(cut.rows))
            parts = ((row.start, part) for row in rows for part in _parts_of_row(row.length, cut))
            wanted = [Run(start + part.start, part.length) for start, part in parts]
        runs = _pick(runs, wanted)
    return runs


def _parts_of_row(length: int, cut: Cut) -> list[Run]:
    """The runs of a row that are kept."""
    if cut.sizes is not None:
        if cut.blocks is None:
            return [Run(sum(cut.sizes[: cut.index]), cut.sizes[cut.index])]
        starts, mine = starts_of(cut.sizes, length), blocks_of_parts(cut.parts, cut.blocks)[cut.index]
        return [Run(starts[block], cut.sizes[block]) for block in mine]
    if cut.owner is not None:
        return [Run(0 if cut.index <= cut.owner else length, length if cut.index == cut.owner else 0)]
    if cut.blocks is None:
        return [chunk(length, cut.parts, cut.index)]
    return [chunk(length, len(cut.blocks), block) for block in blocks_of_parts(cut.parts, cut.blocks)[cut.index]]


def starts_of(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The starts of consecutive parts of these sizes, whose sum is `length`.

    Example:
        >>> starts_of((5, 0, 3), 8)
        (0, 5, 5)
    """
    *starts, end = itertools.accumulate(sizes, initial=0)
    assert end == length, f"sizes {sizes} do not sum to {length}"
    return tuple(starts)


@lru_cache(maxsize=256)
def blocks_of_parts(parts: int, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The blocks of each part, in ascending order.

    Example:
        >>> blocks_of_parts(2, (3, 0, 1, 2))
        ((0, 3), (1, 2))
    """
    each = len(blocks) // parts
    return tuple([tuple(sorted(blocks[part * each : (part + 1) * each])) for part in range(parts)])


def nested_chunk(size: int, parts: Iterable[tuple[int, int]]) -> Run:
    """The run that remains of a dim of `size` after ordinary cuts, `(parts, index)` each: `runs_of` without rows.

    Example:
        >>> nested_chunk(10, [(2, 1), (2, 0)])
        Run(start=5, length=3)
    """
    start, length = 0, size
    for count, index in parts:
        step = -(-length // count)
        begin = min(index * step, length)
        start, length = start + begin, min(step, length - begin)
    return Run(start, length)


class Level(NamedTuple):
    """Consecutive parts of equal length of one cut: `count` of them from `first` on, `extent` indices each."""

    first: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # hides tuple.count
    start: int  # of the first part, relative to the dim that is cut
    extent: int


class EqualChunks(NamedTuple):
    """Chunks of one length of a dim that is cut several times: a level for each cut, major first."""

    levels: tuple[Level, ...]
    length: int


def equal_chunks(size: int, parts: Sequence[int]) -> list[EqualChunks]:
    """All non-empty chunks of a dim of `size` that is cut into `parts`, nested, major first, grouped by length.

    Each cut has full chunks and at most one short one. So there are at most `2 ** cuts` groups for any number of parts.

    Example:
        >>> [(chunks.length, [level.count for level in chunks.levels]) for chunks in equal_chunks(10, [3])]
        [(4, [2]), (2, [1])]
        >>> [(chunks.length, [level.count for level in chunks.levels]) for chunks in equal_chunks(10, [2, 2])]
        [(3, [2, 1]), (2, [2, 1])]
    """
    if not parts:
        return [EqualChunks((), size)] if size else []
    if not size:
        return []
    step = -(-size // parts[0])
    full, rest = divmod(size, step)
    found = []
    for level in (Level(0, full, 0, step), Level(full, 1, full * step, rest)):
        inner = equal_chunks(level.extent, parts[1:])
        found += [EqualChunks((level, *levels), length) for levels, length in inner]
    return found


def _pick(runs: tuple[Run, ...], wanted: list[Run]) -> tuple[Run, ...]:
    """The positions `wanted` of the concatenation of `runs`, as runs of indices."""
    if len(runs) == 1:
        start = runs[0].start
        picked = [Run(start + w.start, w.length) for w in wanted]
    else:
        picked = []
        for want in wanted:
            position = 0
            for run in runs:
                low, high = max(want.start, position), min(want.start + want.length, position + run.length)
                if low < high:
                    picked.append(Run(run.start + low - position, high - low))
                position += run.length
        if not picked:
            picked = [Run(runs[-1].start + runs[-1].length, 0)]
    return _merged(picked)


def _merged(runs: list[Run]) -> tuple[Run, ...]:
    """The runs with adjacent ones joined and empty ones removed, except for one if all are empty."""
    full = [run for run in runs if run.length]
    if not full:
        return (runs[0],)
    joined = [full[0]]
    for run in full[1:]:
        last = joined[-1]
        if last.start + last.length == run.start:
            joined[-1] = Run(last.start, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def block_of(shape: Sequence[int], runs: tuple[tuple[Run, ...], ...]) -> Block:
    """The block of a tensor of `shape` that consists of these runs of its dims.

    Example:
        >>> block_of((4, 6), ((Run(2, 2),), (Run(0, 6),))).offset
        (2, 0)
    """
    local = tuple([run[0].length if len(run) == 1 else _length(run) for run in runs])
    offset = tuple([run[0].start if n else size for run, n, size in zip(runs, local, shape, strict=True)])
    return Block(local, offset, runs)


def full_block(shape: Sequence[int]) -> Block:
    """The block of a replicated tensor of `shape`.

    Example:
        >>> full_block((4, 6)).runs
        ((Run(start=0, length=4),), (Run(start=0, length=6),))
    """
    return block_of(shape, tuple([(Run(0, size),) for size in shape]))


def longest(size: int, divisions: Sequence[Division]) -> int:
    """The largest number of indices of a dim of `size` in any local part after these divisions, major first.

    The first part of an ordinary cut is the longest. After other cuts a shorter block may have a longer part, so all
    lengths are considered.

    Example:
        >>> longest(7, [Division(2), Division(2, 3)])  # 4 and 3 indices: 2 + 2 + 0 and 1 + 1 + 1; the first halves
        3
    """
    if not any(division.rows for division in divisions):
        for division in divisions:
            size = -(-size // division.parts)
        return size
    if len(divisions) == 1 and divisions[0].sizes is not None:
        return max(sizes_of_parts(divisions[0]))
    lengths = {size}
    for division in divisions:
        lengths = {length for n in lengths for length in _part_lengths(n, division)}
    return max(lengths)


def sizes_of_parts(division: Division) -> list[int]:
    """The length of each part of a division whose sizes are given.

    Example:
        >>> sizes_of_parts(Division(2, 1, blocks=(0, 2, 1, 3), sizes=(5, 0, 3, 1)))
        [8, 1]
    """
    sizes, blocks = division.sizes or (), division.blocks
    if blocks is None:
        return [*sizes]
    return [sum(sizes[block] for block in mine) for mine in blocks_of_parts(division.parts, blocks)]


def misfit(size: int, divisions: Sequence[Division]) -> tuple[Division, list[int]] | None:
    """The first division, major first, whose sizes do not sum to the length it divides; and the possible lengths.

    Example:
        >>> misfit(8, [Division(2), Division(2, 1, sizes=(3, 5))])
        (Division(parts=2, rows=1, blocks=None, sizes=(3, 5), owner=None), [4])
    """
    if len(divisions) == 1:
        sizes = divisions[0].sizes
        return (divisions[0], [size]) if sizes is not None and sum(sizes) != size else None
    lengths = {size}
    for division in divisions:
        if division.sizes is not None and lengths != {sum(division.sizes)}:
            return division, sorted(lengths)
        lengths = {length for n in lengths for length in _part_lengths(n, division)}
    return None


def _part_lengths(size: int, division: Division) -> frozenset[int]:
    """The different lengths of the parts into which the rows of a dim are split. Only the last row may be shorter."""
    if division.owner is not None:
        return frozenset((0, size))
    if division.sizes is not None:  # not cached: sizes may be used only once
        return frozenset(sizes_of_parts(division))
    return _chunk_lengths(size, division)


@lru_cache(maxsize=1024)
def _chunk_lengths(size: int, division: Division) -> frozenset[int]:
    parts, rows = division.parts, division.rows or 1
    row = max(-(-size // rows), 1)
    full, last = divmod(size, row)
    if division.blocks is not None:
        cuts = [Cut(parts, index, rows, division.blocks) for index in range(parts)]
        return frozenset(full * _length(_parts_of_row(row, c)) + _length(_parts_of_row(last, c)) for c in cuts)
    ends = {0}  # the parts of a row have one length up to one of these
    for length in (row, last):
        step = max(-(-length // parts), 1)
        ends.update((length // step, length // step + 1))
    return frozenset(full * chunk(row, parts, at).length + chunk(last, parts, at).length for at in ends if at < parts)


def _length(runs: Iterable[Run]) -> int:
    return sum(run.length for run in runs)


def intersect(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[int, int, int]]:
    """The global indices that two lists of runs share: (position in a, position in b, length) each.

    Example:
        >>> intersect([Run(0, 4)], [Run(2, 1), Run(3, 5)])
        [(2, 0, 1), (3, 1, 1)]
    """
    if len(a) == len(b) == 1:  # by far the most frequent case
        (start_a, length_a), (start_b, length_b) = a[0], b[0]
        low, high = max(start_a, start_b), min(start_a + length_a, start_b + length_b)
        return [(low - start_a, low - start_b, high - low)] if low < high else []
    found = []
    at_a = 0
    for run_a in a:
        at_b = 0
        for run_b in b:
            low = max(run_a.start, run_b.start)
            high = min(run_a.start + run_a.length, run_b.start + run_b.length)
            if low < high:
                found.append((at_a + low - run_a.start, at_b + low - run_b.start, high - low))
            at_b += run_b.length
        at_a += run_a.length
    return found


def normalize_dim(dim: int, ndim: int) -> int | None:
    """`dim` counted from the front, or None if a tensor of `ndim` dims has no such dim.

    Example:
        >>> normalize_dim(-1, 3), normalize_dim(3, 3)
        (2, None)
    """
    return dim % ndim if -ndim <= dim < ndim else None


def dense_strides(shape: Sequence[int], like: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims have the memory order of the strides `like`.

    Example:
        >>> dense_strides((2, 3, 4)), dense_strides((2, 3), like=(1, 2))
        ((12, 4, 1), (1, 2))
    """
    order = range(len(shape)) if like is None else sorted(range(len(shape)), key=lambda dim: (-like[dim], dim))
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(list(order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
