"""Fourier transforms: linear; the dims that are transformed are whole. Pure."""

from __future__ import annotations

import torch

from shardwise.rules.notation import Dim, Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fft(call: Call) -> Factors:
    """Every other dim is a factor."""
    ndim = len(call["self"].shape)
    whole = {dim % ndim for dim in call["dim"]}
    dims: tuple[Dim, ...] = tuple(None if d in whole else f"d{d}" for d in range(ndim))
    # no kernel plans the transform of nothing
    return Factors((dims,), (dims,), linear=((0,),), nonempty=frozenset(d for d in dims if d is not None))
