"""The state that a step starts from, so that it can be put back: containers, tensors, random numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.capture.slots import Slots
from shardwise.fabric.rank_tensor import parts_of
from shardwise.tensor import DTensor

__all__ = ["Held", "Snapshot", "local_of", "random_states", "set_random_states"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local of a DTensor; any other tensor itself."""
    return tensor._local_tensor if tensor.__class__ is DTensor else tensor  # pyright: ignore[reportAttributeAccessIssue]


class Held(NamedTuple):
    """The former state of one tensor."""

    tensor: torch.Tensor
    local: torch.Tensor
    spec: Any
    grad: torch.Tensor | None
    requires_grad: bool
    parts: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class Snapshot:
    """Copies of everything that a step may change.

    Args:
        slots: the containers.
        tensors: the tensors.
        generators: of random numbers, besides torch's own.
    """

    def __init__(
        self, slots: Sequence[Slots], tensors: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.slots = list(slots)
        self.held = [_held(tensor) for tensor in tensors]
        self.generators = list(generators)
        self.random = self.random_states()
        self.parts = [part for was in self.held for part in was.parts]  # in the order of a tape's inputs
        ends = list(itertools.accumulate(len(was.parts) for was in self.held))
        self.numbers = [range(end - len(was.parts), end) for was, end in zip(self.held, ends, strict=True)]

    def random_states(self) -> list[tuple[Any, torch.Tensor]]:
        """The states of all generators now."""
        return random_states(self.generators)

    def restore(self) -> None:
        """Put everything back."""
        for each in self.slots:
            if not each.is_same(each.now()):
                each.put(each.before)
        with torch.no_grad():
            for was in self.held:
                for part, value in zip(was.parts, was.values, strict=True):
                    with torch.inference_mode() if part.is_inference() else contextlib.nullcontext():
                        _stored_once(part).copy_(value)
                if was.tensor.__class__ is DTensor:
                    was.tensor._local_tensor, was.tensor._spec = was.local, was.spec  # pyright: ignore[reportAttributeAccessIssue]
                    vars(was.tensor).pop("_reduction", None)
                if was.tensor.grad is not was.grad:
                    was.tensor.grad = was.grad
        set_random_states(self.random)


def _held(tensor: torch.Tensor) -> Held:
    local = local_of(tensor)
    parts = tuple(parts_of(local))
    spec = tensor._spec if tensor.__class__ is DTensor else None  # pyright: ignore[reportAttributeAccessIssue]
    if spec is not None:
        vars(tensor).pop("_reduction", None)  # a cache, not state
    values = tuple(_stored_once(part.detach()).clone() for part in parts)
    return Held(tensor, local, spec, tensor.grad, tensor.requires_grad, parts, values)


def _stored_once(part: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetitions that `expand` shows, which torch does not write to."""
    for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        if stride == 0 and size > 1:
            part = part.narrow(dim, 0, 1)
    return part


def random_states(others: Sequence[torch.Generator] = ()) -> list[tuple[Any, torch.Tensor]]:
    """The states of all default generators, and of others."""
    generators: list[Any] = [*others, torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return [(generator, generator.get_state()) for generator in generators]


def set_random_states(states: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Put generators into these states."""
    for generator, state in states:
        generator.set_state(state)
