"""Fourier transforms: linear; the transformed dims must not be sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.rules.dims import along
from shardwise.rules.engine import FIRST, Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


def fft(call: Call) -> Factors:
    """Every dim that is not transformed is a factor."""
    return along(call, call["dim"], linear=FIRST)


def on_some(op: Any, local: torch.Tensor, *args: Any) -> torch.Tensor:
    """The transform of a local; kernels refuse empty ones."""
    if local.numel():
        return op(local, *args)
    like = op(local.to("meta"), *args)
    return torch.empty_like(like, device=local.device)


NODES = {aten._fft_c2c.default: "", aten._fft_r2c.default: "FftR2CBackward0", aten._fft_c2r.default: ""}
for _op, _node in NODES.items():  # the gradient of a real transform is padded and transformed
    rule(_op, local_op=partial(on_some, _op), gathering_node=_node)(fft)
