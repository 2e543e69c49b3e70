"""Lock files: what a program moves, kept beside it, so that a change that adds communication fails a test.

An entry is named by what stays when code is edited: the phase, the module's path, the file's name and the function, the
operator, the collective and its axes. Lines and folders are not in it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shardwise.debug.records import Record
from shardwise.errors import CommunicationError, LayoutError

__all__ = ["Amount", "Lock", "compare", "difference"]

VERSION = 1
UPDATE = "SHARDWISE_UPDATE_LOCK"  # set to 1, lock files are written instead of compared


class Amount(NamedTuple):
    """How often, and how many bytes a rank received in all."""

    times: int
    received: int

    def __str__(self) -> str:
        return f"{self.times} x, {self.received:,} bytes"


Entry = tuple[str, str]  # where, and what moved there


@dataclass(frozen=True)
class Lock:
    """What moved, by place and by collective."""

    entries: dict[Entry, Amount] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], name_of: Callable[[Record], str]) -> Lock:
        """The lock of some records, whose operators are called as `name_of` says."""
        sums: dict[Entry, tuple[int, float]] = {}
        for record in records:
            for move in record.moves:
                entry = (_place(record), f"{name_of(record)}: {move.collective} over {move.axis}")
                count, received = sums.get(entry, (0, 0.0))
                sums[entry] = (count + 1, received + move.received)
        return cls({entry: Amount(count, round(received)) for entry, (count, received) in sorted(sums.items())})

    @property
    def total(self) -> Amount:
        """The sum of all entries."""
        return Amount(sum(a.times for a in self.entries.values()), sum(a.received for a in self.entries.values()))

    def as_text(self) -> str:
        """The file: JSON with one entry on a line, in a fixed order, so that a diff shows what changed."""
        places: dict[str, list[str]] = {}
        for (place, what), amount in self.entries.items():
            line = f"{json.dumps(what)}: {json.dumps({'count': amount.times, 'received_bytes': amount.received})}"
            places.setdefault(place, []).append(f"      {line}")
        body = ",\n".join(
            f"    {json.dumps(place)}: {{\n" + ",\n".join(lines) + "\n    }" for place, lines in places.items()
        )
        total = json.dumps({"count": self.total.times, "received_bytes": self.total.received})
        inside = f"{{\n{body}\n  }}" if body else "{}"
        return f'{{\n  "shardwise_lock": {VERSION},\n  "total": {total},\n  "communication": {inside}\n}}\n'

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Lock:
        """The lock that a file holds."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found["shardwise_lock"] != VERSION:
                raise ValueError(f"version {found['shardwise_lock']}, not {VERSION}")
            return cls(
                {
                    (place, what): Amount(amount["count"], amount["received_bytes"])
                    for place, entries in found["communication"].items()
                    for what, amount in entries.items()
                }
            )
        except FileNotFoundError:
            raise LayoutError(
                f"there is no lock file {os.fspath(path)}",
                hint=f"make it with report.save_lock(...), or run once with {UPDATE}=1 in the environment",
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutError(
                f"{os.fspath(path)} is not a lock file: {error}", hint="make it anew with report.save_lock(...)"
            ) from None


def _place(record: Record) -> str:
    """Where a record stands, in words that stay the same when lines are added above it."""
    function = f"{os.path.basename(record.where.file)} {record.where.function}".strip()
    parts = [record.phase, f"in {record.module}" if record.module else "", f"from {function}" if function else ""]
    return " ".join(part for part in parts if part)


class Difference(NamedTuple):
    """What is more, and what is less, than a lock says; each line is one entry."""

    more: list[str]
    less: list[str]


def difference(locked: Lock, now: Lock) -> Difference:
    """Compare. The same collectives in a function that was renamed or moved are no difference."""
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
    return Difference(more, less)


def _is_renamed(old: Entry, new: Entry, before: dict[Entry, Amount], after: dict[Entry, Amount]) -> bool:
    return old[1] == new[1] and before[old] == after[new] and old[0].split()[0] == new[0].split()[0]


def compare(path: str | os.PathLike[str], now: Lock) -> None:
    """Raise where `now` moves more than the file says; say so where it moves less."""
    if os.environ.get(UPDATE) == "1":
        Path(path).write_text(now.as_text(), encoding="utf-8")
        return
    locked = Lock.read(path)
    more, less = difference(locked, now)
    if more:
        lines = [f"  + {line}" for line in more] + [f"  - {line}" for line in less]
        raise CommunicationError(
            f"more is moved than {os.fspath(path)} allows ({locked.total} -> {now.total}):\n" + "\n".join(lines),
            hint=f"if that is meant, update the file: report.save_lock(...), or {UPDATE}=1 in the environment",
        )
    if less:
        warnings.warn(
            f"less is moved than {os.fspath(path)} says; update it to keep what was gained "
            f"({UPDATE}=1):\n" + "\n".join(f"  - {line}" for line in less),
            stacklevel=3,
        )
