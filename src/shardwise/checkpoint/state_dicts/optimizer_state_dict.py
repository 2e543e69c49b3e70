"""State dicts of optimizers by parameter names: getting, flattening, and loading."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.state_dicts.parameter_names import named_tensors
from shardwise.checkpoint.state_dicts.state_dict_values import (
    TensorToLoad,
    checked_processes,
    leaves,
    map_leaves,
    receive,
    to_load,
)
from shardwise.errors import CheckpointError

__all__ = ["flattened", "load_optimizers", "optimizer_state"]

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"


def _parameter_names(model: nn.Module, options: Any) -> dict[int, list[str]]:
    """The names of each parameter, by identity; several for a tied parameter."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model, options):
        names.setdefault(id(tensor), []).append(name)
    return names


def _names_in_order(optimizer: torch.optim.Optimizer, names: Mapping[int, list[str]]) -> list[list[str]]:
    """The names of an optimizer's parameters, in the order of their numbers."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model",
                hint="create the optimizer after the model is parallelized, and pass the complete model",
            )
    return [names[id(parameter)] for parameter in parameters]


def _init_optim_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialize the state of an optimizer by a step with zero gradients and a learning rate of zero."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group[PARAMS] if p.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer. Before its first step, a new state to load into; the optimizer keeps none."""
    if optimizer.state:
        return optimizer.state_dict()
    _init_optim_state(optimizer)
    state = optimizer.state_dict()
    optimizer.state.clear()
    for of_parameter in state[STATE].values():
        step = of_parameter.get("step")
        if step is not None:  # undo the count of the initializing step
            of_parameter["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else type(step)(0)
    return state


def optimizer_state(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    options: Any,
    *,
    every_name: bool = False,
    stored: Container[str] | None = None,
) -> dict[str, dict[str, Any] | list[Any]]:
    """The states of all optimizers by names, and their parameter groups.

    Args:
        model: the model whose parameters are optimized.
        optimizers: all optimizers.
        options: a `StateDictOptions`.
        every_name: a tied parameter has an entry under each of its names, otherwise under the first.
        stored: flattened names in a checkpoint. An optimizer before its first step has the states that are there.
    """
    names = _parameter_names(model, options)
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        ordered = [of_one if every_name else of_one[:1] for of_one in _names_in_order(optimizer, names)]
        is_new = not optimizer.state
        own = _own_state(optimizer)
        for number, value in own[STATE].items():
            for name in ordered[number] if isinstance(number, int) else [number]:
                if name in states:
                    raise CheckpointError(
                        f"two optimizers have a state for {name}", hint="get their state dicts one by one"
                    )
                if stored is None or not is_new or any(key in stored for key in _walked(value, f"{STATE}.{name}")):
                    states[name] = value
        groups += [
            {**group, PARAMS: [name for number in group[PARAMS] for name in ordered[number]]} for group in own[GROUPS]
        ]
    return {STATE: states, GROUPS: groups}


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """`{"state": {"w": {"step": 1}}}` as `{"state.w.step": 1}`; group settings are repeated for each parameter."""
    flat = dict(_walked(nested[STATE], STATE))
    for group in nested[GROUPS]:
        settings = {key: value for key, value in group.items() if key not in (PARAMS, PARAM_NAMES)}
        for name in group[PARAMS]:
            flat.update({f"{GROUPS}.{name}.{key}": value for key, value in settings.items()})
    return flat


def _walked(value: Any, name: str) -> dict[str, Any]:
    """The values of nested dicts, by joined names."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {at: inside for key, item in value.items() for at, inside in _walked(item, f"{name}.{key}").items()}


def _unflattened(flat: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The inverse of `flattened`, for parameters of these names; each parameter becomes a group."""
    known = set(names)
    states: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        parts = rest.split(".")
        at = next((i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in known), None)
        if at is None or kind not in (STATE, GROUPS):
            continue
        name, inside = ".".join(parts[:at]), parts[at:]
        if kind == GROUPS:
            groups.setdefault(name, {PARAMS: [name]})[".".join(inside)] = value
            continue
        target = states.setdefault(name, {})
        for part in inside[:-1]:
            target = target.setdefault(part, {})
        target[inside[-1]] = value
    return {STATE: states, GROUPS: list(groups.values())}


def load_optimizers(
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    given: Mapping[str, Any],
    options: Any,
    *,
    own: bool = False,
) -> None:
    """Load a state dict by names. Mismatches raise before anything is sent or changed.

    With `own` it has the entries of this rank's parameters. Ranks do not compare theirs, it may have none, and
    parameters without a state in it have none afterwards, as in `Optimizer.load_state_dict`.
    """
    names = _parameter_names(model, options)
    processes = checked_processes(model.parameters())
    wanted = to_load(given, processes, options, own=own)
    if not wanted and not own:
        raise CheckpointError(
            "the optimizer's state dict to load is empty",
            hint="broadcast_from_rank0=True with full_state_dict=True broadcasts the one of rank 0",
        )
    if STATE not in wanted:
        wanted = _unflattened(wanted, (name for of_one in names.values() for name in of_one))
    picked = []
    for optimizer in optimizers:
        ordered = _names_in_order(optimizer, names)
        by_name = _renumbered(wanted, ordered, len(optimizers)) if _is_numbered(wanted) else wanted
        picked.append(_picked(optimizer, ordered, by_name, options, own))
    receive(wanted, processes, options)
    for optimizer, state in zip(optimizers, picked, strict=True):
        optimizer.load_state_dict(
            map_leaves(state, lambda value: value.value if isinstance(value, TensorToLoad) else value)
        )


def _is_numbered(state: Mapping[str, Any]) -> bool:
    return any(isinstance(number, int) for group in state[GROUPS] for number in group[PARAMS])


def _renumbered(state: Mapping[str, Any], ordered: list[list[str]], count: int) -> dict[str, Any]:
    """Convert a state dict of `optimizer.state_dict()` from numbers to names."""
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    if count != 1 or len(numbers) != len(ordered):
        raise CheckpointError(
            f"the state dict has {len(numbers)} parameters by number, and cannot be loaded into {count} optimizers"
            if count != 1
            else f"the state dict has {len(numbers)} parameters by number, but the optimizer has {len(ordered)}",
            hint="get_optimizer_state_dict returns a state dict by names",
        )
    name = {number: of_one[0] for number, of_one in zip(numbers, ordered, strict=True)}
    return {
        STATE: {name.get(number, number): value for number, value in state[STATE].items()},
        GROUPS: [{**group, PARAMS: [name[number] for number in group[PARAMS]]} for group in state[GROUPS]],
    }


def _picked(
    optimizer: torch.optim.Optimizer, ordered: list[list[str]], given: Mapping[str, Any], options: Any, own_state: bool
) -> dict[str, Any]:
    """The state dict that one optimizer loads, by its numbers; each value knows the tensor it replaces."""
    _init_optim_state(optimizer)
    own = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    states: dict[Any, Any] = {}
    missing: list[str] = []
    for number, parameter in enumerate(parameters):
        name = next((name for name in ordered[number] if name in given[STATE]), None)
        if name is not None and parameter.requires_grad:
            states[number] = given[STATE][name]
            _match(states[number], own[STATE].get(number, {}), parameter)
        elif own[STATE].get(number) and parameter.requires_grad:
            missing.append(ordered[number][0])
    if missing and options.strict and not own_state:
        raise CheckpointError(
            f"no state for {', '.join(missing)} is in the state dict of the optimizer",
            hint="strict=False leaves these without a state, as in a new optimizer",
        )
    groups = [
        {**group, **_settings(group, [ordered[number] for number in group[PARAMS]], given, options)}
        for group in own[GROUPS]
    ]
    return {STATE: states, GROUPS: groups}


def _match(given: Any, own: Any, parameter: torch.Tensor) -> None:
    """Mark the values of a parameter's state as wanted, each with the tensor it replaces."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            inside = own.get(key) if isinstance(own, Mapping) else None
            if isinstance(value, TensorToLoad):
                as_parameter = parameter if value.shape == parameter.shape else None
                value.want(inside if isinstance(inside, torch.Tensor) else as_parameter)
            else:
                _match(value, inside, parameter)


def _settings(own: Mapping[str, Any], names: list[list[str]], given: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """The settings of a group, from the loaded groups that contain its parameters; these must agree."""
    wanted = {name for of_one in names for name in of_one}
    found = [group for group in given[GROUPS] if wanted & set(group[PARAMS])]
    if not names:
        empty = [group for group in given[GROUPS] if not group[PARAMS]]
        found = empty if len(empty) == 1 else []
    settings = [{k: v for k, v in group.items() if k not in (PARAMS, PARAM_NAMES)} for group in found]
    for value in leaves(settings[:1]):
        if isinstance(value, TensorToLoad):
            value.want(None)
    if any(not _same(other, settings[0]) for other in settings[1:]):
        raise CheckpointError(
            f"the parameters {', '.join(of_one[0] for of_one in names)} are one group here, but were saved in "
            "groups of different settings",
            hint="create the optimizer with the same groups",
        )
    if not settings and names and options.strict:
        raise CheckpointError(
            f"no group of the state dict contains {', '.join(of_one[0] for of_one in names)}",
            hint="strict=False keeps the settings of the optimizer",
        )
    return settings[0] if settings else {}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the settings of two groups agree; tensors of no dims (a learning rate) are compared as numbers."""

    def plain(value: Any) -> Any:
        source = value.source if isinstance(value, TensorToLoad) else value
        return source.item() if isinstance(source, torch.Tensor) and not source.dim() else source

    return map_leaves(one, plain) == map_leaves(other, plain)
