"""Formatting of numbers and tables for a terminal, and parsing of numbers.

Loads rich when first needed.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from shardwise.errors import NotationError

__all__ = [
    "DottedName",
    "broken_at_dots",
    "human_bytes",
    "human_seconds",
    "parse_bytes",
    "plural",
    "print_lines",
    "slim_table",
]

WIDTH = 80  # if the output is not a terminal
WIDEST = 100  # on wider terminals


_BYTES = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]*)")
UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def human_bytes(count: float) -> str:
    """Bytes as text, in units of 1024.

    Example:
        >>> human_bytes(512), human_bytes(3 * 2**29), human_bytes(33292288)
        ('512 B', '1.50 GiB', '31.75 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = max((p for p in range(len(units)) if count >= 1024**p), default=0)
    number = f"{count:.0f}" if power == 0 else f"{count / 1024**power:.2f}"
    return f"{number} {units[power]}"


def human_seconds(seconds: float) -> str:
    """Seconds as text.

    Example:
        >>> human_seconds(2.5), human_seconds(0.0284), human_seconds(4e-5)
        ('2.50 s', '28.40 ms', '40.00 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us" if seconds else "0 s"


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "collective"), plural(3, "collective")
        ('1 collective', '3 collectives')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def parse_bytes(text: str) -> int:
    """A number of bytes: `1000`, `64MiB`, `1.5GB`.

    Args:
        text: a number, and a unit of 1000s (kB, MB, GB, TB) or 1024s (KiB, MiB, GiB, TiB).

    Example:
        >>> parse_bytes("64MiB"), parse_bytes("1.5 GB"), parse_bytes("100")
        (67108864, 1500000000, 100)
    """
    found = _BYTES.fullmatch(text.strip())
    unit = UNITS.get(found["unit"].lower()) if found else None
    if found is None or unit is None:
        where = 0 if found is None else len(text) - len(text.lstrip()) + found.start("unit")
        raise NotationError.at(text, where, f"{text!r} is not a number of bytes", hint="as in 1000, 64MiB or 1.5GB")
    return int(float(found["number"]) * unit) if "." in found["number"] else int(found["number"]) * unit


def broken_at_dots(name: str, width: int) -> list[str]:
    """The lines of a dotted name in a narrow column. A part that is longer than a line is abbreviated in its middle.

    Example:
        >>> broken_at_dots("model.layers.0.self_attn.q_proj", 15)
        ['model.layers.0.', 'self_attn.', 'q_proj']
        >>> broken_at_dots("encoder.a_module_of_a_very_long_name", 12)
        ['encoder.', 'a_modu…_name']
    """
    lines = [""]
    for part in re.findall(r"[^.]+\.?|\.", name):
        if len(part) > width:
            end = (width - 1) // 2
            part = f"{part[: width - 1 - end]}…{part[len(part) - end :]}"
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


class DottedName:
    """A dotted name for a column of a table: see `broken_at_dots`.

    Example:
        >>> table = slim_table()
        >>> table.add_column("module", max_width=8)
        >>> table.add_row(DottedName("layers.0.mlp"))
        >>> print_lines(table)
        module
        ────────
        layers.
        0.mlp
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        yield Text("\n".join(broken_at_dots(self.name, max(options.max_width, 2))))

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        longest = max((len(part) for part in self.name.split(".")), default=0)
        return Measurement(min(longest + 1, options.max_width), min(len(self.name), options.max_width))


def slim_table(*headings: str, expand: bool = False) -> Any:
    """An empty `rich.table.Table` with a line under its headings and no other.

    Args:
        *headings: of columns that need no options.
        expand: use the full width.

    Example:
        >>> table = slim_table("axis")
        >>> table.add_row("dp")
        >>> print_lines(table)
        axis
        ────
        dp
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), expand=expand)
    for heading in headings:
        table.add_column(heading)
    return table


def print_lines(*parts: Any, style: str = "", widest: int = WIDEST) -> None:
    """Print text and tables; strings are printed without markup.

    Lines have no trailing spaces.

    Args:
        parts: objects that rich can show, one below the other.
        style: a style of rich for all parts.
        widest: the largest number of columns on wider terminals.

    Example:
        >>> print_lines("[8,32]", "", "two lines below")
        [8,32]
        <BLANKLINE>
        two lines below
    """
    from rich.console import Console

    width = min(Console().width, widest) if sys.stdout.isatty() else WIDTH
    console = Console(highlight=False, markup=False, width=width)
    with console.capture() as printed:
        for part in parts:
            console.print(part, style=style)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))
