"""A progress bar in bytes for operations longer than a few seconds. Shown on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Progress"]

PATIENCE = 2.0  # seconds until the bar is shown


class Progress:
    """Counts bytes; shows a bar after a delay.

    Args:
        title: the name of the operation.
        total: the total number of bytes.
        shown: whether this process may show the bar; it also needs a terminal.
    """

    def __init__(self, title: str, total: int, *, shown: bool) -> None:
        self.done = 0
        self._title, self._total = title, total
        self._shown = shown and total > 0 and sys.stderr.isatty()
        self._since = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, count: int) -> None:
        """Add to the number of processed bytes."""
        self.done += count
        if not self._shown:
            return
        if self._bar is None and time.monotonic() - self._since > PATIENCE:
            self._bar = self._started()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)

    def _started(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
        bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        bar.add_task(self._title, total=self._total)
        bar.start()
        return bar
