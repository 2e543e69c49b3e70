"""Shardwise: a distributed tensor library for PyTorch. The public names; all but data types load when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.mesh import DeviceMesh, on_first_fabric, rebuild_mesh
from shardwise.core.placement import (
    MaskPartial,
    Owned,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
)
from shardwise.core.spec import DTensorSpec, ShardOrder, ShardOrderEntry, TensorMeta
from shardwise.errors import (
    AgreementError,
    CheckpointError,
    CheckpointMismatchError,
    CommunicationError,
    ImplicitCommunicationError,
    LayoutError,
    LostRankError,
    MachineFileError,
    MemoryBoundError,
    MeshError,
    NotationError,
    ParityError,
    PipelineError,
    PlainTensorError,
    RuleError,
    ShardwiseError,
    UnsupportedError,
)
from shardwise.imports import when_called

if TYPE_CHECKING:
    from shardwise import checkpoint, debug, hf, moe, optim, parallel, pipelines, recurrences
    from shardwise.capture import Captured, CapturedReport, captured, load_captured
    from shardwise.debug import Drawing, check_lock, comm_budget, draw, explain, parity
    from shardwise.elastic import batch_indices, remesh
    from shardwise.essentials import (
        CostModel,
        DryRun,
        DTensor,
        DTensorRedistributePlanner,
        HostLinks,
        Link,
        OffsetBasedRNGTracker,
        RankTensor,
        ReplicationWarning,
        RNGTracker,
        Route,
        allow_implicit,
        attention,
        cache_info,
        check_rule,
        current_cost_model,
        distribute_module,
        distribute_tensor,
        dry_run,
        empty,
        from_torch,
        full,
        implicit_replication,
        init_device_mesh,
        is_main,
        load_machine,
        local_map,
        manual_seed,
        ones,
        plain_tensors,
        rand,
        randint,
        randn,
        randperm,
        register_sharding,
        set_cost_model,
        set_plain_tensors,
        strict,
        to_torch,
        use_rng,
        virtual,
        zeros,
    )
    from shardwise.meshes import PendingTransfer, TransferPlan, transfer, transfer_plan
    from shardwise.parallel import fully_shard, replicate
    from shardwise.pipelines import Pipeline, pipeline

__version__ = "0.2.0"

__all__ = [
    "AgreementError",
    "Captured",
    "CapturedReport",
    "CheckpointError",
    "CheckpointMismatchError",
    "CommunicationError",
    "CostModel",
    "DTensor",
    "DTensorRedistributePlanner",
    "DTensorSpec",
    "DeviceMesh",
    "Drawing",
    "DryRun",
    "HostLinks",
    "ImplicitCommunicationError",
    "LayoutError",
    "Link",
    "LostRankError",
    "MachineFileError",
    "MaskPartial",
    "MemoryBoundError",
    "MeshError",
    "NotationError",
    "OffsetBasedRNGTracker",
    "Owned",
    "ParityError",
    "Partial",
    "PendingTransfer",
    "Pipeline",
    "PipelineError",
    "Placement",
    "PlainTensorError",
    "RNGTracker",
    "Ragged",
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
    "TransferPlan",
    "UnsupportedError",
    "Zigzag",
    "allow_implicit",
    "attention",
    "batch_indices",
    "cache_info",
    "captured",
    "check_lock",
    "check_rule",
    "checkpoint",
    "comm_budget",
    "current_cost_model",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "draw",
    "dry_run",
    "empty",
    "explain",
    "from_torch",
    "full",
    "fully_shard",
    "hf",
    "implicit_replication",
    "init_device_mesh",
    "is_main",
    "load_captured",
    "load_machine",
    "local_map",
    "manual_seed",
    "moe",
    "ones",
    "optim",
    "parallel",
    "parity",
    "pipeline",
    "pipelines",
    "plain_tensors",
    "rand",
    "randint",
    "randn",
    "randperm",
    "recurrences",
    "register_sharding",
    "remesh",
    "replicate",
    "set_cost_model",
    "set_plain_tensors",
    "strict",
    "to_torch",
    "transfer",
    "transfer_plan",
    "use_rng",
    "virtual",
    "zeros",
]

# Public names of the rooms that many programs do not use.
_ROOMS = {
    **dict.fromkeys(("Drawing", "check_lock", "comm_budget", "draw", "explain", "parity"), "debug"),
    **dict.fromkeys(("fully_shard", "replicate"), "parallel"),
    **dict.fromkeys(("Captured", "CapturedReport", "captured", "load_captured"), "capture"),
    **dict.fromkeys(("Pipeline", "pipeline"), "pipelines"),
    **dict.fromkeys(("batch_indices", "remesh"), "elastic"),
    **dict.fromkeys(("PendingTransfer", "TransferPlan", "transfer", "transfer_plan"), "meshes"),
}
_PACKAGES = ("checkpoint", "debug", "hf", "moe", "optim", "parallel", "pipelines", "recurrences")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(f"shardwise.{_ROOMS[name]}"), name)
    if name in __all__ and name not in _PACKAGES:
        _load_essentials()
        return globals()[name]
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"shardwise.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"shardwise.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load_essentials() -> None:
    """Load the core of the library, and bind its names, so that `__getattr__` is not called again."""
    essentials = importlib.import_module("shardwise.essentials")
    globals().update({name: getattr(essentials, name) for name in essentials.__all__})


on_first_fabric.append(_load_essentials)
# Functions that torch.load(weights_only=True) may call to rebuild a DTensor: they build data and run no other code.
torch.serialization.add_safe_globals(
    [
        *(Shard, StridedShard, Zigzag, Ragged, Owned, Replicate, Partial, MaskPartial, DTensorSpec, TensorMeta),
        rebuild_mesh,
        *(
            (when_called(module, name), f"{module}.{name}")
            for module, name in (
                ("shardwise.tensor.dtensor", "_rebuild"),
                ("shardwise.fabric.rank_tensor", "RankTensor"),
                ("shardwise.fabric.virtual", "RankTensor"),  # where files of version 0.1 have it
            )
        ),
    ]
)
