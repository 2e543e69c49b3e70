"""check_ranks: switch the comparison of collectives between ranks on and off. `fabric/` compares."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.mode_stack import ModeStack, mode_context
from shardwise.fabric.c10d import c10d
from shardwise.fabric.routes import forget_routes
from shardwise.tensor import forget_operators

__all__ = ["check_ranks"]

_checks = ModeStack[float]("rank checks")


@mode_context
def check_ranks(interval: float = 1.0) -> Iterator[None]:
    """Raise an error on all ranks when ranks issue different collectives, instead of hanging.

    Call it on every rank. At the end of the context all ranks wait for each other and compare once more.
    `SHARDWISE_CHECK=1` in the environment checks the full program, whose exit status is then 1 on all ranks. On the
    virtual fabric, where ranks cannot diverge, it does nothing.

    Args:
        interval: seconds between two comparisons.

    Example:
        >>> import shardwise as sw
        >>> with sw.debug.check_ranks():
        ...     x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)))
    """
    entry = _checks.enter(interval)
    _switch()
    try:
        yield
        c10d.settle_check("the end of check_ranks()")
    finally:
        _checks.leave(entry)
        _switch()


def _switch() -> None:
    """Compare while any thread requests it: other ranks do not know which thread issues a collective."""
    if c10d.check_ranks_while(_checks.values_anywhere()):
        forget_routes()  # bound routes keep the setting they were bound with
        forget_operators()
