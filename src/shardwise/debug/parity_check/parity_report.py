"""The result of `parity`: the first differences with the user's lines, and counts of each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Difference", "ParityReport"]


@dataclass(frozen=True)
class Difference:
    """One operator, redistribution or module whose value differs from one device's.

    Attributes:
        kind: "rounding", "wrong", or "replicas" for replicas that differ between ranks.
        what: the operator, redistribution or module.
        line: the user's line, `file:line`; in backward, the line of the forward operator.
        backward: whether it happened in backward.
        operands: the layouts of the operands.
        result: the layout of the result.
        ranks: the coordinates of the ranks with the worst element, or with the differing replicas.
        at: the index of the worst element in the global tensor.
        value: its value on the ranks.
        expected: its value on one device.
        error: the absolute difference.
        allowed: the difference that rounding explains.
        number: its number among all comparisons, from 1.
    """

    kind: str
    what: str
    line: str
    backward: bool = False
    operands: tuple[str, ...] = ()
    result: str = ""
    ranks: tuple[tuple[int, ...], ...] = ()
    at: tuple[int, ...] = ()
    value: float | complex = 0.0
    expected: float | complex = 0.0
    error: float = 0.0
    allowed: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        verbs = {"rounding": "rounds differently", "wrong": "gave a wrong value", "replicas": "differs between ranks"}
        where = f"in backward of {self.line}" if self.backward else f"at {self.line}"
        lines = [f"{self.what} {verbs[self.kind]}, {where}"]
        if self.operands:
            lines.append(f"  operands {', '.join(self.operands)}")
        ranks = f", on the ranks at {', '.join(map(str, self.ranks[:4]))}" if self.ranks else ""
        lines.append(f"  result   {self.result}{ranks}")
        if self.kind != "replicas":
            lines.append(
                f"  at {list(self.at)} it is {self.value:.8g}, on one device {self.expected:.8g}: "
                f"error {self.error:.3g}, of which rounding explains {self.allowed:.3g}"
            )
        return "\n".join(lines)


@dataclass
class ParityReport:
    """Counts of comparisons, and the differences.

    Attributes:
        findings: wrong values and differing replicas in order; without consequences of earlier ones.
        first_rounding: the first operator whose result is correct but not bitwise equal to one device's.
        counts: the number of comparisons that were "equal", "rounding", "carried" (correct for operands that were
            already rounded differently), "wrong", "replicas" and "unchecked" (could not run on one device).
        drift: the largest difference from one device so far, relative to the largest element, and its line.
    """

    findings: list[Difference] = field(default_factory=list)
    first_rounding: Difference | None = None
    counts: Counter[str] = field(default_factory=Counter)
    drift: tuple[float, str] = (0.0, "")

    @property
    def ok(self) -> bool:
        """Whether no value was wrong."""
        return not self.findings

    @property
    def first(self) -> Difference | None:
        """The first wrong value."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        total = sum(self.counts.values())
        counted = ", ".join(f"{n} {kind}" for kind, n in self.counts.items())
        lines = [f"parity: {total} compared" + (f" ({counted})" if counted else "")]
        if self.first is not None:
            lines += ["", str(self.first)]
            lines += [f"and {len(self.findings) - 1} more, independent of it"] if len(self.findings) > 1 else []
        else:
            lines[0] += ": all values match one device"
        if self.first_rounding is not None:
            lines += ["", f"first {self.first_rounding}"]
        if self.drift[0]:
            lines.append(f"largest difference so far: {self.drift[0]:.2g} of the largest element, at {self.drift[1]}")
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
