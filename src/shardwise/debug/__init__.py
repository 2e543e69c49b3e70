"""Looking at what happens: which collectives were issued; pictures of layouts.

What is for people who look, not for programs that run, is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.debug.comm import CommDebugMode

if TYPE_CHECKING:
    from shardwise.debug.agreement import check_ranks
    from shardwise.debug.compare import parity
    from shardwise.debug.drawing import Drawing, draw
    from shardwise.debug.parity_report import Difference, ParityReport
    from shardwise.debug.visualize import visualize_sharding

__all__ = [
    "CommDebugMode",
    "Difference",
    "Drawing",
    "ParityReport",
    "check_ranks",
    "draw",
    "parity",
    "visualize_sharding",
]

LAZY = {
    "Difference": "parity_report",
    "Drawing": "drawing",
    "ParityReport": "parity_report",
    "check_ranks": "agreement",
    "draw": "drawing",
    "parity": "compare",
    "visualize_sharding": "visualize",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"shardwise.debug.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
