"""Checkpoints at URLs of fsspec: object stores, `memory://`, `file://`. Written without renames, read by ranges.

Files with blocks have names of their own for each save, `blocks-RANK-TOKEN.safetensors`, and are written first. The
index is written last, by one call: a place without an index is no checkpoint. To overwrite is to replace the index;
the files of the old one are removed afterwards. So a reader finds the old checkpoint or the new one. Two jobs that save
to one URL never mix their files: one index counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from shardwise.checkpoint.format.checkpoint_index import INDEX, parse_index
from shardwise.checkpoint.io.range_reader import Replaced
from shardwise.errors import CheckpointError

__all__ = ["RemoteDirectory", "RemotePath", "RemoteStaging", "remote_errors"]

RANGE = 8 << 20  # bytes of one request
UPLOAD = 8 << 20  # bytes of one part of a file that is written
IN_FLIGHT = 4  # requests of one file at a time


class RemotePath(NamedTuple):
    """A URL with a protocol that fsspec knows."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL without its last part."""
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    def opened(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        try:
            import fsspec.core
        except ImportError as error:
            raise ImportError(f"{self.url} needs the package fsspec: pip install fsspec") from error
        with remote_errors(f"{self.url} cannot be opened"):
            return fsspec.core.url_to_fs(self.url.rstrip("/"))


@contextlib.contextmanager
def remote_errors(what: str) -> Iterator[None]:
    """Convert the errors of file systems, which may be of any class, to CheckpointError."""
    try:
        yield
    except (CheckpointError, ImportError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what}: {type(error).__name__}: {str(error)[:200]}", hint="check the URL, access rights and the network"
        ) from error


# ---------------------------------------------------------------- reading


class RemoteFile:
    """A file that is read by ranges: a few requests at a time, within the range that was announced."""

    def __init__(self, system: Any, path: str, size: int, shown: str) -> None:
        self.size = size
        self._system, self._path, self._shown = system, path, shown
        self._announced = (0, 0)
        self._requests: dict[int, Future[bytes]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def will_read(self, at: int, length: int, *, dense: bool) -> None:
        """Announce that this range is read next, in order."""
        self._announced = (at, at + length) if dense else (0, 0)
        self._requests.clear()

    def read_into(self, view: memoryview, at: int) -> int:
        """Read at most `len(view)` bytes from byte `at` on. Returns their number, 0 at the end of the file."""
        first, last = self._announced
        end = min(at + len(view), self.size)
        if end <= at:
            return 0
        if not first <= at < end <= last:
            data = self._request(at, end)
        else:
            number = (at - first) // RANGE
            for other in [key for key in self._requests if key < number]:
                del self._requests[other]
            for ahead in range(number, number + IN_FLIGHT):
                start = first + ahead * RANGE
                if start < last and ahead not in self._requests:
                    stop = min(start + RANGE, last, self.size)
                    self._requests[ahead] = self._pool().submit(self._request, start, stop)
            data = self._requests[number].result()[at - first - number * RANGE :]
        got = min(len(data), len(view))
        view[:got] = data[:got]
        return got

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="shardwise-read")
        return self._threads

    def _request(self, start: int, end: int) -> bytes:
        with remote_errors(f"{self._shown} cannot be read"):
            return self._system.cat_file(self._path, start=start, end=end)

    def close(self) -> None:
        """End the requests."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._requests.clear()


class RemoteDirectory:
    """A checkpoint at a URL, while it is read."""

    def __init__(self, path: RemotePath, missing: str = "there is no checkpoint") -> None:
        self.path = path
        self._missing = missing
        self._system, self._root = path.opened()
        self._index: bytes | None = None

    def __enter__(self) -> RemoteDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def error(self, problem: str, hint: str) -> CheckpointError:
        """The error for a bad file: damage, or `Replaced` if there is another index now."""
        if self._index is not None and _digest(self._system, self._root) != hashlib.sha256(self._index).digest():
            return Replaced(
                f"{self.path} was replaced or removed while it was read",
                hint="read a checkpoint that no job overwrites",
            )
        return CheckpointError(problem, hint=hint)

    def open(self, file: str, what: str, *, links: bool = False) -> RemoteFile:
        """Open a file for reading."""
        path = f"{self._root}/{file}"
        try:
            with remote_errors(f"{what}: {self.path}/{file} cannot be read"):
                known = self._system.info(path)
        except CheckpointError as error:
            raise self.error(error.problem, "the checkpoint is incomplete or damaged") from None
        if known.get("type") != "file" or not isinstance(known.get("size"), int) or (known.get("islink") and not links):
            raise CheckpointError(f"{what}: {self.path}/{file} is not a regular file", hint="the checkpoint is damaged")
        return RemoteFile(self._system, path, known["size"], f"{what}: {self.path}/{file}")

    def read(self, file: str, what: str, *, links: bool = False) -> bytes:
        """The bytes of a small file."""
        if file == INDEX and not self.contains(INDEX):
            raise CheckpointError(
                f"{self._missing} {str(self.path)[:200]}", hint="a checkpoint is a place with an index.json"
            )
        with remote_errors(f"{what}: {self.path}/{file} cannot be read"):
            data = self._system.cat_file(f"{self._root}/{file}")
        if file == INDEX:
            self._index = data
        return data

    def contains(self, file: str) -> bool:
        """Whether it has a file of this name."""
        with remote_errors(f"{self.path} cannot be read"):
            return self._system.isfile(f"{self._root}/{file}")


def _digest(system: Any, root: str) -> bytes:
    """The digest of the index that is there now; empty if there is none."""
    try:
        return hashlib.sha256(system.cat_file(f"{root}/{INDEX}")).digest()
    except Exception:
        return b""


# ---------------------------------------------------------------- writing


class RemoteWriter:
    """Writes one file in large parts."""

    def __init__(self, system: Any, path: str) -> None:
        self.written = 0
        self._file = system.open(path, "wb", block_size=UPLOAD)

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self._file.close()
            return
        with contextlib.suppress(Exception):  # what is left has no index
            getattr(self._file, "discard", self._file.close)()

    def put(self, data: np.ndarray) -> None:
        """Append bytes."""
        self._file.write(data.data)
        self.written += len(data)


class RemoteStaging(NamedTuple):
    """One save to a URL: a unique token for its files, and the digest of the index that it replaces."""

    target: RemotePath
    token: str
    before: bytes = b""

    @classmethod
    def prepare(cls, target: RemotePath, overwrite: bool) -> RemoteStaging:
        """Begin a save; raises if there is a checkpoint already."""
        if not target.name or target.name.endswith(":"):
            raise CheckpointError(f"{target} cannot be a checkpoint: it has no name", hint="use another URL")
        system, root = target.opened()
        with remote_errors(f"{target} cannot be saved"):
            before = _digest(system, root) if system.exists(f"{root}/{INDEX}") else b""
            if before and not overwrite:
                raise CheckpointError(f"{target} exists already", hint="use another name, or overwrite=True")
            if not before and system.isfile(root):
                raise CheckpointError(f"{target} is a file, and is not overwritten", hint="remove it yourself")
            system.makedirs(root, exist_ok=True)
        return cls(target, secrets.token_hex(8), before)

    def block_name(self, rank: int, part: int = 0) -> str:
        """The name of the file with a rank's blocks."""
        return f"blocks-{rank:05d}-{self.token}.safetensors"

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of writing."""
        with remote_errors(f"{self.target} cannot be written"):
            yield

    def is_here(self) -> bool:
        """Nothing to look for: the first process finds the files of the others in `finish`."""
        return True

    def writer(self, name: str) -> RemoteWriter:
        """A writer of a new file."""
        system, root = self.target.opened()
        return RemoteWriter(system, f"{root}/{name}")

    def finish(self, data: bytes) -> None:
        """Write the index, which makes the checkpoint exist; then remove the files of the one it replaces."""
        system, root = self.target.opened()
        with remote_errors(f"{self.target} cannot be saved"):
            system.invalidate_cache()
            sizes = {path.rpartition("/")[2]: size for path, size in self._files(system, root).items()}
            for name, size in parse_index(data).files.items():
                if sizes.get(name) != size:
                    raise CheckpointError(
                        f"{self.target}: {name} was written with {size:,} bytes, and has {sizes.get(name)} there",
                        hint="all processes must write to the same file system; memory:// is that of one process",
                    )
            if (_digest(system, root) if system.exists(f"{root}/{INDEX}") else b"") != self.before:
                raise CheckpointError(
                    f"another job saved to {self.target} at the same time; its checkpoint is kept, and this one is "
                    "discarded",
                    hint="use a different path for each job, or end the other one",
                )
            system.pipe_file(f"{root}/{INDEX}", data)
        for path in self._files(system, root):
            name = path.rpartition("/")[2]
            if self.before and name != INDEX and self.token not in name:
                with contextlib.suppress(Exception):  # not in the index: it costs space alone
                    system.rm_file(path)

    def _files(self, system: Any, root: str) -> dict[str, int]:
        return {path: known["size"] for path, known in system.find(root, maxdepth=1, detail=True).items()}

    def discard(self) -> None:
        """Remove the files of this save."""
        with contextlib.suppress(Exception):
            system, root = self.target.opened()
            for path in self._files(system, root):
                if self.token in path.rpartition("/")[2]:
                    system.rm_file(path)
            if not system.ls(root):
                system.rmdir(root)
