"""State dicts of parallel models and their optimizers by parameter names, with the interface of torch's module.

A state dict is sharded (its tensors are DTensors) or full (plain tensors, as on one device). Names omit wrappers (DDP,
`torch.compile`, activation checkpointing). No file access.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.state_dicts.model_state_dict import load_model, model_state, prefixes_of
from shardwise.checkpoint.state_dicts.optimizer_state_dict import flattened, load_optimizers, optimizer_state
from shardwise.checkpoint.state_dicts.parameter_names import by_names
from shardwise.checkpoint.state_dicts.state_dict_values import finished
from shardwise.errors import CheckpointError

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """The contents of a state dict, and how it is loaded. torch's class of this name is accepted as well.

    Args:
        full_state_dict: plain global tensors in place of DTensors.
        cpu_offload: tensors in host memory. With `full_state_dict` only rank 0 gets them, others an empty dict.
        ignore_frozen_params: omit parameters that require no gradient.
        keep_submodule_prefixes: with `submodules`, names relative to the model, not to the submodule.
        strict: passed to `load_state_dict`; a parameter without a state in the optimizer's state dict is an error.
        broadcast_from_rank0: only rank 0 has the full state dict to load, and broadcasts it; needs `full_state_dict`.
        flatten_optimizer_state_dict: one level of names (`state.0.weight.exp_avg`) in place of nested dicts.
        dsd_fqn_modifiers: the method of a module that names the children which its state dict omits from names.

    Example:
        >>> StateDictOptions(full_state_dict=True, cpu_offload=True).strict
        True
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The state dict of a model, by names without wrappers. Every rank calls it.

    Args:
        model: the model, parallel or not.
        submodules: include only entries of these submodules.
        options: a `StateDictOptions`.

    Example:
        >>> import shardwise as sw
        >>> model = sw.fully_shard(nn.Linear(2, 4), sw.init_device_mesh("cpu", (4,)))
        >>> get_model_state_dict(model)["weight"].spec
        f32[4,2] S0
        >>> type(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["weight"]).__name__
        'Tensor'
    """
    options = _checked(options)
    return finished(model_state(model, prefixes_of(model, submodules, options), options), options)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The states of optimizers in one dict, by parameter names in place of numbers.

    For an optimizer before its first step, it contains new states in their layouts, to load into. The optimizer itself
    stays without a state.

    Args:
        model: the model whose parameters are optimized.
        optimizers: one or several.
        submodules: ignored, for compatibility with torch; the states of all parameters are returned.
        options: a `StateDictOptions`.

    Example:
        >>> import shardwise as sw
        >>> model = sw.fully_shard(nn.Linear(2, 4), sw.init_device_mesh("cpu", (4,)))
        >>> get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))["state"]["weight"]["exp_avg"].spec
        f32[4,2] S0
    """
    options = _checked(options)
    state = optimizer_state(model, _listed(optimizers), options)
    return finished(flattened(state) if options.flatten_optimizer_state_dict else state, options)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of `get_model_state_dict` and `get_optimizer_state_dict`.

    Args:
        model: the model.
        optimizers: one or several.
        submodules: include only parameters of these submodules.
        options: a `StateDictOptions`.

    Example:
        >>> model = nn.Linear(2, 4)
        >>> of_model, of_optimizer = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sorted(of_model), of_optimizer["param_groups"][0]["params"]
        (['bias', 'weight'], ['weight', 'bias'])
    """
    optimizers = _listed(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: Any = None) -> Any:
    """Load a state dict into a model. Parameters keep their layouts; each rank takes its shard of a full tensor.

    Args:
        model: the model, parallel or not, on any mesh or on the meta device.
        model_state_dict: by the names of `get_model_state_dict`; sharded or full. A full one has the same values on all
            ranks, or is on rank 0 only (`broadcast_from_rank0`).
        options: a `StateDictOptions`.

    Returns:
        The result of `load_state_dict`: the missing and the unexpected keys.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> with torch.device("meta"):
        ...     model = sw.fully_shard(nn.Linear(2, 4), mesh)
        >>> full = nn.Linear(2, 4).state_dict()
        >>> set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
        <All keys matched successfully>
        >>> model.weight.spec, torch.equal(model.weight.full_tensor(), full["weight"])
        (f32[4,2] S0, True)
    """
    options = _checked(options)
    return load_model(model, by_names(model, model_state_dict, options), options)


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> None:
    """Load states into optimizers. Each gets the layout that the optimizer gives it, usually its parameter's.

    Args:
        model: the model whose parameters are optimized.
        optimizers: one or several, with or without a state yet.
        optim_state_dict: by names, nested or flattened; sharded or full.
        options: a `StateDictOptions`.

    Example:
        >>> import shardwise as sw
        >>> model = sw.fully_shard(nn.Linear(2, 4), sw.init_device_mesh("cpu", (4,)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        >>> set_optimizer_state_dict(model, optimizer, full, options=StateDictOptions(full_state_dict=True))
        >>> optimizer.state[model.weight]["exp_avg"].spec
        f32[4,2] S0
    """
    options = _checked(options)
    load_optimizers(model, _listed(optimizers), optim_state_dict, options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> Any:
    """`set_model_state_dict` and `set_optimizer_state_dict` in one call.

    Args:
        model: the model.
        optimizers: one or several.
        model_state_dict: the state dict of the model.
        optim_state_dict: the state dict of the optimizers.
        options: a `StateDictOptions`.

    Example:
        >>> model = nn.Linear(2, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> of_model, of_optimizer = get_state_dict(model, optimizer)
        >>> set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        <All keys matched successfully>
    """
    optimizers = _listed(optimizers)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


class NamedOptimizer:
    """Optimizers as an entry of a checkpoint, by the names of their parameters instead of their numbers.

    Numbers depend on the order of the parameters of an optimizer, and those of two stages of a pipeline are the same.
    By names a state loads into any division of the model into stages, optimizers and groups. A tied parameter has an
    entry under each of its names, so that its users may be on one stage or on several.

    Args:
        model: the model whose parameters are optimized; of a pipeline, `pipe.module`.
        optimizers: one or several.

    Example:
        >>> import shardwise as sw, tempfile
        >>> model = nn.Linear(2, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> sw.checkpoint.save({"optimizer": NamedOptimizer(model, optimizer)}, path)
        >>> swapped = torch.optim.AdamW([model.bias, model.weight])
        >>> _ = sw.checkpoint.load({"optimizer": NamedOptimizer(model, swapped)}, path)
        >>> swapped.state[model.weight]["exp_avg"].shape
        torch.Size([4, 2])
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, optimizers

    def state_dict(self) -> dict[str, Any]:
        """The states by names, on one level."""
        return flattened(optimizer_state(self.model, self.optimizers, StateDictOptions(), every_name=True))

    def state_to_load(self, stored: Container[str]) -> dict[str, Any]:
        """As `state_dict`; an optimizer before its first step has only states with names in `stored`."""
        options = StateDictOptions()
        return flattened(optimizer_state(self.model, self.optimizers, options, every_name=True, stored=stored))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states by names, of this process's parameters. Those without a state here have none afterwards."""
        load_optimizers(self.model, self.optimizers, state_dict, StateDictOptions(), own=True)


def _checked(options: Any) -> Any:
    options = StateDictOptions() if options is None else options
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise CheckpointError("broadcast_from_rank0 sends full tensors", hint="set full_state_dict=True as well")
    return options


def _listed(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
