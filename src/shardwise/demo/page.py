"""The demo's output: headings, sentences, code, tables and progress bars, at most 80 columns wide.

Without a terminal a progress bar is a few lines.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardwise.text import WIDTH, print_lines, slim_table

__all__ = ["Page"]

LINES = 8  # of a progress bar without a terminal


class Page:
    """Prints the parts of the demo.

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
        """Print the numbered heading of a part."""
        self.parts += 1
        print_lines("", f"{self.parts}. {text}", style="bold", widest=WIDTH)

    def say(self, *sentences: str, style: str = "") -> None:
        """Print sentences, wrapped."""
        print_lines(textwrap.fill(" ".join(sentences), WIDTH), style=style, widest=WIDTH)
        sys.stdout.flush()

    def lines(self, lines: Iterable[str], style: str = "") -> None:
        """Print lines unchanged, indented."""
        print_lines(*(f"  {line}".rstrip() for line in lines), style=style, widest=WIDTH)

    def code(self, text: str) -> None:
        """Print source code."""
        self.lines(text.splitlines(), style="cyan")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Print a table; the columns in `right` are right-aligned."""
        table = slim_table()
        for column, heading in enumerate(headings):
            table.add_column(heading, justify="right" if column in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        print_lines(table, widest=WIDTH)

    @contextlib.contextmanager
    def bar(self, name: str, total: int, columns: Sequence[str] = ()) -> Iterator[Callable[..., None]]:
        """A progress bar. Call the result once for each step, with a text for each column.

        Args:
            name: the name of the activity.
            total: the number of steps.
            columns: names of the values shown next to the bar.
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
    """A progress bar of rich, which restores the cursor on exit and on exceptions."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # leaves space for the ^C that a terminal prints at the cursor: it must not wrap
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
