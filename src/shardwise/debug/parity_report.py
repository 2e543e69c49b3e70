"""What a comparison with one device found: the first differences, with the user's lines, and how many of each kind.

Holds and shows; compares nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Difference", "ParityReport"]


@dataclass(frozen=True)
class Difference:
    """One operator, move or module whose value is not that of one device.

    Attributes:
        kind: "rounding", "wrong", or "replicas" for copies that differ from rank to rank.
        what: the operator, or what else gave the value.
        line: the user's line, `file:line`; in backward, that of the forward operator.
        backward: whether it happened in backward.
        operands: the layouts that went in.
        result: the layout that came out.
        ranks: the coordinates of the ranks that hold the worst element, or the copies that differ.
        at: the index of the worst element of the whole tensor.
        value: what the ranks have there.
        expected: what one device has.
        error: how far they are apart.
        allowed: how much of that rounding explains.
        number: the how manieth it was, from 1.
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
        said = {"rounding": "rounds otherwise", "wrong": "gave a wrong value", "replicas": "differs from rank to rank"}
        where = f"in backward of {self.line}" if self.backward else f"at {self.line}"
        lines = [f"{self.what} {said[self.kind]}, {where}"]
        if self.operands:
            lines.append(f"  operands {', '.join(self.operands)}")
        held = f", on the ranks at {', '.join(map(str, self.ranks[:4]))}" if self.ranks else ""
        lines.append(f"  result   {self.result}{held}")
        if self.kind != "replicas":
            lines.append(
                f"  at {list(self.at)} it is {self.value:.8g} where one device has {self.expected:.8g}: "
                f"{self.error:.3g} off, of which rounding explains {self.allowed:.3g}"
            )
        return "\n".join(lines)


@dataclass
class ParityReport:
    """What was compared, and what differed.

    Attributes:
        findings: wrong values and differing copies, the first one first; not what follows from them.
        first_rounding: the first operator whose result is not bit for bit that of one device, but right.
        counts: how many were "equal", "rounding", "carried" (right, of operands that had rounded before), "wrong",
            "replicas" and "unchecked" (which one device could not run).
        drift: the largest difference from one device so far, as a part of the largest element, and the line of it.
    """

    findings: list[Difference] = field(default_factory=list)
    first_rounding: Difference | None = None
    counts: Counter[str] = field(default_factory=Counter)
    drift: tuple[float, str] = (0.0, "")

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.findings

    @property
    def first(self) -> Difference | None:
        """The first wrong one."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        total = sum(self.counts.values())
        counted = ", ".join(f"{n} {kind}" for kind, n in self.counts.items())
        lines = [f"parity: {total} compared" + (f" ({counted})" if counted else "")]
        if self.first is not None:
            lines += ["", str(self.first)]
            lines += [f"and {len(self.findings) - 1} more that do not follow from it"] if len(self.findings) > 1 else []
        else:
            lines[0] += ": what the ranks hold is what one device has"
        if self.first_rounding is not None:
            lines += ["", f"first {self.first_rounding}"]
        if self.drift[0]:
            lines.append(f"largest difference so far: {self.drift[0]:.2g} of the largest element, at {self.drift[1]}")
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
