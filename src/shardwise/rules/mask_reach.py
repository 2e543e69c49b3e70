"""How far queries see by the values of an attention mask: a window of near keys, and the blocks of a ring they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.core.layout import Run

__all__ = ["Blocks", "Reach", "band_of", "reach_of", "turns_of"]

Blocks = Sequence[Sequence[Run]]  # the runs of each position of a ring


class Reach(NamedTuple):
    """The keys that queries see.

    Args:
        band: the largest number of keys before and after its own position that a query sees; None if it is unlimited.
        turns: the turns of a ring after which a rank has keys that its queries see, ascending.
    """

    band: tuple[int, int] | None
    turns: tuple[int, ...]


def reach_of(mask: torch.Tensor, queries: Blocks, keys: Blocks) -> Reach | None:
    """Read a mask of scores; minus infinity hides a key. None: all keys may be needed.

    A mask that hides no block is known by a few of its rows.

    Args:
        mask: (..., queries, keys); one row or column may be broadcast.
        queries: the runs of queries at each position of a ring.
        keys: the runs of keys.

    Example:
        >>> near = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).tril().triu(-1) == 0, -math.inf)
        >>> quarters = [[Run(start, 2)] for start in (0, 2, 4, 6)]
        >>> reach_of(near, quarters, quarters)
        Reach(band=(1, 0), turns=(0, 1))
    """
    if mask.dim() < 2:
        return None
    mask = _without_copies(mask)
    narrow = mask.shape[-2] < 2 or mask.shape[-1] < 2 or not _is_hidden(mask[..., 0, -1], mask[..., -1, 0])
    if narrow and _is_needed_everywhere(mask, queries, keys):
        return None
    seen = _seen(mask)
    turns = turns_of(seen, queries, keys)
    band = None if narrow else _band(seen)
    return None if band is None and len(turns) == len(keys) else Reach(band, turns)


def band_of(mask: torch.Tensor) -> tuple[int, int] | None:
    """The largest number of keys before and after its own position that a query sees; None if it is unlimited.

    Example:
        >>> near = torch.ones(8, 8).tril(1).triu(-2).bool()
        >>> band_of(torch.zeros(8, 8).masked_fill(~near, -math.inf))
        (2, 1)
    """
    if mask.dim() < 2 or mask.shape[-2] < 2 or mask.shape[-1] < 2:
        return None
    return _band(_seen(_without_copies(mask))) if _is_hidden(mask[..., 0, -1], mask[..., -1, 0]) else None


def turns_of(seen: torch.Tensor, queries: Blocks, keys: Blocks) -> tuple[int, ...]:
    """The turns of a ring after which a rank has keys that its queries see.

    Args:
        seen: by query and key, whether it is seen.
        queries: the runs of queries at each position of the ring.
        keys: the runs of keys.
    """
    rows, columns = _length(queries), _length(keys)
    if seen.shape[1] != columns:
        seen = seen.expand(-1, columns)
    by_block = torch.stack([_any([seen[:, run.start : run.start + run.length] for run in runs], 1) for runs in keys], 1)
    by_block = by_block.expand(rows, -1) if by_block.shape[0] != rows else by_block
    needed = torch.stack([_any([by_block[run.start : run.start + run.length] for run in runs], 0) for runs in queries])
    at = needed.nonzero()
    return tuple(sorted(set(((at[:, 0] - at[:, 1]) % len(keys)).tolist())))


def _any(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    found = parts[0].any(dim)
    for part in parts[1:]:
        found = found | part.any(dim)
    return found


def _length(blocks: Blocks) -> int:
    return max(run.start + run.length for runs in blocks for run in runs)


def _without_copies(mask: torch.Tensor) -> torch.Tensor:
    """A mask with one of its equal samples and heads."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """By query and key, whether some sample and head sees it; one sample at a time, to hold little."""
    first, *others = mask.reshape(-1, *mask.shape[-2:]).unbind(0)
    seen = first != -math.inf
    for other in others:
        seen |= other != -math.inf
    return seen


def _is_hidden(*corners: torch.Tensor) -> bool:
    return all(bool((corner == -math.inf).all()) for corner in corners)


def _is_needed_everywhere(mask: torch.Tensor, queries: Blocks, keys: Blocks) -> bool:
    """Whether the first and the last row of each run show that every turn is needed."""
    if mask.shape[-2] == 1:
        return len(turns_of(_seen(mask), queries, keys)) == len(keys)
    rows: list[int] = []
    placed: list[list[Run]] = []
    for runs in queries:
        ends = sorted({at for run in runs if run.length for at in (run.start, run.start + run.length - 1)})
        placed.append([Run(len(rows), len(ends))])
        rows += ends
    sample = mask.index_select(-2, torch.tensor(rows, device=mask.device))
    return len(turns_of(_seen(sample), placed, keys)) == len(keys)


def _band(seen: torch.Tensor) -> tuple[int, int]:
    """The largest distance to a key before and after."""
    some = seen.any(1)
    numbers = seen.view(torch.uint8)
    first, last = numbers.argmax(1), seen.shape[1] - 1 - numbers.flip(1).argmax(1)
    rows = torch.arange(seen.shape[0], device=seen.device)
    before, after = (torch.where(some, far, 0).clamp(min=0).amax() for far in (rows - first, last - rows))
    left, right = torch.stack([before, after]).tolist()
    return left, right
