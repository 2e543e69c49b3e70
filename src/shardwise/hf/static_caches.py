"""Static caches of transformers in the layout of their keys and values: sharded over heads."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.factories import zeros
from shardwise.tensor import is_dtensor

__all__ = ["lay_out_static_caches"]

_SEQUENCE = 2  # (samples, heads, tokens, features)


def lay_out_static_caches() -> None:
    """Wrap the function by which a static cache allocates its memory, once, if transformers is loaded.

    It would make plain tensors of the global size on every rank. Caches of plain tensors are unchanged.
    """
    caches: Any = sys.modules.get("transformers.cache_utils")
    if caches is not None and not hasattr(caches.StaticLayer.lazy_initialization, "__wrapped__"):
        caches.StaticLayer.lazy_initialization = _laid_out(caches.StaticLayer.lazy_initialization)


def _laid_out(allocate: Any) -> Any:
    @functools.wraps(allocate)
    def lazy_initialization(layer: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not is_dtensor(key_states) or not is_dtensor(value_states):
            allocate(layer, key_states, value_states)
            return
        length = layer.cumulative_length
        allocate(
            layer, *(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in (key_states, value_states))
        )
        layer.device = key_states.device
        layer.cumulative_length = length.to(key_states.device)
        layer.keys, layer.values = _zeros_as(layer.keys, key_states), _zeros_as(layer.values, value_states)

    return lazy_initialization


def _zeros_as(wanted: torch.Tensor, like: Any) -> Any:
    """Zeros of a shape, in the layout of another tensor; not sharded along the sequence."""
    placements = [_kept(placement) for placement in like.placements]
    return zeros(*wanted.shape, dtype=wanted.dtype, device_mesh=like.device_mesh, placements=placements)


def _kept(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) and placement.dim != _SEQUENCE else Replicate()
