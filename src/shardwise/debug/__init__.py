"""Looking at what happens: which collectives were issued; pictures of layouts.

What is for people who look, not for programs that run, is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.debug.comm import CommDebugMode

if TYPE_CHECKING:
    from shardwise.debug.drawing import Drawing, draw
    from shardwise.debug.visualize import visualize_sharding

__all__ = ["CommDebugMode", "Drawing", "draw", "visualize_sharding"]

LAZY = {"Drawing": "drawing", "draw": "drawing", "visualize_sharding": "visualize"}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"shardwise.debug.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
