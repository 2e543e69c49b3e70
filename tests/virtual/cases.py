"""Moves between two meshes of one world, for virtual ranks and for real ones: (ranks, placements) before and after."""

from __future__ import annotations

from typing import Any

from shardwise import Partial, Replicate, Shard

Ranks = list[Any]
Side = tuple[Ranks, list[Any]]

EXCHANGES: dict[str, tuple[Side, Side]] = {
    "(2,2) to (4,)": (([[0, 1], [2, 3]], [Shard(0), Shard(1)]), ([0, 1, 2, 3], [Shard(0)])),
    "(4,) to (2,2)": (([0, 1, 2, 3], [Shard(0)]), ([[0, 1], [2, 3]], [Shard(1), Shard(0)])),
    "replicas to (2,2)": (([0, 1, 2, 3], [Replicate()]), ([[0, 1], [2, 3]], [Shard(1), Shard(0)])),
    "permuted": (([0, 1, 2, 3], [Shard(0)]), ([3, 1, 0, 2], [Shard(0)])),
    "permuted replicas": (([0, 1, 2, 3], [Replicate()]), ([3, 1, 0, 2], [Replicate()])),
    "permuted sums": (([[0, 2], [1, 3]], [Partial(), Shard(1)]), ([[3, 1], [2, 0]], [Shard(1), Shard(1)])),
    "disjoint": (([0, 1], [Shard(0)]), ([2, 3], [Shard(0)])),
    "disjoint, another dim": (([0, 1], [Shard(0)]), ([2, 3], [Shard(1)])),
    "onto a part": (([0, 1, 2, 3], [Shard(0)]), ([1, 3], [Shard(1)])),
    "onto one": (([0, 1, 2, 3], [Partial()]), ([2], [Replicate()])),
    "from a part": (([2, 1], [Shard(1)]), ([0, 1, 2, 3], [Shard(0)])),
    "from one": (([3], [Replicate()]), ([[0, 1], [2, 3]], [Replicate(), Shard(0)])),
    "sums": (([[0, 1], [2, 3]], [Partial(), Shard(0)]), ([0, 1, 2, 3], [Partial()])),
    "averages to products": (([0, 1, 2], [Partial("avg")]), ([[3, 2]], [Shard(1), Partial("product")])),
}
