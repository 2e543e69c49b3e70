"""comm_budget: a limit on bytes and collectives, for tests and training runs."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.mode_stack import mode_context
from shardwise.debug.recording.recorder import Listener, listening
from shardwise.debug.recording.records import MoveRecord, Record, operator_text
from shardwise.errors import CommunicationError

__all__ = ["Budget", "comm_budget"]


class Budget(Listener):
    """The limits and the communication so far.

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
        """Bytes received by a rank so far."""
        return round(self._received)

    def move(self, record: Record, move: MoveRecord) -> None:
        """Count a collective that is about to be issued; raise, so that it is not issued, if it exceeds a limit."""
        received, collectives = self._received + move.received, self.spent_collectives + 1
        over = []
        if self.limit_bytes is not None and received > self.limit_bytes:
            over.append(f"{received:,.0f} bytes of {self.limit_bytes:,.0f}")
        if self.limit_collectives is not None and collectives > self.limit_collectives:
            over.append(f"{collectives} collectives of {self.limit_collectives}")
        if over:
            self.over = CommunicationError(
                f"communication budget exceeded ({', '.join(over)}): {operator_text(record.name)} in {record.phase} "
                f"at {str(record.where) or 'an unknown line'} would {move.words}, {move.before} -> {move.after.layout}",
                hint="shardwise.explain() shows what moves and how to avoid it; or raise the budget",
            )
            raise self.over
        self._received, self.spent_collectives = received, collectives


@mode_context
def comm_budget(*, bytes: float | None = None, collectives: int | None = None) -> Iterator[Budget]:  # noqa: A002
    """Limit the communication inside the context. The first collective that exceeds a limit raises instead.

    Args:
        bytes: the most bytes that a rank may receive in total.
        collectives: the most collectives.

    Raises:
        CommunicationError: names the operator, its line and the collective. If the program catches it and continues,
            it is raised again at the end of the context.

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
