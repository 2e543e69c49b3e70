"""How far queries see by the values of an attention mask: a window of near keys, a few far keys, blocks of a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.core.layout import Run

__all__ = ["Blocks", "Reach", "reach_of", "reach_of_function"]

Blocks = Sequence[Sequence[Run]]  # the runs of each position of a ring
CELL = 64  # keys that are looked at together
AT_ONCE = 1 << 22  # elements of a mask that are read at once
SPARSE = 0.75  # far keys are searched if queries see a smaller part of the cells between the first and the last
MANY = 0.4  # of all cells: if sampled queries see as many, no more rows are read
MOST_RUNS = 64  # of far keys, on a rank


class Reach(NamedTuple):
    """The keys that queries see.

    Args:
        band: the largest number of keys before and after its own position that a query sees; None if it is unlimited.
        turns: the turns of a ring after which a rank has keys that its queries see, ascending.
        causal: whether no query sees a key after its own position; False if this was not checked.
        far: keys outside of the band (sinks) that the queries at each position of a ring see.
    """

    band: tuple[int, int] | None
    turns: tuple[int, ...]
    causal: bool = False
    far: tuple[tuple[Run, ...], ...] = ()


def reach_of(mask: torch.Tensor, queries: Blocks, keys: Blocks) -> Reach | None:
    """Read a mask of scores; minus infinity hides a key. None: all keys may be needed.

    A mask that hides no block is recognized by a few of its rows.

    Args:
        mask: (..., queries, keys); one row or column may be broadcast.
        queries: the runs of queries at each position of a ring.
        keys: the runs of keys.

    Example:
        >>> near = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).tril().triu(-1) == 0, -math.inf)
        >>> quarters = [[Run(start, 2)] for start in (0, 2, 4, 6)]
        >>> reach_of(near, quarters, quarters)
        Reach(band=(1, 0), turns=(0, 1), causal=False, far=())
    """
    if mask.dim() < 2:
        return None
    mask = _without_copies(mask)
    one = mask.shape[-2] < 2 or mask.shape[-1] < 2
    wide = one or not _is_hidden(mask[..., 0, -1], mask[..., -1, 0])
    if wide and _is_needed_everywhere(mask, queries, keys):
        return None
    if one:
        turns = _turns(_by_block(mask, keys), queries, len(keys))
        return None if len(turns) == len(keys) else Reach(None, turns)

    def visible(start: int, count: int) -> torch.Tensor:
        return mask.narrow(-2, start, count)

    found = _read(visible, mask.shape[-2], keys)
    turns = _turns(found.by_block, queries, len(keys))
    band, far = _band(found), ()
    if _is_sparse(found) and (split := _split(visible, mask.shape[-2], queries)) is not None:
        band, far = split
    if wide and not far:
        return None if len(turns) == len(keys) else Reach(None, turns)
    return Reach(band, turns, far=far)


def reach_of_function(
    visible: Callable[[int, int], torch.Tensor], rows: int, queries: Blocks, keys: Blocks
) -> Reach | None:
    """`reach_of` for a mask that is a function. None: all keys may be needed.

    Args:
        visible: called with the first query and the number of queries; whether they see each key: (..., queries, keys).
        rows: the number of queries.
        queries: the runs of queries at each position of a ring.
        keys: the runs of keys.

    Example:
        >>> seen = torch.ones(8, 8).tril().triu(-1).bool()
        >>> quarters = [[Run(start, 2)] for start in (0, 2, 4, 6)]
        >>> reach_of_function(lambda start, count: seen[start : start + count], 8, quarters, quarters)
        Reach(band=(1, 0), turns=(0, 1), causal=True, far=())
    """
    found = _read(visible, rows, keys)
    left, right = _band(found)
    turns, columns = _turns(found.by_block, queries, len(keys)), _length(keys)
    if _is_sparse(found) and (split := _split(visible, rows, queries)) is not None:
        return Reach(split[0], turns, right == 0, split[1])
    # a band as wide as the sequence is no limit
    band = (left, right) if left < columns - 1 and right < columns - 1 else None
    return None if band is None and right and len(turns) == len(keys) else Reach(band, turns, right == 0)


# ---------------------------------------------------------------- reading


class _Seen(NamedTuple):
    """By query: the first and the last key that it sees, or the number of keys and -1; how many cells of keys it sees;
    the blocks of keys it sees."""

    first: torch.Tensor
    last: torch.Tensor
    cells: torch.Tensor
    by_block: torch.Tensor


def _read(visible: Callable[[int, int], torch.Tensor], rows: int, keys: Blocks) -> _Seen:
    """Read a mask, some rows at a time."""
    found: list[_Seen] = []
    start, count = 0, 1
    while start < rows:
        part = _without_copies(visible(start, min(count, rows - start)))
        cells = _cells(part)
        in_cells = _in_cells(keys, part)
        by_block = _by_block(cells, in_cells) if in_cells else _by_block(part, keys)
        found.append(_Seen(*_ends(part, cells), cells.sum(-1), by_block))
        start += part.shape[-2]
        count = max(1, AT_ONCE // (part.numel() // part.shape[-2]))
    return _Seen(*(torch.cat(column) for column in zip(*found, strict=True)))


def _in_cells(keys: Blocks, part: torch.Tensor) -> Blocks:
    """The runs in units of cells; empty if a run ends inside a cell."""
    columns = part.shape[-1]
    ends = {at for runs in keys for run in runs for at in (run.start, run.start + run.length)} - {columns}
    if any(at % CELL for at in ends):
        return ()
    return [[Run(run.start // CELL, -(-run.length // CELL)) for run in runs] for runs in keys]


def _ends(part: torch.Tensor, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last key that each query sees, for some sample and head: by cells of keys, then in a cell."""
    columns = part.shape[-1]
    some = cells.any(-1)
    numbers = cells.view(torch.uint8)
    ends = []
    for at, pick in ((numbers.argmax(-1), "amin"), (cells.shape[-1] - 1 - numbers.flip(-1).argmax(-1), "amax")):
        index = (at.unsqueeze(-1) * CELL + torch.arange(CELL, device=part.device)).clamp_(max=columns - 1)
        inside = _is_seen(part.gather(-1, index.expand(*part.shape[:-1], CELL)))
        inside = inside.reshape(-1, *inside.shape[-2:]).any(0)
        none = columns if pick == "amin" else -1
        ends.append(getattr(torch.where(inside & some.unsqueeze(-1), index, none), pick)(-1))
    return ends[0], ends[1]


def _cells(part: torch.Tensor) -> torch.Tensor:
    """By query and cell of `CELL` keys, whether some key of it is seen, for some sample and head."""
    columns = part.shape[-1]
    even = columns // CELL * CELL
    found = []
    if even:
        inner = part[..., :even]
        found.append(_any_of_last(inner.unflatten(-1, (-1, CELL))))
    if even < columns:
        found.append(_any_of_last(part[..., even:]).unsqueeze(-1))
    cells = torch.cat(found, -1)
    return cells.reshape(-1, *cells.shape[-2:]).any(0)


def _any_of_last(part: torch.Tensor) -> torch.Tensor:
    """Whether some key of the last dim is seen. Reducing numbers is several times faster than comparing each."""
    if part.dtype is torch.bool:
        return part.view(torch.uint8).amax(-1).view(torch.bool)
    return part.amax(-1) != -math.inf


def _is_seen(part: torch.Tensor) -> torch.Tensor:
    return part if part.dtype is torch.bool else part != -math.inf


def _by_block(part: torch.Tensor, keys: Blocks) -> torch.Tensor:
    """By query and block of keys, whether some key of it is seen, for some sample and head."""
    seen = []
    for runs in keys:
        of_runs = [
            _any_of_last(part if part.shape[-1] == 1 else part[..., run.start : run.start + run.length])
            for run in runs
            if run.length
        ]
        seen.append(torch.stack(of_runs).any(0) if of_runs else part.new_zeros(part.shape[:-1], dtype=torch.bool))
    if not seen:
        return part.new_zeros((part.shape[-2], 0), dtype=torch.bool)
    each = torch.stack(seen, -1)
    return each.reshape(-1, *each.shape[-2:]).any(0)


def _turns(by_block: torch.Tensor, queries: Blocks, count: int) -> tuple[int, ...]:
    """The turns of a ring after which a rank has keys that its queries see."""
    rows = _length(queries)
    by_block = by_block.expand(rows, -1) if by_block.shape[0] != rows else by_block
    needed = torch.stack(
        [torch.stack([by_block[run.start : run.start + run.length].any(0) for run in runs]).any(0) for runs in queries]
    )
    at = needed.nonzero()
    return tuple(sorted(set(((at[:, 0] - at[:, 1]) % count).tolist())))


def _band(seen: _Seen) -> tuple[int, int]:
    """The largest distance to a key before and after."""
    rows = torch.arange(seen.first.shape[0], device=seen.first.device)
    far = rows - torch.where(seen.last < 0, rows, seen.first), seen.last - rows
    before, after = (distance.clamp(min=0).amax() for distance in far)
    left, right = torch.stack([before, after]).tolist()
    return left, right


def _is_sparse(seen: _Seen) -> bool:
    """Whether queries see few of the cells between the first and the last key."""
    cells = torch.div(seen.last, CELL, rounding_mode="floor") - torch.div(seen.first, CELL, rounding_mode="floor") + 1
    between, counted = torch.stack([cells.clamp(min=0).sum(), seen.cells.sum()]).tolist()
    return counted < SPARSE * between


def _split(
    visible: Callable[[int, int], torch.Tensor], rows: int, queries: Blocks
) -> tuple[tuple[int, int], tuple[tuple[Run, ...], ...]] | None:
    """A band, and the keys outside of it that the queries at each position see; None if there are too many.

    A distant key is left out of the band if this makes the band narrower by more than the number of keys left out.
    """
    ends = _read_columns(visible, rows, queries)
    columns = ends.last.shape[0]
    places = torch.arange(columns, device=ends.last.device)
    far = torch.zeros_like(places, dtype=torch.bool)
    for distance in (ends.last - places, places - ends.first):
        ordered = distance.clamp(min=0).sort(descending=True).values
        kept = int((ordered + places).argmin())
        far |= distance > ordered[kept]
    chosen: list[tuple[Run, ...]] = []
    for row in (ends.needed & far).cpu():
        chosen.append(_runs_of(row))
        if len(chosen[-1]) > MOST_RUNS or 2 * sum(run.length for run in chosen[-1]) > columns:
            return None
    near = torch.where(far, 0, torch.stack([ends.last - places, places - ends.first])).clamp(min=0).amax(1)
    left, right = near.tolist()
    if not any(chosen) or left >= columns - 1 or right >= columns - 1:
        return None
    return (left, right), tuple(chosen)


class _Columns(NamedTuple):
    """By key, the first and the last query that sees it; by position of a ring and key, whether a query there sees it.

    For a key that no query sees, the first is beyond the last row and the last is negative.
    """

    first: torch.Tensor
    last: torch.Tensor
    needed: torch.Tensor


def _read_columns(visible: Callable[[int, int], torch.Tensor], rows: int, queries: Blocks) -> _Columns:
    """Read a mask, some rows at a time."""
    owner = torch.empty(rows, dtype=torch.int64)
    for at, runs in enumerate(queries):
        for run in runs:
            owner[run.start : run.start + run.length] = at
    found: _Columns | None = None
    start, count = 0, 1
    while start < rows:
        part = _is_seen(_without_copies(visible(start, min(count, rows - start))))
        part = part.reshape(-1, *part.shape[-2:]).any(0)
        size, columns = part.shape
        if found is None:
            none = torch.full((columns,), -columns, dtype=torch.int32, device=part.device)
            needed = torch.zeros(len(queries), columns, dtype=torch.bool, device=part.device)
            found = _Columns(none + (rows + 2 * columns), none, needed)
        numbers = torch.arange(start, start + size, dtype=torch.int32, device=part.device).unsqueeze(-1)
        torch.minimum(found.first, torch.where(part, numbers, found.first).amin(0), out=found.first)
        torch.maximum(found.last, torch.where(part, numbers, found.last).amax(0), out=found.last)
        of_part = owner[start : start + size]
        for at in of_part.unique().tolist():
            found.needed[at] |= part[(of_part == at).to(part.device)].any(0)
        start += size
        count = max(1, AT_ONCE // columns)
    assert found is not None, "a mask has rows"
    return found


def _runs_of(chosen: torch.Tensor) -> tuple[Run, ...]:
    """The runs of true elements."""
    edges = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    return tuple([Run(begin, end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True)])


def _length(blocks: Blocks) -> int:
    return max(run.start + run.length for runs in blocks for run in runs)


def _without_copies(mask: torch.Tensor) -> torch.Tensor:
    """A mask with one of its equal samples and heads."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _is_hidden(*corners: torch.Tensor) -> bool:
    return all(bool((corner == -math.inf).all()) for corner in corners)


def _is_needed_everywhere(mask: torch.Tensor, queries: Blocks, keys: Blocks) -> bool:
    """Whether the first and the last row of each run show that every turn is needed, and many keys in it."""
    if mask.shape[-2] == 1:
        return len(_turns(_by_block(mask, keys), queries, len(keys))) == len(keys)
    rows: list[int] = []
    placed: list[list[Run]] = []
    for runs in queries:
        ends = sorted({at for run in runs if run.length for at in (run.start, run.start + run.length - 1)})
        placed.append([Run(len(rows), len(ends))])
        rows += ends
    sample = mask.index_select(-2, torch.tensor(rows, device=mask.device))
    if len(_turns(_by_block(sample, keys), placed, len(keys))) < len(keys):
        return False
    cells = _cells(sample)
    return int(cells.sum()) >= MANY * cells.numel()
