"""Mixtures of experts: tokens to the ranks of their experts and back. The public names, nothing else."""

from __future__ import annotations

from shardwise.moe.dispatching import Back, dispatch

__all__ = ["Back", "dispatch"]
