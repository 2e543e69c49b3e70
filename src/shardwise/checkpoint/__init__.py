"""Checkpoints: a state saved on one mesh and loaded on any other; never half-written, never executable."""

from __future__ import annotations

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.reading import Loaded, load, read
from shardwise.checkpoint.writing import async_save, save

__all__ = ["Loaded", "Saving", "async_save", "load", "read", "save"]
