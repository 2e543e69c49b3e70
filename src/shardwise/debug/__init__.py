"""Looking at what happens: which collectives were issued."""

from __future__ import annotations

from shardwise.debug.comm import CommDebugMode

__all__ = ["CommDebugMode"]
