"""The sequence of collectives that a rank has issued in each group, and where the sequences of two ranks diverge.

Pure data, without communication.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["GroupLog", "LogEntry", "Ranks", "argument_name", "difference_text", "parameter_note", "ranks_name"]

Ranks = tuple[int, ...]
KEPT = 4096  # entries of a group


class LogEntry(NamedTuple):
    """One collective: its description, the same on all ranks, the line that issued it, and a digest of all so far."""

    text: str
    line: str
    digest: str


class GroupLog:
    """The collectives of one rank in one group. The last entries are kept; their digests include all before them.

    Example:
        >>> log = GroupLog()
        >>> log.add("all-reduce (sum) over dp of f32[4] dp:P", "train.py:3")
        >>> log.count, [entry.line for entry in log.entries]
        (1, ['train.py:3'])
    """

    def __init__(self) -> None:
        self.count = 0
        self.entries: deque[LogEntry] = deque(maxlen=KEPT)
        self._digest = b""

    def add(self, text: str, line: str) -> None:
        """Append a collective."""
        self._digest = hashlib.blake2b(self._digest + text.encode(), digest_size=8).digest()
        self.entries.append(LogEntry(text, line, self._digest.hex()))
        self.count += 1

    def summary(self) -> dict[str, Any]:
        """The number of entries, and the digest of the last one, which includes all."""
        entries = list(self.entries)
        return {"count": self.count, "digest": entries[-1].digest if entries else ""}

    def differs_from(self, summary: Mapping[str, Any]) -> bool:
        """Whether another rank's sequence differs from ours, up to our length; False if it is longer.

        Example:
            >>> log, other = GroupLog(), GroupLog()
            >>> other.add("x", "")
            >>> log.differs_from(other.summary())
            False
            >>> log.add("y", "")
            >>> log.differs_from(other.summary())
            True
        """
        entries, count = list(self.entries), self.count
        at = summary["count"] - 1 - (count - len(entries))
        return 0 <= at < len(entries) and entries[at].digest != summary["digest"]

    def evidence(self) -> dict[str, Any]:
        """All entries that are still stored."""
        return {"count": self.count, "entries": [list(entry) for entry in list(self.entries)]}


def _by_index(count: int, kept: Sequence[str]) -> dict[int, str]:
    return {count - len(kept) + i: digest for i, digest in enumerate(kept)}


def difference_text(group: Ranks, evidence: Mapping[int, Mapping[str, Any]], around: int = 3) -> str:
    """The sequences of two ranks side by side, around the first difference."""
    logs = {rank: [LogEntry(*entry) for entry in said["entries"]] for rank, said in evidence.items()}
    (a, of_a), (b, of_b) = ((rank, _by_index(evidence[rank]["count"], [e.digest for e in logs[rank]])) for rank in logs)
    common = sorted(of_a.keys() & of_b.keys())
    ends = min(evidence[a]["count"], evidence[b]["count"])  # one may have issued more collectives than the other
    at = next((index for index in common if of_a[index] != of_b[index]), ends)
    where = f"in the group of {ranks_name(group)}, from number {at + 1} on"
    lines = [f"ranks {a} and {b} issue different collectives {where}:"]
    for rank in (a, b):
        first = evidence[rank]["count"] - len(logs[rank])
        lines.append(f"  rank {rank}:")
        for index in range(max(first, at - around), min(evidence[rank]["count"], at + 2)):
            mark = ">" if index == at else " "
            entry = logs[rank][index - first]
            lines.append(f"  {mark} {index + 1}. {entry.text}, at {entry.line}")
        if at >= evidence[rank]["count"]:
            lines.append("  > nothing more")
    return "\n".join(lines)


def ranks_name(ranks: Sequence[int]) -> str:
    """`ranks 0-3`, `ranks 0, 2`.

    Example:
        >>> ranks_name([0, 1, 2]), ranks_name([0, 2])
        ('ranks 0-2', 'ranks 0, 2')
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = list(map(str, ranks)) if len(ranks) <= 8 else [*map(str, ranks[:6]), "...", str(ranks[-1])]
    return f"ranks {', '.join(shown)}"


def argument_name(name: str | int, tensor: torch.Tensor) -> str:
    """An operator's argument as shown in errors: with the parameter's name, if it is a parameter.

    Example:
        >>> argument_name("weight", torch.ones(2))
        "'weight'"
    """
    return f"{name!r}{parameter_note(tensor)}"


def parameter_note(tensor: torch.Tensor) -> str:
    """The name of a parameter, in parentheses, for errors; empty for other tensors.

    The name is that in the outermost module whose forward is running.

    Example:
        >>> class Scale(nn.Linear):
        ...     def forward(self, x):
        ...         return parameter_note(self.weight), parameter_note(x)
        >>> nn.Sequential(Scale(1, 1))(torch.ones(1))
        (' (the parameter 0.weight)', '')
    """
    modules: list[nn.Module] = []
    frame = sys._getframe(1) if isinstance(tensor, nn.Parameter) else None
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(owner, nn.Module):
            modules.append(owner)
        frame = frame.f_back
    for module in reversed(modules):
        for found, parameter in module.named_parameters():
            if parameter is tensor:
                return f" (the parameter {found})"
    return ""
