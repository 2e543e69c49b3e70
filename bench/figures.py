"""What was asked for and what was measured, kept while measurements run, and shown as one table at the end."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One number that was asked for."""

    name: str
    asked: float
    measured: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether it is as good as asked."""
        return self.measured <= self.asked

    @property
    def verdict(self) -> str:
        """In a word."""
        return "holds" if self.holds else "SHORT"


figures: list[Figure] = []


def figure(name: str, measured: float, asked: float, unit: str = "") -> str:
    """Remember a number; what comes back says whether it holds, for the measurement's own output.

    Args:
        name: what was measured; of a ratio, of what to what.
        measured: the number.
        asked: the most that it may be.
        unit: of the number; none for a ratio.
    """
    found = Figure(name, asked, measured, unit)
    figures.append(found)
    return f"{found.verdict}: {shown(measured)}{unit}, asked at most {shown(asked)}{unit}"


def leave(path: Path) -> None:
    """Write them to a file, for another process."""
    path.write_text(json.dumps([asdict(one) for one in figures]))


def take_over(path: Path) -> None:
    """Add those that another process has left."""
    figures.extend(Figure(**one) for one in json.loads(path.read_text()))


def table() -> str:
    """All of them in Markdown."""
    lines = ["| | asked | measured | |", "|---|---|---|---|"]
    for one in figures:
        asked, measured = (f"{shown(value)}{one.unit}" for value in (one.asked, one.measured))
        lines.append(f"| {one.name} | {asked} | {measured if one.holds else f'**{measured}**'} | {one.verdict} |")
    return "\n".join(lines)


def shown(value: float) -> str:
    """A number with as many digits as matter."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
