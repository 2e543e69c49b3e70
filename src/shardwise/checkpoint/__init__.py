"""Checkpoints: a state saved on one mesh and loaded on any other; never half-written, never executable."""

from __future__ import annotations

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.mapping import Fused
from shardwise.checkpoint.reading import Loaded, load, read
from shardwise.checkpoint.safetensors_layout import export_safetensors, load_safetensors
from shardwise.checkpoint.tools import Difference, Summary, TensorSummary, diff, inspect, reshard, verify
from shardwise.checkpoint.writing import async_save, save

__all__ = [
    "Difference",
    "Fused",
    "Loaded",
    "Saving",
    "Summary",
    "TensorSummary",
    "async_save",
    "diff",
    "export_safetensors",
    "inspect",
    "load",
    "load_safetensors",
    "read",
    "reshard",
    "save",
    "verify",
]
