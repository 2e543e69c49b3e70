"""Calls that differ from a known one only in given shard sizes reuse its decision.

The decision is made for a stand-in of the call, with sizes as even as possible. So it does not depend on the order in
which ranks met calls, and new sizes at each step cost only their specs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwise.core.cache import BoundedCache
from shardwise.core.placement import Placement, Ragged
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.signature import Key, Signature
from shardwise.errors import LayoutError
from shardwise.plan.propagate import OutputSharding

__all__ = ["RaggedCalls", "is_ragged"]

MAX_CALLS = 4096
Sizes = tuple[int, ...]
Results = tuple[tuple[TensorMeta, ...] | None, OutputSharding | None]


class KnownCall(NamedTuple):
    """The decision for a stand-in, and which sizes of the call its sizes stand for."""

    results: Results
    specs: tuple[DTensorSpec, ...]  # of the operands of the stand-in
    numbers: dict[Sizes, int]


class RaggedCalls:
    """The layouts of calls whose operands have shards of given sizes."""

    def __init__(self) -> None:
        # None: the decision depends on the sizes
        self._known: BoundedCache[Key, KnownCall | None] = BoundedCache(MAX_CALLS)

    def find(self, signature: Signature, key: Key, work_out: Callable[[Signature], Results]) -> Results:
        """The result of a call and all layouts; computed by `work_out` if no similar call is known."""
        read = _read_sizes(signature)
        numbers: dict[Sizes, int] = {}
        pattern = (*_without_sizes(key, numbers, read), signature.pinned)
        try:
            known = self._known[pattern]
        except KeyError:
            known = self._known.keep(pattern, _worked_out(signature, list(numbers), read, work_out))
        return work_out(signature) if known is None else _with_sizes(known, signature, list(numbers))

    def forget(self) -> None:
        """Drop all of them."""
        self._known.clear()


def is_ragged(key: Key) -> bool:
    """Whether some operand of a call has shards of given sizes."""
    for part in key:
        kind = part.__class__
        if part.is_ragged if kind is DTensorSpec else kind is tuple and is_ragged(part):
            return True
    return False


def _read_sizes(signature: Signature) -> frozenset[Sizes]:
    """The sizes that the rule of an operator reads: those of the groups of a grouped product, which do not change."""
    rule = signature.info.rule
    if rule is None or not rule.by_groups:
        return frozenset()
    ends = [spec for slot, spec in zip(signature.slots, signature.specs, strict=True) if slot.name == "offs"]
    return frozenset(p.sizes for spec in ends for p in spec.placements if isinstance(p, Ragged))


def _without_sizes(key: Key, numbers: dict[Sizes, int], read: frozenset[Sizes]) -> Key:
    """A key in which sizes are numbered in order of appearance, except those that a rule reads."""
    parts: list[Any] = []
    for part in key:
        kind = part.__class__
        if kind is tuple:
            part = _without_sizes(part, numbers, read)
        elif kind is DTensorSpec and part.is_ragged:
            placed = [
                (p.dim, p.blocks, numbers.setdefault(p.sizes, len(numbers)))
                if p.__class__ is Ragged and p.sizes not in read
                else p
                for p in part.placements
            ]
            part = (part.mesh, part.tensor_meta, part.shard_order, part.broadcast, *placed)
        parts.append(part)
    return tuple(parts)


def _worked_out(
    signature: Signature, sizes: Sequence[Sizes], read: frozenset[Sizes], work_out: Callable[[Signature], Results]
) -> KnownCall | None:
    """The decision for all sizes; None if it may depend on them."""
    stand_ins = _stand_ins(sizes, read)
    if stand_ins is None:
        return None
    to = dict(zip(sizes, stand_ins, strict=True))
    try:
        specs = tuple([_replaced(spec, to) for spec in signature.specs])
    except LayoutError:  # sizes of an axis that splits the shards of another axis of given sizes
        return None
    swapped = dict(zip(signature.specs, specs, strict=True))

    def stand_in(value: Any) -> Any:
        if isinstance(value, list):
            return [stand_in(item) for item in value]
        return swapped.get(value, value) if value.__class__ is DTensorSpec else value

    arguments = {name: stand_in(value) for name, value in signature.arguments.items()}
    results = work_out(dataclasses.replace(signature, specs=specs, arguments=arguments))
    numbers = {chosen: number for number, chosen in enumerate(stand_ins)}
    return KnownCall(results, specs, numbers) if _holds_for_all(results[1], {*numbers, *read}) else None


def _holds_for_all(sharding: OutputSharding | None, known: set[Sizes]) -> bool:
    """Whether neither the rule's layouts nor the sizes of results depend on given sizes."""
    if sharding is None:
        return True
    factors = sharding.factors
    if factors is None or factors.even or factors.nonempty or sharding.halo is not None:
        return False
    exchanged = () if sharding.exchange is None else (sharding.exchange.before, sharding.exchange.after)
    placed = [p for spec in (*sharding.inputs, *sharding.outputs) for p in spec.placements if isinstance(p, Ragged)]
    return not any(spec.is_ragged for spec in exchanged) and all(p.sizes in known for p in placed)


def _stand_ins(sizes: Sequence[Sizes], read: frozenset[Sizes]) -> list[Sizes] | None:
    """Replacement sizes, different for different sizes; None if there are not enough."""
    chosen: list[Sizes] = []
    for given in sizes:
        parts, total = len(given), sum(given)
        even = [total // parts + (part < total % parts) for part in range(parts)]
        for shift in range(parts):
            moved = list(even)
            if shift and moved[0]:
                moved[0], moved[shift] = moved[0] - 1, moved[shift] + 1
            if tuple(moved) not in chosen and tuple(moved) not in read:
                chosen.append(tuple(moved))
                break
        else:
            return None
    return chosen


def _replaced(spec: DTensorSpec, to: dict[Sizes, Sizes]) -> DTensorSpec:
    """The same layout with other sizes."""
    if not spec.is_ragged:
        return spec
    placements: list[Placement] = [
        Ragged._intern(p.dim, to.get(p.sizes, p.sizes), p.blocks) if isinstance(p, Ragged) else p
        for p in spec.placements
    ]
    return DTensorSpec._intern(spec.mesh, tuple(placements), spec.tensor_meta, spec.shard_order, spec.broadcast)


def _with_sizes(known: KnownCall, signature: Signature, sizes: Sequence[Sizes]) -> Results:
    """The decision with the sizes of a call."""
    metas, sharding = known.results
    if sharding is None:
        return metas, None
    to = {stand_in: sizes[number] for stand_in, number in known.numbers.items()}
    own = dict(zip(known.specs, signature.specs, strict=True))
    inputs = tuple([own.get(spec) or _replaced(spec, to) for spec in sharding.inputs])
    outputs = tuple([own.get(spec) or _replaced(spec, to) for spec in sharding.outputs])
    return metas, OutputSharding(
        inputs, outputs, sharding.call, sharding.rule, sharding.exchange, sharding.halo, sharding.algorithm
    )
