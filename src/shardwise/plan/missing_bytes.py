"""The bytes that ranks lack of their blocks in the goal: a lower bound on the bytes that must move.

Computed dim by dim on the coordinates of the axes involved, never rank by rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from shardwise.core.layout import Division, blocks_of_parts, sizes_of_parts, starts_of
from shardwise.core.mesh import DeviceMesh
from shardwise.plan.state import Dims, Problem, Splits, common_beginning, division_of

__all__ = ["missing"]

Cuts = tuple[Division, ...]  # of each split of a dim, major first
Places = Sequence[np.ndarray]  # for each cut the part of each rank: arrays that broadcast to all ranks involved
ROUNDING = 1e-12


def missing(problem: Problem, dims: Dims) -> float:
    """Bytes that a rank lacks for the goal if `dims` are split in this way, on average over the ranks."""
    found = problem.missing_of.get(dims)
    if found is None:
        if problem.same_mesh:
            lacks = problem.goal_mean - _shared_elements(problem, dims) * problem.itemsize
        else:
            lacks = _missing_between_meshes(problem, dims) * problem.itemsize
        found = problem.missing_of[dims] = lacks if lacks > ROUNDING * problem.goal_mean else 0.0
    return found


def _shared_elements(problem: Problem, dims: Dims) -> float:
    """The average number of elements that a rank has of its block in the goal.

    The average of the product over the dims is the product of the averages, if the dims vary independently.
    """
    if not problem.nbytes:
        return 0.0
    shared = [_shared_of_dim(problem.sizes, *dim) for dim in zip(problem.shape, dims, problem.goal, strict=True)]
    varying = [axis for dim in shared for axis in dim.varies_along]
    if len(set(varying)) == len(varying):
        return math.prod([dim.average for dim in shared])
    constant = math.prod([dim.average for dim in shared if not dim.varies_along])
    ways = zip(problem.shape, dims, problem.goal, shared, strict=True)
    tables = [_shared_on_mesh(problem.sizes, size, *way) for size, *way, dim in ways if dim.varies_along]
    product = reduce(np.multiply, tables)
    return constant * float(product.sum()) / product.size


class SharedIndices(NamedTuple):
    """The indices of a dim that a rank has before and after: their average number, and the axes on which it depends."""

    average: float
    varies_along: tuple[int, ...]


@lru_cache(maxsize=16384)
def _shared_of_dim(sizes: tuple[int, ...], size: int, have: Splits, want: Splits) -> SharedIndices:
    """Each index has one owner before and one after. So ranks share size / parts of them on average, if no axis counts
    twice; an axis that counts twice is repeated in `SharedIndices`."""
    axes, common = len(sizes), common_beginning(have, want)
    splits = have + want[common:]
    parts = math.prod([sizes[split % axes] for split in splits])
    nested = len(splits) == len(have) or common == len(have)
    if nested and size % parts == 0 and max(splits, default=0) < axes:
        return SharedIndices(size / parts, ())
    return SharedIndices(size / parts, tuple([split % axes for split in splits]))


@lru_cache(maxsize=4096)
def _shared_on_mesh(sizes: tuple[int, ...], size: int, have: Splits, want: Splits) -> np.ndarray:
    """The number of indices of a dim that a rank has before and after: an array over the axes that split it."""
    return _shared(size, *_cut_on_mesh(sizes, have), *_cut_on_mesh(sizes, want))


@lru_cache(maxsize=1024)
def _cut_on_mesh(sizes: tuple[int, ...], splits: Splits) -> tuple[Cuts, Places]:
    axes = len(sizes)
    places = [
        np.arange(sizes[split % axes]).reshape([-1 if a == split % axes else 1 for a in range(axes)])
        for split in splits
    ]
    return _cuts(sizes, splits), places


def _cuts(sizes: tuple[int, ...], splits: Splits) -> Cuts:
    axes = len(sizes)
    return tuple([division_of(split // axes, sizes[split % axes]) for split in splits])


def _missing_between_meshes(problem: Problem, dims: Dims) -> float:
    """The elements that a rank lacks if the goal is on another mesh, on average over the ranks of that mesh."""
    if not problem.nbytes:
        return 0.0
    source, target = problem.mesh, problem.target.mesh
    before, after = _positions_in_both(source, target)
    product = np.ones(len(before), dtype=np.int64)
    for size, have, want in zip(problem.shape, dims, problem.goal, strict=True):
        having = [source.coordinates[before, split % source.ndim] for split in have]
        wanting = [target.coordinates[after, split % target.ndim] for split in want]
        product = product * _shared(size, _cuts(source.shape, have), having, _cuts(target.shape, want), wanting)
    parts = math.prod([target.shape[split % target.ndim] for splits in problem.goal for split in splits])
    wanted = math.prod(problem.shape) * target.grid_size // parts  # by all ranks together
    return (wanted - int(product.sum())) / target.grid_size


@lru_cache(maxsize=256)
def _positions_in_both(one: DeviceMesh, other: DeviceMesh) -> tuple[np.ndarray, np.ndarray]:
    """The positions in both grids of the ranks that are in both meshes."""
    _, first, second = np.intersect1d(one.grid_ranks, other.grid_ranks, assume_unique=True, return_indices=True)
    return first, second


# ---------------------------------------------------------------- one dim


def _shared(size: int, have: Cuts, having: Places, want: Cuts, wanting: Places) -> np.ndarray:
    """The number of indices of a dim that ranks have under both divisions."""
    if any(cut.rows for cut in have + want):
        return _shared_by_owners(size, have, having, want, wanting)
    start, stop = _extent(size, have, having)
    goal_start, goal_stop = _extent(size, want, wanting)
    return np.asarray(np.maximum(np.minimum(stop, goal_stop) - np.maximum(start, goal_start), 0))


def _extent(size: int, cuts: Cuts, places: Places) -> tuple[np.ndarray | int, np.ndarray | int]:
    """Begin and end of the one run that remains after plain cuts."""
    start, length = 0, size
    for cut, place in zip(cuts, places, strict=True):
        step = -(-length // cut.parts)
        begin = np.minimum(place * step, length)
        start, length = start + begin, np.minimum(step, length - begin)
    return start, start + length


def _shared_by_owners(size: int, have: Cuts, having: Places, want: Cuts, wanting: Places) -> np.ndarray:
    pairs, lengths = _owner_pairs(size, have, want)
    wanted = _owner(have, having) * math.prod([cut.parts for cut in want]) + _owner(want, wanting)
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    return np.where(pairs[at] == wanted, lengths[at], 0)


def _owner(cuts: Cuts, places: Places) -> np.ndarray | int:
    """The number of each rank's part, with the first cut major."""
    number = 0
    for cut, place in zip(cuts, places, strict=True):
        number = number * cut.parts + place
    return number


@lru_cache(maxsize=256)
def _owner_pairs(size: int, have: Cuts, want: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """The parts of two divisions of a dim that have indices in common, in order, and the number of these."""
    starts, owners = _owned_runs(size, have)
    other_starts, other_owners = _owned_runs(size, want)
    bounds = np.union1d(starts, other_starts)
    before = owners[np.searchsorted(starts, bounds, side="right") - 1]
    after = other_owners[np.searchsorted(other_starts, bounds, side="right") - 1]
    pairs, which = np.unique(before * math.prod([cut.parts for cut in want]) + after, return_inverse=True)
    lengths = np.diff(bounds, append=size)
    return pairs, np.bincount(which, lengths).astype(np.int64)


def _owned_runs(size: int, cuts: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """The dim as runs of indices of one owner each: where they begin, in order, and the owners."""
    start, inside, length = np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, size)
    part_size, owner = np.full(1, size), np.zeros(1, np.int64)  # the length and the number of the part a run belongs to
    for cut in cuts:
        if cut.sizes is not None or cut.owner is not None:
            at, part, start, inside, length = _split_as_given(cut, start, inside, length)
            part_size = part_size[at] if cut.sizes is None else np.array(sizes_of_parts(cut))[part]
            owner = owner[at] * cut.parts + part
            continue
        mine, owners, before = _blocks(cut)
        row_length = -(-part_size // max(cut.rows or 0, 1))
        at, row, start, inside, length = _split(start, inside, length, 0 * inside, row_length)
        part_size, owner, row_length = part_size[at], owner[at], row_length[at]
        row_start = row * row_length
        step = -(-np.minimum(row_length, part_size - row_start) // len(owners))
        at, block, start, inside, length = _split(start, inside, length, row_start, step)
        part_size, owner, row_length = part_size[at], owner[at], row_length[at]
        row, row_start, step = row[at], row_start[at], step[at]
        part = owners[block]
        # only the last row may be shorter; blocks before this one are full
        full_rows, rest = part_size // row_length, part_size % row_length
        of_full = _part_length(row_length, mine, part)
        inside = inside - row_start - block * step + before[block] * step + row * of_full
        part_size = full_rows * of_full + _part_length(rest, mine, part)
        owner = owner * cut.parts + part
    order = np.argsort(start)
    return start[order], owner[order]


def _split_as_given(
    cut: Division, start: np.ndarray, inside: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Runs cut where the parts of a given division begin: the run each piece is of, its part, the runs."""
    if cut.sizes is None:
        return np.arange(len(start)), np.full(len(start), cut.owner), start, inside, length
    sizes, starts = np.array(cut.sizes), np.array(starts_of(cut.sizes, sum(cut.sizes)))
    mine, owners, _ = _blocks(cut if cut.blocks is not None else Division(cut.parts))
    before = np.empty_like(sizes)  # the number of indices of its part before a block
    before[mine] = np.cumsum(sizes[mine], -1) - sizes[mine]
    first = np.searchsorted(starts, inside, side="right") - 1  # of equal starts the last: others are empty
    count = np.searchsorted(starts, inside + length - 1, side="right") - first
    at = np.repeat(np.arange(len(count)), count)
    block = first[at] + np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(inside[at], starts[block])
    high = np.minimum(inside[at] + length[at], starts[block] + sizes[block])
    held = high > low
    at, block, low, high = at[held], block[held], low[held], high[held]
    return at, owners[block], start[at] + low - inside[at], low - starts[block] + before[block], high - low


@lru_cache(maxsize=256)
def _blocks(cut: Division) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks of each part; the part of each block; the number of earlier blocks of that part."""
    plain = cut.blocks is None
    mine = np.arange(cut.parts)[:, None] if plain else np.array(blocks_of_parts(cut.parts, cut.blocks))
    owners, before = np.empty(mine.size, np.int64), np.empty(mine.size, np.int64)
    owners[mine] = np.arange(cut.parts)[:, None]
    before[mine] = np.arange(mine.shape[1])
    return mine, owners, before


def _part_length(size: np.ndarray, mine: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The length of one part of a row of this size, whose blocks are those of `torch.chunk`."""
    step = -(-size // mine.size)
    return np.clip(size[:, None] - mine[part] * step[:, None], 0, step[:, None]).sum(-1)


def _split(
    start: np.ndarray, inside: np.ndarray, length: np.ndarray, origin: np.ndarray, step: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Runs cut at the multiples of `step`, counted from `origin`: the run of each, the multiple, the new runs."""
    first = (inside - origin) // step
    count = (inside + length - 1 - origin) // step - first + 1
    at = np.repeat(np.arange(len(count)), count)
    multiple = first[at] + np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(inside[at], origin[at] + multiple * step[at])
    high = np.minimum(inside[at] + length[at], origin[at] + (multiple + 1) * step[at])
    return at, multiple, start[at] + low - inside[at], low, high - low
