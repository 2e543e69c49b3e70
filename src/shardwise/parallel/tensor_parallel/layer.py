"""How one layer of a style runs: hooks that lay out its input and output, and local tensors inside if possible.

A forward runs on local tensors if, by the rules, no operator in it communicates (`forward_layouts`): DTensors would run
the same operators on the same locals. In all other cases, for example on a larger mesh, it runs on DTensors.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.compilers import never_traced
from shardwise.core.cache import BoundedCache
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, Placement, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.tracing import is_dynamo_compiling, is_tracing
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of, fabrics
from shardwise.fabric.rank_tensor import is_even, is_of_ranks
from shardwise.parallel.tensor_parallel.forward_layouts import Used, forward_layouts
from shardwise.parallel.tensor_parallel.local_region import from_layer, rows_here, to_layer
from shardwise.parallel.tensor_parallel.module_parameters import remap_parameters, restore_parameters
from shardwise.parallel.tensor_parallel.value_layouts import in_layout, local_of, target_of
from shardwise.rules.embedding import zero_missing
from shardwise.tensor import AnyDTensor, DTensor, is_dtensor, is_forward_or_transformed
from shardwise.torch_private import (
    dispatch_mode_count,
    dispatch_mode_stack,
    function_mode_count,
    function_mode_stack,
    global_backward_hooks,
    global_forward_hooks,
)
from shardwise.transforms import innermost

__all__ = ["Layer", "LayerLayouts", "features_of", "layer_of", "reinstall", "uninstall"]

MAX_KEPT = 256
new_cache = functools.partial(BoundedCache[Any, Any], MAX_KEPT)
_KEY = -1  # of the hooks of a layer; torch numbers its own from 0
_INSTALLED = "_shardwise_layers"  # on a module: the layers whose hooks it has, and the keys of the hooks
# on a module that runs on locals: the program, its own parameters, missing rows, and the thread that runs it
_RUNNING = "_shardwise_running"


@dataclass(frozen=True)
class LayerLayouts:
    """The layouts that a style defines for a layer, on the axis of its mesh. The operators' rules define the others.

    Args:
        parameters: the layout of each parameter.
        input: the layout that the forward needs its input in.
        features: the global size of the last dim of the input, for inputs that are sharded in it: a number, or a
            parameter and its dim of that size.
        on_locals: whether the forward may run on local tensors.
    """

    parameters: Mapping[str, Placement]
    input: Placement
    features: tuple[str, int] | int | None = None
    on_locals: bool = True


@dataclass(frozen=True)
class Program:
    """How a layer runs on local tensors.

    Args:
        names: the parameters that it computes with.
        targets: the layouts that it computes with, of these parameters and of an input that is a DTensor.
        gradients: the layouts of their gradients.
        result: the layout of its result.
        looks_up: whether the input holds row numbers of a table whose rows are sharded.
    """

    names: tuple[str, ...]
    targets: tuple[DTensorSpec, ...]
    gradients: tuple[DTensorSpec, ...]
    result: DTensorSpec
    looks_up: bool


@dataclass(frozen=True)
class KnownProgram:
    """The program for one signature, None if it runs on DTensors, and what the forward has used."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    used: Used
    program: Program | None


@dataclass(frozen=True)
class Layer:
    """The hooks of one module."""

    mesh: DeviceMesh
    layouts: LayerLayouts
    given: Placement
    output: Placement | None
    to_local: bool
    # by the class, the forward and the specs of its operands; and of results, by the strides and dtypes of locals
    programs: BoundedCache[Any, KnownProgram] = field(default_factory=new_cache, compare=False, repr=False)
    results: BoundedCache[Any, tuple[DTensorSpec, DTensorSpec]] = field(
        default_factory=new_cache, compare=False, repr=False
    )

    def install(self, module: nn.Module) -> nn.Module:
        """Put the hooks around the forward of a module."""
        before = module.register_forward_pre_hook(self.before, with_kwargs=True)
        first = _under_fixed_key(before.id, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        after = module.register_forward_hook(self.after, always_call=True)
        last = _under_fixed_key(after.id, module._forward_hooks, module._forward_hooks_always_called)
        module.__dict__[_INSTALLED] = (*module.__dict__.get(_INSTALLED, ()), (self, first, last))
        return module

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Lay out the first argument for the module, and remap its parameters to the same mesh."""
        name = None if args else next(iter(kwargs), None)
        value = args[0] if args else kwargs.get(name or "")
        if not isinstance(value, torch.Tensor):
            return None
        found = self._entered(module, value, len(args) + len(kwargs) == 1)
        if found is value:
            return None
        return ((found, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: found})

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """The result in the requested layout. Also called after an error, with None as the result."""
        # while compiling nothing runs on locals, and Dynamo of torch 2.11 does not know this dict
        running = None if is_dynamo_compiling() else module.__dict__.get(_RUNNING)
        if running is not None and running[3] == threading.get_ident():
            program, own, elsewhere, _ = running
            module._parameters.update(own)
            del module.__dict__[_RUNNING]  # only now may another thread run it
            if result is None:
                return None
            return self._left(program, result if elsewhere is None else zero_missing(result, elsewhere))
        restore_parameters(module)
        if self.output is not None:
            result = in_layout(result, self.mesh, self.output, self.output, async_op=True)
        return local_of(result, self.mesh) if self.to_local else result

    def _entered(self, module: nn.Module, value: torch.Tensor, alone: bool) -> torch.Tensor:
        """The input as the forward receives it; `alone`: it is the only argument."""
        program = self._program(module, value) if alone and self.layouts.on_locals else None
        if program is not None:
            return self._run(module, program, value)
        if not is_dtensor(value):
            value = self._annotated(module, value)
            program = self._program(module, value) if alone and self.layouts.on_locals else None
            if program is not None:
                return self._run(module, program, value)
        if not is_dynamo_compiling() and _RUNNING in module.__dict__:
            _recover(module)
        found = in_layout(value, self.mesh, self.given, self.layouts.input, async_op=True)
        if found._spec.mesh != self.mesh:  # not "is not", see local_of
            remap_parameters(module, self.mesh, found._spec.mesh)
        return found

    def _annotated(self, module: nn.Module, value: torch.Tensor) -> AnyDTensor:
        """A plain input as a DTensor; the module has its number of features, even or not."""
        features = self._features(module, value)
        shape = None if features is None else (*value.shape[:-1], features)
        return DTensor.from_local(value, self.mesh, (self.given,), shape=shape)

    def _features(self, module: nn.Module, value: torch.Tensor) -> int | None:
        """The global size of the last dim of an input that is sharded in it, if the module has it."""
        features = self.layouts.features
        if features is None or not isinstance(self.given, Shard) or self.given.dim not in (-1, value.dim() - 1):
            return None
        return features_of(module, features)

    # ---------------------------------------------------------------- on locals

    def _program(self, module: nn.Module, value: torch.Tensor) -> Program | None:
        """How to run on local tensors; None if the call must run on DTensors."""
        state = module.__dict__
        if is_dynamo_compiling() or is_forward_or_transformed() or "forward" in state:
            return None
        if (dispatch_mode_count() or function_mode_count()) and (is_tracing() or _has_other_modes()):
            return None
        if _RUNNING in state:
            _recover(module)
        # other hooks that would get local tensors: between our hooks and forward, or in backward
        if next(reversed(module._forward_pre_hooks)) != _KEY or next(iter(module._forward_hooks)) != _KEY:
            return None
        if module._backward_hooks or global_backward_hooks or (global_forward_hooks and _has_other_global_hooks()):
            return None
        if fabrics[self.mesh.fabric].many_ranks and is_of_ranks(value) and not is_even(value):
            return None
        parameters = module._parameters
        key = (
            type(module),
            type(module).forward,
            self.mesh.device_type != "meta" and torch.is_autocast_enabled(self.mesh.device_type),
            value._spec if isinstance(value, DTensor) else (value.shape, value.stride(), value.dtype, type(value)),
            *parameters,
            *[getattr(parameter, "_spec", parameter is None) for parameter in parameters.values()],
        )
        known = self.programs.get(key)
        if known is not None:
            used = known.used
            now = map(getattr, used.owners, used.names, itertools.repeat(None))
            if (
                all(map(operator.is_, known.values, map(state.get, known.names)))
                and all(map(operator.is_, used.values, now))
                and (not used.definitions or used.definitions_hold())
            ):
                return known.program
        return self.programs.keep(key, self._made_program(module, value)).program

    def _made_program(self, module: nn.Module, value: torch.Tensor) -> KnownProgram:
        layouts, mesh, fabric = self.layouts, self.mesh, fabric_of(self.mesh)
        names = [name for name in layouts.parameters if module._parameters.get(name) is not None]
        given = {name: getattr(module._parameters.get(name), "_spec", None) for name in layouts.parameters}
        entered = value._spec if isinstance(value, DTensor) else self._spec_of_plain(module, value)
        fits = (
            fabric.has_values
            and not fabric.is_outside(mesh)
            # else a parametrization computes some of them
            and layouts.parameters.keys() <= module._parameters.keys()
            and all((spec := given[name]) is not None and spec.mesh is mesh for name in names)
        )
        if not fits or entered is None or entered.mesh is not mesh:
            return KnownProgram((), (), Used(), None)
        operands = [given[name] for name in names] + [target_of(entered, mesh, layouts.input)]
        used, found = forward_layouts(module, names, operands)  # pyright: ignore[reportArgumentType]
        known = functools.partial(KnownProgram, tuple(used.attributes), tuple(used.attributes.values()), used)
        if found is None:
            return known(None)
        # a composite operator on a RankTensor takes the sizes of the first rank for those of all
        everything = (*operands, *found.operands, *found.gradients)
        if fabric.many_ranks and not all(map(_is_even, everything)):  # pyright: ignore[reportArgumentType]
            return known(None)
        count = len(names)
        if isinstance(value, DTensor):
            count += 1
        elif found.gradients[-1].placements != found.operands[-1].placements:
            return known(None)  # autograd has to know how the gradient of the input is distributed
        return known(
            Program(tuple(names), found.operands[:count], found.gradients[:count], found.result, found.looks_up)
        )

    def _spec_of_plain(self, module: nn.Module, value: torch.Tensor) -> DTensorSpec | None:
        """The spec of a plain input that is already in the layout of the forward; None for other inputs."""
        given = self.given
        if given is not self.layouts.input or (
            fabrics[self.mesh.fabric].many_ranks and not is_of_ranks(innermost(value))
        ):
            return None
        shape = list(value.shape)
        if isinstance(given, Shard):
            if not -len(shape) <= given.dim < len(shape):
                return None
            features = self._features(module, value)
            shape[given.dim] = shape[given.dim] * self.mesh.shape[0] if features is None else features
        meta = TensorMeta(shape, dense_strides(shape, like=value.stride()), value.dtype)
        return DTensorSpec(self.mesh, (given,), meta)

    def _run(self, module: nn.Module, program: Program, value: torch.Tensor) -> torch.Tensor:
        """The local of the input. Until the end of forward, the parameters of the module are locals."""
        parameters, entered = module._parameters, isinstance(value, DTensor)
        own = {name: parameters[name] for name in self.layouts.parameters if name in parameters}
        tensors = [own[name] for name in program.names]
        found = to_layer(program.targets, program.gradients, [*tensors, value] if entered else tensors)
        inside, elsewhere = found[-1] if entered else value, None
        if program.looks_up:
            inside, elsewhere = rows_here(program.targets[0], inside)
        running = (program, own, elsewhere, threading.get_ident())
        if module.__dict__.setdefault(_RUNNING, running) is not running:
            raise _two_threads(module)
        if not all(map(operator.is_, own.values(), map(parameters.get, own))):  # another thread's locals
            del module.__dict__[_RUNNING]
            raise _two_threads(module)
        for name, local in zip(program.names, found, strict=False):
            parameters[name] = local  # pyright: ignore[reportArgumentType]
        return inside

    def _left(self, program: Program, result: torch.Tensor) -> Any:
        """A result on local tensors, in the requested layout."""
        key = (program.result, result.stride(), result.dtype)
        specs = self.results.get(key)
        if specs is None:
            specs = self.results.keep(key, self._specs_of_result(*key))
        return from_layer(result, *specs, to_local=self.to_local)

    def _specs_of_result(
        self, spec: DTensorSpec, stride: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[DTensorSpec, DTensorSpec]:
        """The computed and the requested layout of a result."""
        source = spec.with_meta(TensorMeta(spec.shape, dense_strides(spec.shape, like=stride), dtype))
        return source, source if self.output is None else target_of(source, self.mesh, self.output)


# If Dynamo traced these alone, after a graph break, results would have its proxy of a mesh. Inside a graph it may.
never_traced(Layer.before, Layer.after)


def _recover(module: nn.Module) -> None:
    """Restore the parameters of a module after an interrupt, which ends a forward without calling hooks.

    Raises if another thread is running the module.
    """
    running = module.__dict__.get(_RUNNING)
    if running is None:
        return
    if running[3] != threading.get_ident():
        raise _two_threads(module)
    module._parameters.update(running[1])
    del module.__dict__[_RUNNING]


def _two_threads(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"two threads call one {type(module).__name__} of a plan at once",
        hint="a layer of a plan has local tensors for parameters while it runs; use a lock, or a copy for each thread",
    )


def layer_of(module: nn.Module) -> Layer | None:
    """The layer whose hooks a module has, if it has the hooks of one."""
    installed = module.__dict__.get(_INSTALLED, ())
    return installed[0][0] if len(installed) == 1 else None


def reinstall(module: nn.Module, layer: Layer) -> None:
    """Replace the hooks of a module by those of `layer`."""
    ((_, first, last),) = module.__dict__[_INSTALLED]
    module._forward_pre_hooks[first] = layer.before
    module._forward_hooks[last] = layer.after
    module.__dict__[_INSTALLED] = ((layer, first, last),)


def uninstall(module: nn.Module) -> None:
    """Remove the hooks of a module's only layer."""
    ((_, first, last),) = module.__dict__.pop(_INSTALLED)
    for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
        del hooks[first]
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        del hooks[last]


def features_of(module: nn.Module, features: tuple[str, int] | int) -> Any:
    """The size of the last dim of a layer's input, by its layouts."""
    if isinstance(features, int):
        return features
    own = module._parameters.get(features[0])
    return module.in_features if own is None else own.shape[features[1]]  # None: a parametrization computes it


def _under_fixed_key(number: int, hooks: dict[int, Any], *marks: dict[int, bool]) -> int:
    """Store a hook under a key that is the same on all similar modules; returns the key.

    torch numbers hooks in a process, and Dynamo guards the numbers: each block of a model would be compiled again.
    """
    key = _KEY
    while key in hooks:
        key -= 1
    for kept in (hooks, *marks):
        kept[key] = kept.pop(number)
    return key


def _has_other_global_hooks() -> bool:
    """Whether there are global hooks of others, which would get local results."""
    return any(not hook.__module__.startswith("shardwise.") for hook in global_forward_hooks.values())


def _has_other_modes() -> bool:
    """Whether there are modes of others, which would get the local tensors of functions or operators."""
    modes = (*dispatch_mode_stack(), *function_mode_stack())
    return not all(type(mode).__module__.startswith(("torch.", "shardwise.")) for mode in modes)


def _is_even(spec: DTensorSpec) -> bool:
    """Whether all ranks have equal shares."""
    sharded = [p for p in spec.placements if isinstance(p, AnyShard)]
    return all(isinstance(p, Shard) and spec.shape[p.dim] % spec.mesh.shape[0] == 0 for p in sharded)
