"""Block files: safetensors files written once from front to back, and read in exact ranges.

The format (8 bytes of length, a JSON header, the data) is written and read here and not by the safetensors package:
blocks go to disk past the page cache without a copy of the state, with checksums made on the way, and readers must
know that a range lies in the file before anything is allocated for it. Files are the same to any safetensors reader.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.boxes import rows_of
from shardwise.checkpoint.checksum import MODULUS, checksum, sum_of_rows
from shardwise.checkpoint.dtypes import stored_as
from shardwise.errors import CheckpointError

__all__ = ["FileReader", "FileWriter", "Item", "as_bytes", "block_header", "read_all", "write_blocks"]

PAGE = 4096
BUFFER = 8 << 20  # bytes that go to disk at a time
STRIDE = 1 << 20  # bytes that are read or summed at a time, so that they are still in the cache
SECTOR = 512  # runs shorter than this are read with what lies between them: a disk has nothing smaller
MOST_OPEN = 64
Count = Callable[[int], None]


class Item(NamedTuple):
    """A block to be written: its name in the file, dtype, sizes, and how to get it as a tensor in host memory."""

    key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    get: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        numel = 1
        for size in self.sizes:
            numel *= size
        return numel * self.dtype.itemsize


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in host memory, row-major; without a copy where it lies so."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def block_header(items: Sequence[Item]) -> tuple[bytes, list[int]]:
    """The header of a file of these blocks, filled up to whole pages, and where each block starts in the file."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, []
    for item in items:
        name, sizes = stored_as(item.dtype, item.sizes)
        described[item.key] = {"dtype": name, "shape": sizes, "data_offsets": [at, at + item.nbytes]}
        starts.append(at)
        at += item.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return len(text).to_bytes(8, "little") + text, [start + len(text) + 8 for start in starts]


def write_blocks(path: Path, items: Sequence[Item], count: Count) -> tuple[int, list[tuple[int, int]]]:
    """Write a block file and flush it to disk; its bytes, and start and checksum of each block."""
    header, starts = block_header(items)
    sums = []
    with FileWriter(path) as file:
        file.put(np.frombuffer(header, dtype=np.uint8))
        for item in items:
            data = as_bytes(item.get())
            total = 0
            for first in range(0, len(data), STRIDE):
                part = data[first : first + STRIDE]
                total += checksum(part, first)
                file.put(part)
                count(len(part))
            sums.append(total % MODULUS)
    return file.written, list(zip(starts, sums, strict=True))


class FileWriter:
    """A new file, written from front to back in large pieces that go around the page cache where the disk allows it."""

    def __init__(self, path: Path) -> None:
        self.written = 0
        self._buffer = mmap.mmap(-1, BUFFER)  # begins at a page, which direct writes need
        self._array = np.frombuffer(self._buffer, dtype=np.uint8)
        self._filled = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._set_direct(True)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._fd)

    def put(self, data: np.ndarray) -> None:
        """Append bytes."""
        self.written += len(data)
        while len(data):
            part = data[: BUFFER - self._filled]
            self._array[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BUFFER:
                self._flush(BUFFER)

    def _flush(self, length: int) -> None:
        view = memoryview(self._buffer)[:length]
        while len(view):
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise
        self._filled = 0

    def _finish(self) -> None:
        if self._filled:
            length = -(-self._filled // PAGE) * PAGE  # whole pages, cut off again below
            self._array[self._filled : length] = 0
            self._flush(length)
            os.ftruncate(self._fd, self.written)
        os.fsync(self._fd)

    def _set_direct(self, on: bool) -> bool:
        """Turn direct writes on or off; whether that changed anything."""
        flag = getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, before | flag if on else before & ~flag)
        except OSError:  # a file system without them
            return False
        return bool(flag) and bool(before & flag) != on


# ---------------------------------------------------------------- reading


def open_regular(path: Path, what: str, *, links: bool = False) -> int:
    """A file opened for reading that is a plain file: no pipe that would block, no link unless they are allowed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{what}: {path} {why}", hint="the checkpoint is incomplete or damaged") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{what}: {path} is not a plain file", hint="the checkpoint is damaged")
    return fd


def read_all(path: Path, what: str, *, links: bool = False) -> bytes:
    """The bytes of a small file."""
    fd = open_regular(path, what, links=links)
    with os.fdopen(fd, "rb") as file:
        return file.read()


class FileReader:
    """The files of a checkpoint, read in exact ranges; counts the bytes that are read."""

    def __init__(
        self, directory: Path, files: Mapping[str, int], count: Count = lambda n: None, *, links: bool = False
    ) -> None:
        self.bytes_read = 0
        self._links = links
        self._directory = directory
        self._sizes = files
        self._count = count
        self._open: dict[str, int] = {}

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def descriptor(self, file: str, what: str) -> int:
        """The open file, which is as long as the index says."""
        fd = self._open.pop(file, None)
        if fd is None:
            fd = open_regular(self._directory / file, what, links=self._links)
            have, want = os.fstat(fd).st_size, self._sizes[file]
            if have != want:
                os.close(fd)
                raise CheckpointError(
                    f"{what}: {file} has {have:,} bytes instead of {want:,}", hint="the file is truncated or damaged"
                )
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
        self._open[file] = fd  # the last of the dict is the latest used
        return fd

    def read_part(
        self,
        file: str,
        start: int,
        sizes: Sequence[int],
        part: Sequence[slice],
        itemsize: int,
        out: np.ndarray,
        what: str,
    ) -> int:
        """Read a part of the block that starts at byte `start` into `out`, dense; its share of the block's checksum."""
        fd = self.descriptor(file, what)
        total, at = 0, 0
        for first, count, pitch, length in rows_of(sizes, part, itemsize):
            if count == 1 or length >= SECTOR:
                step = max(1, STRIDE // length)
            else:
                step = max(1, STRIDE // pitch)
            for row in range(0, count, step):
                rows = out[at : at + min(step, count - row) * length].reshape(-1, length)
                total += self._rows(fd, start, first + row * pitch, pitch, rows, f"{what}: {file}")
                at += rows.size
        return total % MODULUS

    def _rows(self, fd: int, start: int, first: int, pitch: int, rows: np.ndarray, what: str) -> int:
        """Read rows of a block; the sum of them."""
        count, length = rows.shape
        if count == 1:
            total = 0
            for at in range(0, length, STRIDE):
                part = rows[0, at : at + STRIDE]
                self._read(fd, part, start + first + at, what)
                total += checksum(part, first + at)
            return total
        if length >= SECTOR:
            for i in range(count):
                self._read(fd, rows[i], start + first + i * pitch, what)
        else:
            span = np.empty((count - 1) * pitch + length, dtype=np.uint8)
            self._read(fd, span, start + first, what)
            rows[:] = np.lib.stride_tricks.as_strided(span, rows.shape, (pitch, 1))
        return sum_of_rows(rows, first, pitch)

    def _read(self, fd: int, out: np.ndarray, at: int, what: str) -> None:
        view = memoryview(out.data)
        while len(view):
            got = os.preadv(fd, [view], at)
            if not got:
                raise CheckpointError(f"{what} ends at byte {at:,}, before its blocks do", hint="the file is truncated")
            view, at = view[got:], at + got
        self.bytes_read += len(out)
        self._count(len(out))
