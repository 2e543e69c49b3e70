"""Where checkpoints are: directories of local and mounted file systems, or URLs of fsspec. Listing, removing."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from shardwise.checkpoint.format.checkpoint_index import HEAD, INDEX, saved_at
from shardwise.checkpoint.io import atomic_directory as atomic
from shardwise.checkpoint.io.atomic_directory import Staging
from shardwise.checkpoint.io.range_reader import OpenDirectory, ReadableDirectory
from shardwise.checkpoint.io.remote_directory import RemoteDirectory, RemotePath, RemoteStaging, remote_errors
from shardwise.errors import CheckpointError

__all__ = ["AnyStaging", "Place", "begin_save", "checkpoints_in", "number_of", "open_place", "place_of", "remove"]

Place = Path | RemotePath
AnyStaging = Staging | RemoteStaging
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[^:]+)*://.*", re.DOTALL)
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")


def place_of(path: str | os.PathLike[str]) -> Place:
    """A path or a URL.

    Example:
        >>> place_of("s3://bucket/run/step-3").name, place_of("/run/step-3")
        ('step-3', PosixPath('/run/step-3'))
    """
    if isinstance(path, str) and _URL.fullmatch(path):
        return RemotePath(path)
    return Path(path)


def open_place(path: str | os.PathLike[str] | RemotePath) -> ReadableDirectory:
    """Open a checkpoint for reading."""
    place = path if isinstance(path, RemotePath) else place_of(path)
    if isinstance(place, RemotePath):
        return RemoteDirectory(place)
    return OpenDirectory(place, "there is no checkpoint")


def begin_save(target: Place, keep: int | None, overwrite: bool) -> AnyStaging:
    """Check that a checkpoint can be saved under this name, and make a place for its files."""
    if keep is not None and (keep < 1 or number_of(target) is None):
        raise CheckpointError(
            f"keep={keep} with the name {target.name}",
            hint="keep must be at least 1, and names end in a number, as in step-300",
        )
    if isinstance(target, RemotePath):
        return RemoteStaging.prepare(target, overwrite)
    atomic.check_target(target, overwrite)
    return atomic.prepare(target)


def number_of(place: Place) -> tuple[str, int] | None:
    """The name of a checkpoint without its final number, and the number; None if it has none."""
    match = _NUMBERED.fullmatch(place.name)
    return None if match is None else (match["stem"], int(match["number"]))


def checkpoints_in(folder: Place) -> list[tuple[float, Place]]:
    """Everything in a folder that has an index, with the time of its save; the latest first.

    The time is in the index, so that copies have it as well. Older formats do not have it: then it is that of the file.
    Of two with the same time, the one with the larger number is first.
    """
    found = _remote(folder) if isinstance(folder, RemotePath) else _local(folder)
    return sorted(found, key=lambda pair: (pair[0], (number_of(pair[1]) or ("", -1))[1]), reverse=True)


def _local(folder: Path) -> list[tuple[float, Place]]:
    found: list[tuple[float, Place]] = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}", hint="pass a directory") from None
    for name in names:
        if not name.startswith("."):
            with contextlib.suppress(OSError):
                found.append((_saved(folder / name / INDEX), folder / name))
    return found


def _saved(index: Path) -> float:
    written = os.stat(index)
    if not stat.S_ISREG(written.st_mode):  # a pipe would block
        return written.st_mtime_ns / 1e9
    with index.open("rb") as file:
        return saved_at(file.read(HEAD)) or written.st_mtime_ns / 1e9


def _remote(folder: RemotePath) -> list[tuple[float, Place]]:
    system, root = folder.opened()
    with remote_errors(f"{folder} cannot be listed"):
        system.invalidate_cache()
        if not system.isdir(root):
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in system.ls(root, detail=True)]
        inside = [name for name in names if not name.startswith(".") and system.isfile(f"{root}/{name}/{INDEX}")]
        times = [(_written(system, f"{root}/{name}/{INDEX}"), folder / name) for name in inside]
        return [(when, place) for when, place in times if when is not None]


def _written(system: Any, path: str) -> float | None:
    """The time of an index; None if it is empty, or was removed meanwhile."""
    try:
        saved = saved_at(system.cat_file(path, start=0, end=HEAD))
        return system.modified(path).timestamp() if saved is None else saved
    except (NotImplementedError, KeyError):  # some file systems have no times: numbers decide
        return 0.0
    except OSError:
        system.invalidate_cache()
        try:
            if system.info(path)["size"]:
                raise
        except FileNotFoundError:
            pass
        return None


def remove(place: Place) -> bool:
    """Remove a checkpoint so that no reader sees it half removed; False if another job did it already."""
    if isinstance(place, Path):
        return atomic.remove_checkpoint(place)
    system, root = place.opened()
    with remote_errors(f"{place} cannot be removed"), contextlib.suppress(FileNotFoundError):
        system.rm_file(f"{root}/{INDEX}")
        with contextlib.suppress(FileNotFoundError):
            system.rm(root, recursive=True)
        return True
    return False
