"""State dicts of parallel models and their optimizers, by parameter names, as torch's module of this name has them.

A state dict is sharded (its tensors are DTensors) or full (plain tensors, as on one device). Names are those of the
model without wrappers (DDP, `torch.compile`, activation checkpointing). Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.together import Processes, Turn, processes_of
from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.fabric.virtual import RankTensor
from shardwise.loading import laid_out_as
from shardwise.tensor import DTensor

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """What a state dict holds, and how it is loaded. torch's class of this name may be given in its place.

    Args:
        full_state_dict: whole plain tensors in place of DTensors.
        cpu_offload: tensors in the host's memory. With `full_state_dict` rank 0 alone gets them, others an empty dict.
        ignore_frozen_params: leave parameters out that require no gradient.
        keep_submodule_prefixes: with `submodules`, names as they are in the whole model.
        strict: of `load_state_dict`; and parameters without a state in the optimizer's state dict are an error.
        broadcast_from_rank0: rank 0 alone has the full state dict to load, and sends it; needs `full_state_dict`.
        flatten_optimizer_state_dict: one level of names (`state.0.weight.exp_avg`) in place of nested dicts.
        dsd_fqn_modifiers: the method by which a module says which of its children its state dict leaves out of names.

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
    """The state dict of a model, under the names it has without wrappers.

    Args:
        model: the model, parallel or not. Every rank calls this.
        submodules: only what belongs to these.
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
    return finished(model_state(model, _prefixes(model, submodules, options), options), options)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The states of optimizers in one dict, by the names of parameters in place of their numbers.

    For an optimizer that has made no step yet it holds states in their layouts, to be loaded into. The optimizer itself
    is left without.

    Args:
        model: the model whose parameters are optimized.
        optimizers: one or several.
        submodules: taken for the sake of torch's signature; states are of all parameters.
        options: a `StateDictOptions`.

    Example:
        >>> import shardwise as sw
        >>> model = sw.fully_shard(nn.Linear(2, 4), sw.init_device_mesh("cpu", (4,)))
        >>> get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))["state"]["weight"]["exp_avg"].spec
        f32[4,2] S0
    """
    options = _checked(options)
    state = _optimizer_state(model, _listed(optimizers), options)
    return finished(_flattened(state) if options.flatten_optimizer_state_dict else state, options)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `get_model_state_dict` and `get_optimizer_state_dict` give.

    Args:
        model: the model.
        optimizers: one or several.
        submodules: only the parameters that belong to these.
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
    """Load a state dict into a model. Parameters keep their layouts, and of a whole tensor each rank takes its part.

    Args:
        model: the model, parallel or not, on any mesh; on the meta device too, where its layouts count.
        model_state_dict: by the names that `get_model_state_dict` gives; sharded or full. Of a full one all ranks have
            the same values, or rank 0 alone has them (`broadcast_from_rank0`).
        options: a `StateDictOptions`.

    Returns:
        What `load_state_dict` returns: the missing and the unexpected keys.

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
    return _load_model(model, _by_names(model, model_state_dict, options), options)


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> None:
    """Load states into optimizers. Each gets the layout that the optimizer gives it, as a rule that of its parameter.

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
    _load_optimizers(model, _listed(optimizers), optim_state_dict, options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> Any:
    """What `set_model_state_dict` and `set_optimizer_state_dict` do.

    Args:
        model: the model.
        optimizers: one or several.
        model_state_dict: the state dict of the model.
        optim_state_dict: that of the optimizers.
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


def _checked(options: Any) -> Any:
    options = StateDictOptions() if options is None else options
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise CheckpointError("broadcast_from_rank0 sends whole tensors", hint="set full_state_dict=True as well")
    return options


def _listed(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


# ---------------------------------------------------------------- names

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and activation checkpointing call the inner


def canonical_name(model: nn.Module, path: str, modifiers: str = "_fqn_modifiers") -> str:
    """The name of a parameter or of a state dict's entry without wrappers.

    Example:
        >>> canonical_name(nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}), "_orig_mod.weight")  # as torch.compile does
        'weight'
    """
    kept: list[str] = []
    module: nn.Module | None = model
    for part in path.split("."):
        child = None
        if module is not None:
            if part in ("_fsdp_wrapped_module", "_flat_param"):
                raise UnsupportedError(
                    "the model is wrapped in torch's FullyShardedDataParallel", hint="use shardwise.fully_shard"
                )
            hidden = _hidden_children(module, modifiers)
            inner = [module, *(module._modules[name] for name in hidden)]  # whose names stand in a state dict as well
            child = next((c._modules[part] for c in inner if c is not None and part in c._modules), None)
            if part in hidden:
                module = child
                continue
        kept.append(part)
        module = child
    return ".".join(kept)


def _hidden_children(module: nn.Module, modifiers: str) -> list[str]:
    """The children whose names are left out."""
    if isinstance(module, DistributedDataParallel):
        return ["module"]
    hidden = [*WRAPPERS]
    if hasattr(module, modifiers):
        hidden += getattr(module, modifiers)().values()
    return [name for name in hidden if name in module._modules]


def _named_tensors(model: nn.Module, options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under each of their names."""
    for of_kind in (model.named_parameters, model.named_buffers):
        for path, tensor in of_kind(remove_duplicate=False):
            yield canonical_name(model, path, options.dsd_fqn_modifiers), tensor


def _by_names(model: nn.Module, given: Mapping[Any, Any], options: Any) -> Mapping[str, Any]:
    """A state dict by names; one of submodules, each with its own state dict, is made one of the model."""
    if not any(isinstance(key, nn.Module) for key in given):
        return given
    paths = {module: path for path, module in model.named_modules()}
    return {
        canonical_name(model, ".".join(filter(None, (paths[module], key))), options.dsd_fqn_modifiers): value
        for module, state in given.items()
        for key, value in state.items()
    }


# ---------------------------------------------------------------- values


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Dicts, lists and tuples made anew, with `function` of everything else in them."""
    if isinstance(value, Mapping):
        return {key: _mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(value, found.append)
    return found


def finished(state: dict[str, Any], options: Any) -> dict[str, Any]:
    """A state dict as the options want it: with whole tensors, in the host's memory, on rank 0 alone."""
    if not options.full_state_dict and not options.cpu_offload:
        return state
    processes = _processes_of(leaf for leaf in _leaves(state) if isinstance(leaf, torch.Tensor))
    is_kept = processes.is_first or not (options.full_state_dict and options.cpu_offload)

    def finish(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if options.full_state_dict and isinstance(value, DTensor):
            value = _whole(value)
        return value.cpu() if is_kept and options.cpu_offload else value if is_kept else None

    finished = _mapped(state, finish)
    return finished if is_kept else {}


def _processes_of(tensors: Iterable[torch.Tensor]) -> Processes:
    """Who has these tensors; tensors that no state dict can hold are an error."""
    turn = Turn()
    processes = processes_of(turn, tensors)
    if turn.error is not None:
        raise turn.error
    return processes


def _whole(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, as plain one. All ranks call this."""
    with torch.no_grad():
        whole = tensor.full_tensor()
    if not isinstance(whole, RankTensor):
        return whole
    if any(not torch.equal(other, whole.tensors[0]) for other in whole.tensors[1:]):
        raise CheckpointError(
            f"{tensor.spec} has other values in each slice of its mesh, and one full state dict cannot hold them",
            hint="use a sharded state dict: full_state_dict=False",
        )
    return whole.tensors[0].clone()


class _Info(NamedTuple):
    """What rank 0 says about a tensor before it sends it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Value:
    """A tensor to be loaded: where it comes from, whether anybody wants it, and what it is put in the place of."""

    def __init__(self, source: torch.Tensor | _Info) -> None:
        self.source = source
        self.is_wanted = False
        self.like: torch.Tensor | None = None
        self.value: Any = None

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self.source.shape)

    def want(self, like: torch.Tensor | None) -> None:
        """Say that it is loaded, in the place of `like` where that is known."""
        self.is_wanted, self.like = True, like

    def come(self, processes: Processes | None) -> None:
        """Take the tensor, from rank 0 if there are processes to get it from, and keep what `like` holds of it."""
        if not self.is_wanted:  # the name alone counts, or that the shape is wrong
            self.value = torch.empty(self.shape, dtype=self.source.dtype, device="meta")
            return
        tensor = self._sent(processes) if processes is not None and self.shape else self.source
        assert isinstance(tensor, torch.Tensor)
        if isinstance(self.like, DTensor) and self.like.shape == self.shape:
            laid_out = laid_out_as(tensor, self.like.spec)
            self.value = laid_out.detach().clone() if laid_out is tensor else laid_out
        elif self.like is not None and isinstance(tensor, DTensor):
            self.value = _whole(tensor)
        else:
            self.value = tensor.detach().clone()

    def _sent(self, processes: Processes) -> torch.Tensor:
        source = self.source
        device = processes.device(torch.device("cpu") if self.like is None else self.like.device)
        if isinstance(source, _Info):
            tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
        else:
            tensor = source.detach().to(device).contiguous()
        processes.fill_from_first(tensor)
        return tensor


def _to_load(given: Any, processes: Processes, options: Any) -> Any:
    """What is to be loaded, with a `_Value` for each tensor; all ranks know of the same, where rank 0 sends it."""
    if processes.alone or not options.broadcast_from_rank0:
        turn = Turn()
        turn.says = bool(given)
        if len(set(processes.tell(turn))) > 1:
            raise CheckpointError(
                "some ranks have a state dict to load, and others an empty one",
                hint="broadcast_from_rank0=True with full_state_dict=True sends that of rank 0",
            )
        return _mapped(given, lambda value: _Value(value) if isinstance(value, torch.Tensor) else value)
    sharded = next((leaf for leaf in _leaves(given) if isinstance(leaf, DTensor)), None) if processes.is_first else None
    if sharded is not None:
        says: Any = CheckpointError(
            f"broadcast_from_rank0 sends whole tensors, and the state dict of rank 0 holds {sharded.spec}",
            hint="get it with full_state_dict=True, or load it without broadcast_from_rank0",
        )
    else:
        says = _mapped(given, _announced) if processes.is_first else None
    said = processes.said_by_first(says)
    if isinstance(said, CheckpointError):
        raise said
    made = _mapped(said, lambda value: _Value(value) if isinstance(value, _Info | torch.Tensor) else value)
    if processes.is_first:
        for value, tensor in zip(_leaves(made), _leaves(given), strict=True):
            if isinstance(value, _Value):
                value.source = tensor
    return made


def _announced(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Info(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()


def _come(wanted: Any, processes: Processes, options: Any) -> None:
    """Let the values come, in the order in which all ranks have them."""
    sender = processes if options.broadcast_from_rank0 and not processes.alone else None
    for value in _leaves(wanted):
        if isinstance(value, _Value):
            value.come(sender)


# ---------------------------------------------------------------- models


def model_state(model: nn.Module, prefixes: Iterable[str], options: Any) -> dict[str, Any]:
    """The model's state dict by names: of all, or of what has one of these prefixes."""
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        name = canonical_name(model, key, options.dsd_fqn_modifiers)
        if name in state:
            raise CheckpointError(f"two entries of the state dict have the name {name} without wrappers")
        state[name] = value
    if options.ignore_frozen_params:
        for name, tensor in _named_tensors(model, options):
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


def _prefixes(model: nn.Module, submodules: set[nn.Module] | None, options: Any) -> list[str]:
    """What the names of the parameters of these submodules begin with."""
    paths = [path for path, module in model.named_modules() if submodules and module in submodules]
    return [f"{canonical_name(model, path, options.dsd_fqn_modifiers)}." if path else "" for path in paths]


def _load_model(model: nn.Module, given: Mapping[str, Any], options: Any) -> Any:
    """Load what is given by names; parameters on the meta device are replaced, those that are tied by one."""
    keys: dict[str, str] = {canonical_name(model, key, options.dsd_fqn_modifiers): key for key in model.state_dict()}
    held = dict(_named_tensors(model, options))
    processes = _processes_of(held.values())
    values = _to_load(given, processes, options)
    if not values and keys and options.strict:
        raise CheckpointError("the state dict to load is empty", hint="strict=False loads what there is")
    for name, value in values.items():
        if isinstance(value, _Value) and name in keys and (name not in held or held[name].shape == value.shape):
            value.want(held.get(name))
    _come(values, processes, options)
    loaded: dict[str, Any] = {
        name: value.value if isinstance(value, _Value) else value for name, value in values.items()
    }
    assign = any(tensor.is_meta for name, tensor in held.items() if name in keys)
    if assign:
        _materialize(loaded, held, options)
    return model.load_state_dict(
        {keys.get(name, name): value for name, value in loaded.items()}, strict=options.strict, assign=assign
    )


def _materialize(loaded: dict[str, Any], held: Mapping[str, torch.Tensor], options: Any) -> None:
    """Prepare values to be assigned: parameters for those on the meta device, and the others themselves, filled."""
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


# ---------------------------------------------------------------- optimizers


def _parameter_names(model: nn.Module, options: Any) -> dict[int, list[str]]:
    """The names of each parameter, by identity; several where it is tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model, options):
        names.setdefault(id(tensor), []).append(name)
    return names


def _names_in_order(optimizer: torch.optim.Optimizer, names: Mapping[int, list[str]]) -> list[list[str]]:
    """The names of an optimizer's parameters, in the order in which it numbers them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model",
                hint="make the optimizer after the model is parallel, and give the whole model",
            )
    return [names[id(parameter)] for parameter in parameters]


def _init_optim_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer without a state make one, as its first step would: a step with gradients and a rate of zero."""
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
    """The state dict of an optimizer. Without a state yet, one to be loaded into; the optimizer stays without."""
    if optimizer.state:
        return optimizer.state_dict()
    _init_optim_state(optimizer)
    state = optimizer.state_dict()
    optimizer.state.clear()
    for of_parameter in state[STATE].values():
        step = of_parameter.get("step")
        if step is not None:  # none was made
            of_parameter["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else type(step)(0)
    return state


def _optimizer_state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], options: Any
) -> dict[str, dict[str, Any] | list[Any]]:
    """The states of all optimizers by names, and their groups."""
    names = _parameter_names(model, options)
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        ordered = _names_in_order(optimizer, names)
        own = _own_state(optimizer)
        for number, value in own[STATE].items():
            name = ordered[number][0] if isinstance(number, int) else number
            if name in states:
                raise CheckpointError(
                    f"two optimizers have a state for {name}", hint="get their state dicts one by one"
                )
            states[name] = value
        groups += [{**group, PARAMS: [ordered[number][0] for number in group[PARAMS]]} for group in own[GROUPS]]
    return {STATE: states, GROUPS: groups}


def _flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """`{"state": {"w": {"step": 1}}}` as `{"state.w.step": 1}`; settings of a group under each of its parameters."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        else:
            flat[name] = value

    walk(nested[STATE], STATE)
    for group in nested[GROUPS]:
        for name in group[PARAMS]:
            flat.update({f"{GROUPS}.{name}.{key}": value for key, value in group.items() if key != PARAMS})
    return flat


def _unflattened(flat: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What `_flattened` was given, for parameters of these names; each is a group of its own."""
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


def _load_optimizers(
    model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], given: Mapping[str, Any], options: Any
) -> None:
    """Load what is given by names. What does not fit is an error before anything is sent or changed."""
    names = _parameter_names(model, options)
    processes = _processes_of(model.parameters())
    wanted = _to_load(given, processes, options)
    if not wanted:
        raise CheckpointError(
            "the optimizer's state dict to load is empty",
            hint="broadcast_from_rank0=True with full_state_dict=True sends that of rank 0",
        )
    if STATE not in wanted:
        wanted = _unflattened(wanted, (name for of_one in names.values() for name in of_one))
    picked = []
    for optimizer in optimizers:
        ordered = _names_in_order(optimizer, names)
        by_name = _renumbered(wanted, ordered, len(optimizers)) if _is_numbered(wanted) else wanted
        picked.append(_picked(optimizer, ordered, by_name, options))
    _come(wanted, processes, options)
    for optimizer, state in zip(optimizers, picked, strict=True):
        optimizer.load_state_dict(_mapped(state, lambda value: value.value if isinstance(value, _Value) else value))


def _is_numbered(state: Mapping[str, Any]) -> bool:
    return any(isinstance(number, int) for group in state[GROUPS] for number in group[PARAMS])


def _renumbered(state: Mapping[str, Any], ordered: list[list[str]], count: int) -> dict[str, Any]:
    """A state dict as `optimizer.state_dict()` gives it, by names."""
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    if count != 1 or len(numbers) != len(ordered):
        raise CheckpointError(
            f"the state dict numbers {len(numbers)} parameters, which cannot be those of {count} optimizers"
            if count != 1
            else f"the state dict numbers {len(numbers)} parameters, and the optimizer has {len(ordered)}",
            hint="get_optimizer_state_dict gives one by names",
        )
    name = {number: of_one[0] for number, of_one in zip(numbers, ordered, strict=True)}
    return {
        STATE: {name.get(number, number): value for number, value in state[STATE].items()},
        GROUPS: [{**group, PARAMS: [name[number] for number in group[PARAMS]]} for group in state[GROUPS]],
    }


def _picked(
    optimizer: torch.optim.Optimizer, ordered: list[list[str]], given: Mapping[str, Any], options: Any
) -> dict[str, Any]:
    """What one optimizer loads, by its own numbers; each value knows the state whose place it takes."""
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
    if missing and options.strict:
        raise CheckpointError(
            f"no state for {', '.join(missing)} is in the state dict of the optimizer",
            hint="strict=False leaves these without a state, as a new optimizer is",
        )
    groups = [
        {**group, **_settings(group, [ordered[number] for number in group[PARAMS]], given, options)}
        for group in own[GROUPS]
    ]
    return {STATE: states, GROUPS: groups}


def _match(given: Any, own: Any, parameter: torch.Tensor) -> None:
    """Tell the values of a parameter's state what they are put in the place of."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            inside = own.get(key) if isinstance(own, Mapping) else None
            if isinstance(value, _Value):
                as_parameter = parameter if value.shape == parameter.shape else None
                value.want(inside if isinstance(inside, torch.Tensor) else as_parameter)
            else:
                _match(value, inside, parameter)


def _settings(own: Mapping[str, Any], names: list[list[str]], given: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """The settings of a group: those of the given group, or groups that agree, in which its parameters are."""
    wanted = {name for of_one in names for name in of_one}
    found = [group for group in given[GROUPS] if wanted & set(group[PARAMS])]
    if not names:
        empty = [group for group in given[GROUPS] if not group[PARAMS]]
        found = empty if len(empty) == 1 else []
    settings = [{k: v for k, v in group.items() if k not in (PARAMS, "param_names")} for group in found]
    for value in _leaves(settings[:1]):
        if isinstance(value, _Value):
            value.want(None)
    if any(not _same(other, settings[0]) for other in settings[1:]):
        raise CheckpointError(
            f"the parameters {', '.join(of_one[0] for of_one in names)} are one group here, and were in groups of "
            "different settings",
            hint="make the optimizer with the same groups",
        )
    if not settings and names and options.strict:
        raise CheckpointError(
            f"no group of the state dict holds {', '.join(of_one[0] for of_one in names)}",
            hint="strict=False keeps the settings of the optimizer",
        )
    return settings[0] if settings else {}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the settings of two groups agree; tensors among them (a rate) are numbers."""

    def plain(value: Any) -> Any:
        source = value.source if isinstance(value, _Value) else value
        return source.item() if isinstance(source, torch.Tensor) and not source.dim() else source

    return _mapped(one, plain) == _mapped(other, plain)
