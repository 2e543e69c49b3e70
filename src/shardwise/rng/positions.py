"""Where the elements of a block stand in the memory of the whole tensor, for any range of them. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.core.layout import Block, Run, block_of, dense_strides  # noqa: F401  # in the example

__all__ = ["Positions"]


class Positions:
    """The elements of a block, in their order, as runs of equal length in a contiguous tensor of `shape`.

    Example:
        >>> positions = Positions((4, 6), block_of((4, 6), ((Run(0, 4),), (Run(3, 3),))))  # the right half
        >>> positions.between(0, 4).tolist(), positions.before(6)
        ([3, 4, 5, 9], 3)
    """

    def __init__(self, shape: Sequence[int], block: Block) -> None:
        strides = dense_strides(shape)
        self.count = math.prod(block.shape)
        dim = len(shape)  # from here on the block is whole
        while dim and block.runs[dim - 1] == (Run(0, shape[dim - 1]),):
            dim -= 1
        self.length = math.prod(shape[dim:])
        first = 0
        if dim and len(block.runs[dim - 1]) == 1:  # and one run of the dim before
            dim -= 1
            first = block.runs[dim][0].start * strides[dim]
            self.length *= block.shape[dim]
        starts = torch.tensor([first])
        for outer in reversed(range(dim)):
            indices = torch.cat([torch.arange(run.start, run.start + run.length) for run in block.runs[outer]])
            starts = (indices[:, None] * strides[outer] + starts).reshape(-1)
        self.starts = starts

    @property
    def is_run(self) -> bool:
        """Whether all elements follow each other."""
        return len(self.starts) == 1

    def before(self, position: int) -> int:
        """How many elements of the block stand before `position` of the whole."""
        if not self.count:
            return 0
        run = int(torch.searchsorted(self.starts, position)) - 1  # the last that begins before it
        if run < 0:
            return 0
        return run * self.length + min(position - int(self.starts[run]), self.length)

    def between(self, low: int, high: int, device: torch.device | None = None) -> torch.Tensor:
        """Where the elements `low` to `high` of the block stand in the whole."""
        index, starts = torch.arange(low, high, device=device), self.starts.to(device)
        if self.is_run:
            return index + starts
        run = index // self.length
        return starts[run] + (index - run * self.length)
