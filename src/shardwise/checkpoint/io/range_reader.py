"""Reads exact byte ranges of files and sums them in the same pass.

A directory is kept open while it is read. Files are opened relative to it, so all of them belong to one checkpoint,
even if another one takes its name. If the checkpoint was replaced or removed meanwhile, a missing file is no sign of
damage: `Replaced` is raised, and the reader starts over.

Files are read through the page cache, whose read-ahead works while the bytes before are checksummed. Runs with gaps
shorter than a page are read together with the gaps: the system reads full pages in any case.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from shardwise.checkpoint.format.checksum import PartSum
from shardwise.checkpoint.io.block_writer import PAGE, STRIDE, Count
from shardwise.checkpoint.partition.boxes import ByteRuns, byte_runs
from shardwise.errors import CheckpointError

__all__ = [
    "Absent",
    "FileReader",
    "LocalFile",
    "OpenDirectory",
    "PartKey",
    "ReadableDirectory",
    "ReadableFile",
    "Replaced",
    "not_here",
    "retry_replaced",
]

MOST_OPEN = 64
TRIES = 20  # attempts of a reader while writers replace the checkpoint

T = TypeVar("T")
PartKey = tuple[str, int, tuple[tuple[int, int], ...]]  # file, first byte of a block, slices in the block


class Replaced(CheckpointError):
    """The checkpoint was replaced or removed while it was read."""


class Absent(CheckpointError):
    """There is no checkpoint of this name on a rank's disk; other hosts may have it."""


def retry_replaced(attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is called again if the checkpoint was replaced meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return attempt()
        except Replaced:
            pass
    return attempt()


@runtime_checkable
class ReadableFile(Protocol):
    """An open file: its size, and reads of byte ranges."""

    size: int

    def read_into(self, view: memoryview, at: int) -> int:
        """Read at most `len(view)` bytes from byte `at` on. Returns their number, 0 at the end of the file."""
        ...

    def will_read(self, at: int, length: int, *, dense: bool) -> None:
        """Announce that this range is read next: all of it (`dense`), or most of its pages."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


@runtime_checkable
class ReadableDirectory(Protocol):
    """The directory of a checkpoint, local or remote, while it is read."""

    def __enter__(self) -> ReadableDirectory: ...

    def __exit__(self, *exception: object) -> None: ...

    def error(self, problem: str, hint: str) -> CheckpointError:
        """The error for a bad file: damage, or `Replaced` if the directory was replaced."""
        ...

    def open(self, file: str, what: str, *, links: bool = False) -> ReadableFile:
        """Open a file for reading."""
        ...

    def read(self, file: str, what: str, *, links: bool = False) -> bytes:
        """The bytes of a small file."""
        ...

    def contains(self, file: str) -> bool:
        """Whether it has an entry of this name."""
        ...


class LocalFile:
    """A regular file of a local or mounted file system."""

    def __init__(self, fd: int) -> None:
        status = os.fstat(fd)
        self.descriptor = fd
        self.size = status.st_size
        self._written = status.st_mtime_ns, status.st_ctime_ns

    def read_into(self, view: memoryview, at: int) -> int:
        """Read at most `len(view)` bytes from byte `at` on. Returns their number, 0 at the end of the file."""
        return os.preadv(self.descriptor, (view,), at)

    def will_read(self, at: int, length: int, *, dense: bool) -> None:
        """Start to read this range into the page cache; for a dense one the system does it by itself."""
        if not dense:
            os.posix_fadvise(self.descriptor, at, length, os.POSIX_FADV_WILLNEED)

    def is_touched(self) -> bool:
        """Whether its times of the last write and the last change have changed since it was opened.

        Programs can set the first, and not the second.
        """
        status = os.fstat(self.descriptor)
        return (status.st_mtime_ns, status.st_ctime_ns) != self._written

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class OpenDirectory:
    """A directory kept open for reading its files."""

    def __init__(self, path: Path, missing: str = "there is no directory") -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            known = isinstance(error, FileNotFoundError | NotADirectoryError)
            why = "" if known else f" that can be read ({error.strerror if isinstance(error, OSError) else error})"
            raise (Absent if known else CheckpointError)(
                f"{missing} {str(path)[:200]}{why}", hint="a checkpoint is a directory with an index.json"
            ) from None

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    @property
    def descriptor(self) -> int:
        """The descriptor of the directory."""
        return self._fd

    def is_current(self) -> bool:
        """Whether its path still refers to it."""
        try:
            there, here = os.stat(self.path), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def error(self, problem: str, hint: str) -> CheckpointError:
        """The error for a bad file: damage, or `Replaced` if the directory was replaced."""
        if self.is_current():
            return CheckpointError(problem, hint=hint)
        return Replaced(
            f"{self.path} was replaced or removed while it was read", hint="read a checkpoint that no job overwrites"
        )

    def open(self, file: str, what: str, *, links: bool = False) -> LocalFile:
        """Open a regular file for reading; refuses pipes, which would block, and links, unless they are allowed."""
        path = self.path / file
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
        try:
            fd = os.open(file, flags, dir_fd=self._fd)
        except (OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) else errno.EINVAL  # a null byte in the name
            why = "is a symbolic link" if code == errno.ELOOP else f"cannot be read ({os.strerror(code or 0)})"
            raise self.error(f"{what}: {path} {why}", "the checkpoint is incomplete or damaged") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(f"{what}: {path} is not a regular file", hint="the checkpoint is damaged")
        return LocalFile(fd)

    def read(self, file: str, what: str, *, links: bool = False) -> bytes:
        """The bytes of a small file."""
        opened = self.open(file, what, links=links)
        data = bytearray(opened.size)
        try:
            view, at = memoryview(data), 0
            while at < len(data) and (got := opened.read_into(view[at:], at)):
                at += got
        except OSError as error:
            raise self.error(f"{what}: {file} cannot be read ({error.strerror})", "is the disk damaged?") from None
        finally:
            opened.close()
        return bytes(data[:at])

    def contains(self, file: str) -> bool:
        """Whether it has an entry of this name."""
        try:
            os.stat(file, dir_fd=self._fd)
        except OSError:
            return False
        return True


def not_here(what: str, file: str, host: str) -> CheckpointError:
    """The error for a file that no rank has."""
    return CheckpointError(
        f"{what}: {file} is on the disk of {host}, and on no disk of the processes that read it",
        hint=f"hosts do not share the disks of this checkpoint: run on {host} as well, or copy its files",
    )


def _sum_runs(data: np.ndarray, runs: Iterable[ByteRuns], sums: PartSum) -> None:
    """Sum runs of a block, which follow each other in `data`."""
    at = 0
    for first, count, pitch, length in runs:
        sums.add(data[at : at + count * length].reshape(count, length), first, pitch)
        at += count * length


class FileReader:
    """Reads exact ranges of the files of a checkpoint; counts the bytes.

    Args:
        directory: the checkpoint.
        files: the sizes of its files.
        count: called with the bytes of each read.
        links: whether files may be links.
        hosts: the hosts of files that are on one disk alone.
        gap: runs with shorter gaps are read together with the gaps. A page by default: the system reads full pages, and
            one call takes less time than one for each run. Less where the bytes read are to be those needed.
    """

    def __init__(
        self,
        directory: ReadableDirectory,
        files: Mapping[str, int],
        count: Count = lambda n: None,
        *,
        links: bool = False,
        hosts: Mapping[str, str] | None = None,
        gap: int = PAGE,
    ) -> None:
        self.bytes_read = 0
        self._gap = gap
        self.fetched: dict[PartKey, np.ndarray] = {}  # parts in files that are not here, as bytes
        self._hosts = hosts or {}
        self._links = links
        self._directory = directory
        self._sizes = files
        self.count = count  # called with the bytes of each read
        self._open: dict[str, ReadableFile] = {}
        self._buffer = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def opened(self, name: str, what: str) -> ReadableFile:
        """A file whose size matches the index."""
        file = self._open.pop(name, None)
        if file is None:
            if name in self._hosts and not self._directory.contains(name):
                raise not_here(what, name, self._hosts[name])
            file = self._directory.open(name, what, links=self._links)
            have, want = file.size, self._sizes[name]
            if have != want:
                file.close()
                raise CheckpointError(
                    f"{what}: {name} has {have:,} bytes instead of {want:,}", hint="the file is truncated or damaged"
                )
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
        self._open[name] = file  # the most recently used is last
        return file

    def is_touched(self, names: Iterable[str]) -> bool:
        """Whether one of these files may have been written to since it was opened."""
        return any(isinstance(file := self._open.get(name), LocalFile) and file.is_touched() for name in names)

    def read_part(
        self,
        name: str,
        start: int,
        sizes: Sequence[int],
        part: Sequence[slice],
        itemsize: int,
        out: np.ndarray | None,
        what: str,
        sums: PartSum | None = None,
    ) -> None:
        """Read a part of the block at byte `start` densely into `out`, and add it to `sums`.

        With None as `out` it is read through a small buffer, for the sums alone.
        """
        runs = byte_runs(sizes, part, itemsize)
        held = self.fetched.get((name, start, tuple([(piece.start, piece.stop) for piece in part])))
        if held is not None:
            if out is not None:
                out[:] = held
            if sums is not None:
                _sum_runs(held, runs, sums)
            return
        file = self.opened(name, what)
        try:
            self._read_runs(file, start, runs, out, sums, f"{what}: {name}")
        except OSError as error:
            raise self._directory.error(
                f"{what}: {name} cannot be read ({error.strerror})", "the disk may be damaged"
            ) from None

    def _read_runs(
        self,
        file: ReadableFile,
        start: int,
        runs: Iterable[ByteRuns],
        out: np.ndarray | None,
        sums: PartSum | None,
        what: str,
    ) -> None:
        at = 0
        for first, count, pitch, length in runs:
            dense = count == 1 or pitch - length < self._gap
            if dense or 4 * length >= pitch:  # most pages are needed
                file.will_read(start + first, (count - 1) * pitch + length, dense=dense)
            step = max(1, STRIDE // (length if count == 1 else pitch))
            for row in range(0, count, step):
                shape = min(step, count - row), length
                size = shape[0] * length
                part = None if out is None else out[at : at + size]
                if shape[0] == 1:
                    self._read_run(file, length, part, start, first + row * pitch, sums, what)
                else:
                    self._rows(file, shape, part, start, first + row * pitch, pitch, sums, what)
                at += size

    def _rows(
        self,
        file: ReadableFile,
        shape: tuple[int, int],
        out: np.ndarray | None,
        start: int,
        first: int,
        pitch: int,
        sums: PartSum | None,
        what: str,
    ) -> None:
        """Read rows of a block."""
        count, length = shape
        if pitch - length >= self._gap:
            rows = (self._small(count * length) if out is None else out).reshape(shape)
            for row, at in zip(rows, range(start + first, start + first + count * pitch, pitch), strict=True):
                self._read(file, row, at, what)
        else:
            span = self._small(count * pitch)
            self._read(file, span[: (count - 1) * pitch + length], start + first, what)
            rows = span.reshape(count, pitch)[:, :length]
            if out is not None:
                out.reshape(shape)[:] = rows
        if sums is not None:
            sums.add(rows, first, pitch)

    def _read_run(
        self,
        file: ReadableFile,
        length: int,
        out: np.ndarray | None,
        start: int,
        first: int,
        sums: PartSum | None,
        what: str,
    ) -> None:
        """Read one run of a block; it is summed while the data is in the CPU cache."""
        for at in range(0, length, STRIDE):
            size = min(STRIDE, length - at)
            part = self._small(size) if out is None else out[at : at + size]
            self._read(file, part, start + first + at, what)
            if sums is not None:
                sums.add(part.reshape(1, -1), first + at, 0)

    def _small(self, size: int) -> np.ndarray:
        """The reader's own buffer: what it had before is overwritten."""
        if len(self._buffer) < size:
            self._buffer = np.empty(max(size, STRIDE), dtype=np.uint8)
        return self._buffer[:size]

    def _read(self, file: ReadableFile, out: np.ndarray, at: int, what: str) -> None:
        view = out.data
        while len(view):
            got = file.read_into(view, at)
            if not got:
                raise CheckpointError(f"{what} ends at byte {at:,}, before its blocks do", hint="the file is truncated")
            view, at = view[got:], at + got
            self.bytes_read += got
            self.count(got)
