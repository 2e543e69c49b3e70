"""What DTensors do, for people to see: which collectives were issued, from which lines, and why; pictures; parity.

What is for people who look, not for programs that run, is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.debug.agreement import check_ranks
    from shardwise.debug.comm import CommDebugMode
    from shardwise.debug.compare import parity
    from shardwise.debug.drawing import Drawing, draw
    from shardwise.debug.explaining import explain
    from shardwise.debug.graph import make_fx
    from shardwise.debug.guards import Budget, check_lock, comm_budget
    from shardwise.debug.parity_report import Difference, ParityReport
    from shardwise.debug.report import Report
    from shardwise.debug.summary import Total
    from shardwise.debug.visualize import visualize_sharding

__all__ = [
    "Budget", "CommDebugMode", "Difference", "Drawing", "ParityReport", "Report", "Total", "check_lock", "check_ranks",
    "comm_budget", "draw", "explain", "make_fx", "parity", "visualize_sharding",
]  # fmt: skip

LAZY = {
    "Budget": "guards",
    "CommDebugMode": "comm",
    "Difference": "parity_report",
    "Drawing": "drawing",
    "ParityReport": "parity_report",
    "Report": "report",
    "Total": "summary",
    "check_lock": "guards",
    "check_ranks": "agreement",
    "comm_budget": "guards",
    "draw": "drawing",
    "explain": "explaining",
    "make_fx": "graph",
    "parity": "compare",
    "visualize_sharding": "visualize",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"shardwise.debug.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
