"""Every rule module, imported so that its rules stand in the registry."""

from __future__ import annotations

from shardwise.rules import matmul, movement, pointwise, view

__all__ = ["matmul", "movement", "pointwise", "view"]
