"""A save on a background thread: waiting for it, and raising its error at the next call."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

from shardwise.fabric.base import of_one_rank
from shardwise.fabric.rank_threads import rank_threads

__all__ = ["Saving", "finish_pending", "start_pending"]


class Saving:
    """A save in progress."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if rank_threads() is not None:  # with ranks as threads, another thread would have no rank
            self._write(write)
            return
        # not a daemon thread: at its end the program waits for the checkpoint
        self._thread = threading.Thread(target=self._write, args=(write,), name="shardwise-checkpoint")
        self._thread.start()

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end. Raises the error of the save, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if _pending and _pending[0] is self:
            _pending.clear()
        if error is not None:
            raise error


_pending: list[Saving] = of_one_rank([])


def start_pending(write: Callable[[], None]) -> Saving:
    """Run `write` on a thread; `finish_pending` waits for it."""
    saving = Saving(write)
    _pending[:] = [saving]
    return saving


def finish_pending() -> None:
    """Wait for the save in progress, if there is one, and raise its error."""
    if _pending:
        _pending[0].wait()


@atexit.register
def _print_unraised_error() -> None:
    if _pending and _pending[0]._error is not None:
        print(f"shardwise: the last checkpoint was not saved: {_pending[0]._error}", file=sys.stderr)
