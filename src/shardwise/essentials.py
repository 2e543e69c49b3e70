"""The core of the library: the functions and classes that most programs use, and its connections to torch.

Loaded when one of these names is first used, or before the first mesh. `import shardwise` alone loads data types.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardwise import loading, optimizer_hook, raw_memory, recurrent_states
from shardwise.api import distribute_module, distribute_tensor
from shardwise.core.mesh import on_first_mesh
from shardwise.extend import check_rule, local_map, register_sharding
from shardwise.fabric.c10d import c10d
from shardwise.fabric.compiled_failures import name_compiled_failures
from shardwise.fabric.dry import DryRun, dry_run
from shardwise.fabric.machine_file import load_machine
from shardwise.fabric.process_groups import take_meshes_as_groups
from shardwise.fabric.rank_tensor import RankTensor
from shardwise.fabric.world import init_device_mesh, is_main, virtual
from shardwise.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from shardwise.imports import when_called, when_imported
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

__all__ = [
    "CostModel",
    "DTensor",
    "DTensorRedistributePlanner",
    "DryRun",
    "HostLinks",
    "Link",
    "OffsetBasedRNGTracker",
    "RNGTracker",
    "RankTensor",
    "ReplicationWarning",
    "Route",
    "allow_implicit",
    "attention",
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
    "is_main",
    "load_machine",
    "local_map",
    "manual_seed",
    "ones",
    "plain_tensors",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_sharding",
    "set_cost_model",
    "set_plain_tensors",
    "strict",
    "to_torch",
    "use_rng",
    "virtual",
    "zeros",
]

_STATE_DICT = "shardwise.checkpoint.state_dicts.torch_state_dict"
_FLEX_ATTENTION = "shardwise.decompose.sharded_flex_attention"


def _wrap_torch_state_dict(module: Any) -> None:
    importlib.import_module(_STATE_DICT).wrap(module)


def _register_flex_attention(module: Any) -> None:
    importlib.import_module(_FLEX_ATTENTION).register()


def _use_functional_collectives(module: Any) -> None:
    take_meshes_as_groups(module)
    name_compiled_failures(c10d.named_group)


def _name_in_opt_einsum(module: Any) -> None:
    """Let opt_einsum, which selects functions by the name of a tensor's package, use torch's for DTensors."""
    getattr(module, "_aliases", {}).setdefault("shardwise", "opt_einsum.backends.torch")


# Methods of DTensor that torch.distributed.checkpoint calls to list its shards.
for _method, _function in (
    ("__create_write_items__", "write_items"),
    ("__create_chunk_list__", "chunk_list"),
    ("__get_tensor_shard__", "tensor_shard"),
):
    setattr(DTensor, _method, when_called("shardwise.checkpoint.dcp", _function))

RULE_MODULES.append("shardwise.decompose")
# DTensors need a mesh, so torch is unchanged until the first mesh is made.
on_first_mesh.append(loading.wrap_load_state_dict)
on_first_mesh.append(raw_memory.wrap_to_dlpack)
on_first_mesh.append(raw_memory.wrap_jiterator)
on_first_mesh.append(recurrent_states.wrap_recurrent_modules)
on_first_mesh.append(optimizer_hook.install)
on_first_mesh.append(lambda: when_imported("torch.distributed.checkpoint.state_dict", _wrap_torch_state_dict))
on_first_mesh.append(lambda: when_imported("torch.distributed._functional_collectives", _use_functional_collectives))
on_first_mesh.append(lambda: when_imported("torch.nn.attention.flex_attention", _register_flex_attention))
on_first_mesh.append(lambda: when_imported("opt_einsum.backends.dispatch", _name_in_opt_einsum))
