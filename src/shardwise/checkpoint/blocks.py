"""A box of a stored tensor put together from its blocks, and the sums of what was read of them, which are verified.

Knows files and the index; knows nothing of DTensors, states or processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from shardwise.checkpoint.boxes import Box, common, rows_of
from shardwise.checkpoint.checksum import MODULUS
from shardwise.checkpoint.files import as_bytes
from shardwise.checkpoint.index import Index, StoredTensor
from shardwise.checkpoint.ranges import FileReader
from shardwise.errors import CheckpointError

__all__ = ["Memory", "Sums", "check_sums", "note_sums", "read_box"]

Found = dict[int, tuple[int, int]]  # of a box, for each stored block by number: bytes, and their sum
Sums = dict[tuple[str, Box], Found]


class Memory:
    """Host memory in one piece, handed out bit by bit: large pages, which many small pieces would not get."""

    def __init__(self, size: int) -> None:
        self._data = np.empty(size, dtype=np.uint8)
        self._used = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """That of a tensor itself, where it lies dense in host memory."""
        made = cls(0)
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            made._data = as_bytes(tensor)
        return made

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[np.ndarray, torch.Tensor]:
        """Memory as bytes and as a tensor; new where there is not enough left that is aligned."""
        size = math.prod(shape) * dtype.itemsize
        start = -(-self._used // 16) * 16  # as wide as the widest dtype
        data = self._data[start : start + size]
        if len(data) == size:
            self._used = start + size
        else:
            data = np.empty(size, dtype=np.uint8)
        tensor = torch.from_numpy(data).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        return data, tensor


_none = Memory(0)


def read_box(files: FileReader, stored: StoredTensor, box: Box, memory: Memory = _none) -> tuple[torch.Tensor, Found]:
    """The values of a box of a stored tensor, and the sums of what was read of each block."""
    itemsize = stored.dtype.itemsize
    data, values = memory.take(box.sizes, stored.dtype)
    found: Found = {}
    for number, block in enumerate(stored.blocks):
        part = common(block.box, box)
        if part is None:
            continue
        dense = _dense_range(box, part, itemsize)
        out, piece = _none.take(part.sizes, stored.dtype) if dense is None else (data[dense], None)
        where = part.inside(block.box)
        what = f"tensor {stored.name}"
        total = files.read_part(block.file, block.start, block.box.sizes, where, itemsize, out, what)
        if piece is not None:
            values[part.inside(box)] = piece
        found[number] = (len(out), total)
    return values, found


def _dense_range(box: Box, part: Box, itemsize: int) -> slice | None:
    """Where the bytes of a part lie in those of the box, if they follow each other."""
    first, *others = rows_of(box.sizes, part.inside(box), itemsize)
    if others or first.number != 1:
        return None
    return slice(first.start, first.start + first.length)


# ---------------------------------------------------------------- verifying


def note_sums(sums: Sums, stored: StoredTensor, box: Box, found: Found) -> None:
    """Keep the sums of a box; copies of one box must have the same."""
    if sums.setdefault((stored.name, box), found) != found:
        number = next(n for n in found if sums[stored.name, box].get(n) != found[n])
        raise _damaged(stored, number)


def check_sums(index: Index, told: Sequence[Sums]) -> None:
    """The sums of what all processes read must be those of the blocks; an error names the first that is not."""
    merged: Sums = {}
    for sums in told:
        for (name, box), found in sums.items():
            note_sums(merged, index.tensors[name], box, found)
    totals: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for (name, _), found in merged.items():
        for number, (size, total) in found.items():
            size_before, total_before = totals[name].get(number, (0, 0))
            totals[name][number] = (size_before + size, (total_before + total) % MODULUS)
    for name, blocks in totals.items():
        stored = index.tensors[name]
        for number, block in enumerate(stored.blocks):
            size, total = blocks.get(number, (0, 0))
            if size != block.box.numel * stored.dtype.itemsize:
                raise CheckpointError(
                    f"tensor {name}: the ranks together do not read all of it exactly once",
                    hint="every process of the mesh must call load with the same state",
                )
            if total != block.checksum:
                raise _damaged(stored, number)


def _damaged(stored: StoredTensor, number: int) -> CheckpointError:
    block = stored.blocks[number]
    return CheckpointError(
        f"tensor {stored.name}: its block at {block.box.offset} in {block.file} does not have the checksum it was "
        "saved with; nothing was loaded",
        hint="the file is damaged: load an older checkpoint",
    )
