"""check_lock: compare the communication of a program with a lock file."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwise.core.mode_stack import mode_context
from shardwise.debug.explain_report.explain_context import explain
from shardwise.debug.explain_report.report import Report
from shardwise.debug.limits.lock_file import UPDATE, Amount, Entry, Lock
from shardwise.errors import CommunicationError

__all__ = ["check_lock", "compare_with_file", "difference"]


def check_lock(path: str | os.PathLike[str], report: Report | None = None) -> contextlib.AbstractContextManager[Report]:
    """Raise if a program communicates more than a lock file records; warn if it communicates less.

    Args:
        path: a file written by `report.save_lock`. With SHARDWISE_UPDATE_LOCK=1 in the environment it is written
            instead of compared.
        report: the report to compare. Without it, use the result as a context, which records and compares its body.

    Raises:
        CommunicationError: lists the entries that increased and decreased.

    Example:
        >>> import shardwise as sw, tempfile, os
        >>> x = sw.ones(8, device_mesh=sw.init_device_mesh("cpu", (4,)), placements=[sw.Shard(0)])
        >>> with sw.explain() as report:
        ...     _ = x.full_tensor()
        >>> path = os.path.join(tempfile.mkdtemp(), "communication.lock")
        >>> report.save_lock(path)
        >>> with sw.check_lock(path):
        ...     _ = x.full_tensor()
    """
    if report is not None:
        compare_with_file(path, report.lock())
        return contextlib.nullcontext(report)
    return _checking(path)


@mode_context
def _checking(path: str | os.PathLike[str]) -> Iterator[Report]:
    with explain() as report:
        yield report
    compare_with_file(path, report.lock())


class LockChanges(NamedTuple):
    """The entries that increased and decreased against a lock; one line each."""

    more: list[str]
    less: list[str]


def difference(locked: Lock, now: Lock) -> LockChanges:
    """Compare two locks. Renaming or moving a function is not a difference if its collectives are the same."""
    before, after = dict(locked.entries), dict(now.entries)
    for entry in [entry for entry in after if entry not in before]:
        renamed = next(
            (old for old in before if old not in now.entries and _is_renamed(old, entry, before, after)), None
        )
        if renamed is not None:
            del before[renamed], after[entry]
    more, less = [], []
    for entry in sorted({*before, *after}):
        old, new = before.get(entry, Amount(0, 0)), after.get(entry, Amount(0, 0))
        if old == new:
            continue
        line = f"{entry[0]}: {entry[1]}: {old} -> {new}"
        (more if new.times > old.times or new.received > old.received else less).append(line)
    return LockChanges(more, less)


def _is_renamed(old: Entry, new: Entry, before: dict[Entry, Amount], after: dict[Entry, Amount]) -> bool:
    return old[1] == new[1] and before[old] == after[new] and old[0].split()[0] == new[0].split()[0]


def compare_with_file(path: str | os.PathLike[str], now: Lock) -> None:
    """Raise if `now` communicates more than the file records; warn if it communicates less."""
    if os.environ.get(UPDATE) == "1":
        Path(path).write_text(now.as_text(), encoding="utf-8")
        return
    locked = Lock.read(path)
    more, less = difference(locked, now)
    if more:
        lines = [f"  + {line}" for line in more] + [f"  - {line}" for line in less]
        raise CommunicationError(
            f"more communication than {os.fspath(path)} allows ({locked.total} -> {now.total}):\n" + "\n".join(lines),
            hint=f"if this is intended, update the file: report.save_lock(...), or {UPDATE}=1 in the environment",
        )
    if less:
        warnings.warn(
            f"less communication than {os.fspath(path)} records; update the file ({UPDATE}=1) to keep the "
            "improvement:\n" + "\n".join(f"  - {line}" for line in less),
            stacklevel=3,
        )
