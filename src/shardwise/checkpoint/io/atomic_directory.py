"""Atomic directories: written to a staging directory, flushed to disk, renamed. Also removes old checkpoints.

Every save has its own staging directory next to its target, `.NAME.saving-TOKEN`, and an owner record,
`.NAME.saving-TOKEN.owner`, which names the process; until it is complete, its own name does. Two jobs that save to one
path never share a file: the first to publish gets the name, the other an error. The next save in the same directory
removes the leftovers of dead processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.checkpoint.format.checkpoint_index import INDEX
from shardwise.checkpoint.io.block_writer import FileWriter
from shardwise.errors import CheckpointError

__all__ = [
    "Staging",
    "check_target",
    "discard",
    "disk_errors",
    "flush_directory",
    "prepare",
    "publish",
    "remove_checkpoint",
    "rename_new",
    "taken_on_disks",
    "write_flushed",
]

ABANDONED = 24 * 3600.0  # seconds without changes until a staging directory of another machine is removed
MARK = "rank-"
LONGEST = 180  # the most bytes of a target's name in the names of its staging directories
_LEFTOVER = re.compile(r"(?P<place>\..+\.(?P<kind>saving|removing)-[0-9a-f]{16})(?:\.owner(?P<draft>-.+)?)?", re.DOTALL)
_DRAFT = re.compile(r"-(?P<pid>\d+)-(?P<started>\d+|None)-(?P<machine>[0-9a-f]{8})")
_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

Identity = tuple[int, int, int]


class Staging(NamedTuple):
    """The staging area of one save: the target, a unique token, and the identity of the checkpoint it replaces."""

    target: Path
    token: str
    before: Identity | None = None

    def _beside(self, kind: str) -> Path:
        name = os.fsencode(self.target.name)
        if len(name) > LONGEST:
            name = name[: LONGEST - 13] + b"~" + hashlib.sha256(name).hexdigest()[:12].encode()
        return self.target.with_name(f".{os.fsdecode(name)}.{kind}-{self.token}")

    @property
    def directory(self) -> Path:
        """The staging directory."""
        return self._beside("saving")

    @property
    def owner(self) -> Path:
        """The owner record, which names the saving process."""
        return self.directory.with_name(f"{self.directory.name}.owner")

    @property
    def removing(self) -> Path:
        """The name of the replaced checkpoint during its removal."""
        return self._beside("removing")

    def block_name(self, rank: int, part: int = 0) -> str:
        """The name of the file with a rank's blocks; `part` counts the saves that others build upon."""
        return f"blocks-{rank:05d}{f'-{part}' if part else ''}.safetensors"

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert errors of writing."""
        return disk_errors(f"{self.directory} cannot be written")

    def is_here(self) -> bool:
        """Whether this process sees the staging directory, which the first process made."""
        return self.directory.is_dir()

    def mark(self, rank: int, *, make: bool) -> None:
        """Leave a file with the number of a rank in the staging directory, which it may have to make on its disk."""
        with self.errors():
            if make:
                self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{MARK}{rank}").open("xb").close()

    def marked(self) -> tuple[int, ...]:
        """The ranks whose marks are here: they share this disk. The token is random, so no mark is an old one."""
        with self.errors():
            return tuple(sorted(int(name[len(MARK) :]) for name in os.listdir(self.directory) if name.startswith(MARK)))

    def claim(self) -> None:
        """Take the name of the target on a disk that the first process does not see."""
        if _exists(self.target):
            raise taken_on_disks(self.target)
        with self.errors():
            _claim(self)
            _remove_leftovers(self.target.parent, now=self.owner.stat().st_mtime)

    def write_index(self, data: bytes) -> None:
        """Write the index on one of several disks, and remove the marks."""
        with self.errors():
            for rank in self.marked():
                (self.directory / f"{MARK}{rank}").unlink()
            write_flushed(self.directory / INDEX, data)
            flush_directory(self.directory)

    def writer(self, name: str) -> FileWriter:
        """A writer of a new file."""
        return FileWriter(self.directory / name)

    def finish(self, data: bytes) -> None:
        """Write the index, and publish."""
        with disk_errors(f"{self.target} cannot be saved"):
            write_flushed(self.directory / INDEX, data)
        publish(self)

    def discard(self) -> None:
        """Remove the staging directory, then its owner record."""
        discard(self)


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Convert OSError to CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""),
            hint="check free space and permissions, or use another path",
        ) from error


def check_target(target: Path, overwrite: bool) -> None:
    """Raise if a checkpoint cannot be saved under this name."""
    if not _exists(target):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already", hint="use another name, or overwrite=True")
    if not (target / INDEX).is_file():
        raise CheckpointError(f"{target} is not a checkpoint, and is not overwritten", hint="remove it yourself")


def _exists(target: Path) -> bool:
    """Whether the name is in use; raises if it is invalid (too long, below a file, a null byte)."""
    try:
        os.lstat(target)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{str(target)[:80]!r}{'...' if len(str(target)) > 80 else ''} cannot be a checkpoint: {why}",
            hint="use another path",
        ) from error
    return True


def taken_on_disks(target: Path) -> CheckpointError:
    """The error for a name that is in use on one of several disks."""
    return CheckpointError(
        f"{target} exists already on {socket.gethostname()}, and hosts do not share their disks: they cannot replace "
        "it atomically",
        hint="use another name, or remove it on all hosts first",
    )


# ---------------------------------------------------------------- staging


def prepare(target: Path) -> Staging:
    """Make an empty staging directory for a save, and remove leftovers of dead processes."""
    before = _identity(target) if _exists(target) else None
    staging = Staging(target, secrets.token_hex(8), before)
    with disk_errors(f"{target} cannot be saved"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _claim(staging)
            staging.directory.mkdir()
            _remove_leftovers(target.parent, now=staging.owner.stat().st_mtime)
            if staging.before is not None:  # check first that the file system can exchange two directories
                staging.removing.mkdir()
                _exchange(staging.directory, staging.removing)
                staging.removing.rmdir()
        except BaseException:
            discard(staging)
            raise
    return staging


def discard(staging: Staging) -> None:
    """Remove the staging directory, then its owner record."""
    _remove(staging.removing)
    _remove_owned(staging.directory, staging.owner)


def _claim(staging: Staging) -> None:
    """Write the owner record. It is renamed to its name when it is complete; until then its name tells the process.

    Not flushed: it tells living processes apart, and after a power cut there are none.
    """
    process = _this_process()
    draft = staging.owner.with_name(
        f"{staging.owner.name}-{process['pid']}-{process['started']}-{_machine_digest(_machine())}"
    )
    try:
        draft.write_bytes(json.dumps(process | {"target": staging.target.name}).encode())
        os.rename(draft, staging.owner)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _remove_owned(directory: Path, owner: Path) -> None:
    """Remove a staging directory, and its owner record if it is gone: a dying process may still add a file to it."""
    _remove(directory)
    if not os.path.lexists(directory):
        with contextlib.suppress(OSError):
            owner.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _identity(target: Path) -> Identity | None:
    """The identity of the checkpoint with this name, by the file of its index; None if there is none."""
    try:
        status = os.stat(target / INDEX)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _this_process() -> dict[str, Any]:
    return {**_machine(), "host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _machine() -> dict[str, str]:
    """Boot id and process id namespace: equal for processes that see each other's ids. Empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "pids": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {}


def _start_time(pid: int) -> int | None:
    """The start time of a process in clock ticks; None if it has ended or is not visible.

    A killed process has ended when its last thread has: until then, one may be about to rename the directory.
    """
    state, fields = _status(f"/proc/{pid}/stat")
    if state in "ZX":
        with contextlib.suppress(OSError):
            if any(
                _status(f"/proc/{pid}/task/{thread}/stat")[0] not in "ZX" for thread in os.listdir(f"/proc/{pid}/task")
            ):
                return int(fields[18])
        return None
    return int(fields[18])


def _status(path: str) -> tuple[str, list[str]]:
    """The state of a process or thread, and the fields after it; as one that has ended if there is none."""
    try:
        state, *fields = Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return "X", []
    return state, fields


def _is_dead(pid: int, started: int | None) -> bool:
    """Whether the process with this id and start time has ended; a process that is not visible has not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # a process of another user: it may be hidden, but its id is in use
        found = _start_time(pid)
        return found is not None and found != started
    return _start_time(pid) != started


def _remove_leftovers(parent: Path, now: float) -> None:
    """Remove staging directories of dead processes, and checkpoints whose removal was interrupted."""
    found = [match for match in map(_LEFTOVER.fullmatch, os.listdir(parent)) if match]
    for match in found:
        if match["draft"] and _is_abandoned_draft(parent / match.string, match["draft"], now):
            with contextlib.suppress(OSError):
                (parent / match.string).unlink(missing_ok=True)
    for place, kind in sorted({(match["place"], match["kind"]) for match in found if not match["draft"]}):
        directory = parent / place
        owner = parent / f"{place.replace('.removing-', '.saving-')}.owner"
        if kind == "removing" and not owner.exists():
            _remove(directory)
        elif _is_abandoned(directory, owner, now):
            if kind == "saving":
                _remove_owned(directory, owner)
            else:
                _remove(directory)


def _is_abandoned(directory: Path, owner: Path, now: float) -> bool:
    """Whether the owner is dead; for an owner on another machine, whether nothing changed for a long time."""
    try:
        record = json.loads(owner.read_bytes())
        here, pid, started = _machine(), record["pid"], record["started"]
        if here and all(record.get(key) == value for key, value in here.items()):
            return _is_dead(pid, started)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        pass  # no owner record, or an incomplete one
    changed = 0.0
    for path in (owner, directory, *(directory.iterdir() if directory.is_dir() else ())):
        with contextlib.suppress(OSError):
            changed = max(changed, path.lstat().st_mtime)
    return now - changed > ABANDONED


def _is_abandoned_draft(path: Path, name: str, now: float) -> bool:
    """Whether the process is dead that began an owner record, by its name."""
    here, said = _machine(), _DRAFT.fullmatch(name)
    if here and said and said["machine"] == _machine_digest(here):
        return _is_dead(int(said["pid"]), None if said["started"] == "None" else int(said["started"]))
    try:
        return now - path.lstat().st_mtime > ABANDONED
    except OSError:
        return False


def _machine_digest(machine: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:8]


def write_flushed(path: Path, data: bytes) -> None:
    """Write a new small file and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- publishing


def publish(staging: Staging) -> None:
    """Rename the staging directory to the target, atomically.

    The target must still be the checkpoint from the start of the save, or not exist. If another job has published there
    since, its checkpoint is kept, and this save raises.
    """
    with disk_errors(f"{staging.target} cannot be saved"):
        flush_directory(staging.directory)
        if staging.before is None or not _replaced(staging):
            rename_new(staging.directory, staging.target)
        flush_directory(staging.target.parent)
    discard(staging)


def _replaced(staging: Staging) -> bool:
    """Exchange the old checkpoint with the new one; False if the old one does not exist any more."""
    found = _identity(staging.target)
    if found is not None and found != staging.before:
        raise _taken(staging.target)
    try:
        _exchange(staging.directory, staging.target)
    except FileNotFoundError:
        return False
    if _identity(staging.directory) != staging.before:  # another job published after the check above
        _exchange(staging.directory, staging.target)
        raise _taken(staging.target)
    os.rename(staging.directory, staging.removing)  # by this name any process may remove it
    return True


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or directory; raises CheckpointError if the target exists."""
    try:
        try:
            _rename(source, target, _NO_REPLACE)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            if not source.is_dir() and os.path.lexists(target):
                raise _taken(target) from None
            os.rename(source, target)  # does not replace a non-empty directory
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(target) from None
        raise


def _taken(target: Path) -> CheckpointError:
    return CheckpointError(
        f"another job saved to {target} at the same time; its checkpoint is kept, and this one is discarded",
        hint="use a different path for each job, or end the other one",
    )


def _exchange(a: Path, b: Path) -> None:
    """Exchange two directories atomically: both names exist at all times."""
    try:
        _rename(a, b, _EXCHANGE)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        raise CheckpointError(
            f"this file system cannot replace {b} atomically", hint="save under another name, then remove the old one"
        ) from None


def _rename(a: Path, b: Path, flag: int) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flag) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(a), None, str(b))


def flush_directory(path: Path) -> None:
    """Flush the entries of a directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint; it is renamed before, so that no reader sees it half removed. False if it is not there."""
    gone = Staging(path, secrets.token_hex(8)).removing
    try:
        os.rename(path, gone)
    except FileNotFoundError:  # another job removed it
        return False
    _remove(gone)
    return True
