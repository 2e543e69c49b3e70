"""Messages of transfers between processes: bucket by bucket, two in flight, on a separate process group.

Transfers of one lane run one after the other, so that messages between two ranks have one order.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.fabric.state_messages import BucketMessages, RankTransfer

__all__ = ["TransferLane"]

IN_FLIGHT = 2  # buckets


class _Flight(NamedTuple):
    """A bucket in flight: the work to wait for, and the memory it needs until then."""

    bucket: BucketMessages
    works: list[Any]
    arriving: list[torch.Tensor]
    leaving: list[torch.Tensor]


class TransferLane:
    """The process group of some ranks for transfers, and the transfer that is running.

    Args:
        group: their group; None for a single rank.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._last: _Running | None = None

    def start(self, run: Callable[[], None], in_thread: bool) -> Callable[[], None]:
        """Run in a thread after the previous transfers; returns a function that waits and raises its error."""
        former, running = self._last, _Running()
        self._last = running

        def work() -> None:
            if former is not None:
                former.done.wait()
            running.attempt(run)

        if in_thread:
            threading.Thread(target=work, name="shardwise transfer", daemon=True).start()
        else:
            work()
        return running.wait

    def move(
        self,
        own: RankTransfer,
        locals_: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        report: Callable[[int], object],
    ) -> None:
        """Send and receive every bucket."""
        flights: collections.deque[_Flight] = collections.deque()
        with torch.no_grad():
            for bucket in own.buckets:
                while len(flights) >= IN_FLIGHT:
                    self._land(flights.popleft(), results, report)
                flights.append(self._send(bucket, locals_, results))
                bucket.keep(locals_, results)
            while flights:
                self._land(flights.popleft(), results, report)

    def _send(
        self, bucket: BucketMessages, locals_: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> _Flight:
        arriving = [message.empty(results) for message in bucket.receives]
        leaving = [message.pack(locals_) for message in bucket.sends]
        operations = [
            dist.P2POp(dist.irecv, buffer, message.ranks[0], self.group)
            for message, buffer in zip(bucket.receives, arriving, strict=True)
        ]
        operations += [
            dist.P2POp(dist.isend, buffer, rank, self.group)
            for message, buffer in zip(bucket.sends, leaving, strict=True)
            for rank in message.ranks
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Flight(bucket, works, arriving, leaving)

    def _land(self, flight: _Flight, results: Sequence[torch.Tensor], report: Callable[[int], object]) -> None:
        for work in flight.works:
            work.wait()
        for message, buffer in zip(flight.bucket.receives, flight.arriving, strict=True):
            message.unpack(buffer, results)
        report(flight.bucket.nbytes)


class _Running:
    """A transfer that was started, and its error."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def attempt(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def wait(self) -> None:
        """Return when it is done; raise what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
