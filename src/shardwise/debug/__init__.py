"""Debugging tools: which collectives were issued, by which lines, and why; pictures of layouts; parity with one device.

Each tool is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.debug.comm_mode import CommDebugMode
    from shardwise.debug.explain_report.explain_context import explain
    from shardwise.debug.explain_report.report import Report
    from shardwise.debug.explain_report.summary import Total
    from shardwise.debug.fx_graph import make_fx
    from shardwise.debug.limits.budget import Budget, comm_budget
    from shardwise.debug.limits.lock_check import check_lock
    from shardwise.debug.parity_check.parity_context import parity
    from shardwise.debug.parity_check.parity_report import Difference, ParityReport
    from shardwise.debug.pictures.draw_ring import draw_ring
    from shardwise.debug.pictures.draw_svg import Drawing, draw
    from shardwise.debug.pictures.draw_text import visualize_sharding
    from shardwise.debug.rank_checks import check_ranks

__all__ = [
    "Budget", "CommDebugMode", "Difference", "Drawing", "ParityReport", "Report", "Total", "check_lock", "check_ranks",
    "comm_budget", "draw", "draw_ring", "explain", "make_fx", "parity", "visualize_sharding",
]  # fmt: skip

LAZY = {
    "Budget": "limits.budget",
    "CommDebugMode": "comm_mode",
    "Difference": "parity_check.parity_report",
    "Drawing": "pictures.draw_svg",
    "ParityReport": "parity_check.parity_report",
    "Report": "explain_report.report",
    "Total": "explain_report.summary",
    "check_lock": "limits.lock_check",
    "check_ranks": "rank_checks",
    "comm_budget": "limits.budget",
    "draw": "pictures.draw_svg",
    "draw_ring": "pictures.draw_ring",
    "explain": "explain_report.explain_context",
    "make_fx": "fx_graph",
    "parity": "parity_check.parity_context",
    "visualize_sharding": "pictures.draw_text",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"shardwise.debug.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
