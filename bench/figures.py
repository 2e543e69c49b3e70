"""What was asked for and what was measured, kept while measurements run, and shown as one table at the end.

Points of plots are kept in the same manner: `python -m bench --plots docs/images` draws them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench.line_plot import Series, line_plot


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


@dataclass(frozen=True)
class Point:
    """One point of a plot."""

    plot: str
    series: str
    x: float
    y: float


class Measured(NamedTuple):
    """What one measurement left, when it was made, and how it failed, if it did."""

    when: str
    failed: str
    figures: tuple[Figure, ...] = ()
    points: tuple[Point, ...] = ()


class Plot(NamedTuple):
    """What a plot is called on the page."""

    title: str
    x_label: str
    y_label: str


PLOTS = {
    "weak_scaling": Plot("Weak scaling: peak memory of a rank", "ranks", "units of a rank's data"),
    "cold_axes": Plot("First call of an operator with a new shape", "mesh axes", "us"),
    "step_time": Plot("Host time of a fully sharded training step", "ranks", "ms"),
    "memory_ranks": Plot("Peak memory of a rank, llama of 8B in bfloat16, dry runs", "ranks", "GiB"),
}
figures: list[Figure] = []  # of the measurement that runs in this process
points: list[Point] = []


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


def point(plot: str, series: str, x: float, y: float) -> None:
    """Remember a point of a plot of `PLOTS`."""
    assert plot in PLOTS, plot
    points.append(Point(plot, series, x, y))


def leave(path: Path, when: str) -> None:
    """Write what was measured in this process to a file, for another process."""
    write({"": Measured(when, "", tuple(figures), tuple(points))}, path)


def write(measured: Mapping[str, Measured], path: Path) -> None:
    """Write what measurements left, by their names."""
    kept = {
        name: {"when": one.when, "failed": one.failed}
        | {"figures": [asdict(each) for each in one.figures], "points": [asdict(each) for each in one.points]}
        for name, one in measured.items()
    }
    path.write_text(json.dumps(kept, indent=1))


def read(path: Path) -> dict[str, Measured]:
    """What `write` wrote."""
    return {
        name: Measured(
            one["when"],
            one["failed"],
            tuple(Figure(**each) for each in one["figures"]),
            tuple(Point(**each) for each in one["points"]),
        )
        for name, one in json.loads(path.read_text()).items()
    }


def draw_plots(measured: Iterable[Measured], folder: Path) -> list[Path]:
    """An SVG for each plot that has points; the files."""
    written = []
    found = [each for one in measured for each in one.points]
    for name, plot in PLOTS.items():
        mine = [one for one in found if one.plot == name]
        names = dict.fromkeys(one.series for one in mine)
        series = [Series(each, [(one.x, one.y) for one in mine if one.series == each]) for each in names]
        if series:
            written.append(folder / f"plot_{name}.svg")
            written[-1].write_text(line_plot(plot.title, series, x_label=plot.x_label, y_label=plot.y_label))
    return written


def table(measured: Mapping[str, Measured]) -> str:
    """All figures in Markdown, by measurement; those that failed are named."""
    lines = ["| `python -m bench ...` | | asked, at most | measured |", "|---|---|---|---|"]
    for name, one in measured.items():
        head = f"`{name}`"
        for each in one.figures:
            asked, found = (f"{shown(value)}{each.unit}" for value in (each.asked, each.measured))
            lines.append(f"| {head} | {each.name} | {asked} | {found if each.holds else f'**{found}**'} |")
            head = ""
        if one.failed:
            lines.append(f"| {head} | not measured to its end: {one.failed} | | |")
    return "\n".join(lines)


def shown(value: float) -> str:
    """A number with as many digits as matter."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
