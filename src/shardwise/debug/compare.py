"""parity: a sharded program beside the same program on one device, and the first value that is not the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.mode_stack import mode_context
from shardwise.debug.module_parity import ModuleParity
from shardwise.debug.parity_report import ParityReport
from shardwise.debug.shadows import Shadows
from shardwise.tensor import watch

__all__ = ["parity"]


@mode_context
def parity(
    reference: torch.nn.Module | None = None,
    sharded: torch.nn.Module | None = None,
    *,
    rtol: float | None = None,
    stop: bool = True,
) -> Iterator[ParityReport]:
    """Inside, what the ranks compute is compared with what one device computes, in forward and in backward.

    Without a model, operator by operator: each also runs on whole tensors of one device, kept beside the DTensors.
    With a plain model, module by module, and the gradients of the parameters at the end. What rounding explains is
    told from what it does not. On process groups all ranks must take part, and all come to the same verdict.

    Args:
        reference: the same model on one device, with the same parameters. It is copied, not changed.
        sharded: the model to compare with it; by default the first one to be called that has the same parts.
        rtol: what counts as rounding, as a part of the size of a result; by default worked out from the operator, its
            dtype and how many numbers are added up.
        stop: raise at the first wrong value, where it happens; otherwise it is only noted in the report.

    Raises:
        ParityError: a value that is not the one of one device, with the line of the user's that made it.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
        >>> with sw.parity() as check:
        ...     y = (x * 2).cumsum(0)
        >>> print(check)
        parity: 2 compared (2 equal): what the ranks hold is what one device has
    """
    report = ParityReport()
    if reference is not None:
        yield from _of_modules(ModuleParity(reference, sharded, report, rtol, stop), report)
        return
    watch(Shadows(report, rtol, stop))
    try:
        yield report
    finally:
        watch(None)


def _of_modules(comparison: ModuleParity, report: ParityReport) -> Iterator[ParityReport]:
    failed = True
    try:
        yield report
        failed = False
    finally:
        comparison.close(failed)
