"""Atomic directories: written to a staging directory, flushed to disk, renamed. Also removes old checkpoints.

Every save has its own staging directory next to its target, `.NAME.saving-TOKEN`, and an owner record,
`.NAME.saving-TOKEN.owner`, which names the process. Two jobs that save to one path never share a file: the first to
publish gets the name, the other an error. The next save in the same directory removes the leftovers of dead processes.
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
from shardwise.errors import CheckpointError

__all__ = [
    "Staging",
    "check_target",
    "discard",
    "disk_errors",
    "flush_directory",
    "prepare",
    "prune",
    "publish",
    "rename_new",
    "write_flushed",
]

ABANDONED = 24 * 3600.0  # seconds without changes until a staging directory of another machine is removed
LONGEST = 180  # the most bytes of a target's name in the names of its staging directories
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")
_LEFTOVER = re.compile(r"(?P<place>\..+\.(?P<kind>saving|removing)-[0-9a-f]{16})(\.owner)?", re.DOTALL)
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


def check_target(target: Path, keep: int | None, overwrite: bool) -> None:
    """Raise if a checkpoint cannot be saved under this name."""
    if keep is not None and (keep < 1 or not _NUMBERED.fullmatch(target.name)):
        raise CheckpointError(
            f"keep={keep} with the name {target.name}",
            hint="keep must be at least 1, and names end in a number, as in step-300",
        )
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


# ---------------------------------------------------------------- staging


def prepare(target: Path) -> Staging:
    """Make an empty staging directory for a save, and remove leftovers of dead processes."""
    before = _identity(target) if _exists(target) else None
    staging = Staging(target, secrets.token_hex(8), before)
    with disk_errors(f"{target} cannot be saved"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_flushed(staging.owner, json.dumps(_this_process() | {"target": target.name}).encode())
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
    _remove(staging.directory)
    with contextlib.suppress(OSError):
        staging.owner.unlink(missing_ok=True)


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
    """The start time of a process in clock ticks; None if it has ended or is not visible."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _is_dead(pid: int, started: int) -> bool:
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
    for place, kind in sorted({(m["place"], m["kind"]) for m in map(_LEFTOVER.fullmatch, os.listdir(parent)) if m}):
        directory = parent / place
        owner = parent / f"{place.replace('.removing-', '.saving-')}.owner"
        if kind == "removing" and not owner.exists():
            _remove(directory)
        elif _is_abandoned(directory, owner, now):
            _remove(directory)
            if kind == "saving":
                with contextlib.suppress(OSError):
                    owner.unlink(missing_ok=True)


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


def prune(target: Path, keep: int) -> list[Path]:
    """Keep the `keep` latest checkpoints whose names differ from the target's only in the final number; remove others.

    The target and checkpoints published after it are kept. A checkpoint is renamed before its removal, so that no
    reader sees it half removed.
    """
    match = _NUMBERED.fullmatch(target.name)
    assert match is not None, "checked by check_target"
    family = re.compile(re.escape(match["stem"]) + r"\d+")
    own = _published(target)
    others: list[tuple[int, Path]] = []
    removed: list[Path] = []
    for path in target.parent.iterdir():
        if family.fullmatch(path.name) and path.name != target.name:
            when = _published(path)
            if when is not None:
                others.append((when, path))
    for when, path in sorted(others, reverse=True)[keep - 1 :]:
        if own is None or when > own:
            continue
        gone = Staging(path, secrets.token_hex(8)).removing
        try:
            os.rename(path, gone)
        except FileNotFoundError:  # another job removed it
            continue
        _remove(gone)
        removed.append(path)
    return removed


def _published(path: Path) -> int | None:
    """The time at which the index of a checkpoint was written; None if there is no checkpoint."""
    identity = _identity(path)
    return None if identity is None else identity[1]
