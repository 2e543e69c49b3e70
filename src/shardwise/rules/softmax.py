"""Softmax and its logarithm: row by row; along a sharded dim see `decompose/sharded_softmax.py`."""

from __future__ import annotations

import torch

from shardwise.rules.dims import along
from shardwise.rules.engine import FIRST, Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(call: Call) -> Factors:
    """Rows are independent."""
    return along(call, [call["dim"]])


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: Call) -> Factors:
    """Rows are independent; linear in the gradient."""
    return along(call, [call["dim"]], linear=FIRST)
