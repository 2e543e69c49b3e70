"""The store of the process group with a limit for every call, and other calls of torch that may never return.

torch's client of a TCPStore waits for answers without a limit: `check`, `add` and `get` always, and `wait` after its
timeout, when it notifies the server. While the host of the store is frozen, or the link to it is down, they wait for
TCP, which gives up after about a quarter of an hour. Such calls run in a thread that is left behind.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from shardwise.fabric.lost_ranks import lost_rank_error

__all__ = ["MARGIN", "BoundedStore", "address_of", "run_bounded"]

T = TypeVar("T")
MARGIN = 5.0  # seconds after the timeout of the process group, whose own error is more specific


def run_bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """The result of a call that must end within some seconds.

    Args:
        function: it runs in a thread of its own, with the current device.
        seconds: the limit, after which the thread is left behind.
        what: the part that did not answer, for the error.
    """
    job, device = _Job(function), _current_device()

    def run_on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        job.run()

    threading.Thread(target=run_on_device, name="shardwise-bounded", daemon=True).start()
    return job.result(seconds, what)


class BoundedStore:
    """A torch store whose calls raise `LostRankError` after a time limit. After one failure all calls fail.

    Args:
        store: used by this object alone.
        seconds: the limit of a call.
        use: what the ranks use it for, for errors.
        ranks: those that use it.
    """

    def __init__(self, store: Any, seconds: float, use: str, ranks: Sequence[int]) -> None:
        self._store, self._seconds, self._use, self._ranks = store, seconds, use, ranks
        self._jobs: _Jobs = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)  # ends the thread
        # started here: a thread keeps alive the exception hook that was set when it started, which may refer to a user
        # of this store
        threading.Thread(target=_work, args=(self._jobs,), name="shardwise-store", daemon=True).start()
        self._lock = threading.Lock()
        self._failure: RuntimeError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Whether these keys exist."""
        return self._ask(lambda: self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value if the current one equals the expected one; returns the value stored afterwards."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it existed."""
        return self._ask(lambda: self._store.delete_key(key))

    def _ask(self, call: Callable[[], T]) -> T:
        job = _Job(call)
        with self._lock:  # calls take turns; the limit holds for each call
            if self._failure is None:
                self._jobs.put(job)
                try:
                    return job.result(self._seconds, f"the store of the process group{address_of(self._store)}")
                except RuntimeError as error:
                    self._failure = error
            failure = self._failure
        named = lost_rank_error(failure, self._use, self._ranks)
        if named is None:
            raise failure
        raise named from failure


class _Job(Generic[T]):
    """A call in another thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def result(self, seconds: float, what: str) -> T:
        if not self._done.wait(seconds):
            raise dist.DistStoreError(f"timed out: {what} has not answered for {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._results[0]


_Jobs = queue.SimpleQueue[_Job[Any] | None]


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        job = None  # it may be the last reference to the store


def address_of(store: Any) -> str:
    """The address of a store's server, for messages; empty if it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f" at [{store.host}]:{store.port}" if isinstance(store, dist.TCPStore) else ""


def _current_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
