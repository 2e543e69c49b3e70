"""Reads a box of a stored tensor from its blocks, and verifies the checksums of all processes together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from shardwise.checkpoint.format.checkpoint_index import Index, StoredBlock, StoredTensor
from shardwise.checkpoint.format.checksum import MODULUS, PartSum
from shardwise.checkpoint.io.host_memory import HostBuffer
from shardwise.checkpoint.io.range_reader import FileReader
from shardwise.checkpoint.partition.boxes import Box, byte_runs, intersection
from shardwise.errors import CheckpointError

__all__ = ["BlockSums", "PartSums", "Sums", "check_sums", "note_sums", "parts_of", "read_again", "read_box", "sum_box"]

BlockSums = dict[int, tuple[int, int]]  # for a box: bytes read and their checksum, by the number of the stored block
Sums = dict[tuple[str, Box], BlockSums]
PartSums = dict[int, PartSum]  # for a box: the sums of its part of each stored block, by the number of the block


_none = HostBuffer(0)


def read_box(
    files: FileReader, stored: StoredTensor, box: Box, memory: HostBuffer = _none
) -> tuple[torch.Tensor, BlockSums]:
    """The values of a box of a stored tensor, and the checksum of the part read of each block."""
    values, parts = _read(files, stored, box, memory, full=True)
    return values, _checksums(parts)


def sum_box(files: FileReader, stored: StoredTensor, box: Box) -> tuple[BlockSums, PartSums]:
    """The checksums of `read_box`, without its memory; and what `read_again` compares with."""
    parts: PartSums = {}
    for number, block, part in parts_of(stored, box):
        parts[number] = PartSum()
        _read_part(files, stored, block, part, None, parts[number])
    return _checksums(parts), parts


def read_again(files: FileReader, stored: StoredTensor, box: Box, memory: HostBuffer, before: PartSums) -> torch.Tensor:
    """The values of a box that was summed before. Raises if its bytes are not the same any more.

    The sum of pairs is compared: it misses changes of the highest bits alone. So checksums are compared as well if a
    file may have been written to.
    """
    names = {stored.blocks[number].file for number in before}
    full = files.is_touched(names)
    values, parts = _read(files, stored, box, memory, full=full)
    if not full and files.is_touched(names):
        full = True
        values, parts = _read(files, stored, box, HostBuffer.of(values), full=True)
    for number, sums in parts.items():
        if sums.pairs != before[number].pairs or (full and sums.checksum != before[number].checksum):
            block = stored.blocks[number]
            raise CheckpointError(
                f"tensor {stored.name}: {block.file} has changed since its block at {block.box.offset} was verified",
                hint="the disk is damaged, or another program writes to the file",
            )
    return values


def _read(
    files: FileReader, stored: StoredTensor, box: Box, memory: HostBuffer, *, full: bool
) -> tuple[torch.Tensor, PartSums]:
    itemsize = stored.dtype.itemsize
    data, values = memory.take(box.sizes, stored.dtype)
    parts: PartSums = {}
    for number, block, part in parts_of(stored, box):
        dense = _dense_range(box, part, itemsize)
        out, piece = _none.take(part.sizes, stored.dtype) if dense is None else (data[dense], None)
        parts[number] = PartSum(full=full)
        _read_part(files, stored, block, part, out, parts[number])
        if piece is not None:
            values[part.inside(box)] = piece
    return values, parts


def _read_part(
    files: FileReader, stored: StoredTensor, block: StoredBlock, part: Box, out: np.ndarray | None, sums: PartSum
) -> None:
    where, itemsize, what = part.inside(block.box), stored.dtype.itemsize, f"tensor {stored.name}"
    files.read_part(block.file, block.start, block.box.sizes, where, itemsize, out, what, sums)


def _checksums(parts: Mapping[int, PartSum]) -> BlockSums:
    return {number: (sums.nbytes, sums.checksum) for number, sums in parts.items()}


def parts_of(stored: StoredTensor, box: Box) -> Iterator[tuple[int, StoredBlock, Box]]:
    """The parts of a box in the blocks of a tensor, with the numbers of the blocks."""
    same = next((number for number, block in enumerate(stored.blocks) if block.box == box), None)
    if same is not None:  # blocks do not overlap: no other one has a part of the box
        yield same, stored.blocks[same], box
        return
    for number, block in enumerate(stored.blocks):
        part = intersection(block.box, box)
        if part is not None:
            yield number, block, part


def _dense_range(box: Box, part: Box, itemsize: int) -> slice | None:
    """The byte range of a part in the memory of the box, if it is contiguous."""
    first, *others = byte_runs(box.sizes, part.inside(box), itemsize)
    if others or first.number != 1:
        return None
    return slice(first.start, first.start + first.length)


# ---------------------------------------------------------------- verifying


def note_sums(sums: Sums, stored: StoredTensor, box: Box, found: BlockSums) -> None:
    """Store the checksums of a box; all replicas of a box must have the same."""
    if sums.setdefault((stored.name, box), found) != found:
        number = next(n for n in found if sums[stored.name, box].get(n) != found[n])
        raise _damaged(stored, number)


def check_sums(index: Index, gathered: Sequence[Sums]) -> None:
    """Compare the checksums of all processes with the index; raises for the first block that differs."""
    merged: Sums = {}
    for sums in gathered:
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
                    f"tensor {name}: the ranks together do not read each element exactly once",
                    hint="every process of the mesh must call load with the same state",
                )
            if total != block.checksum:
                raise _damaged(stored, number)


def _damaged(stored: StoredTensor, number: int) -> CheckpointError:
    block = stored.blocks[number]
    return CheckpointError(
        f"tensor {stored.name}: its block at {block.box.offset} in {block.file} does not match its checksum; nothing "
        "was loaded",
        hint="the file is damaged: load an older checkpoint",
    )
