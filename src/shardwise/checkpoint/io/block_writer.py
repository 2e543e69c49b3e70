"""Writes block files: safetensors files, sequentially and with direct I/O.

The safetensors package is not used: blocks are written without a copy of the state and checksummed in the same pass,
and readers (range_reader.py) validate a byte range before they allocate memory for it. Any safetensors reader can read
the files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from shardwise.checkpoint.format.checksum import MODULUS, checksum
from shardwise.checkpoint.format.stored_dtypes import stored_as

__all__ = ["BlockFile", "BlockToWrite", "FileWriter", "as_bytes", "block_header", "write_blocks"]

PAGE = 4096
BUFFER = 2 << 20  # bytes of one write: larger ones are no faster, and leave the CPU's cache
STRIDE = 1 << 19  # bytes read or written and checksummed at a time, while they are in the CPU's own cache
Count = Callable[[int], None]


class BlockToWrite(NamedTuple):
    """A block to write: its name in the file, dtype, sizes, and a function that returns it in host memory."""

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
    """The row-major bytes of a tensor in host memory; without a copy if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # with at most one element any stride counts as contiguous, but a view as bytes needs stride 1
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


def block_header(items: Sequence[BlockToWrite]) -> tuple[bytes, list[int]]:
    """The header of a file of these blocks, padded to full pages, and the first byte of each block in the file."""
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


@runtime_checkable
class BlockFile(Protocol):
    """A new file that is written from its begin to its end."""

    written: int

    def __enter__(self) -> BlockFile: ...

    def __exit__(self, kind: Any, *rest: Any) -> None: ...

    def put(self, data: np.ndarray) -> None:
        """Append bytes."""
        ...


def write_blocks(file: BlockFile, items: Sequence[BlockToWrite], count: Count) -> tuple[int, list[tuple[int, int]]]:
    """Write a block file and flush it to disk. Returns its size, and the start and checksum of each block."""
    header, starts = block_header(items)
    sums = []
    with file:
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
    """Writes a new file sequentially in large buffers, with direct I/O if the file system supports it."""

    def __init__(self, path: Path) -> None:
        self.written = 0
        self._buffer = mmap.mmap(-1, BUFFER)  # page-aligned, as direct I/O requires
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
            length = -(-self._filled // PAGE) * PAGE  # full pages; the file is truncated below
            self._array[self._filled : length] = 0
            self._flush(length)
            os.ftruncate(self._fd, self.written)
        os.fsync(self._fd)

    def _set_direct(self, on: bool) -> bool:
        """Turn direct I/O on or off. Returns whether that changed anything."""
        flag = getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, before | flag if on else before & ~flag)
        except OSError:  # not supported by the file system
            return False
        return bool(flag) and bool(before & flag) != on
