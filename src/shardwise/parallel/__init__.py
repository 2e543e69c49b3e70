"""Plans for modules: how a model that knows nothing of DTensors is sharded. The public names, nothing else."""

from __future__ import annotations

from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import parallelize_module
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
