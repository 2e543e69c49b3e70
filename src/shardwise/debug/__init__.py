"""Looking at what happens: which collectives were issued, what stands in a graph."""

from __future__ import annotations

from shardwise.debug.comm import CommDebugMode
from shardwise.debug.graph import make_fx

__all__ = ["CommDebugMode", "make_fx"]
