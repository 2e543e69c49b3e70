"""Moves operands to the layouts of a call: each by its route, reductions of a list in one collective.

The reduction of a Partial is cached on its tensor, so the next operator that reads it moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.flat_buffer import FlatBuffer, alike
from shardwise.dispatch.signature import Executor, Signature, Wrapping
from shardwise.fabric.rank_tensor import writes_to
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.schema import OpInfo, Slot

__all__ = ["MoveOperands", "operand_mover", "reduced_first", "reduced_in_place"]

MoveOperands = Callable[[tuple[Any, ...], Mapping[str, Any]], list[torch.Tensor]]
Versions = tuple[int, int] | None


class Reduction(NamedTuple):
    """The reduction of a Partial tensor, and the version of the tensor at that time."""

    versions: Versions
    target: DTensorSpec
    local: torch.Tensor


def operand_mover(signature: Signature, routes: Sequence[BoundRoute | None]) -> MoveOperands:
    """The function that returns the locals of a call's operands in the layouts of the rule."""
    slots, mesh, wrapping = signature.slots, signature.mesh, signature.wrapping
    # the base of a view may be written to
    remembers = [not signature.info.is_view and reduces(route) for route in routes]
    moves = [None if route is None else route.run if signature.info.is_view else route.read for route in routes]
    flat = _flat_reductions(signature, routes) if any(remembers) else []

    def move_operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        for several in flat:
            several.reduce([slots[i].get(args, kwargs) for i in several.positions])
        found = []
        for slot, route, move, remember in zip(slots, routes, moves, remembers, strict=True):
            tensor = slot.get(args, kwargs)
            if route is None or move is None:
                found.append(wrapping.local_of(tensor, mesh))
            elif remember:
                found.append(_reduced_local(tensor, route))
            else:
                found.append(move(wrapping.local_of(tensor, mesh)))
        return found

    return move_operands


def reduces(route: BoundRoute | None) -> bool:
    return route is not None and route.communicates and bool(route.route.source.partial_axes)


def _reduced_local(tensor: Any, route: BoundRoute) -> torch.Tensor:
    """The reduction of a Partial tensor; the cached one if nothing has been written to it since."""
    target = route.route.target
    kept = _remembered(tensor, target)
    if kept is None:
        kept = route.read(tensor._local_tensor)
        tensor._reduction = Reduction(_versions(tensor), target, kept)
    return kept


def _remembered(tensor: Any, target: DTensorSpec) -> torch.Tensor | None:
    kept: Reduction | None = tensor._reduction
    if kept is None or kept.target is not target or kept.versions is None or kept.versions != _versions(tensor):
        return None
    return kept.local


def _versions(tensor: Any) -> Versions:
    """The version counters of a tensor and its local; None if torch does not count."""
    if tensor._copied_view is not None or tensor.is_inference():
        return None
    written = writes_to(tensor._local_tensor)
    return None if written is None else (tensor._version, written)


# ---------------------------------------------------------------- lists


class _FlatReduction(NamedTuple):
    """Partial operands of lists that must be reduced: gradients of replicated tensors, norms."""

    positions: list[int]
    targets: list[DTensorSpec]
    buffer: FlatBuffer
    route: BoundRoute

    def reduce(self, tensors: Sequence[Any]) -> None:
        """Reduce them in one collective, unless that is done."""
        if all(_remembered(t, target) is not None for t, target in zip(tensors, self.targets, strict=True)):
            return
        joined = self.buffer.joined(tensor._local_tensor for tensor in tensors)
        parts = self.buffer.parts(self.route.run(joined))
        for tensor, target, part in zip(tensors, self.targets, parts, strict=True):
            tensor._reduction = Reduction(_versions(tensor), target, part)


def _flat_reductions(signature: Signature, routes: Sequence[BoundRoute | None]) -> list[_FlatReduction]:
    """The operands of lists that can be reduced in one collective, grouped by layout."""
    wanted: dict[int, DTensorSpec] = {}
    for i, (slot, route) in enumerate(zip(signature.slots, routes, strict=True)):
        if route is not None and slot.item is not None and reduces(route) and route.route.target.is_replicated:
            wanted[i] = signature.specs[i]
    return _several(wanted)


def _several(waiting: Mapping[int, DTensorSpec]) -> list[_FlatReduction]:
    """The groups of at least two with the same layout, sharded on no axis."""
    fit = {
        i: spec
        for i, spec in waiting.items()
        if spec.tensor_meta.is_contiguous and not any(spec.dim_axes) and not spec.broadcast
    }
    return [_flat_reduction(positions, [fit[i] for i in positions]) for positions in alike(fit) if len(positions) > 1]


def _flat_reduction(positions: list[int], specs: Sequence[DTensorSpec]) -> _FlatReduction:
    buffer = FlatBuffer.of(specs)
    return _FlatReduction(
        positions, [spec.reduced() for spec in specs], buffer, bound_route(buffer.spec, buffer.spec.reduced())
    )


def reduced_first(info: OpInfo, wrapping: Wrapping, slots: Sequence[Slot]) -> Executor:
    """The same call with these operands reduced, those of one layout in one collective."""

    def run_on_reduced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = list(args), dict(kwargs)
        tensors = [slot.get(args, kwargs) for slot in slots]
        for several in _several({i: tensor._spec for i, tensor in enumerate(tensors)}):
            several.reduce([tensors[i] for i in several.positions])
        for slot, tensor in zip(slots, tensors, strict=True):
            spec = tensor._spec.reduced()
            slot.put(
                new_args, new_kwargs, wrapping.wrapper(spec)(_reduced_local(tensor, bound_route(tensor._spec, spec)))
            )
        return info.op(*new_args, **new_kwargs)

    return run_on_reduced


def reduced_in_place(info: OpInfo, copied: Executor) -> Executor:
    """The same call on its operand, which takes the reduced value: the view shares memory with it.

    Not for an operand that is a copied view itself: `copied` computes a copy of it.
    """

    def run_on_reduced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensor = args[0]
        if tensor._copied_view is not None:
            return copied(args, kwargs)
        goal = tensor._spec.reduced()
        tensor._local_tensor = bound_route(tensor._spec, goal).run(tensor._local_tensor)
        tensor._spec, tensor._reduction = goal, None
        return info.op(*args, **kwargs)

    return run_on_reduced
