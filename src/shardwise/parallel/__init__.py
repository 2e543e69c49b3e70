"""Modules over a mesh: sharding of models that do not use DTensors. Only the public names."""

from __future__ import annotations

from shardwise.parallel.data_parallel.data_axes import DataParallelMeshDims
from shardwise.parallel.data_parallel.fully_shard import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.parallel.data_parallel.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.data_parallel.replicate import ReplicateModule, replicate
from shardwise.parallel.tensor_parallel.expert_style import ExpertParallel
from shardwise.parallel.tensor_parallel.parallelize import loss_parallel, parallelize_module
from shardwise.parallel.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.tensor_parallel.style import ParallelStyle
from shardwise.parallel.tensor_parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DataParallelMeshDims",
    "ExpertParallel",
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
