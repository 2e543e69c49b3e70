"""State dicts of models by names: getting and loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.state_dicts.parameter_names import canonical_name, named_tensors
from shardwise.checkpoint.state_dicts.state_dict_values import TensorToLoad, checked_processes, receive, to_load
from shardwise.errors import CheckpointError
from shardwise.tensor import DTensor

__all__ = ["load_model", "model_state", "prefixes_of"]


def model_state(model: nn.Module, prefixes: Iterable[str], options: Any) -> dict[str, Any]:
    """The model's state dict by names: all entries, or those with one of these prefixes."""
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        name = canonical_name(model, key, options.dsd_fqn_modifiers)
        if name in state:
            raise CheckpointError(f"two entries of the state dict have the name {name} without wrappers")
        state[name] = value
    if options.ignore_frozen_params:
        for name, tensor in named_tensors(model, options):
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                state.pop(name, None)
    if not prefixes:
        return state
    return {
        name if options.keep_submodule_prefixes else name[len(prefix) :]: value
        for name, value in state.items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


def prefixes_of(model: nn.Module, submodules: set[nn.Module] | None, options: Any) -> list[str]:
    """The prefixes of the parameter names of these submodules."""
    paths = [path for path, module in model.named_modules() if submodules and module in submodules]
    return [f"{canonical_name(model, path, options.dsd_fqn_modifiers)}." if path else "" for path in paths]


def load_model(model: nn.Module, given: Mapping[str, Any], options: Any, *, own: bool = False) -> Any:
    """Load a state dict by names. Parameters on the meta device are replaced; tied ones by one parameter.

    With `own` it has the entries of this rank's stages, and ranks do not compare theirs.
    """
    keys: dict[str, str] = {canonical_name(model, key, options.dsd_fqn_modifiers): key for key in model.state_dict()}
    held = dict(named_tensors(model, options))
    processes = checked_processes(held.values())
    values = to_load(given, processes, options, own=own)
    if not values and keys and options.strict:
        raise CheckpointError("the state dict to load is empty", hint="strict=False allows missing entries")
    for name, value in values.items():
        if isinstance(value, TensorToLoad) and name in keys and (name not in held or held[name].shape == value.shape):
            value.want(held.get(name))
    receive(values, processes, options)
    loaded: dict[str, Any] = {
        name: value.value if isinstance(value, TensorToLoad) else value for name, value in values.items()
    }
    assign = any(tensor.is_meta for name, tensor in held.items() if name in keys)
    if assign:
        _materialize(loaded, held, options)
    return model.load_state_dict(
        {keys.get(name, name): value for name, value in loaded.items()}, strict=options.strict, assign=assign
    )


def _materialize(loaded: dict[str, Any], held: Mapping[str, torch.Tensor], options: Any) -> None:
    """Prepare values for assignment: new parameters for those on the meta device; the others are filled in place."""
    devices = [tensor.device for tensor in held.values() if not tensor.is_meta]
    devices += [torch.device(t.device_mesh.device_type) for t in held.values() if isinstance(t, DTensor)]
    made: dict[int, torch.Tensor] = {}
    for name, value in loaded.items():
        like = held.get(name)
        if like is None or not isinstance(value, torch.Tensor) or value.shape != like.shape or value.is_meta:
            continue
        if not like.is_meta:
            with torch.no_grad():
                like.copy_(value)
            made[id(like)] = like
        elif id(like) not in made:
            if not isinstance(value, DTensor):
                value = value.to(devices[0] if devices else "cpu")
            value = value.cpu() if options.cpu_offload else value
            is_parameter = isinstance(like, nn.Parameter)
            made[id(like)] = nn.Parameter(value, requires_grad=like.requires_grad) if is_parameter else value
        loaded[name] = made[id(like)]
