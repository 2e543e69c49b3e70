"""Series of checkpoints in one folder: the newest complete one, and the removal of old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.checkpoint.format.checkpoint_index import INDEX, parse_index
from shardwise.checkpoint.io.atomic_directory import disk_errors
from shardwise.checkpoint.io.checkpoint_places import Place, checkpoints_in, number_of, open_place, place_of, remove
from shardwise.checkpoint.io.range_reader import FileReader, Replaced, retry_replaced
from shardwise.checkpoint.operations.background_save import finish_pending
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes, processes_of
from shardwise.errors import CheckpointError

__all__ = ["latest", "prune", "prune_disks"]


def latest(folder: str | Path, *, process_group: Any = None) -> str | None:
    """The newest complete checkpoint in a folder; None if there is none.

    Checkpoints that are being written, or were interrupted, have no name there or no index, and are ignored. So are
    those whose index is damaged, or whose files are missing or of another size. Their blocks are not read: a load
    verifies them. The newest is the one that was saved last, by the time in its index, which copies have as well. Every
    process of the group calls it, and all get the same answer. Where hosts do not share the disk, their disks together
    must have all files.

    Args:
        folder: a directory with checkpoints, or a URL of fsspec.
        process_group: the processes that take part; default: all.

    Example:
        >>> import shardwise as sw, tempfile, torch, os
        >>> folder = tempfile.mkdtemp()
        >>> sw.checkpoint.latest(folder) is None
        True
        >>> for step in (1, 2):
        ...     sw.checkpoint.save({"w": torch.ones(2), "step": step}, f"{folder}/step-{step}", keep=3)
        >>> os.path.basename(sw.checkpoint.latest(folder))
        'step-2'
    """
    outcome = Outcome()
    outcome.attempt(finish_pending, None)
    processes = processes_of(outcome, [], process_group)
    place = outcome.attempt(lambda: place_of(folder), Path())
    local = not processes.alone and isinstance(place, Path)
    listed = outcome.attempt(lambda: checkpoints_in(place) if local or processes.is_first else [], [])
    answer = outcome.attempt(lambda: _latest(listed) if processes.is_first else (None, False), (None, False))
    outcome.value = (sorted([found.name for _, found in listed]), *answer)
    gathered = processes.exchange(outcome)
    names, newest, on_disks = gathered[0]
    if not local or (not on_disks and all(others == names for others, _, _ in gathered)):
        return newest
    outcome.value = outcome.attempt(lambda: {found.name: _describe(when, found) for when, found in listed}, {})
    ordered = _complete_on_disks(processes.exchange(outcome))
    return str(place / ordered[0][1]) if ordered else None


def _latest(listed: list[tuple[float, Place]]) -> tuple[str | None, bool]:
    """The newest complete checkpoint; and whether there is one before it whose files are on several disks."""
    for _, place in listed:
        if is_complete(place):
            return str(place), False
        if _describe(0.0, place).on_disks:
            return None, True
    return None, False


def is_complete(place: Place) -> bool:
    """Whether a checkpoint has a valid index, and all of its files in the right sizes."""
    known = _describe(0.0, place)
    return bool(known.digest) and not known.missing


class OnDisk(NamedTuple):
    """What a disk has of a checkpoint: when it was saved, by its index, the index, and the files that are not there."""

    when: float
    digest: str  # empty if the index is not valid
    missing: frozenset[str]
    on_disks: bool  # whether hosts do not share its files


def _describe(when: float, place: Place) -> OnDisk:
    try:
        return retry_replaced(lambda: _look(when, place))
    except CheckpointError:
        return OnDisk(when, "", frozenset(), False)


def _look(when: float, place: Place) -> OnDisk:
    with open_place(place) as source:
        index = parse_index(source.read(INDEX, "the index"))
        missing: set[str] = set()
        with FileReader(source, index.files) as files:
            for name in index.files:
                try:
                    files.opened(name, "the checkpoint")
                except Replaced:
                    raise
                except CheckpointError:
                    missing.add(name)
        return OnDisk(when, index.digest, frozenset(missing), bool(index.hosts))


def _complete_on_disks(found: Sequence[Mapping[str, OnDisk] | None]) -> list[tuple[float, str]]:
    """The checkpoints whose files are all on some disk, the latest first, from what each process has."""
    complete = []
    for name in sorted({name for disk in found for name in disk or {}}):
        known = [disk[name] for disk in found if disk and name in disk]
        same = len({one.digest for one in known}) == 1 and known[0].digest
        if same and not frozenset.intersection(*(one.missing for one in known)):
            complete.append((max(one.when for one in known), name))
    return sorted(complete, key=lambda pair: (pair[0], (number_of(Path(pair[1])) or ("", -1))[1]), reverse=True)


# ---------------------------------------------------------------- removing old ones


def prune(target: Place, keep: int) -> list[Place]:
    """Keep the `keep` latest complete checkpoints whose names differ from the target's only in the final number.

    The target and checkpoints published after it are kept. Damaged ones do not count, and are removed with those that
    are older than the last one that is kept.
    """
    family = _family(target)
    return [place for place in _outdated(target, keep, family, is_complete) if remove(place)]


def _family(target: Place) -> list[tuple[float, Place]]:
    own = number_of(target)
    assert own is not None, "checked by begin_save"
    return [
        (when, place) for when, place in checkpoints_in(target.parent) if (number_of(place) or ("", 0))[0] == own[0]
    ]


def _outdated(
    target: Place, keep: int, family: Sequence[tuple[float, Place]], complete: Callable[[Place], bool]
) -> Iterator[Place]:
    published = next((when for when, place in family if place.name == target.name), None)
    left = keep - 1
    for when, place in family:
        if place.name == target.name:
            continue
        if left > 0:
            left -= complete(place)
        elif published is not None and when <= published:
            yield place


def prune_disks(processes: Processes, target: Path, keep: int, *, leads: bool) -> None:
    """As `prune`, on disks that hosts do not share: a checkpoint is complete if the disks together have its files."""
    outcome = Outcome()
    family = outcome.attempt(lambda: _family(target) if leads else [], [])
    outcome.value = outcome.attempt(lambda: {place.name: _describe(when, place) for when, place in family}, {})
    gathered = processes.exchange(outcome)
    complete = {name for _, name in _complete_on_disks(gathered)}
    times: dict[str, float] = {}
    for disk in gathered:
        for name, known in disk.items():
            times[name] = max(known.when, times.get(name, known.when))
    together = sorted(
        ((when, target.parent / name) for name, when in times.items()),
        key=lambda pair: (pair[0], (number_of(pair[1]) or ("", -1))[1]),
        reverse=True,
    )

    def remove_old() -> None:
        with disk_errors(f"{target} is saved, but older checkpoints could not be removed"):
            for place in _outdated(target, keep, together, lambda place: place.name in complete):
                remove(place)

    outcome.value = None
    if leads:
        outcome.attempt(remove_old, None)
    processes.exchange(outcome)
