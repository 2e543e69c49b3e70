"""parity: compare a sharded program with the same program on one device, and find the first difference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.mode_stack import mode_context
from shardwise.debug.parity_check.module_parity import ModuleParity
from shardwise.debug.parity_check.op_parity import OpParity
from shardwise.debug.parity_check.parity_report import ParityReport

__all__ = ["parity"]


@mode_context
def parity(
    reference: torch.nn.Module | None = None,
    sharded: torch.nn.Module | None = None,
    *,
    rtol: float | None = None,
    stop: bool = True,
) -> Iterator[ParityReport]:
    """Compare the computation of the ranks with one device, in forward and in backward.

    Without a model, compares operator by operator: each also runs on global reference tensors, one for each DTensor.
    With a plain model, compares module by module, and the gradients of the parameters at the end. Rounding is
    distinguished from wrong values. On process groups all ranks must take part; all reach the same verdict.

    Args:
        reference: the same model on one device, with the same parameters. It is copied, not changed.
        sharded: the model to compare with it; by default the first called model with the same submodules.
        rtol: the error that counts as rounding, relative to the magnitude of a result; by default estimated from the
            operator, its dtype and the number of addends.
        stop: raise at the first wrong value; otherwise only add it to the report.

    Raises:
        ParityError: a value differs from one device's by more than rounding; names the user's line.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
        >>> with sw.parity() as check:
        ...     y = (x * 2).cumsum(0)
        >>> print(check)
        parity: 2 compared (2 equal): all values match one device
    """
    report = ParityReport()
    if reference is not None:
        yield from _of_modules(ModuleParity(reference, sharded, report, rtol, stop), report)
        return
    with OpParity(report, rtol, stop).observing():
        yield report


def _of_modules(comparison: ModuleParity, report: ParityReport) -> Iterator[ParityReport]:
    failed = True
    try:
        yield report
        failed = False
    finally:
        comparison.close(failed)
