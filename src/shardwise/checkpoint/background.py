"""One save under way on a thread of its own: waiting for it, and its error at the next call."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

from shardwise.fabric.base import of_one_rank
from shardwise.fabric.rank_threads import rank_threads

__all__ = ["Saving", "finish_pending", "start_pending"]


class Saving:
    """A save under way."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if rank_threads() is not None:  # a thread beside them would speak for whichever rank is running
            self._run(run)
            return
        # not a daemon: a program that ends waits for its checkpoint
        self._thread = threading.Thread(target=self._run, args=(run,), name="shardwise-checkpoint")
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for it; raises what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if _pending and _pending[0] is self:
            _pending.clear()
        if error is not None:
            raise error


_pending: list[Saving] = of_one_rank([])


def start_pending(run: Callable[[], None]) -> Saving:
    """Run it on a thread; `finish_pending` waits for it."""
    saving = Saving(run)
    _pending[:] = [saving]
    return saving


def finish_pending() -> None:
    """Wait for the save under way, if there is one, and raise its error."""
    if _pending:
        _pending[0].wait()


@atexit.register
def _say_what_nobody_asked_for() -> None:
    if _pending and _pending[0]._error is not None:
        print(f"shardwise: the last checkpoint was not saved: {_pending[0]._error}", file=sys.stderr)
