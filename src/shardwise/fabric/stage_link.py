"""Messages between the stages of a pipeline on processes: point to point, and reports of failed stages.

A wait is done by a thread, so that this one can look whether another rank has failed.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import PipelineError

__all__ = ["StageLink"]

LOOK = 0.5  # seconds between looks at whether another rank has failed
LAST_WORDS = 10.0  # seconds in which the others may hear of a failure before this process goes on


class StageLink:
    """The connections of the ranks of a pipeline.

    Args:
        group: their process group, used by nothing else.
        store: where they tell each other what is not a tensor.
        on_failure: called before a failure of another rank is raised.
    """

    def __init__(self, group: Any, store: Any, on_failure: Callable[[], None]) -> None:
        self._group, self._store, self._on_failure = group, store, on_failure
        self._size = 1 if group is None else dist.get_world_size(group)
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _Job]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, rank: int, tag: int, buffer: torch.Tensor) -> None:
        """Send to a rank; returns at once."""
        self._sent.append((dist.isend(buffer, rank, self._group, tag), buffer))

    def receive(self, messages: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """Fill the buffers of these ranks and tags."""
        works: list[Any] = [dist.irecv(buffer, rank, self._group, tag) for rank, tag, buffer in messages]
        for work in works:
            self._watched(work.wait)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            self._watched(work.wait)
        self._sent.clear()

    # ---------------------------------------------------------------- what is not a tensor

    def publish(self, key: str, value: Any) -> None:
        """Tell the others a value."""
        self._store.set(key, pickle.dumps(value))

    def lookup(self, key: str) -> Any:
        """The value that another rank publishes."""
        while not self._asked(lambda: self._store.check([key])):
            self._raise_failure(None)
            time.sleep(0.002)
        return pickle.loads(self._store.get(key))

    def forget(self, key: str) -> None:
        """Remove a value that nobody asks for any more."""
        self._store.delete_key(key)

    # ---------------------------------------------------------------- failures

    def fail(self, text: str) -> None:
        """Tell the others that this rank has failed, and wait a while until they have heard."""
        try:
            self._store.set("failed", text)
            end = time.monotonic() + LAST_WORDS
            while self._store.add("heard", 0) < self._size - 1 and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError:  # the store is gone, and with it the others
            pass

    def _watched(self, wait: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardwise pipeline", daemon=True)
            self._thread.start()
        job = _Job()
        self._jobs.put((wait, job))
        while not job.done.wait(LOOK):
            self._raise_failure(None)
        if job.error is not None:  # a connection that broke: its rank may have said why
            for _ in range(10):
                self._raise_failure(job.error)
                time.sleep(LOOK)
            raise PipelineError(
                f"the connection to another stage broke: {job.error}", hint="look at the output of the other ranks"
            ) from job.error

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            self._on_failure()
            raise PipelineError(
                f"the store of the process group is gone, and with it the rank that has it: {error}",
                hint="look at the output of rank 0",
            ) from error

    def _raise_failure(self, cause: BaseException | None) -> None:
        if self._asked(lambda: self._store.check(["failed"])):
            text = self._store.get("failed").decode()
            self._store.add("heard", 1)
            self._on_failure()
            raise PipelineError(text) from cause

    def _run(self) -> None:
        while True:
            wait, job = self._jobs.get()
            try:
                wait()
            except BaseException as error:
                job.error = error
            job.done.set()


class _Job:
    """A wait that was asked for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
