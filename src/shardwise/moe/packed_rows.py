"""Rows of several tensors as one tensor of bytes, so that one exchange carries them all.

Each row has the bytes of a row of each tensor, one after another, at offsets that their dtypes can be viewed at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["PackedRows", "packed_rows"]


class PackedRows(NamedTuple):
    """Where the parts of a row of bytes are.

    Args:
        parts: for each tensor the first byte, the byte after its last, and the dtype.
        size: the bytes of a row.
    """

    parts: tuple[tuple[int, int, torch.dtype], ...]
    size: int

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        """Memory for so many rows, in the dtype of the first tensor."""
        dtype = self.parts[0][2]
        return torch.empty((rows, self.size // dtype.itemsize), dtype=dtype, device=device)

    def views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in packed rows: matrices that share their memory."""
        found = []
        for start, end, dtype in self.parts:
            whole = packed if dtype is packed.dtype else packed.view(dtype)
            found.append(whole[:, start // dtype.itemsize : end // dtype.itemsize])
        return found


def packed_rows(parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> PackedRows:
    """How rows of these shapes and dtypes are packed.

    Example:
        >>> packed_rows([((3,), torch.bfloat16), ((2,), torch.float32)])
        PackedRows(parts=((0, 6, torch.bfloat16), (8, 16, torch.float32)), size=16)
    """
    found, end, largest = [], 0, 1
    for shape, dtype in parts:
        item = dtype.itemsize
        start = -(-end // item) * item
        end, largest = start + math.prod(shape) * item, max(largest, item)
        found.append((start, end, dtype))
    return PackedRows(tuple(found), -(-end // largest) * largest)
