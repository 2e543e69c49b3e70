"""Assigns elements of a block to threads, so that elements of one Philox call share it where possible.

Integer arithmetic only. The assignment affects speed, not the numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from shardwise.rng.block_geometry import Extent, count_below, is_run
from shardwise.rng.cuda.torch_kernels import TorchLaunch

__all__ = ["BlockLaunch", "block_launch"]

ALONE = -1
_TURNS = 4  # calls of Philox in a thread, to amortize its setup
_WARPS = 256  # distance between the elements of a thread if they share no calls: accesses of a warp stay coalesced


class BlockLaunch(NamedTuple):
    """A launch that fills the elements [first, last) of a block: the number of threads, and the kernel's arguments."""

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
def block_launch(
    extents: tuple[Extent, ...], torch_launch: TorchLaunch, values: int, vector: int, threads: int
) -> BlockLaunch | None:
    """Our launch for the elements of the block in a launch of torch; None if there are none. `threads`: torch's.

    Example:
        >>> from shardwise.core.layout import Run
        >>> block_launch((Extent((Run(100, 50),), 1),), TorchLaunch(0, 1000, 0), values=4, vector=1, threads=8)
        BlockLaunch(threads=8, shared=0, first=0, last=50, base=0, spread=8, slab=50, inner=1, chunks=1, groups=2)
    """
    first, last = count_below(extents, torch_launch.start), count_below(extents, torch_launch.stop)
    if first == last:
        return None
    if vector > 1:
        launch = _neighbours(extents, torch_launch, first, last, values)
    else:
        launch = _turns(extents, torch_launch, first, last, values, threads)
    return launch or BlockLaunch(-(-(last - first) // (_WARPS * values)) * _WARPS, ALONE, first, last, first, _WARPS)


def _neighbours(
    extents: tuple[Extent, ...], torch_launch: TorchLaunch, first: int, last: int, values: int
) -> BlockLaunch | None:
    """Calls shared by consecutive elements: all elements of a call must be in the block."""
    lead = 0
    if is_run(extents):
        lead = (extents[0].runs[0].start - torch_launch.start) % values
    elif any(extent.stride % values for extent in extents[:-1]) or any(
        run.start % values or run.length % values for run in extents[-1].runs
    ):
        return None
    base = (first + lead) // values * values - lead
    return BlockLaunch(-(-(last - base) // values), 0, first, last, base, 1)


def _turns(
    extents: tuple[Extent, ...], torch_launch: TorchLaunch, first: int, last: int, values: int, threads: int
) -> BlockLaunch | None:
    """Calls shared by elements at the distance `threads`: a number of complete rows along one of the dims."""
    dim = _dim_of_turns(extents, torch_launch, threads)
    if dim is None:
        return None
    stride, inner, slab = extents[dim].stride, _elements(extents[dim + 1 :]), _elements(extents[dim:])
    spread = threads // stride * inner
    group = spread * values
    if _elements(extents[:dim]) > 1:
        # each slab starts at another position of torch's calls; the number of groups is for the worst case
        groups, chunks = _shared_out(group - inner + slab, group)
        base, end = first // slab * chunks, ((last - 1) // slab + 1) * chunks
    else:
        begin = sum(extent.runs[0].start * extent.stride for extent in extents[: dim + 1])
        lead = (begin - torch_launch.start) % (threads * values) // stride * inner
        groups, chunks = _shared_out(lead + slab, group)
        base, end = (first + lead) // (group * groups), -(-(last + lead) // (group * groups))
    return BlockLaunch((end - base) * spread, dim, first, last, base, spread, slab, inner, chunks, groups)


def _shared_out(elements: int, group: int) -> tuple[int, int]:
    """The number of groups in a chunk, and the number of chunks for the elements."""
    groups = -(-elements // group)
    chunks = -(-groups // _TURNS)
    return -(-groups // chunks), chunks


def _dim_of_turns(extents: tuple[Extent, ...], torch_launch: TorchLaunch, threads: int) -> int | None:
    """The outermost dim along which `threads` is a number of complete rows, with enough rows to share calls."""
    for dim, (runs, stride) in enumerate(extents):
        is_aligned = threads % stride == 0 and torch_launch.start % stride == 0 and len(runs) == 1
        if is_aligned and runs[0].length >= threads // stride * 2:
            return dim
    return None


def _elements(extents: tuple[Extent, ...]) -> int:
    return math.prod(extent.size for extent in extents)
