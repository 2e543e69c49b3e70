"""Modules over a mesh: data parallel and fully sharded ones."""

from __future__ import annotations

from shardwise.parallel.fully_shard import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from shardwise.parallel.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.replicate import ReplicateModule, replicate

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
]
