"""What the demo prints: headings, sentences, code, tables and bars that move; at most 80 columns wide.

Knows nothing of what is told. On what is not a terminal a bar is a few lines instead.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardwise.text import WIDTH, print_lines, slim_table

__all__ = ["Page"]

LINES = 8  # of a bar that cannot move


class Page:
    """A page that grows downwards.

    Example:
        >>> page = Page()
        >>> page.heading("A part")
        <BLANKLINE>
        1. A part
        >>> page.say("A sentence.")
        A sentence.
    """

    def __init__(self) -> None:
        self.parts = 0

    def heading(self, text: str) -> None:
        """The beginning of a part, numbered."""
        self.parts += 1
        print_lines("", f"{self.parts}. {text}", style="bold", widest=WIDTH)

    def say(self, *sentences: str, style: str = "") -> None:
        """Sentences, broken into lines."""
        print_lines(textwrap.fill(" ".join(sentences), WIDTH), style=style, widest=WIDTH)
        sys.stdout.flush()

    def lines(self, lines: Iterable[str], style: str = "") -> None:
        """Lines that stay as they are, moved in a little."""
        print_lines(*(f"  {line}".rstrip() for line in lines), style=style, widest=WIDTH)

    def code(self, text: str) -> None:
        """What one would write."""
        self.lines(text.splitlines(), style="cyan")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Rows of cells; the columns numbered in `right` are numbers."""
        table = slim_table()
        for column, heading in enumerate(headings):
            table.add_column(heading, justify="right" if column in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        print_lines(table, widest=WIDTH)

    @contextlib.contextmanager
    def bar(self, name: str, total: int, columns: Sequence[str] = ()) -> Iterator[Callable[..., None]]:
        """A bar for the time of the block; what it gives is called once for each step, with a text for each column.

        Args:
            name: what goes on.
            total: how many steps there are.
            columns: what stands beside the bar.
        """
        if not sys.stdout.isatty():
            yield _steps_as_lines(name, total, columns)
            return
        with _live(columns) as progress:
            task = progress.add_task(name, total=total, **dict.fromkeys(columns, ""))

            def step(*texts: str) -> None:
                progress.update(task, advance=1, **dict(zip(columns, texts, strict=True)))

            yield step


def _live(columns: Sequence[str]) -> Any:
    """A bar of rich, which gives the cursor back however its block ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # room for the ^C that a terminal writes where the cursor stands: it must not begin a new line
    console = Console(highlight=False, markup=False, width=min(Console().width, WIDTH) - 3)
    beside = [TextColumn(f"{name} {{task.fields[{name}]}}", markup=False) for name in columns]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        *beside,
        TimeElapsedColumn(),
        console=console,
        expand=True,
    )


def _steps_as_lines(name: str, total: int, columns: Sequence[str]) -> Callable[..., None]:
    done = 0

    def step(*texts: str) -> None:
        nonlocal done
        done += 1
        if columns and (done == 1 or done == total or done % max(1, total // LINES) == 0):
            beside = "   ".join(f"{column} {text}" for column, text in zip(columns, texts, strict=True))
            print(f"{name} {done:{len(str(total))}}/{total}   {beside}", flush=True)

    return step
