"""Limits on communication, for tests and training runs: check_lock compares with a file, comm_budget with numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from shardwise.core.mode_stack import mode_context
from shardwise.debug.explaining import explain
from shardwise.debug.lock import compare
from shardwise.debug.recorder import Listener, listening
from shardwise.debug.records import Move, Record
from shardwise.debug.report import Report
from shardwise.debug.units import operator_text
from shardwise.errors import CommunicationError

__all__ = ["Budget", "check_lock", "comm_budget"]


class Budget(Listener):
    """What may be moved, and what was.

    Example:
        >>> import shardwise as sw
        >>> with sw.comm_budget(bytes=1000) as budget:
        ...     pass
        >>> budget.spent_bytes, budget.spent_collectives
        (0, 0)
    """

    def __init__(self, limit_bytes: float | None, limit_collectives: int | None) -> None:
        self.limit_bytes, self.limit_collectives = limit_bytes, limit_collectives
        self._received = 0.0
        self.spent_collectives = 0
        self.over: CommunicationError | None = None

    @property
    def spent_bytes(self) -> int:
        """Bytes that a rank received so far."""
        return round(self._received)

    def move(self, record: Record, move: Move) -> None:
        """Count a collective that is about to be issued; what would go over the limit is not issued."""
        received, collectives = self._received + move.received, self.spent_collectives + 1
        over = []
        if self.limit_bytes is not None and received > self.limit_bytes:
            over.append(f"{received:,.0f} bytes of {self.limit_bytes:,.0f}")
        if self.limit_collectives is not None and collectives > self.limit_collectives:
            over.append(f"{collectives} collectives of {self.limit_collectives}")
        if over:
            self.over = CommunicationError(
                f"over the budget of communication ({', '.join(over)}): {operator_text(record.name)} in {record.phase} "
                f"at {str(record.where) or 'an unknown line'} would {move.words}, {move.before} -> {move.after.layout}",
                hint="shardwise.explain() shows what moves and what would spare it; or raise the budget",
            )
            raise self.over
        self._received, self.spent_collectives = received, collectives


@mode_context
def comm_budget(*, bytes: float | None = None, collectives: int | None = None) -> Iterator[Budget]:  # noqa: A002
    """Inside, no more than this may be moved. The first collective that would go over it raises instead.

    Args:
        bytes: what a rank may receive in all.
        collectives: how many there may be.

    Raises:
        CommunicationError: names the operator, its line and what it was about to move. Where the program went on in
            spite of it, it is raised again at the end.

    Example:
        >>> import shardwise as sw
        >>> x = sw.ones(8, device_mesh=sw.init_device_mesh("cpu", (4,)), placements=[sw.Shard(0)])
        >>> with sw.comm_budget(bytes=24, collectives=1) as budget:
        ...     _ = x.full_tensor()
        >>> budget.spent_bytes, budget.spent_collectives
        (24, 1)
    """
    budget = Budget(bytes, collectives)
    with listening(budget):
        yield budget
    if budget.over is not None:
        raise budget.over


def check_lock(path: str | os.PathLike[str], report: Report | None = None) -> contextlib.AbstractContextManager[Report]:
    """Fail where more is moved than a lock file says; a warning says where it is less.

    Args:
        path: the file that `report.save_lock` wrote. With SHARDWISE_UPDATE_LOCK=1 in the environment it is written
            instead of compared.
        report: what was recorded. Left out, use the result as a context: what runs inside is recorded and compared.

    Raises:
        CommunicationError: lists what is more, entry by entry, and what is less.

    Example:
        >>> import shardwise as sw, tempfile, os
        >>> x = sw.ones(8, device_mesh=sw.init_device_mesh("cpu", (4,)), placements=[sw.Shard(0)])
        >>> with sw.explain() as report:
        ...     _ = x.full_tensor()
        >>> path = os.path.join(tempfile.mkdtemp(), "communication.lock")
        >>> report.save_lock(path)
        >>> with sw.check_lock(path):
        ...     _ = x.full_tensor()
    """
    if report is not None:
        compare(path, report.lock())
        return contextlib.nullcontext(report)
    return _checking(path)


@mode_context
def _checking(path: str | os.PathLike[str]) -> Iterator[Report]:
    with explain() as report:
        yield report
    compare(path, report.lock())
