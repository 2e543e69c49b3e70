"""check_ranks: compare the collectives that ranks issue while a part of a program runs.

The switch alone; the comparison is the fabric's.
"""

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
    """Inside, ranks that issue different collectives all raise an error, instead of waiting for each other.

    Call it on every rank: they wait for each other where it ends, and compare once more. `SHARDWISE_CHECK=1` in the
    environment does the same for a whole program, whose exit status is then 1 on all ranks. On the virtual
    fabric, where ranks cannot part, it does nothing.

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
    """Compare while any thread asks for it: which thread issues a collective is not known to the other ranks."""
    if c10d.check_ranks_while(_checks.values_anywhere()):
        forget_routes()  # what is bound goes on as it was bound
        forget_operators()
