"""Indices of a block's elements in the global tensor, with as few dims as possible. Integer arithmetic only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwise.core.layout import Block, Run

__all__ = ["Extent", "count_below", "extents_of", "index_of", "indices_between", "is_run"]


class Extent(NamedTuple):
    """One dim of a block: its runs of indices, and its stride in the global tensor."""

    runs: tuple[Run, ...]
    stride: int

    @property
    def size(self) -> int:
        """The number of indices in the block."""
        return sum(run.length for run in self.runs)


@lru_cache(maxsize=4096)
def extents_of(shape: tuple[int, ...], block: Block) -> tuple[Extent, ...]:
    """The dims of `block` in a contiguous tensor of `shape`; dims that are contiguous together are merged.

    Example:
        >>> rows = Block((2, 6), (2, 0), ((Run(2, 2),), (Run(0, 6),)))
        >>> extents_of((4, 6), rows)  # twelve consecutive elements
        (Extent(runs=(Run(start=12, length=12),), stride=1),)
    """
    joined: list[tuple[int, tuple[Run, ...]]] = [(1, (Run(0, 1),))]
    for size, runs in zip(shape, block.runs, strict=True):
        outer_size, outer = joined[-1]
        if runs == (Run(0, size),):
            joined[-1] = (outer_size * size, tuple(Run(run.start * size, run.length * size) for run in outer))
        elif len(outer) == 1 and outer[0].length == 1:
            begin = outer[0].start * size
            joined[-1] = (outer_size * size, tuple(Run(begin + run.start, run.length) for run in runs))
        else:
            joined.append((size, runs))
    sizes = [size for size, _ in joined]
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    return tuple(
        extent for (_, runs), stride in zip(joined, strides, strict=True) for extent in _extents_of_dim(runs, stride)
    )


def _extents_of_dim(runs: tuple[Run, ...], stride: int) -> tuple[Extent, ...]:
    """One extent; or two (across and within runs), if all runs have the same length and spacing.

    Example:
        >>> _extents_of_dim((Run(1, 2), Run(5, 2), Run(9, 2)), 1)
        (Extent(runs=(Run(start=0, length=3),), stride=4), Extent(runs=(Run(start=1, length=2),), stride=1))
    """
    if len(runs) == 1:
        return (Extent(runs, stride),)
    spacing = runs[1].start - runs[0].start
    before, start = divmod(runs[0].start, spacing)
    length = runs[0].length
    if start + length > spacing or any(run != Run(runs[0].start + at * spacing, length) for at, run in enumerate(runs)):
        return (Extent(runs, stride),)
    return Extent((Run(before, len(runs)),), stride * spacing), Extent((Run(start, length),), stride)


def is_run(extents: Sequence[Extent]) -> bool:
    """Whether the elements of the block are consecutive in the global tensor.

    Example:
        >>> is_run(extents_of((4, 6), Block((2, 6), (2, 0), ((Run(2, 2),), (Run(0, 6),)))))
        True
    """
    return len(extents) == 1 and len(extents[0].runs) == 1


def indices_between(extents: Sequence[Extent], low: int, high: int, device: torch.device | None = None) -> torch.Tensor:
    """The global indices of the elements `low` to `high` of the block, both counted in row-major order.

    Example:
        >>> columns = extents_of((4, 6), Block((4, 2), (0, 2), ((Run(0, 4),), (Run(2, 2),))))
        >>> indices_between(columns, 1, 8).tolist()
        [3, 8, 9, 14, 15, 20, 21]
    """
    element = torch.arange(low, high, device=device)
    index: torch.Tensor | int = 0
    for extent in reversed(extents[1:]):
        size = max(extent.size, 1)
        outer = element // size
        index = index + _indices_of_dim(extent, element - outer * size)
        element = outer
    return index + _indices_of_dim(extents[0], element)


def _indices_of_dim(extent: Extent, element: torch.Tensor) -> torch.Tensor:
    """The contribution of one dim to the global indices of a block's elements."""
    runs, stride = extent
    if len(runs) == 1:
        return (element + runs[0].start) * stride
    begins = list(itertools.accumulate((run.length for run in runs[:-1]), initial=0))
    ahead = torch.tensor([run.start - begin for run, begin in zip(runs, begins, strict=True)], device=element.device)
    run = torch.searchsorted(torch.tensor(begins, device=element.device), element, right=True) - 1
    return (element + ahead[run]) * stride


def index_of(extents: Sequence[Extent], element: int) -> int:
    """The global index of one element of the block, as in `indices_between`.

    Example:
        >>> columns = extents_of((4, 6), Block((4, 2), (0, 2), ((Run(0, 4),), (Run(2, 2),))))
        >>> [index_of(columns, element) for element in range(1, 8)]
        [3, 8, 9, 14, 15, 20, 21]
    """
    extent, inner = extents[0], extents[1:]
    at, rest = divmod(element, math.prod(e.size for e in inner))
    for run in extent.runs:
        if at < run.length:
            return (run.start + at) * extent.stride + (index_of(inner, rest) if inner else 0)
        at -= run.length
    raise IndexError("the block has fewer elements")


def count_below(extents: Sequence[Extent], index: int) -> int:
    """The number of elements of the block before global index `index`. They are its first elements.

    Example:
        >>> columns = extents_of((4, 6), Block((4, 2), (0, 2), ((Run(0, 4),), (Run(2, 2),))))
        >>> count_below(columns, 9), count_below(columns, 10)
        (3, 4)
    """
    if not extents:
        return 0
    extent, inner = extents[0], extents[1:]
    at, rest = divmod(index, extent.stride)
    before = sum(min(max(at - run.start, 0), run.length) for run in extent.runs)
    inside = any(run.start <= at < run.start + run.length for run in extent.runs)
    return before * math.prod(e.size for e in inner) + (count_below(inner, rest) if inside and rest else 0)
