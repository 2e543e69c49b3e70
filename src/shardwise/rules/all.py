"""Every rule module, imported so that its rules stand in the registry."""

from __future__ import annotations

from shardwise.rules import (  # noqa: F401  # read for what they declare
    attention,
    batch_norm,
    convolution,
    creation,
    embedding,
    encoder,
    extremes,
    fft,
    foreach,
    grouped_matmul,
    indexing,
    joining,
    linalg,
    loss,
    matmul,
    movement,
    normalization,
    padding,
    pointwise,
    random,
    recurrent,
    reduction,
    scans,
    searching,
    slicing,
    softmax,
    statistics,
    view,
)
