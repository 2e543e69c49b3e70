"""Every rule module, imported so that its rules stand in the registry."""

from __future__ import annotations

from shardwise.rules import (
    attention,
    convolution,
    creation,
    embedding,
    fft,
    foreach,
    indexing,
    linalg,
    loss,
    matmul,
    movement,
    normalization,
    pointwise,
    random,
    reduction,
    view,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "embedding",
    "fft",
    "foreach",
    "indexing",
    "linalg",
    "loss",
    "matmul",
    "movement",
    "normalization",
    "pointwise",
    "random",
    "reduction",
    "view",
]
