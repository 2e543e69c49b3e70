"""Wraps torch's `torch.distributed.checkpoint.state_dict` for models with our DTensors; `state_dict` does the work.

torch recognizes only its own DTensor class, and no other can be registered. It would treat ours as plain tensors, and a
full state dict would contain only the shard of rank 0. So the four internal functions of its module are wrapped. For
models without our DTensors they call the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from shardwise.checkpoint import state_dict as ours
from shardwise.checkpoint.state_dicts.model_state_dict import model_state
from shardwise.checkpoint.state_dicts.state_dict_values import finished
from shardwise.tensor import DTensor
from shardwise.torch_private import IncompatibleKeys

__all__ = ["wrap"]


def wrap(module: ModuleType) -> None:
    """Make the functions of torch's module accept models with our DTensors."""
    for name, instead in _INSTEAD.items():
        setattr(module, name, _choosing(getattr(module, name), instead))


def _choosing(theirs: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs, assigned=("__doc__",))
    def choose(model: nn.Module, *args: Any) -> Any:
        holds_ours = any(isinstance(t, DTensor) for of in (model.parameters, model.buffers) for t in of())
        return (instead if holds_ours else theirs)(model, *args)

    return choose


def _get_model(model: nn.Module, info: Any) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    return finished(model_state(model, sorted(info.submodule_prefixes), info), info)


def _get_optimizers(model: nn.Module, optimizers: Any, info: Any) -> dict[str, Any]:
    return ours.get_optimizer_state_dict(model, optimizers, options=info) if info.handle_optim else {}


def _set_model(model: nn.Module, state: Any, info: Any) -> Any:
    return ours.set_model_state_dict(model, state, options=info) if info.handle_model else IncompatibleKeys([], [])


def _set_optimizers(model: nn.Module, optimizers: Any, state: Any, info: Any) -> None:
    if info.handle_optim:
        ours.set_optimizer_state_dict(model, optimizers, state, options=info)


# torch looks these up in its module at each call, so the order of imports does not matter
_INSTEAD: dict[str, Callable[..., Any]] = {
    "_get_model_state_dict": _get_model,
    "_get_optim_state_dict": _get_optimizers,
    "_load_model_state_dict": _set_model,
    "_load_optim_state_dict": _set_optimizers,
}
