"""Every rule module, imported so that its rules stand in the registry."""

from __future__ import annotations

from shardwise.rules import attention, convolution, matmul, movement, pointwise, reduction, view

__all__ = ["attention", "convolution", "matmul", "movement", "pointwise", "reduction", "view"]
