"""Lock files: the communication of a program in a file, so that a change that adds communication fails a test.

The key of an entry is stable when code is edited: phase, module path, file name and function, operator, collective and
mesh axes. It has no line numbers and no folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shardwise.debug.recording.records import Record
from shardwise.errors import LayoutError

__all__ = ["UPDATE", "Amount", "Entry", "Lock"]

VERSION = 1
UPDATE = "SHARDWISE_UPDATE_LOCK"  # environment variable; with value 1, lock files are written instead of compared


class Amount(NamedTuple):
    """A count, and the total bytes received by a rank."""

    times: int
    received: int

    def __str__(self) -> str:
        return f"{self.times} x, {self.received:,} bytes"


Entry = tuple[str, str]  # place in the program; operator, collective and axes


@dataclass(frozen=True)
class Lock:
    """The communication of a program, by place and by collective."""

    entries: dict[Entry, Amount] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], name_of: Callable[[Record], str]) -> Lock:
        """The lock of records. `name_of` gives the name of a record's operator."""
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
        """The text of the file: JSON, one entry on each line, in a fixed order, so that diffs are readable."""
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
        """Read a lock file."""
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            raise LayoutError(
                f"there is no lock file {os.fspath(path)}",
                hint=f"create it with report.save_lock(...), or run once with {UPDATE}=1 in the environment",
            ) from None
        return cls.parse(data, os.fspath(path))

    @classmethod
    def parse(cls, data: bytes, name: str) -> Lock:
        """The lock of a file with these bytes."""
        try:
            found = json.loads(data.decode("utf-8"))
            if found["shardwise_lock"] != VERSION:
                raise ValueError(f"version {found['shardwise_lock']}, not {VERSION}")
            return cls(
                {
                    (place, what): Amount(_count(amount["count"]), _count(amount["received_bytes"]))
                    for place, entries in found["communication"].items()
                    for what, amount in entries.items()
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(
                f"{name} is not a lock file: {error}", hint="create it again with report.save_lock(...)"
            ) from None


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:40]} is not a count")
    return value


def _place(record: Record) -> str:
    """The place of a record: phase, module, file and function, without line numbers."""
    function = f"{os.path.basename(record.where.file)} {record.where.function}".strip()
    parts = [record.phase, f"in {record.module}" if record.module else "", f"from {function}" if function else ""]
    return " ".join(part for part in parts if part)
