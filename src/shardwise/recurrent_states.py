"""First states of recurrent modules: zeros of stride 0 in place of torch's plain zeros of the global batch.

A module of torch without given states makes them in its forward, as a plain tensor. On many ranks these would exceed a
rank's part of the batch. So calls of such modules are wrapped when the first mesh is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.tensor import DTensor

__all__ = ["wrap_recurrent_modules"]


def wrap_recurrent_modules() -> None:
    """Let recurrent modules and cells begin with zeros of stride 0 if the batch is sharded and no states are given."""
    for kind, states_of in ((nn.RNNBase, _layer_states), (nn.RNNCellBase, _cell_states)):
        kind.__call__ = _with_first_states(kind.__call__, states_of)


def _with_first_states(call: Callable[..., Any], states_of: Callable[[Any, DTensor], Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_with_states(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], DTensor):
            return call(self, args[0], states_of(self, args[0]))
        return call(self, *args, **kwargs)

    return call_with_states


def _layer_states(module: nn.RNNBase, batch: DTensor) -> Any:
    """The states of all layers and directions; None to let torch make its zeros, or raise its errors."""
    dim = 0 if module.batch_first else 1
    if batch.dim() != 3 or not _is_sharded_along(batch, dim):
        return None
    layers = module.num_layers * (2 if module.bidirectional else 1)
    hidden = _zeros(batch, (layers, batch.shape[dim], module.proj_size or module.hidden_size))
    if not isinstance(module, nn.LSTM):
        return hidden
    return hidden, _zeros(batch, (layers, batch.shape[dim], module.hidden_size))


def _cell_states(cell: nn.RNNCellBase, batch: DTensor) -> Any:
    if batch.dim() != 2 or not _is_sharded_along(batch, 0):
        return None
    zeros = _zeros(batch, (batch.shape[0], cell.hidden_size))
    return (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros


def _is_sharded_along(batch: DTensor, dim: int) -> bool:
    """Whether axes shard this dim and no other."""
    sharded = [placement for placement in batch.placements if placement.is_shard()]
    return bool(sharded) and all(placement.is_shard(dim) for placement in sharded)


def _zeros(batch: DTensor, shape: tuple[int, ...]) -> torch.Tensor:
    return batch.new_zeros(()).expand(shape)
