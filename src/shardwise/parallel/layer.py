"""How one layer of a style runs: hooks that lay out what goes in and out, and locals inside where that says the same.

A linear layer or a norm whose operands lie as its style wants them does on locals exactly what DTensors would do, and
its many small operators need not be dispatched one by one. What lies otherwise, on a larger mesh say, goes by DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.dry import dry
from shardwise.fabric.virtual import RankTensor, virtual
from shardwise.parallel.layouts import in_layout, local_of, target_of
from shardwise.parallel.parameters import see_on, unsee
from shardwise.tensor import DTensor, _make, _moved, _redistributed, gradient_spec

__all__ = ["Layer", "Recipe"]

MAX_SPECS = 256
_LOCALS = "_shardwise_locals"  # on a module that runs on locals: its own parameters, and the global size of a dim


@dataclass(frozen=True)
class Recipe:
    """What a layer computes with, along the axis of its style.

    Args:
        parameters: how parameters lie.
        input: how the input has to lie.
        result: how the result comes out.
        input_gradient: what the ranks' gradients of the input are together.
        gradients: the same of parameters, where they do not lie as the parameters do.
        features: the parameter whose size in a dim is that of the input's last dim: where it is sharded, it tells.
        added: a parameter that is added to the result once its parts are.
        exact: the forward functions that can run on locals; none of them, where DTensors have to.
    """

    parameters: Mapping[str, Placement]
    input: Placement
    result: Placement | None = None
    input_gradient: Placement | None = None
    gradients: Mapping[str, Placement] = field(default_factory=dict)
    features: tuple[str, int] | None = None
    added: str | None = None
    exact: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Layer:
    """The hooks of one module."""

    mesh: DeviceMesh
    recipe: Recipe
    given: Placement
    output: Placement | None
    to_local: bool
    specs: dict[Any, DTensorSpec] = field(default_factory=dict, compare=False, repr=False)  # of results, by local shape

    def install(self, module: nn.Module) -> nn.Module:
        """Put the hooks around the forward of a module."""
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, always_call=True)
        return module

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The first argument in the layout that the module computes with; its parameters on the same mesh."""
        name = None if args else next(iter(kwargs), None)
        value = args[0] if args else kwargs.get(name or "")
        found = self._entered(module, value)
        if found is value:
            return None
        return ((found, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: found})

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """The result in the layout that was asked for. Called after an error too, without a result."""
        kept = module.__dict__.pop(_LOCALS, None)
        if kept is not None:
            own, size = kept
            module._parameters.update(own)
            return result if result is None else self._left(module, result, size)
        unsee(module)
        if self.output is not None:
            result = in_layout(result, self.mesh, self.output, self.output, async_op=True)
        return local_of(result, self.mesh) if self.to_local else result

    # ---------------------------------------------------------------- on DTensors

    def _entered(self, module: nn.Module, value: Any) -> Any:
        mesh = self.mesh
        if not isinstance(value, torch.Tensor):
            return value
        own = self._own_parameters(module, value)
        if own is not None:
            return self._entered_on_locals(module, value, own)
        value = self._annotated(module, value)
        found = in_layout(value, mesh, self.given, self.recipe.input, async_op=True)
        if found._spec.mesh is not mesh:
            see_on(module, mesh, found._spec.mesh)
        return found

    def _annotated(self, module: nn.Module, value: torch.Tensor) -> DTensor:
        """A plain input as a DTensor; the module knows its number of features, however they are split."""
        if isinstance(value, DTensor):
            return value
        if (
            self.recipe.features is not None
            and isinstance(self.given, Shard)
            and self.given.dim in (-1, value.dim() - 1)
        ):
            name, dim = self.recipe.features
            shape = (*value.shape[:-1], module._parameters[name].shape[dim])  # pyright: ignore[reportOptionalMemberAccess]
            return DTensor.from_local(value, self.mesh, (self.given,), shape=shape)
        return DTensor.from_local(value, self.mesh, (self.given,))

    # ---------------------------------------------------------------- on locals

    def _own_parameters(self, module: nn.Module, value: torch.Tensor) -> dict[str, Any] | None:
        """The parameters, if the layer can run on locals: everything is on this mesh, and lies as it should."""
        recipe, mesh = self.recipe, self.mesh
        if type(module).forward not in recipe.exact or mesh.fabric == dry.name or torch.compiler.is_compiling():
            return None
        if isinstance(value, DTensor) and value._spec.mesh is not mesh:
            return None
        if not _treats_alike(module, recipe.input, value.dim()):
            return None
        own = {}
        for name, placement in recipe.parameters.items():
            parameter = module._parameters.get(name)
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor) or parameter._spec.mesh is not mesh:
                return None
            if parameter._spec.placements[0] is not placement:
                return None
            own[name] = parameter
        return own if mesh.fabric != virtual.name or self._is_even(value, own) else None

    def _is_even(self, value: torch.Tensor, own: dict[str, Any]) -> bool:
        """Whether all ranks hold as much: a composite operator on a `RankTensor` takes the sizes of the first rank."""
        ranks = self.mesh.shape[0]
        sharded = [(p._spec.shape, p._spec.placements[0]) for p in own.values()]
        if isinstance(value, DTensor):
            sharded += [(value.shape, value._spec.placements[0]), (value.shape, self.recipe.input)]
        elif isinstance(value, RankTensor) and any(t.shape != value.shape for t in value.tensors):
            return False
        return all(shape[p.dim] % ranks == 0 for shape, p in sharded if isinstance(p, Shard | StridedShard))

    def _entered_on_locals(self, module: nn.Module, value: torch.Tensor, own: dict[str, Any]) -> torch.Tensor:
        """The local of the input. The module has locals for parameters until its forward has ended."""
        recipe, mesh = self.recipe, self.mesh
        if not isinstance(value, DTensor) and not self._is_local_already(value):
            value = self._annotated(module, value)
        entries: list[tuple[DTensor, DTensorSpec, DTensorSpec]] = []
        for name, parameter in own.items():
            if name != recipe.added:
                spec = parameter._spec
                entries.append((parameter, spec, target_of(spec, mesh, recipe.gradients.get(name, spec.placements[0]))))
        if isinstance(value, DTensor):
            spec = value._spec
            gradient = target_of(spec, mesh, recipe.input_gradient or recipe.input)
            entries.append((value, target_of(spec, mesh, recipe.input), gradient))
        found = _locals(entries)
        seen: dict[str, Any] = dict.fromkeys(own)
        seen.update(zip((name for name in own if name != recipe.added), found, strict=False))
        size = self._size_of_result(own, value)
        module._parameters.update(seen)
        module.__dict__[_LOCALS] = (own, size)
        return found[-1] if isinstance(value, DTensor) else value

    def _is_local_already(self, value: torch.Tensor) -> bool:
        """Whether a plain input is what the layer computes with, and its gradient what each rank has of it."""
        recipe = self.recipe
        if self.given is not recipe.input or recipe.input_gradient is not None:
            return False
        return self.mesh.fabric != virtual.name or isinstance(value, RankTensor)

    def _size_of_result(self, own: dict[str, Any], value: torch.Tensor) -> int | None:
        """The global size of the dim in which the result is sharded."""
        recipe = self.recipe
        if not isinstance(recipe.result, Shard):
            return None
        if recipe.result is recipe.input:  # the result is sharded as the input is
            dim = recipe.input.dim
            return value.shape[dim] * (1 if isinstance(value, DTensor) else self.mesh.shape[0])
        weight = own["weight"]._spec
        return weight.shape[weight.placements[0].dim]

    def _left(self, module: nn.Module, result: torch.Tensor, size: int | None) -> Any:
        """What has been computed on locals, in the layout that was asked for."""
        key = (result.shape, result.stride(), result.dtype, size)
        source = self.specs.get(key)
        if source is None:
            if len(self.specs) >= MAX_SPECS:
                self.specs.clear()
            source = self.specs[key] = self._spec_of_result(result, size)
        target = source if self.output is None else target_of(source, self.mesh, self.output)
        added = None if self.recipe.added is None else module._parameters.get(self.recipe.added)
        if added is not None:
            total = _result(result, source, target, False) + added
            return (
                local_of(in_layout(total, self.mesh, self.given, target.placements[0]), self.mesh)
                if self.to_local
                else total
            )
        if self.to_local and target is source:
            return result
        return _result(result, source, target, self.to_local)

    def _spec_of_result(self, result: torch.Tensor, size: int | None) -> DTensorSpec:
        placement, shape = self.recipe.result, list(result.shape)
        if isinstance(placement, Shard):
            assert size is not None
            shape[placement.dim] = size
        meta = TensorMeta(shape, dense_strides(shape, like=result.stride()), result.dtype)
        return DTensorSpec(self.mesh, (placement,), meta)


def _treats_alike(module: nn.Module, wanted: Placement, ndim: int) -> bool:
    """Whether a norm leaves the dim alone that its input is sharded in."""
    normalized = getattr(module, "normalized_shape", None)
    if normalized is None or not isinstance(wanted, Shard):
        return True
    return -ndim <= wanted.dim < ndim and wanted.dim % ndim < ndim - len(normalized)


# ---------------------------------------------------------------- to locals and back, in one step each


def _locals(entries: list[tuple[DTensor, DTensorSpec, DTensorSpec]]) -> list[torch.Tensor]:
    """The locals of tensors, each moved to a spec; and how each rank's gradient of the local is to be understood."""
    if torch.is_grad_enabled():
        graded = [entry for entry in entries if entry[0].requires_grad]
        if graded:
            tensors, targets, gradients = zip(*graded, strict=True)
            given = iter(_Locals.apply(targets, gradients, *tensors))
            return [next(given) if entry[0].requires_grad else _local(*entry[:2]) for entry in entries]
    return [_local(tensor, target) for tensor, target, _ in entries]


def _local(tensor: DTensor, target: DTensorSpec) -> torch.Tensor:
    return tensor._local_tensor if tensor._spec is target else _moved(tensor, target, False, None)._local_tensor


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: Any, gradients: Any, *tensors: DTensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        ctx.sources = [t._spec if t._spec is not target else None for t, target in zip(tensors, targets, strict=True)]
        return tuple([_local(t, target).detach() for t, target in zip(tensors, targets, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: list[Any] = [None, None]
        for grad, spec, source in zip(grads, ctx.gradients, ctx.sources, strict=True):
            if grad is not None:
                made = _make(spec if grad.dtype is spec.tensor_meta.dtype else spec.with_dtype(grad.dtype), grad)
                grad = made if source is None else _redistributed(made, gradient_spec(source))
            found.append(grad)
        return tuple(found)


def _result(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, to_local: bool) -> torch.Tensor:
    """A local that lies as `source` moved to `target`, as a DTensor or as the local of one."""
    if torch.is_grad_enabled() and local.requires_grad:
        return _Result.apply(local, source, target, to_local)
    made = _moved(_make(source, local), target, False, None)
    return made._local_tensor if to_local else made


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, to_local: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.source, ctx.target, ctx.to_local = gradient_spec(source), gradient_spec(target), to_local
        made = _moved(_make(source, local.detach()), target, False, None)
        return made._local_tensor if to_local else made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.to_local:
            spec = ctx.target
            grad = _make(spec if grad.dtype is spec.tensor_meta.dtype else spec.with_dtype(grad.dtype), grad)
        return _redistributed(grad, ctx.source)._local_tensor, None, None, None
