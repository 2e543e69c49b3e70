"""parity: a sharded program beside the same program on one device, and the first value that is not the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardwise.debug.parity_report import ParityReport
from shardwise.debug.shadows import Shadows
from shardwise.tensor import watch

__all__ = ["parity"]


@contextlib.contextmanager
def parity(*, rtol: float | None = None, stop: bool = True) -> Iterator[ParityReport]:
    """Inside, every operator on DTensors is compared with what one device computes, in forward and backward."""
    report = ParityReport()
    watch(Shadows(report, rtol, stop))
    try:
        yield report
    finally:
        watch(None)
