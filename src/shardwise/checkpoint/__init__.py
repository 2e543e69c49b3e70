"""Checkpoints: a state saved on one mesh and loaded on any other; never half-written, never executable."""

from __future__ import annotations

from shardwise.checkpoint import dcp  # noqa: F401  # makes DTensors known to torch.distributed.checkpoint
from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.mapping import Fused
from shardwise.checkpoint.reading import Loaded, load, read
from shardwise.checkpoint.safetensors_layout import export_safetensors, load_safetensors
from shardwise.checkpoint.writing import async_save, save

__all__ = [
    "Fused",
    "Loaded",
    "Saving",
    "async_save",
    "export_safetensors",
    "load",
    "load_safetensors",
    "read",
    "save",
]
