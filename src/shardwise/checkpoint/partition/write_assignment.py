"""Which rank writes which box of which tensor: every box once, by a rank that holds it, balanced by bytes.

A pure function of layouts: all ranks compute the same assignment without communication. A rank that lacks some of the
tensors cannot know the bytes that they give to others: then only boxes of the same holders are balanced.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwise.checkpoint.partition.boxes import Box, HeldBox, split_box

__all__ = ["TensorToWrite", "WriteShare", "assign_writes"]

SPLIT = 1 << 20  # bytes; larger replicated boxes are split among the ranks that hold them


class TensorToWrite(NamedTuple):
    """A tensor to write: its name, bytes per element, and its boxes with the ranks that hold them."""

    name: str
    itemsize: int
    held: Sequence[HeldBox]


class WriteShare(NamedTuple):
    """A box that one rank writes; `source` is the held box that contains it."""

    name: str
    box: Box
    source: HeldBox


def assign_writes(tensors: Iterable[TensorToWrite], *, complete: bool = True) -> dict[int, list[WriteShare]]:
    """The boxes that each rank writes.

    A box on one rank is written by it. Other boxes are assigned, the largest first, to the rank with the fewest bytes
    so far among those that hold the box.

    Args:
        tensors: the tensors of this process, in the same order on all.
        complete: every process has all tensors. If not, the bytes that count are those of boxes with the same holders,
            which are known to all of these.

    Example:
        >>> held = HeldBox(Box((0,), (4,)), (slice(0, 4),), (0, 1))
        >>> shares = assign_writes([TensorToWrite("a", 4, [held]), TensorToWrite("b", 4, [held])])
        >>> [[share.name for share in shares[rank]] for rank in (0, 1)]
        [['a'], ['b']]
    """
    shares: dict[int, list[WriteShare]] = defaultdict(list)
    load: dict[int, int] = defaultdict(int)
    choices: list[tuple[int, int, WriteShare]] = []  # by size, then in the order of the tensors
    for name, itemsize, held in tensors:
        for source in held:
            size = source.box.numel * itemsize
            if len(source.ranks) == 1:
                shares[source.ranks[0]].append(WriteShare(name, source.box, source))
                load[source.ranks[0]] += size
                continue
            for part in split_box(source.box, len(source.ranks)) if size > SPLIT else [source.box]:
                choices.append((-part.numel * itemsize, len(choices), WriteShare(name, part, source)))
    if complete:
        _deal(choices, shares, load)
    else:
        by_holders: dict[tuple[int, ...], list[tuple[int, int, WriteShare]]] = defaultdict(list)
        for choice in choices:
            by_holders[choice[2].source.ranks].append(choice)
        for of_holders in by_holders.values():
            _deal(of_holders, shares, {})
    return dict(shares)


def _deal(
    choices: list[tuple[int, int, WriteShare]], shares: dict[int, list[WriteShare]], load: Mapping[int, int]
) -> None:
    """Assign each box to the rank with the least load; one priority queue for each set of ranks."""
    loads = dict(load)
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for negative, _, share in sorted(choices):
        ranks = share.source.ranks
        queue = queues.get(ranks)
        if queue is None:
            queue = queues[ranks] = [(loads.get(rank, 0), rank) for rank in ranks]
            heapq.heapify(queue)
        while queue[0][0] != loads.get(queue[0][1], 0):  # out of date: another queue increased the load
            heapq.heapreplace(queue, (loads.get(queue[0][1], 0), queue[0][1]))
        rank = queue[0][1]
        loads[rank] = loads.get(rank, 0) - negative
        heapq.heapreplace(queue, (loads[rank], rank))
        shares[rank].append(share)
