"""Checkpoints: save a state on one mesh, load it on any other. Written atomically; loading executes no code."""

from __future__ import annotations

from shardwise.checkpoint.operations.background_save import Saving
from shardwise.checkpoint.operations.checkpoint_series import latest
from shardwise.checkpoint.operations.checkpoint_tools import (
    Difference,
    Summary,
    TensorSummary,
    diff,
    inspect,
    reshard,
    verify,
)
from shardwise.checkpoint.operations.load_checkpoint import Loaded, load, read
from shardwise.checkpoint.operations.safetensors_models import export_safetensors, load_safetensors
from shardwise.checkpoint.operations.save_checkpoint import async_save, save
from shardwise.checkpoint.partition.fused_tensors import Fused
from shardwise.checkpoint.state_dict import NamedOptimizer

__all__ = [
    "Difference",
    "Fused",
    "Loaded",
    "NamedOptimizer",
    "Saving",
    "Summary",
    "TensorSummary",
    "async_save",
    "diff",
    "export_safetensors",
    "inspect",
    "latest",
    "load",
    "load_safetensors",
    "read",
    "reshard",
    "save",
    "verify",
]
