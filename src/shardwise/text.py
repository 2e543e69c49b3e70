"""How numbers and tables are shown to people in a terminal. Knows nothing of tensors; loads rich when first needed."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["human_bytes", "human_seconds", "print_lines", "slim_table"]

WIDTH = 80  # of what is not a terminal
WIDEST = 100  # on one that is wider


def human_bytes(count: float) -> str:
    """Bytes for people, in 1024s.

    Example:
        >>> human_bytes(512), human_bytes(3 * 2**29), human_bytes(33292288)
        ('512 B', '1.50 GiB', '31.75 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = max((p for p in range(len(units)) if count >= 1024**p), default=0)
    number = f"{count:.0f}" if power == 0 else f"{count / 1024**power:.2f}"
    return f"{number} {units[power]}"


def human_seconds(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> human_seconds(2.5), human_seconds(0.0284), human_seconds(4e-5)
        ('2.50 s', '28.40 ms', '40.00 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us" if seconds else "0 s"


def slim_table(*, expand: bool = False) -> Any:
    """A `rich.table.Table` to fill: a line under its headings and no other.

    Args:
        expand: as wide as the page.

    Example:
        >>> table = slim_table()
        >>> table.add_column("axis")
        >>> table.add_row("dp")
        >>> print_lines(table)
        axis
        ────
        dp
    """
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), expand=expand)


def print_lines(*parts: Any, style: str = "", widest: int = WIDEST) -> None:
    """Print text and tables; a string is shown as it is, without markup.

    Lines are not padded to the full width, so that a file of them reads well.

    Args:
        parts: what rich can show, one below the other.
        style: of all of it, as rich names styles.
        widest: the most columns on a terminal that has more.

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
