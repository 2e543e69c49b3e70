"""The state dict of an optimizer before its first step, with tensors to load the checkpoint's state into.

An optimizer creates its moments at its first step. To load before that, they are created here: with the layout of their
parameter if they have its shape, otherwise as plain tensors.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol, runtime_checkable

import torch

from shardwise.checkpoint.format.checkpoint_index import Index
from shardwise.checkpoint.format.json_values import Name, join
from shardwise.checkpoint.format.state_tree import stored_entries, tensor_name

__all__ = ["optimizer_state", "room_for"]


@runtime_checkable
class StatesByName(Protocol):
    """An object with optimizers whose states have names."""

    def state_to_load(self, stored: Container[str]) -> dict[str, Any]:
        """The state dict; of optimizers without a state, with the entries that are stored."""
        ...


def optimizer_state(owner: Any, path: Name, index: Index) -> dict[Any, Any]:
    """`owner.state_dict()`; for an optimizer without a state, with the entries of the checkpoint."""
    if isinstance(owner, StatesByName):
        size = len(path)
        stored = (at for at, _ in stored_entries(index.state).values() if at[:size] == path)
        return owner.state_to_load({join(at[size:]) for at in stored})
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
    """A tensor to load a stored one into, or None for a plain object."""
    if name is None:
        return None
    stored = index.tensors[name]
    return room_for(parameter, stored.shape, stored.dtype)


def room_for(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for a state of a parameter: with its layout if it has its shape, otherwise plain."""
    if shape == tuple(parameter.shape) and shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype)
