"""Who writes which box of which tensor: every box once, by one of those that hold it, evenly by bytes.

A pure function of layouts, so that all ranks come to the same answer without a word.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwise.checkpoint.boxes import Box, Held, cut

__all__ = ["Share", "Shared", "share_out"]

SPLIT = 1 << 20  # bytes; replicas above this are written in parts by several of their holders


class Shared(NamedTuple):
    """A tensor to be written: its name, bytes of an element, and its boxes with their holders."""

    name: str
    itemsize: int
    held: Sequence[Held]


class Share(NamedTuple):
    """A box that one rank writes; `source` says which held box it is a part of."""

    name: str
    box: Box
    source: Held


def share_out(tensors: Iterable[Shared]) -> dict[int, list[Share]]:
    """For each rank the boxes that it writes.

    Boxes of one holder are its own. The others go, the largest first, to the holder that has least to write so far.

    Example:
        >>> held = Held(Box((0,), (4,)), (slice(0, 4),), (0, 1))
        >>> shares = share_out([Shared("a", 4, [held]), Shared("b", 4, [held])])
        >>> [[share.name for share in shares[rank]] for rank in (0, 1)]
        [['a'], ['b']]
    """
    shares: dict[int, list[Share]] = defaultdict(list)
    load: dict[int, int] = defaultdict(int)
    choices: list[tuple[int, int, Share]] = []
    for name, itemsize, held in tensors:
        for source in held:
            size = source.box.numel * itemsize
            if len(source.ranks) == 1:
                shares[source.ranks[0]].append(Share(name, source.box, source))
                load[source.ranks[0]] += size
                continue
            for part in cut(source.box, len(source.ranks)) if size > SPLIT else [source.box]:
                choices.append((-part.numel * itemsize, len(choices), Share(name, part, source)))
    _deal(choices, shares, load)
    return dict(shares)


def _deal(choices: list[tuple[int, int, Share]], shares: dict[int, list[Share]], load: Mapping[int, int]) -> None:
    """Give each box to the holder with the least load; one queue of loads for each set of holders that occurs."""
    loads = dict(load)
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for negative, _, share in sorted(choices):
        ranks = share.source.ranks
        queue = queues.get(ranks)
        if queue is None:
            queue = queues[ranks] = [(loads.get(rank, 0), rank) for rank in ranks]
            heapq.heapify(queue)
        while queue[0][0] != loads.get(queue[0][1], 0):  # it got something from another queue meanwhile
            heapq.heapreplace(queue, (loads.get(queue[0][1], 0), queue[0][1]))
        rank = queue[0][1]
        loads[rank] = loads.get(rank, 0) - negative
        heapq.heapreplace(queue, (loads[rank], rank))
        shares[rank].append(share)
