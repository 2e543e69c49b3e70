"""Shardwise: a distributed tensor library for PyTorch. The public names; the larger parts are loaded when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise import loading, optimizer_hook, raw_memory, recurrent_states
from shardwise.api import distribute_module, distribute_tensor
from shardwise.core.mesh import DeviceMesh, on_first_mesh
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
from shardwise.extend import check_rule, local_map, register_sharding
from shardwise.fabric.c10d import take_meshes_as_groups
from shardwise.fabric.dry import DryRun, dry_run
from shardwise.fabric.machine_file import load_machine
from shardwise.fabric.virtual import RankTensor
from shardwise.fabric.world import init_device_mesh, is_main, virtual
from shardwise.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from shardwise.imports import when_imported
from shardwise.interop import from_torch, to_torch
from shardwise.modes import (
    ReplicationWarning,
    allow_implicit,
    attention,
    implicit_replication,
    plain_tensors,
    set_plain_tensors,
    strict,
)
from shardwise.plan.cost import CostModel, HostLinks, Link, current_cost_model, set_cost_model
from shardwise.plan.route import DTensorRedistributePlanner, Route
from shardwise.random import OffsetBasedRNGTracker, RNGTracker, manual_seed, use_rng
from shardwise.schema import RULE_MODULES
from shardwise.tensor import DTensor, cache_info

if TYPE_CHECKING:
    from shardwise import checkpoint, debug, hf, moe, optim, parallel, pipelines
    from shardwise.capture import Captured, CapturedReport, captured, load_captured
    from shardwise.debug import Drawing, check_lock, comm_budget, draw, explain, parity
    from shardwise.elastic import batch_indices, remesh
    from shardwise.meshes import PendingTransfer, TransferPlan, transfer, transfer_plan
    from shardwise.parallel import fully_shard, replicate
    from shardwise.pipelines import Pipeline, pipeline

__version__ = "0.1.0"

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


_PACKAGES = ("checkpoint", "debug", "hf", "moe", "optim", "parallel", "pipelines")
_DCP = "shardwise.checkpoint.dcp"
_STATE_DICT = "shardwise.checkpoint.state_dicts.torch_state_dict"
_FLEX_ATTENTION = "shardwise.decompose.sharded_flex_attention"
_LATER = {
    **dict.fromkeys(("Drawing", "check_lock", "comm_budget", "draw", "explain", "parity"), "debug"),
    **dict.fromkeys(("fully_shard", "replicate"), "parallel"),
    **dict.fromkeys(("Captured", "CapturedReport", "captured", "load_captured"), "capture"),
    **dict.fromkeys(("Pipeline", "pipeline"), "pipelines"),
    **dict.fromkeys(("batch_indices", "remesh"), "elastic"),
    **dict.fromkeys(("PendingTransfer", "TransferPlan", "transfer", "transfer_plan"), "meshes"),
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"shardwise.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(f"shardwise.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _by_dcp(name: str) -> Any:
    """A method of DTensor that torch.distributed.checkpoint calls to list its shards."""
    return lambda *args: getattr(importlib.import_module(_DCP), name)(*args)


for _method, _function in (
    ("__create_write_items__", "write_items"),
    ("__create_chunk_list__", "chunk_list"),
    ("__get_tensor_shard__", "tensor_shard"),
):
    setattr(DTensor, _method, _by_dcp(_function))


def _wrap_torch_state_dict(module: Any) -> None:
    importlib.import_module(_STATE_DICT).wrap(module)


def _register_flex_attention(module: Any) -> None:
    importlib.import_module(_FLEX_ATTENTION).register()


RULE_MODULES.append("shardwise.decompose")
# DTensors need a mesh, so torch is unchanged until the first mesh is made.
on_first_mesh.append(loading.wrap_load_state_dict)
on_first_mesh.append(raw_memory.wrap_to_dlpack)
on_first_mesh.append(raw_memory.wrap_jiterator)
on_first_mesh.append(recurrent_states.wrap_recurrent_modules)
on_first_mesh.append(optimizer_hook.install)
on_first_mesh.append(lambda: when_imported("torch.distributed.checkpoint.state_dict", _wrap_torch_state_dict))
on_first_mesh.append(lambda: when_imported("torch.distributed._functional_collectives", take_meshes_as_groups))
on_first_mesh.append(lambda: when_imported("torch.nn.attention.flex_attention", _register_flex_attention))
