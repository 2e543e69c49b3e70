"""Blocks that did not change since an earlier checkpoint: its files are linked into the new one instead of written.

A block counts as unchanged if its tensor, box, dtype and checksum are those of the earlier one, and then its bytes,
which are read and compared: a checksum alone could miss a change. A file is linked if at least half of it is unchanged;
otherwise its blocks are written again, so that few bytes are kept that nobody needs. A checkpoint with linked files is
complete: it has its own directory entries, and stays when the earlier one is removed.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.format.checkpoint_index import Index, StoredBlock, StoredTensor
from shardwise.checkpoint.format.checksum import MODULUS, checksum
from shardwise.checkpoint.io.atomic_directory import Staging, disk_errors
from shardwise.checkpoint.io.block_writer import STRIDE, BlockToWrite, as_bytes
from shardwise.checkpoint.io.checkpoint_places import AnyStaging, open_place, place_of
from shardwise.checkpoint.io.range_reader import FileReader, OpenDirectory
from shardwise.checkpoint.operations.load_checkpoint import read_index
from shardwise.checkpoint.partition.write_assignment import WriteShare
from shardwise.errors import CheckpointError

__all__ = ["BaseCheckpoint", "Unchanged"]

Files = dict[int, list[tuple[WriteShare, BlockToWrite]]]


class Unchanged(NamedTuple):
    """The blocks of this process that are in files of the earlier checkpoint, by rank and position."""

    blocks: dict[tuple[int, int], tuple[str, StoredBlock]]

    def used(self, index: Index) -> Counter[str]:
        """Bytes of the earlier files that are still right."""
        found: Counter[str] = Counter()
        for name, block in self.blocks.values():
            found[block.file] += block.box.numel * index.tensors[name].dtype.itemsize
        return found


class BaseCheckpoint:
    """The earlier checkpoint, kept open while its blocks are compared and its files are linked."""

    def __init__(self, path: str | os.PathLike[str], staging: AnyStaging) -> None:
        if not isinstance(staging, Staging) or not isinstance(place_of(path), Path):
            raise CheckpointError(
                f"base={str(path)[:200]!r} with {staging.target}: files are linked within local file systems alone",
                hint="save without base, or to a path without a protocol",
            )
        opened = open_place(path)
        assert isinstance(opened, OpenDirectory)
        self._source = opened
        self._staging = staging
        try:
            self.index = read_index(opened)
            if self.index.hosts:
                raise CheckpointError(
                    f"base={str(path)[:200]!r} is on disks that hosts do not share", hint="save without base"
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the directory."""
        self._source.__exit__()

    def unchanged(self, files: Files) -> Unchanged:
        """The blocks to write whose bytes are in the earlier checkpoint."""
        found: dict[tuple[int, int], tuple[str, StoredBlock]] = {}
        by_box = {
            (name, block.box): (tensor, block) for name, tensor in self.index.tensors.items() for block in tensor.blocks
        }
        with FileReader(self._source, self.index.files) as reader:
            for rank, shares in files.items():
                for position, (share, item) in enumerate(shares):
                    known = by_box.get((share.name, share.box))
                    if known is not None and known[0].dtype is item.dtype and _same(reader, *known, item):
                        found[rank, position] = (share.name, known[1])
        return Unchanged(found)

    def link(self, used: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """The files that are linked, with their sizes, from the bytes that all processes found unchanged."""
        total: Counter[str] = Counter()
        for one in used:
            total.update(one)
        return {file: size for file, size in self.index.files.items() if 2 * total[file] >= size and total[file]}

    def make_links(self, files: Mapping[str, int]) -> None:
        """Link files into the staging directory; copy those that cannot be linked."""
        with disk_errors(f"{self._staging.target} cannot be saved"):
            for name, size in files.items():
                target = self._staging.directory / name
                try:
                    os.link(name, target, src_dir_fd=self._source.descriptor, follow_symlinks=False)
                except FileNotFoundError:
                    raise self._source.error(f"{name} is missing in {self._source.path}", "save without base") from None
                except OSError:  # another file system, or one without links
                    self._copy(name, target)
                if os.lstat(target).st_size != size:
                    raise CheckpointError(f"{name} of {self._source.path} has changed", hint="save without base")

    def _copy(self, name: str, target: Path) -> None:
        opened = self._source.open(name, "the base")
        with os.fdopen(os.dup(opened.descriptor), "rb") as source, target.open("xb") as out:
            opened.close()
            source.seek(0)
            shutil.copyfileobj(source, out, STRIDE)
            out.flush()
            os.fsync(out.fileno())


def _same(reader: FileReader, tensor: StoredTensor, block: StoredBlock, item: BlockToWrite) -> bool:
    """Whether a block has the bytes of the earlier one."""
    data = as_bytes(item.get())
    starts = range(0, len(data), STRIDE)
    if sum(checksum(data[at : at + STRIDE], at) for at in starts) % MODULUS != block.checksum:
        return False
    there = np.empty(min(len(data), STRIDE), dtype=np.uint8)
    for at in starts:
        part = data[at : at + STRIDE]
        out = there[: len(part)]
        whole = (slice(0, len(part)),)
        reader.read_part(block.file, block.start + at, (len(part),), whole, 1, out, f"tensor {tensor.name}")
        if not np.array_equal(part, out):
            return False
    return True
