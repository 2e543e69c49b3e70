"""An operator on DTensors: one look-up, run, wrap; and everything that a signature met for the first time takes."""

from shardwise.dispatch.dispatcher import CacheInfo, OpDispatcher

__all__ = ["CacheInfo", "OpDispatcher"]
