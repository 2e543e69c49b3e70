"""Modules over a mesh: how a model that knows nothing of DTensors is sharded. The public names, nothing else."""

from __future__ import annotations

from shardwise.parallel.data_axes import DataParallelMeshDims
from shardwise.parallel.fully_shard import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import parallelize_module
from shardwise.parallel.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.replicate import ReplicateModule, replicate
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateModule",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "fully_shard",
    "loss_parallel",
    "parallelize_module",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]
