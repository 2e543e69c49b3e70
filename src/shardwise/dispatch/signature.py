"""What is known of a call apart from its values, and how locals become DTensors again.

The tensor class is known only as what is unwrapped and wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.fabric.virtual import part_at
from shardwise.local import laid_out_like, like
from shardwise.plan.propagate import replicated, replicated_spec
from shardwise.schema import OpInfo, Slot
from shardwise.torch_private import OpOverload, tree_map

__all__ = [
    "Executor",
    "GradientHooks",
    "Hook",
    "Signature",
    "Wrap",
    "Wrapping",
    "fixed_sizes",
    "routes_between",
    "sparse_result",
    "whole_of",
]

Executor = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
Wrap = Callable[[torch.Tensor], torch.Tensor]


Hook = Callable[[torch.Tensor], torch.Tensor]


class GradientHooks(NamedTuple):
    """What gradients of operands that are no DTensors pass through: they come as DTensors."""

    of_plain: Hook
    of_ranks: Hook  # of a `RankTensor`


class Wrapping:
    """The way between a tensor class that has `_local_tensor` and `_spec`, and its locals."""

    def __init__(
        self, tensor_class: type[torch.Tensor], wrapper: Callable[[DTensorSpec], Wrap], gradient_hooks: GradientHooks
    ) -> None:
        self.tensor_class: Any = tensor_class
        self.gradient_hooks = gradient_hooks
        self.wrapper = wrapper  # the function that makes a DTensor of a local with a spec

    def spec_of(self, tensor: Any, mesh: DeviceMesh) -> DTensorSpec:
        """The spec of an operand; a plain tensor is every rank's."""
        if isinstance(tensor, self.tensor_class):
            return tensor._spec
        spec = replicated_spec(mesh, TensorMeta.of(tensor))
        # what torch makes for a gradient that is not there is expanded
        repeated = [dim for dim, stride in enumerate(spec.tensor_meta.stride) if stride.__class__ is int and not stride]
        return DTensorSpec(mesh, spec.placements, spec.tensor_meta, broadcast=repeated) if repeated else spec

    def local_of(self, tensor: Any, mesh: DeviceMesh) -> torch.Tensor:
        """The local of an operand; a plain tensor is every rank's."""
        if isinstance(tensor, self.tensor_class):
            return tensor._local_tensor
        return fabric_of(mesh).spread(mesh, tensor)

    def wrap_plain(self, results: Any, mesh: DeviceMesh) -> Any:
        """Results of a decomposition, of which the plain ones were made on the way, alike on every rank."""
        if isinstance(results, tuple | list):
            return like(results, (self.wrap_plain(result, mesh) for result in results))
        if isinstance(results, torch.Tensor) and not isinstance(results, self.tensor_class):
            local = fabric_of(mesh).build(mesh, lambda coordinate: results.clone())
            return self.wrapper(replicated_spec(mesh, TensorMeta.of(results)))(local)
        return results

    def in_memory_order(self, results: Any, metas: Sequence[TensorMeta]) -> Any:
        """Results of a decomposition with the strides that the operator itself gives."""
        if not isinstance(results, tuple | list):
            return self.in_memory_order((results,), metas)[0]
        left = iter(metas)
        return like(results, (self._ordered(r, left) if isinstance(r, self.tensor_class) else r for r in results))

    def _ordered(self, tensor: Any, metas: Iterator[TensorMeta]) -> Any:
        meta, spec = next(metas, None), tensor._spec
        if meta is None or meta is spec.tensor_meta or meta.shape != spec.shape:
            return tensor
        if meta.dtype is not spec.tensor_meta.dtype or meta.dense() is not meta:
            return tensor
        return self.wrapper(spec.with_meta(meta))(laid_out_like(tensor._local_tensor, meta.stride))

    def wrap_replicated(self, info: OpInfo, results: Any, mesh: DeviceMesh) -> Any:
        """Results of an operator that ran on whole tensors everywhere, whose shapes are known only now."""
        if isinstance(results, tuple | list):
            return like(results, (self.wrap_replicated(info, result, mesh) for result in results))
        if not isinstance(results, torch.Tensor):
            return results
        if part_at(results, 0).layout is not torch.strided:
            raise sparse_result(info)
        return self.wrapper(replicated_spec(mesh, TensorMeta.of(results)))(results)


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One call apart from its values: the operator, where its tensors stand, how they lie."""

    info: OpInfo
    slots: tuple[Slot, ...]
    specs: tuple[DTensorSpec, ...]
    arguments: Mapping[str, Any]  # all of them by name, with specs in the place of tensors
    wrapping: Wrapping

    @classmethod
    def of(
        cls,
        info: OpInfo,
        found: Sequence[tuple[Slot, Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mesh: DeviceMesh,
        wrapping: Wrapping,
    ) -> Signature:
        """The signature of a call whose tensors stand at `found`."""
        slots = tuple([slot for slot, _ in found])
        specs = tuple([wrapping.spec_of(tensor, mesh) for _, tensor in found])
        arguments = info.bind(args, kwargs)
        lists: dict[str, list[Any]] = {}
        for slot, spec in zip(slots, specs, strict=True):
            if slot.item is None:
                arguments[slot.name] = spec
                continue
            if slot.name not in lists:
                lists[slot.name] = arguments[slot.name] = list(arguments[slot.name])
            lists[slot.name][slot.item] = spec
        return cls(info, slots, specs, arguments, wrapping)

    @property
    def mesh(self) -> DeviceMesh:
        """The one mesh of all operands."""
        return self.specs[0].mesh

    @property
    def pinned(self) -> tuple[int, ...]:
        """The operands that are written to: they keep their layout."""
        writes = self.info.writes
        return tuple(i for i, slot in enumerate(self.slots) if slot.name in writes) if writes else ()

    def with_whole_operands(self) -> tuple[DTensorSpec, ...]:
        """The operands' specs, were they all made whole."""
        return tuple(map(replicated, self.specs))


def fixed_sizes(wrapping: Wrapping, func: OpOverload) -> Executor:
    """Runs an operator with the sizes of a compiler fixed to what they are now; it traces anew for others."""

    def fixed(value: Any) -> Any:
        if isinstance(value, wrapping.tensor_class):
            spec = value._spec
            return wrapping.wrapper(spec.with_meta(spec.tensor_meta.specialized()))(value._local_tensor)
        return int(value) if isinstance(value, torch.SymInt) else value

    def run_with_fixed_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = tree_map(fixed, (args, dict(kwargs)))
        return func(*new_args, **new_kwargs)

    return run_with_fixed_sizes


def whole_of(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A local made whole on every rank."""
    whole = replicated(spec)
    return local if whole is spec else bound_route(spec, whole).run(local)


def routes_between(have: tuple[DTensorSpec, ...], want: tuple[DTensorSpec, ...]) -> tuple[BoundRoute | None, ...]:
    """For each operand the route that it must take, None where it stays."""
    if have == want:
        return (None,) * len(have)
    return tuple(None if a is b else bound_route(a, b) for a, b in zip(have, want, strict=True))


def sparse_result(info: OpInfo) -> UnsupportedError:
    """The word about a result that no DTensor can be."""
    return UnsupportedError(
        f"{info.op} gives a sparse tensor, and a DTensor is dense",
        hint="use to_local() or full_tensor() and make that sparse",
    )
