"""Directories that appear whole or not at all: written under another name, flushed, renamed; old ones removed after.

Knows nothing of what is in them but the name of the index.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from pathlib import Path

from shardwise.checkpoint.index import INDEX
from shardwise.errors import CheckpointError

__all__ = ["check_target", "discard", "prepare", "prune", "publish", "temporary", "write_flushed"]

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")
_SAVING, _REMOVING = ".saving", ".removing"
_AT_FDCWD, _EXCHANGE = -100, 2


def temporary(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(f".{target.name}{_SAVING}")


def check_target(target: Path, keep: int | None, overwrite: bool) -> None:
    """An error if a checkpoint cannot get this name."""
    if keep is not None and (keep < 1 or not _NUMBERED.fullmatch(target.name)):
        raise CheckpointError(
            f"keep={keep} with the name {target.name}",
            hint="keep at least one, of checkpoints whose names end in a number, as in step-300",
        )
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(f"{target} exists already", hint="give each checkpoint its own name, or overwrite=True")
    if overwrite and os.path.lexists(target) and not (target / INDEX).is_file():
        raise CheckpointError(f"{target} is not a checkpoint, so it is not overwritten", hint="remove it yourself")


def prepare(target: Path) -> None:
    """An empty temporary directory; what a save that was killed left there is gone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    place = temporary(target)
    if place.exists():
        shutil.rmtree(place)
    place.mkdir()


def discard(target: Path) -> None:
    """Remove the temporary directory."""
    shutil.rmtree(temporary(target), ignore_errors=True)


def write_flushed(path: Path, data: bytes) -> None:
    """A new small file that is on disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(target: Path) -> None:
    """Give the temporary directory its name, in one step that either has happened or has not."""
    place = temporary(target)
    flush_directory(place)
    if os.path.lexists(target):
        _exchange(place, target)
        flush_directory(target.parent)
        discard(target)
    else:
        os.rename(place, target)
        flush_directory(target.parent)


def _exchange(a: Path, b: Path) -> None:
    """Swap two directories at once; there is no moment at which either name is missing."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) != 0:
        raise CheckpointError(
            f"this system cannot replace {b} in one step", hint="save under another name, then remove the old one"
        )


def flush_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prune(target: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` latest checkpoints whose names differ from the target's in the number at the end only.

    The target is the latest. One that is removed loses its name first, so that none is ever seen half removed.
    """
    match = _NUMBERED.fullmatch(target.name)
    assert match is not None, "check_target has seen to it"
    family = re.compile(re.escape(match["stem"]) + r"\d+")
    leftover = re.compile(rf"\.{family.pattern}({re.escape(_SAVING)}|{re.escape(_REMOVING)})")
    others: list[tuple[int, Path]] = []
    removed: list[Path] = []
    for path in target.parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif family.fullmatch(path.name) and path.name != target.name and (path / INDEX).is_file():
            others.append(((path / INDEX).stat().st_mtime_ns, path))
    for _, path in sorted(others, reverse=True)[keep - 1 :]:
        gone = path.with_name(f".{path.name}{_REMOVING}")
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        removed.append(path)
    return removed
