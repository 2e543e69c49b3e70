"""The state dict of an optimizer that has not made a step yet, with room for what a checkpoint holds for it.

An optimizer makes its moments at its first step. To be loaded into before that, they are made here: laid out as their
parameter where they have its shape, plain otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpoint.index import Index
from shardwise.checkpoint.tree import stored_entries, tensor_name
from shardwise.checkpoint.values import Name

__all__ = ["optimizer_state"]


def optimizer_state(owner: Any, path: Name, index: Index) -> dict[Any, Any]:
    """What `owner.state_dict()` gives; for an optimizer, with the entries that the checkpoint has beyond it."""
    state = owner.state_dict()
    if not isinstance(owner, torch.optim.Optimizer) or state["state"]:
        return state
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    made: dict[Any, Any] = {}
    for at, value in stored_entries(index.state).values():
        inside = at[len(path) :]
        if at[: len(path)] != path or len(inside) != 3 or inside[0] != "state":
            continue
        _, number, key = inside
        if type(number) is int and 0 <= number < len(parameters):
            made.setdefault(number, {})[key] = _room(parameters[number], tensor_name(value), index)
    return {**state, "state": made}


def _room(parameter: torch.Tensor, name: str | None, index: Index) -> Any:
    """A tensor for a stored one, or None for a plain object, which is replaced anyway."""
    if name is None:
        return None
    stored = index.tensors[name]
    if stored.shape == tuple(parameter.shape) and stored.shape:
        return torch.zeros_like(parameter.detach(), dtype=stored.dtype)
    return torch.zeros(stored.shape, dtype=stored.dtype)
