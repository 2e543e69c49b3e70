"""Runs operators on DTensors: one look-up, run, wrap; and resolves a signature at its first call."""

from shardwise.dispatch.dispatcher import CacheInfo, OpDispatcher

__all__ = ["CacheInfo", "OpDispatcher"]
