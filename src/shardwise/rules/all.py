"""Every rule module, imported so that its rules stand in the registry."""

from __future__ import annotations

from shardwise.rules import movement, pointwise, view

__all__ = ["movement", "pointwise", "view"]
