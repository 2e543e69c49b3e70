"""Shardwise: a distributed tensor library for PyTorch. The public names, nothing else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.api import distribute_module, distribute_tensor
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, ShardOrder, ShardOrderEntry, TensorMeta
from shardwise.errors import (
    AgreementError,
    ImplicitCommunicationError,
    LayoutError,
    MemoryBoundError,
    MeshError,
    NotationError,
    PlainTensorError,
    RuleError,
    ShardwiseError,
    UnsupportedError,
)
from shardwise.extend import check_rule, local_map, register_sharding
from shardwise.fabric.dry import DryRun, dry_run
from shardwise.fabric.virtual import RankTensor
from shardwise.fabric.world import init_device_mesh, virtual
from shardwise.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from shardwise.interop import from_torch, to_torch
from shardwise.modes import ReplicationWarning, allow_implicit, implicit_replication, strict
from shardwise.plan.cost import CostModel, Link, current_cost_model, set_cost_model
from shardwise.plan.route import DTensorRedistributePlanner, Route
from shardwise.random import OffsetBasedRNGTracker, RNGTracker, manual_seed, use_rng
from shardwise.tensor import DTensor, cache_info

if TYPE_CHECKING:
    from shardwise import parallel

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "CostModel",
    "DTensor",
    "DTensorRedistributePlanner",
    "DTensorSpec",
    "DeviceMesh",
    "DryRun",
    "ImplicitCommunicationError",
    "LayoutError",
    "Link",
    "MaskPartial",
    "MemoryBoundError",
    "MeshError",
    "NotationError",
    "OffsetBasedRNGTracker",
    "Partial",
    "Placement",
    "PlainTensorError",
    "RNGTracker",
    "RankTensor",
    "Replicate",
    "ReplicationWarning",
    "Route",
    "RuleError",
    "Shard",
    "ShardOrder",
    "ShardOrderEntry",
    "ShardwiseError",
    "StridedShard",
    "TensorMeta",
    "UnsupportedError",
    "allow_implicit",
    "cache_info",
    "check_rule",
    "current_cost_model",
    "distribute_module",
    "distribute_tensor",
    "dry_run",
    "empty",
    "from_torch",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "manual_seed",
    "ones",
    "parallel",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_sharding",
    "set_cost_model",
    "strict",
    "to_torch",
    "use_rng",
    "virtual",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """What is read on first use: not every program shards modules, and each pays for what is imported."""
    if name == "parallel":
        return importlib.import_module("shardwise.parallel")
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
