"""The tensors that a program is given, as facts that outlive them, and how they are found again by name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.capture.program import Root, Same, Sequenced, Tabled
from shardwise.capture.reachable import storage_key
from shardwise.capture.snapshot import Held, local_of
from shardwise.capture.tape import Geometry
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.fabric.rank_tensor import parts_of

__all__ = ["NamedMemories", "Opaque", "RootFact", "check_root", "facts_of", "matched", "named_tensors", "shape_of"]


class RootFact(NamedTuple):
    """One tensor that exists before a step.

    Args:
        memories: weak references to the memory of its locals, not to the tensor: torch exchanges the parameters of a
            module (`model.double()`) only while nothing refers to them weakly. None for an argument, which is
            another tensor on each call.
        owner: the position of the tensor whose gradient it is.
        spec: of a DTensor.
        parts: how its local, or those of all virtual ranks, lie in memory.
        device: of the locals.
        requires_grad: whether it does.
        has_grad: whether it had a gradient.
        numbers: of its locals in the program.
    """

    memories: tuple[weakref.ref[torch.UntypedStorage], ...] | None
    owner: int | None
    spec: DTensorSpec | None
    parts: tuple[Geometry, ...]
    device: torch.device
    requires_grad: bool
    has_grad: bool
    numbers: tuple[int, ...]

    def locals(self) -> list[torch.Tensor] | None:
        """The locals of a tensor that is no argument; None once their memory is gone."""
        storages = [memory() for memory in self.memories or ()]
        found = []
        for storage, (shape, stride, offset, dtype) in zip(storages, self.parts, strict=True):
            if storage is None:
                return None
            found.append(torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset, shape, stride))  # pyright: ignore[reportArgumentType]
        return found


class Opaque(NamedTuple):
    """An argument that is no plain data."""

    kind: str


def facts_of(held: Sequence[Held], numbers: Sequence[Sequence[int]], arguments: int) -> tuple[RootFact, ...]:
    """Facts of all tensors before a step.

    Args:
        held: what they were.
        numbers: those of their locals.
        arguments: from which position on they are arguments.
    """
    positions = {id(was.tensor): at for at, was in enumerate(held)}
    owners = {positions[id(was.grad)]: at for at, was in enumerate(held) if id(was.grad) in positions}
    return tuple(
        RootFact(
            tuple(weakref.ref(part.untyped_storage()) for part in was.parts) if at < arguments else None,
            owners.get(at),
            was.spec,
            tuple(map(Geometry.of, was.parts)),
            was.parts[0].device if was.parts else torch.device("cpu"),
            was.requires_grad,
            was.grad is not None,
            tuple(own),
        )
        for at, (was, own) in enumerate(zip(held, numbers, strict=True))
    )


def shape_of(value: Any, roots: Mapping[int, int]) -> Any:
    """Arguments as a description: tensors by their positions, plain data by value.

    Args:
        value: the arguments.
        roots: the positions of tensors by their identities.
    """
    if isinstance(value, torch.Tensor):
        at = roots.get(id(value))
        return Opaque("tensor that the program does not know") if at is None else Root(at)
    if value is None or value.__class__ in (bool, int, float, str):
        return Same(value)
    if value.__class__ in (list, tuple):
        return Sequenced(value.__class__, tuple(shape_of(item, roots) for item in value))
    if value.__class__ is dict and all(isinstance(name, str) for name in value):
        return Tabled(dict, tuple((Same(name), shape_of(item, roots)) for name, item in value.items()))
    return Opaque(type(value).__name__)


def matched(shape: Any, value: Any, path: str, found: dict[int, torch.Tensor]) -> None:
    """Compare arguments with a description, and collect their tensors by position."""
    match shape:
        case Root(position):
            if not isinstance(value, torch.Tensor):
                raise LayoutError(f"{path} is a {type(value).__name__}, and was a tensor", hint=_AS_SAVED)
            if found.setdefault(position, value) is not value:
                raise LayoutError(f"{path} is another tensor than one that it was the same as", hint=_AS_SAVED)
        case Sequenced(kind, items):
            if value.__class__ is not kind or len(value) != len(items):
                raise LayoutError(f"{path} is not a {kind} of {len(items)} as it was", hint=_AS_SAVED)
            for at, (item, given) in enumerate(zip(items, value, strict=True)):
                matched(item, given, f"{path}[{at}]", found)
        case Tabled(_, items):
            names = [name.value for name, _ in items]
            if value.__class__ is not dict or list(value) != names:
                raise LayoutError(f"{path} has other names than {names}", hint=_AS_SAVED)
            for name, item in items:
                matched(item, value[name.value], f"{path}[{name.value!r}]", found)
        case Same(was):
            if value.__class__ is not was.__class__ or repr(value) != repr(was):  # -0.0 is another number than 0.0
                raise LayoutError(f"{path} is {value!r}; the program was recorded with {was!r}", hint=_AS_SAVED)
        case _:
            raise AssertionError(shape)


_AS_SAVED = "a loaded program takes the arguments that it was recorded with, up to the values of tensors"


def named_tensors(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of modules, dicts, lists and tensors by names."""
    for name, value in objects.items():
        yield from _named(name, value)


class NamedMemories:
    """The names of tensors by their memory.

    Args:
        objects: what holds the tensors, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._names: dict[Any, dict[int, str]] = {}  # of each memory those of its tensors
        self.names: dict[int, str] = {}  # the first of each tensor, by its identity
        self._others: dict[str, list[str]] = {}  # by the first name of a tensor
        for name, tensor in named_tensors(objects):
            known = self._names.setdefault(_memory_key(parts_of(local_of(tensor)), tensor.requires_grad), {})
            known.setdefault(id(tensor), name)
            first = self.names.setdefault(id(tensor), name)
            if first != name:
                self._others.setdefault(first, []).append(name)

    def others(self, name: str) -> tuple[str, ...]:
        """The other names of a tensor with this first name."""
        return tuple(self._others.get(name, ()))

    def find(self, fact: RootFact) -> str | None:
        """The name of the tensor that a fact is of; None if no object holds it."""
        parts = fact.locals()
        names = [] if parts is None else list(self._names.get(_memory_key(parts, fact.requires_grad), {}).values())
        if len(names) > 1:
            raise UnsupportedError(
                f"save: {' and '.join(names)} are different tensors in the same memory, which the program uses",
                hint="give objects that hold one of them, or use one tensor in both places",
            )
        return names[0] if names else None


def _memory_key(parts: Sequence[torch.Tensor], requires_grad: bool) -> Any:
    return tuple((storage_key(part), Geometry.of(part)) for part in parts), requires_grad


def _named(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        for inner, tensor in value.named_parameters(name, remove_duplicate=False):
            yield inner, tensor
        for inner, tensor in value.named_buffers(name, remove_duplicate=False):
            yield inner, tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _named(f"{name}.{at}", item)


def check_root(fact: RootFact, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """The locals of a tensor that is given to a program; raises where it is not as the recorded one was."""
    spec = getattr(tensor, "_spec", None)
    if spec is not fact.spec:
        raise LayoutError(
            f"{name} is {spec or 'a plain tensor'}, and was {fact.spec or 'a plain tensor'}", hint=_LAYOUT
        )
    parts = list(parts_of(local_of(tensor)))
    found = tuple(map(Geometry.of, parts))
    if found != fact.parts or any(part.device != fact.device for part in parts):
        raise LayoutError(f"{name} is {found} on {tensor.device}, and was {fact.parts} on {fact.device}", hint=_LAYOUT)
    if tensor.requires_grad is not fact.requires_grad:
        raise LayoutError(f"{name}: requires_grad is not {fact.requires_grad}, as it was", hint=_LAYOUT)
    if tensor.grad_fn is not None:
        raise LayoutError(f"{name} was computed by autograd, and no gradient would reach it", hint="detach() it")
    return parts


_LAYOUT = "a program holds for the layouts, shapes, strides and dtypes that it was recorded with; capture it again"
