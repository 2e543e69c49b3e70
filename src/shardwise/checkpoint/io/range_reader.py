"""Reads exact byte ranges of files and checksums them in the same pass.

A directory is kept open while it is read. Files are opened relative to it, so all of them belong to one checkpoint,
even if another one takes its name. If the checkpoint was replaced or removed meanwhile, a missing file is no sign of
damage: `Replaced` is raised, and the reader starts over.

Long runs are read from the page cache if they are in it, otherwise with direct I/O: filling the page cache costs more
than the reading.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardwise.checkpoint.format.checksum import MODULUS, checksum, sum_of_rows
from shardwise.checkpoint.io.block_writer import BUFFER, PAGE, STRIDE, Count
from shardwise.checkpoint.partition.boxes import ByteRuns, byte_runs
from shardwise.errors import CheckpointError

__all__ = ["FileReader", "OpenDirectory", "Replaced", "retry_replaced"]

SECTOR = 512  # shorter runs are read together with the gaps between them: a disk reads no less
LONG = 4 << 20  # bytes of a run read at a time
MOST_OPEN = 64
TRIES = 20  # attempts of a reader while writers replace the checkpoint

T = TypeVar("T")


class Replaced(CheckpointError):
    """The checkpoint was replaced or removed while it was read."""


def retry_replaced(attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is called again if the checkpoint was replaced meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return attempt()
        except Replaced:
            pass
    return attempt()


class OpenDirectory:
    """A directory kept open for reading its files."""

    def __init__(self, path: Path, missing: str = "there is no directory") -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            known = isinstance(error, FileNotFoundError | NotADirectoryError)
            why = "" if known else f" that can be read ({error.strerror if isinstance(error, OSError) else error})"
            raise CheckpointError(
                f"{missing} {str(path)[:200]}{why}", hint="a checkpoint is a directory with an index.json"
            ) from None

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

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

    def open(self, file: str, what: str, *, links: bool = False) -> int:
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
        return fd

    def read(self, file: str, what: str, *, links: bool = False) -> bytes:
        """The bytes of a small file."""
        with os.fdopen(self.open(file, what, links=links), "rb") as opened:
            try:
                return opened.read()
            except OSError as error:
                raise self.error(f"{what}: {file} cannot be read ({error.strerror})", "is the disk damaged?") from None

    def contains(self, file: str) -> bool:
        """Whether it has an entry of this name."""
        try:
            os.stat(file, dir_fd=self._fd)
        except OSError:
            return False
        return True


class FileReader:
    """Reads exact ranges of the files of a checkpoint; counts the bytes."""

    def __init__(
        self, directory: OpenDirectory, files: Mapping[str, int], count: Count = lambda n: None, *, links: bool = False
    ) -> None:
        self.bytes_read = 0
        self._links = links
        self._directory = directory
        self._sizes = files
        self._count = count
        self._open: dict[str, int] = {}
        self._around: AroundCache | None = None

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        if self._around is not None:
            self._around.close()

    def descriptor(self, file: str, what: str) -> int:
        """The descriptor of a file, whose size matches the index."""
        fd = self._open.pop(file, None)
        if fd is None:
            fd = self._directory.open(file, what, links=self._links)
            have, want = os.fstat(fd).st_size, self._sizes[file]
            if have != want:
                os.close(fd)
                raise CheckpointError(
                    f"{what}: {file} has {have:,} bytes instead of {want:,}", hint="the file is truncated or damaged"
                )
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
        self._open[file] = fd  # the most recently used is last
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
        """Read a part of the block at byte `start` densely into `out`. Returns its part of the block's checksum."""
        fd = self.descriptor(file, what)
        try:
            return self._read_runs(fd, start, byte_runs(sizes, part, itemsize), out, f"{what}: {file}")
        except OSError as error:
            raise self._directory.error(
                f"{what}: {file} cannot be read ({error.strerror})", "the disk may be damaged"
            ) from None

    def _read_runs(self, fd: int, start: int, runs: Iterable[ByteRuns], out: np.ndarray, what: str) -> int:
        total, at = 0, 0
        for first, count, pitch, length in runs:
            if count > 1 and 4 * length >= pitch:  # most pages are needed: start read-ahead
                os.posix_fadvise(fd, start + first, count * pitch, os.POSIX_FADV_WILLNEED)
            if count == 1 or length >= SECTOR:
                step = max(1, STRIDE // length)
            else:
                step = max(1, STRIDE // pitch)
            for row in range(0, count, step):
                rows = out[at : at + min(step, count - row) * length].reshape(-1, length)
                total += self._rows(fd, start, first + row * pitch, pitch, rows, what)
                at += rows.size
        return total % MODULUS

    def _rows(self, fd: int, start: int, first: int, pitch: int, rows: np.ndarray, what: str) -> int:
        """Read rows of a block. Returns their checksum."""
        count, length = rows.shape
        if count == 1:
            return self._read_run(fd, rows[0], start, first, what)
        if length >= SECTOR:
            self._read_apart(fd, rows, start + first, pitch, what)
        else:
            span = np.empty((count - 1) * pitch + length, dtype=np.uint8)
            self._read(fd, span, start + first, what)
            rows[:] = np.lib.stride_tricks.as_strided(span, rows.shape, (pitch, 1))
        return sum_of_rows(rows, first, pitch)

    def _read_run(self, fd: int, run: np.ndarray, start: int, first: int, what: str) -> int:
        """Read one run of a block. Returns its checksum, computed while the data is in the CPU cache."""
        total = 0
        for at in range(0, len(run), LONG):
            part = run[at : at + LONG]
            self._read(fd, part, start + first + at, what)
            total += checksum(part, first + at)
        return total

    def _read_apart(self, fd: int, rows: np.ndarray, at: int, pitch: int, what: str) -> None:
        """Read rows with gaps between them: many short reads, so the loop is kept minimal."""
        count, length = rows.shape
        view, preadv = rows.reshape(-1).data, os.preadv
        for first in range(0, count * length, length):
            if preadv(fd, (view[first : first + length],), at) != length:
                raise CheckpointError(f"{what} cannot be read at byte {at:,}", hint="the file is truncated or damaged")
            at += pitch
        self._counted(count * length)

    def _read(self, fd: int, out: np.ndarray, at: int, what: str) -> None:
        view = out.data
        while len(view):
            got = self._some(fd, view, at)
            if not got:
                raise CheckpointError(f"{what} ends at byte {at:,}, before its blocks do", hint="the file is truncated")
            view, at = view[got:], at + got

    def _some(self, fd: int, view: memoryview, at: int) -> int:
        """One read: long runs by `AroundCache`, short ones through the page cache. Returns the number of bytes."""
        got = 0
        if len(view) >= STRIDE:
            if self._around is None:
                self._around = AroundCache()
            got = self._around.read(fd, view, at)
        got = got or os.preadv(fd, [view], at)
        self._counted(got)
        return got

    def _counted(self, count: int) -> None:
        self.bytes_read += count
        self._count(count)


class AroundCache:
    """Long reads of open files: from the page cache if the data is in it, otherwise with direct I/O.

    Direct reads are of full pages, into a page-aligned buffer, and are copied from there.
    """

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, BUFFER)
        self._array = np.frombuffer(self._buffer, dtype=np.uint8)
        self._of: tuple[int, int, int] | None = None
        self._opened: tuple[int, int] | None = None  # descriptors for the page cache and for direct I/O

    def read(self, fd: int, view: memoryview, at: int) -> int:
        """Read into `view`. Returns the number of bytes; 0 if the file does not support it."""
        opened = self._descriptors(fd)
        if opened is None:
            return 0
        asking, direct = opened
        try:
            return os.preadv(asking, [view], at, os.RWF_NOWAIT)
        except OSError:  # not in the cache
            pass
        skipped = at % PAGE
        wanted = min(BUFFER, -(-(skipped + len(view)) // PAGE) * PAGE)
        try:
            got = os.preadv(direct, [memoryview(self._buffer)[:wanted]], at - skipped)
        except OSError:
            return 0
        useful = max(0, min(got - skipped, len(view)))
        np.frombuffer(view, dtype=np.uint8)[:useful] = self._array[skipped : skipped + useful]
        return useful

    def _descriptors(self, fd: int) -> tuple[int, int] | None:
        """The same file opened twice more; None if that is not possible."""
        status = os.fstat(fd)
        key = (fd, status.st_dev, status.st_ino)
        if self._of != key:
            self.close()
            self._of = key
            name, flags = f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC
            try:
                direct = os.open(name, flags | os.O_DIRECT)
                asking = os.open(name, flags)
                os.posix_fadvise(asking, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
                self._opened = (asking, direct)
            except (OSError, AttributeError):
                return None
        return self._opened

    def close(self) -> None:
        """Close the file."""
        for fd in self._opened or ():
            os.close(fd)
        self._of, self._opened = None, None
