"""A call without its values: its key, its operands and their specs; and how locals become DTensors.

The tensor class is a parameter: only unwrapping and wrapping are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwise import modes
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import AgreementError, UnsupportedError
from shardwise.events import user_line
from shardwise.fabric.base import fabric_of
from shardwise.fabric.rank_sizes import count_of
from shardwise.fabric.rank_tensor import is_of_ranks, part_at
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.local import laid_out_like, like
from shardwise.plan.propagate import replicated, replicated_spec
from shardwise.schema import NUMBERS, UNREAD, OpInfo, Reader, Slot, infos, op_info
from shardwise.torch_private import OpOverload, tree_map

__all__ = [
    "Executor",
    "GradientHooks",
    "Hook",
    "Key",
    "Signature",
    "Wrap",
    "Wrapping",
    "fixed_sizes",
    "gathered_local",
    "is_symbolic",
    "key_of",
    "nested_result",
    "routes_between",
    "sparse_result",
    "tensor_slots",
]

Executor = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
Wrap = Callable[[torch.Tensor], torch.Tensor]
Hook = Callable[[torch.Tensor], torch.Tensor]


Key = tuple[Any, ...]
CONSTANTS = {type(None), bool, int, torch.dtype, torch.device, torch.layout, torch.memory_format}


def key_of(tensor_class: type, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
    """The key of a call: specs of DTensors; type and value of other arguments, only the type of those no rule reads."""
    parts: list[Any] = [id(func)]  # OpOverload hashes in Python, and operators live for ever
    info = infos.get(id(func)) or op_info(func)
    reads = info.reads
    for i, arg in enumerate(args):
        kind = arg.__class__
        if kind is tensor_class:
            parts.append(arg._spec)
        elif kind is int or kind is bool:
            parts.append((kind, arg) if reads[i] is None else _part(tensor_class, arg, reads[i]))
        elif isinstance(arg, torch.Tensor):
            ours = issubclass(kind, tensor_class)
            parts.append(arg._spec if ours else _plain_key(arg))  # pyright: ignore[reportAttributeAccessIssue]
        else:
            parts.append(_part(tensor_class, arg, reads[i]))
    for name in kwargs:
        arg = kwargs[name]
        kind = arg.__class__
        read = reads[info.names.index(name)]
        parts += (name, (kind, arg) if read is None and kind in CONSTANTS else _part(tensor_class, arg, read))
    return tuple(parts)


def _part(tensor_class: type, value: Any, looked_at: Reader) -> Any:
    kind = value.__class__
    if issubclass(kind, tensor_class):
        return value._spec
    if kind is list or kind is tuple:
        if value and value[0].__class__ is int and looked_at is None:  # sizes and dims: of one type by the schema
            return tuple(value)
        return tuple(
            [item._spec if item.__class__ is tensor_class else _part(tensor_class, item, looked_at) for item in value]
        )
    if isinstance(value, torch.Tensor):
        return _plain_key(value)
    if looked_at is not None:
        # a number that affects no shape: its type, and the part that the rule reads, if any
        return kind if looked_at is UNREAD else (kind, looked_at(value))
    # 1 == 1.0 == True to a dictionary, but not to an operator
    return (kind, value)


def _plain_key(tensor: torch.Tensor) -> Key:
    """The key of a plain tensor, with its interpretation."""
    if tensor.__class__ is not torch.Tensor and is_of_ranks(tensor) and count_of(tensor.shape) is not None:
        raise AgreementError(
            f"a plain torch.Tensor of shape {tuple(tensor.shape)} among DTensors at {user_line()} is taken as a global "
            "tensor, and ranks do not have the same: its sizes differ between them",
            hint="DTensor.from_local(tensor, mesh, placements) if each rank holds a part of a tensor",
        )
    return (modes.plain_policy(), TensorMeta.of(tensor))


def is_symbolic(key: Key) -> bool:
    """Whether a call has symbolic sizes: then it is traced and does not recur."""
    for part in key:
        kind = part.__class__
        if kind is DTensorSpec:
            part = part.tensor_meta
            kind = TensorMeta
        if part.is_symbolic if kind is TensorMeta else is_symbolic(part) if kind is tuple else kind is torch.SymInt:
            return True
    return False


# ---------------------------------------------------------------- between DTensors and locals


class GradientHooks(NamedTuple):
    """Hooks for gradients of operands that are not DTensors: these gradients are DTensors."""

    of_plain: Hook
    of_ranks: Hook  # of a `RankTensor`


class Wrapping:
    """Converts between a tensor class that has `_local_tensor` and `_spec`, and its locals."""

    def __init__(
        self, tensor_class: type[torch.Tensor], wrapper: Callable[[DTensorSpec], Wrap], gradient_hooks: GradientHooks
    ) -> None:
        self.tensor_class: Any = tensor_class
        self.gradient_hooks = gradient_hooks
        self.wrapper = wrapper  # the function that makes a DTensor of a local with a spec

    def spec_of(self, tensor: Any, mesh: DeviceMesh) -> DTensorSpec:
        """The spec of an operand; a plain tensor is the same on every rank."""
        if isinstance(tensor, self.tensor_class):
            return tensor._spec
        spec = replicated_spec(mesh, TensorMeta.of(tensor))
        # torch makes an expanded tensor for a missing gradient
        repeated = [dim for dim, stride in enumerate(spec.tensor_meta.stride) if stride.__class__ is int and not stride]
        return DTensorSpec(mesh, spec.placements, spec.tensor_meta, broadcast=repeated) if repeated else spec

    def local_of(self, tensor: Any, mesh: DeviceMesh) -> torch.Tensor:
        """The local of an operand; a plain tensor is the same on every rank."""
        if isinstance(tensor, self.tensor_class):
            return tensor._local_tensor
        return fabric_of(mesh).spread(mesh, tensor)

    def wrap_plain(self, results: Any, mesh: DeviceMesh) -> Any:
        """Wrapped results of a decomposition. Plain ones were created inside it, equal on every rank."""
        if isinstance(results, tuple | list):
            return like(results, (self.wrap_plain(result, mesh) for result in results))
        if isinstance(results, torch.Tensor) and not isinstance(results, self.tensor_class):
            local = fabric_of(mesh).build(mesh, lambda coordinate: results.clone())
            return self.wrapper(replicated_spec(mesh, TensorMeta.of(results)))(local)
        return results

    def in_memory_order(self, results: Any, metas: Sequence[TensorMeta]) -> Any:
        """Results of a decomposition with the strides of the operator's own results."""
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
        """Results of an operator that ran on replicated operands, whose shapes are known only now."""
        if isinstance(results, tuple | list):
            return like(results, (self.wrap_replicated(info, result, mesh) for result in results))
        if not isinstance(results, torch.Tensor):
            return results
        if part_at(results, 0).layout is not torch.strided:
            raise sparse_result(info)
        return self.wrapper(replicated_spec(mesh, TensorMeta.of(results)))(results)


# ---------------------------------------------------------------- a call


def tensor_slots(info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Slot, Any]]:
    """Every tensor of a call with its position, in the order of the schema."""
    found: list[tuple[Slot, Any]] = []
    for i, name in enumerate(info.names):
        if i < len(args):
            index, value = i, args[i]
        elif name in kwargs:
            index, value = None, kwargs[name]
        else:
            continue
        if isinstance(value, torch.Tensor):
            found.append((Slot(index, name, None), value))
        elif isinstance(value, list | tuple):
            found += [(Slot(index, name, i), one) for i, one in enumerate(value) if isinstance(one, torch.Tensor)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One call without its values: the operator, the positions of its tensors, their specs."""

    info: OpInfo
    slots: tuple[Slot, ...]
    specs: tuple[DTensorSpec, ...]
    arguments: Mapping[str, Any]  # all by name: specs in place of tensors, UNREAD in place of numbers not in the key
    wrapping: Wrapping
    mesh: DeviceMesh  # the one mesh of all operands
    pinned: tuple[int, ...]  # the operands that are written to: they keep their layout

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
        """The signature of a call with the tensors `found`."""
        tensor_class = wrapping.tensor_class
        arguments = {**info.defaults, **dict(zip(info.names, args, strict=False)), **kwargs}
        for name in info.unread:  # another call of this key may have another number
            if name in arguments and arguments[name].__class__ in NUMBERS:
                arguments[name] = UNREAD
        lists: dict[str, list[Any]] = {}
        specs: list[DTensorSpec] = []
        for slot, tensor in found:
            spec = tensor._spec if isinstance(tensor, tensor_class) else wrapping.spec_of(tensor, mesh)
            specs.append(spec)
            if slot.item is None:
                arguments[slot.name] = spec
                continue
            if slot.name not in lists:
                lists[slot.name] = arguments[slot.name] = list(arguments[slot.name])
            lists[slot.name][slot.item] = spec
        pinned = tuple([i for i, (slot, _) in enumerate(found) if slot.name in info.writes]) if info.writes else ()
        return cls(info, tuple([slot for slot, _ in found]), tuple(specs), arguments, wrapping, mesh, pinned)

    def replicated_operands(self) -> tuple[DTensorSpec, ...]:
        """The operands' specs after replication."""
        return tuple(map(replicated, self.specs))


def fixed_sizes(wrapping: Wrapping, func: OpOverload) -> Executor:
    """Runs an operator with symbolic sizes specialized to their current values; other sizes are traced again."""

    def fixed(value: Any) -> Any:
        if isinstance(value, wrapping.tensor_class):
            spec = value._spec
            return wrapping.wrapper(spec.with_meta(spec.tensor_meta.specialized()))(value._local_tensor)
        return int(value) if isinstance(value, torch.SymInt) else value

    def run_with_fixed_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = tree_map(fixed, (args, dict(kwargs)))
        return func(*new_args, **new_kwargs)

    return run_with_fixed_sizes


def gathered_local(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A local gathered on every rank."""
    target = replicated(spec)
    return local if target is spec else bound_route(spec, target).run(local)


def routes_between(have: tuple[DTensorSpec, ...], want: tuple[DTensorSpec, ...]) -> tuple[BoundRoute | None, ...]:
    """The route of each operand; None if it stays."""
    if have == want:
        return (None,) * len(have)
    return tuple(None if a is b else bound_route(a, b) for a, b in zip(have, want, strict=True))


def sparse_result(info: OpInfo) -> UnsupportedError:
    """The error for a sparse result, which cannot be a DTensor."""
    return UnsupportedError(
        f"{info.op} gives a sparse tensor, and a DTensor is dense",
        hint="use to_local() or full_tensor() and make that sparse",
    )


def nested_result() -> UnsupportedError:
    """The error for a nested tensor, strided or jagged, of DTensors."""
    return UnsupportedError(
        "a nested tensor cannot be made of DTensors, which are dense",
        hint="pad with torch.nn.utils.rnn.pad_sequence, or make a nested tensor of full_tensor() or of locals",
    )
