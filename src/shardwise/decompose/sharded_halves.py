"""Halves, planes and groups of sharded dims, split and joined: `glu`, `rot90`, `channel_shuffle`, `renorm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.decompose.layout_helpers import as_result, reduced, widened
from shardwise.rules.dims import wrapped
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.glu.default)
def glu_by_halves(x: Any, dim: int = -1) -> Any:
    """Halves of a sharded dim stay sharded: ranks exchange rows."""
    first, second = (widened(half) for half in x.chunk(2, dim))
    return as_result(first * second.sigmoid(), x.dtype)


@decomposition(aten.glu_backward.default)
def glu_backward_by_halves(grad: Any, x: Any, dim: int) -> Any:
    """The gradients of both halves."""
    first, second = (widened(half) for half in x.chunk(2, dim))
    gate, grad = second.sigmoid(), widened(grad)
    return as_result(torch.cat([gate * grad, (1 - gate) * gate * first * grad], dim), x.dtype)


@decomposition(aten.rot90.default)
def rot90_by_flips(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Flips of single dims, for which ranks exchange rows, and a transposition."""
    first, second = dims
    match k % 4:
        case 0:
            return x.clone()
        case 1:
            return x.flip(second).transpose(first, second)
        case 2:
            return x.flip(first).flip(second)
        case _:
            return x.flip(first).transpose(first, second)


@decomposition(aten.channel_shuffle.default)
def channels_by_groups(x: Any, groups: int) -> Any:
    """Channels are split into groups; ranks exchange the parts that views need on other ranks."""
    if not x.numel() or x.shape[1] % groups:
        return NotImplemented
    apart = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return apart.transpose(1, 2).reshape(x.shape)


@decomposition(aten.renorm.default, reductions=1)
def renorm_by_norms(x: Any, p: Any, dim: int, maxnorm: Any) -> Any:
    """The norms of the slices are reduced."""
    others = [d for d in range(x.dim()) if d != wrapped(dim, x.dim())]
    norms = reduced(torch.linalg.vector_norm(widened(x), p, others, keepdim=True))
    return as_result(widened(x) * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0), x.dtype)
