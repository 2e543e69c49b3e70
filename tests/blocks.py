"""Blocks for tests: the part of a tensor that remains after some cuts."""

from collections.abc import Sequence

from shardwise.core import layout
from shardwise.core.layout import Block, Cut, runs_of


def block_of(shape: Sequence[int], cuts: Sequence[tuple[Cut, ...]]) -> Block:
    """The block of a tensor of `shape` that is left after the cuts of each dim."""
    return layout.block_of(shape, tuple(runs_of(size, tuple(of_dim)) for size, of_dim in zip(shape, cuts, strict=True)))
