"""Messages between the stages of a pipeline on processes: point to point, and reports of failed stages.

A thread waits, so that the calling thread can check whether another rank has failed.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import PipelineError
from shardwise.fabric.lost_ranks import is_timeout, reporting_rank

__all__ = ["StageLink"]

LOOK = 0.5  # seconds between checks whether another rank has failed
LOOKS = 8  # at a rank whose connection broke, before it counts as gone
LAST_WORDS = 5.0  # seconds for the others to learn of a failure before this process continues


class StageLink:
    """The connections of the ranks of a pipeline.

    Args:
        group: their process group, used by nothing else.
        store: where they publish values that are not tensors.
        on_failure: called before a failure of another rank is raised.
        stages: the stages of each rank.
    """

    def __init__(
        self, group: Any, store: Any, on_failure: Callable[[], None], stages: Mapping[int, Sequence[int]]
    ) -> None:
        self._group, self._store, self._on_failure, self._stages = group, store, on_failure, stages
        self._size = 1 if group is None else dist.get_world_size(group)
        self._sent: list[tuple[int, Any, torch.Tensor]] = []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _Job]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, rank: int, tag: int, buffer: torch.Tensor) -> None:
        """Send to a rank; returns at once."""
        self._sent.append((rank, self._begun(dist.isend, rank, tag, buffer), buffer))

    def receive(self, messages: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """Fill the buffers of these ranks and tags."""
        works = [self._begun(dist.irecv, rank, tag, buffer) for rank, tag, buffer in messages]
        for work, (rank, _, _) in zip(works, messages, strict=True):
            self._wait_or_fail(work.wait, rank)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for rank, work, _ in self._sent:
            self._wait_or_fail(work.wait, rank)
        self._sent.clear()

    # ---------------------------------------------------------------- what is not a tensor

    def publish(self, key: str, value: Any) -> None:
        """Publish a value for the others."""
        self._store.set(key, pickle.dumps(value))

    def lookup(self, key: str) -> Any:
        """The value that another rank publishes."""
        while not self._asked(lambda: self._store.check([key])):
            self._raise_failure()
            time.sleep(0.002)
        return pickle.loads(self._store.get(key))

    def forget(self, key: str) -> None:
        """Remove a value that is no longer needed."""
        self._store.delete_key(key)

    # ---------------------------------------------------------------- failures

    def fail(self, text: str) -> str:
        """Inform the others that this rank has failed, and wait a while until they have read it.

        Returns the first failure: this one, or that of another rank, which may have caused it.
        """
        try:
            first = self._store.compare_set("failed", "", text).decode()
            end = time.monotonic() + LAST_WORDS
            while first == text and self._store.add("heard", 0) < self._size - 1 and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError:  # the store is gone, and with it the others
            return text
        return first

    def _wait_or_fail(self, wait: Callable[[], object], rank: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardwise pipeline", daemon=True)
            self._thread.start()
        job = _Job()
        self._jobs.put((wait, job))
        while not job.done.wait(LOOK):
            self._raise_failure(rank)
        if job.error is not None:
            self._raise_gone(rank, job.error)

    def _begun(self, begin: Callable[..., Any], rank: int, tag: int, buffer: torch.Tensor) -> Any:
        try:
            return begin(buffer, rank, self._group, tag)
        except RuntimeError as error:
            self._raise_gone(rank, error)

    def _raise_gone(self, rank: int, error: BaseException) -> None:
        """Raise for a broken connection to a rank. It, or the rank it waited for, may have published the reason."""
        for _ in range(LOOKS):
            self._raise_failure(rank, error)
            time.sleep(LOOK)
        happened = "did not answer in time" if is_timeout(error) else "is gone"
        own = f"{self._name(rank)} {happened}: {_first_line(error)}; says {reporting_rank()}"
        text = self.fail(own)
        self._on_failure()
        raise PipelineError(
            text if text == own else f"{text}\n  {own}", hint="look at the output of that rank"
        ) from error

    def _name(self, rank: int) -> str:
        return f"rank {rank}, which has stage {', '.join(map(str, self._stages.get(rank, ())))},"

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            self._on_failure()
            raise PipelineError(
                f"the store of the process group does not answer, and the ranks cannot inform each other: {error}",
                hint="look at the output of the other ranks, of rank 0 first",
            ) from error

    def _raise_failure(self, rank: int | None = None, cause: BaseException | None = None) -> None:
        """Raise the failure of another rank, if there is one, with the rank that this one waits for."""
        if self._asked(lambda: self._store.check(["failed"])):
            text = self._store.get("failed").decode()
            self._store.add("heard", 1)
            self._on_failure()
            waits = "for a message" if rank is None else f"for {self._name(rank).rstrip(',')}"
            raise PipelineError(f"{text}\n  {reporting_rank()}, waited {waits}") from cause

    def _run(self) -> None:
        while True:
            wait, job = self._jobs.get()
            try:
                wait()
            except BaseException as error:
                job.error = error
            job.done.set()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class _Job:
    """A requested wait."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
