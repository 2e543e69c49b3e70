"""How one layer of a style runs: hooks that lay out what goes in and out, and locals inside where that says the same.

A linear layer or a norm whose operands lie as its style wants them does on locals exactly what DTensors would do, and
its many small operators need not be dispatched one by one. What lies otherwise, on a larger mesh say, goes by DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.core.cache import BoundedCache
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, Placement, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.base import fabric_of, fabrics
from shardwise.fabric.virtual import RankTensor, is_even
from shardwise.parallel.tensor_parallel.local_region import from_layer, to_layer
from shardwise.parallel.tensor_parallel.module_parameters import see_on, unsee
from shardwise.parallel.tensor_parallel.table_lookup import is_plain_table, rows_here, zero_elsewhere
from shardwise.parallel.tensor_parallel.value_layouts import in_layout, local_of, target_of
from shardwise.tensor import AnyDTensor, DTensor, is_dtensor, is_forward_or_transformed
from shardwise.transforms import innermost

__all__ = ["Layer", "LayerLayouts", "features_of", "layer_of", "reinstall", "uninstall"]

MAX_KEPT = 256
new_cache = functools.partial(BoundedCache[Any, Any], MAX_KEPT)
_INSTALLED = "_shardwise_layers"  # on a module: the layers whose hooks it has, and the keys of the hooks
_RUNNING = "_shardwise_running"  # on a module that runs on locals: how, its own parameters, what is looked up elsewhere


@dataclass(frozen=True)
class LayerLayouts:
    """What a layer computes with, along the axis of its style.

    Args:
        parameters: how parameters lie.
        input: how the input has to lie.
        result: how the result comes out.
        input_gradient: what the ranks' gradients of the input are together, where they do not lie as the input does.
        gradients: the same of parameters.
        features: how long the last dim of the input is, for inputs that are sharded in it: a number, or a parameter
            and its dim of that length.
        inside: how parameters lie that a layer computes with in another layout than they have; what is added to a sum
            is to be a sum too.
        exact: the forward functions that can run on locals.
        looks_up: whether the input are indices of rows, of which each rank has some.
    """

    parameters: Mapping[str, Placement]
    input: Placement
    result: Placement | None = None
    input_gradient: Placement | None = None
    gradients: Mapping[str, Placement] = field(default_factory=dict)
    features: tuple[str, int] | int | None = None
    inside: Mapping[str, Placement] = field(default_factory=dict)
    exact: tuple[Any, ...] = ()
    looks_up: bool = False


@dataclass(frozen=True)
class Program:
    """How a layer runs on locals: for each parameter it computes with, and the input last, what it lies as and how the
    gradient does; and how long the dim is that the result is sharded in, where that is known.
    """

    names: tuple[str, ...]
    targets: tuple[DTensorSpec, ...]
    gradients: tuple[DTensorSpec, ...]
    size: int | None


@dataclass(frozen=True)
class Layer:
    """The hooks of one module."""

    mesh: DeviceMesh
    layouts: LayerLayouts
    given: Placement
    output: Placement | None
    to_local: bool
    # by the specs of what goes in; and of results, by the shapes of locals
    programs: BoundedCache[Any, Program | None] = field(default_factory=new_cache, compare=False, repr=False)
    results: BoundedCache[Any, tuple[DTensorSpec, DTensorSpec]] = field(
        default_factory=new_cache, compare=False, repr=False
    )

    def install(self, module: nn.Module) -> nn.Module:
        """Put the hooks around the forward of a module."""
        before = module.register_forward_pre_hook(self.before, with_kwargs=True)
        first = _under_fixed_key(before.id, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        after = module.register_forward_hook(self.after, always_call=True)
        last = _under_fixed_key(after.id, module._forward_hooks, module._forward_hooks_always_called)
        module.__dict__.setdefault(_INSTALLED, []).append((self, first, last))
        return module

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The first argument in the layout that the module computes with; its parameters on the same mesh."""
        name = None if args else next(iter(kwargs), None)
        value = args[0] if args else kwargs.get(name or "")
        if not isinstance(value, torch.Tensor):
            return None
        found = self._entered(module, value)
        if found is value:
            return None
        return ((found, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: found})

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """The result in the layout that was asked for. Called after an error too, without a result."""
        # while compiling nothing runs on locals, and Dynamo of torch 2.11 does not know this dict
        running = None if torch.compiler.is_compiling() else module.__dict__.pop(_RUNNING, None)
        if running is not None:
            program, own, elsewhere = running
            module._parameters.update(own)
            if result is None:
                return None
            return self._left(program, result if elsewhere is None else zero_elsewhere(result, elsewhere))
        unsee(module)
        if self.output is not None:
            result = in_layout(result, self.mesh, self.output, self.output, async_op=True)
        return local_of(result, self.mesh) if self.to_local else result

    def _entered(self, module: nn.Module, value: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(value) and not self._is_local_already(value):
            value = self._annotated(module, value)
        program = self._program(module, value)
        if program is not None:
            return self._run(module, program, value)
        given = value if is_dtensor(value) else self._annotated(module, value)
        found = in_layout(given, self.mesh, self.given, self.layouts.input, async_op=True)
        if found._spec.mesh != self.mesh:  # not "is not", see local_of
            see_on(module, self.mesh, found._spec.mesh)
        return found

    def _is_local_already(self, value: torch.Tensor) -> bool:
        """Whether a plain input is what the layer computes with, and its gradient what each rank has of it."""
        layouts = self.layouts
        if self.given is not layouts.input or layouts.input_gradient is not None or not layouts.exact:
            return False
        return not fabrics[self.mesh.fabric].many_ranks or isinstance(innermost(value), RankTensor)

    def _annotated(self, module: nn.Module, value: torch.Tensor) -> AnyDTensor:
        """A plain input as a DTensor; the module knows its number of features, however they are split."""
        shape, features = None, self.layouts.features
        if features is not None and isinstance(self.given, Shard) and self.given.dim in (-1, value.dim() - 1):
            shape = (*value.shape[:-1], features_of(module, features))
        return DTensor.from_local(value, self.mesh, (self.given,), shape=shape)

    # ---------------------------------------------------------------- on locals

    def _program(self, module: nn.Module, value: torch.Tensor) -> Program | None:
        """How to run on locals; None where that is not what DTensors would do."""
        layouts = self.layouts
        if type(module).forward not in layouts.exact or torch.compiler.is_compiling() or is_forward_or_transformed():
            return None
        parameters = module._parameters
        key = (
            value._spec if isinstance(value, DTensor) else value.dim(),
            *[getattr(parameters.get(name), "_spec", None) for name in layouts.parameters],
        )
        if key not in self.programs:
            self.programs.keep(key, self._made_program(module, key))
        program = self.programs[key]
        if isinstance(value, RankTensor) and program is not None:
            return program if is_even(value) else None
        return program

    def _made_program(self, module: nn.Module, key: tuple[Any, ...]) -> Program | None:
        layouts, mesh = self.layouts, self.mesh
        if not layouts.parameters.keys() <= module._parameters.keys():  # a parametrization computes some of them
            return None
        given = {
            name: spec
            for name, spec in zip(layouts.parameters, key[1:], strict=True)
            if module._parameters[name] is not None
        }
        fits = (
            fabric_of(mesh).has_values
            and not fabric_of(mesh).is_outside(mesh)
            and all(
                spec is not None and spec.mesh is mesh and spec.placements == (layouts.parameters[name],)
                for name, spec in given.items()
            )
        )
        entered = key[0] if isinstance(key[0], DTensorSpec) else None
        ndim: int = key[0] if entered is None else entered.ndim  # pyright: ignore[reportAssignmentType]
        if not fits or (entered is not None and entered.mesh is not mesh) or not _treats_alike(module, layouts, ndim):
            return None
        if layouts.looks_up and not is_plain_table(module, given["weight"]):
            return None
        names = tuple(given)
        targets = [target_of(given[n], mesh, layouts.inside.get(n, layouts.parameters[n])) for n in names]
        gradients = [target_of(given[n], mesh, layouts.gradients.get(n, layouts.parameters[n])) for n in names]
        if entered is not None:
            targets.append(target_of(entered, mesh, layouts.input))
            gradients.append(target_of(entered, mesh, layouts.input_gradient or layouts.input))
        # a composite operator on a RankTensor takes the sizes of the first rank for those of all
        if fabric_of(mesh).many_ranks and not all(map(_is_even, (*given.values(), *targets, *gradients))):
            return None
        return Program(names, tuple(targets), tuple(gradients), self._size(given, entered))

    def _size(self, given: Mapping[str, DTensorSpec], entered: DTensorSpec | None) -> int | None:
        """The global size of the dim in which the result is sharded; None if only the result itself tells."""
        layouts = self.layouts
        if not isinstance(layouts.result, Shard):
            return None
        if layouts.result is layouts.input:  # the result is sharded as the input is
            return None if entered is None else entered.shape[layouts.result.dim]
        weight = given["weight"]
        return weight.shape[next(dim for dim, axes in enumerate(weight.dim_axes) if axes)]

    def _run(self, module: nn.Module, program: Program, value: torch.Tensor) -> torch.Tensor:
        """The local of the input. The module has locals for parameters until its forward has ended."""
        parameters, entered = module._parameters, isinstance(value, DTensor)
        own = {name: parameters[name] for name in self.layouts.parameters if name in parameters}
        tensors = [own[name] for name in program.names]
        found = to_layer(program.targets, program.gradients, [*tensors, value] if entered else tensors)
        inside, elsewhere = found[-1] if entered else value, None
        if self.layouts.looks_up:
            inside, elsewhere = rows_here(program.targets[0], inside)
        module.__dict__[_RUNNING] = (program, own, elsewhere)
        for name, local in zip(program.names, found, strict=False):
            parameters[name] = local  # pyright: ignore[reportArgumentType]
        return inside

    def _left(self, program: Program, result: torch.Tensor) -> Any:
        """What has been computed on locals, in the layout that was asked for."""
        key = (program.size, result.shape, result.stride(), result.dtype)
        specs = self.results.get(key)
        if specs is None:
            specs = self.results.keep(key, self._specs_of_result(result, program.size))
        return from_layer(result, *specs, to_local=self.to_local)

    def _specs_of_result(self, result: torch.Tensor, size: int | None) -> tuple[DTensorSpec, DTensorSpec]:
        """How a result lies as it is computed, and as it was asked for."""
        placement, shape = self.layouts.result, list(result.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] = shape[placement.dim] * self.mesh.shape[0] if size is None else size
        meta = TensorMeta(shape, dense_strides(shape, like=result.stride()), result.dtype)
        source = DTensorSpec(self.mesh, (placement,), meta)
        return source, source if self.output is None else target_of(source, self.mesh, self.output)


def layer_of(module: nn.Module) -> Layer | None:
    """The layer whose hooks a module has, if it is one."""
    installed = module.__dict__.get(_INSTALLED, ())
    return installed[0][0] if len(installed) == 1 else None


def reinstall(module: nn.Module, layer: Layer) -> None:
    """Give a module the hooks of `layer`, in place of those that it has."""
    ((_, first, last),) = module.__dict__[_INSTALLED]
    module._forward_pre_hooks[first] = layer.before
    module._forward_hooks[last] = layer.after
    module.__dict__[_INSTALLED] = [(layer, first, last)]


def uninstall(module: nn.Module) -> None:
    """Take away the hooks of the one layer that a module has."""
    ((_, first, last),) = module.__dict__.pop(_INSTALLED)
    for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
        del hooks[first]
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        del hooks[last]


def features_of(module: nn.Module, features: tuple[str, int] | int) -> Any:
    """How long the last dim of a layer's input is, as the layouts says it."""
    if isinstance(features, int):
        return features
    own = module._parameters.get(features[0])
    return module.in_features if own is None else own.shape[features[1]]  # None: a parametrization computes it


def _under_fixed_key(number: int, hooks: dict[int, Any], *marks: dict[int, bool]) -> int:
    """Keep a hook under a key that is the same on all modules alike, and give the key.

    torch numbers the hooks of a process, and Dynamo guards the numbers: each block of a model would be compiled anew.
    """
    key = -1
    while key in hooks:
        key -= 1
    for kept in (hooks, *marks):
        kept[key] = kept.pop(number)
    return key


def _treats_alike(module: nn.Module, layouts: LayerLayouts, ndim: int) -> bool:
    """Whether a norm leaves the dim alone that its input is sharded in."""
    normalized = getattr(module, "normalized_shape", None)
    if normalized is None or not isinstance(layouts.input, Shard):
        return True
    return -ndim <= layouts.input.dim < ndim and layouts.input.dim % ndim < ndim - len(normalized)


def _is_even(spec: DTensorSpec) -> bool:
    """Whether all ranks hold as much."""
    sharded = [p for p in spec.placements if isinstance(p, AnyShard)]
    return all(isinstance(p, Shard) and spec.shape[p.dim] % spec.mesh.shape[0] == 0 for p in sharded)
