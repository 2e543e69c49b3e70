"""Which elements of a block one thread fills, so that a call of Philox serves all of them where it can.

Pure arithmetic. Whatever is chosen here the numbers are the same: it is about speed alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from shardwise.rng.geometry import Extent, count_below, is_run
from shardwise.rng.recipe import Piece

__all__ = ["Launch", "launch_of"]

ALONE = -1
_TURNS = 4  # how many calls a thread makes one after the other, so that what it does once weighs less
_WARPS = 256  # from one element of a thread to its next where they do not share calls: neighbours in a warp stay so


class Launch(NamedTuple):
    """How many threads fill the elements [first, last) of a block, and the rest as the kernel has it."""

    threads: int
    shared: int
    first: int
    last: int
    base: int
    spread: int
    slab: int = 0
    inner: int = 0
    chunks: int = 1
    groups: int = 1


@lru_cache(maxsize=4096)
def launch_of(extents: tuple[Extent, ...], piece: Piece, values: int, vector: int, threads: int) -> Launch | None:
    """The launch for what the block has of a piece; None if nothing. `threads` are those that torch starts.

    Example:
        >>> from shardwise.core.layout import Run
        >>> launch_of((Extent((Run(100, 50),), 1),), Piece(0, 1000, 0), values=4, vector=1, threads=8)
        Launch(threads=8, shared=0, first=0, last=50, base=0, spread=8, slab=50, inner=1, chunks=1, groups=2)
    """
    first, last = count_below(extents, piece.start), count_below(extents, piece.stop)
    if first == last:
        return None
    if vector > 1:
        launch = _neighbours(extents, piece, first, last, values)
    else:
        launch = _turns(extents, piece, first, last, values, threads)
    return launch or Launch(-(-(last - first) // (_WARPS * values)) * _WARPS, ALONE, first, last, first, _WARPS)


def _neighbours(extents: tuple[Extent, ...], piece: Piece, first: int, last: int, values: int) -> Launch | None:
    """A call serves neighbours: those of one call must stand together in the block."""
    lead = 0
    if is_run(extents):
        lead = (extents[0].runs[0].start - piece.start) % values
    elif any(extent.stride % values for extent in extents[:-1]) or any(
        run.start % values or run.length % values for run in extents[-1].runs
    ):
        return None
    base = (first + lead) // values * values - lead
    return Launch(-(-(last - base) // values), 0, first, last, base, 1)


def _turns(
    extents: tuple[Extent, ...], piece: Piece, first: int, last: int, values: int, threads: int
) -> Launch | None:
    """A call serves elements that are `threads` apart: a number of whole rows along one of the dims."""
    dim = _dim_of_turns(extents, piece, threads)
    if dim is None:
        return None
    stride, inner, slab = extents[dim].stride, _elements(extents[dim + 1 :]), _elements(extents[dim:])
    spread = threads // stride * inner
    group = spread * values
    if _elements(extents[:dim]) > 1:
        # each slab begins elsewhere in the calls of torch's threads; there are groups for the worst of them
        groups, chunks = _shared_out(group - inner + slab, group)
        base, end = first // slab * chunks, ((last - 1) // slab + 1) * chunks
    else:
        begin = sum(extent.runs[0].start * extent.stride for extent in extents[: dim + 1])
        lead = (begin - piece.start) % (threads * values) // stride * inner
        groups, chunks = _shared_out(lead + slab, group)
        base, end = (first + lead) // (group * groups), -(-(last + lead) // (group * groups))
    return Launch((end - base) * spread, dim, first, last, base, spread, slab, inner, chunks, groups)


def _shared_out(elements: int, group: int) -> tuple[int, int]:
    """How many groups make a chunk, and how many chunks hold the elements."""
    groups = -(-elements // group)
    chunks = -(-groups // _TURNS)
    return -(-groups // chunks), chunks


def _dim_of_turns(extents: tuple[Extent, ...], piece: Piece, threads: int) -> int | None:
    """The outermost dim of which `threads` is whole rows, and the block has enough of them for two to share a call."""
    for dim, (runs, stride) in enumerate(extents):
        whole = threads % stride == 0 and piece.start % stride == 0 and len(runs) == 1
        if whole and runs[0].length >= threads // stride * 2:
            return dim
    return None


def _elements(extents: tuple[Extent, ...]) -> int:
    return math.prod(extent.size for extent in extents)
