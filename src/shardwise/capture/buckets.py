"""Many small collectives of one group as one: their tensors are copied into a flat buffer and out of it.

A collective waits for later ones of its kind (operator, group, dtype, reduction) until a call uses what it gives or
writes to what it reads, or until the buffer is full; then all are issued where the last of them was. A call that may
use anything ends all buckets, and so does a collective of ranks that are no group of a mesh.

An all-gather gives the same bits in any buffer. The order in which a reduction adds may depend on the place in the
buffer: only those that do not round, or have two ranks, are joined unless that is asked for.

Collectives pass those of other groups here. Ranks compare their order before such a program is used
(`schedule_check`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.capture.collective_calls import axes_of, bound_arguments, group_ranks, is_collective
from shardwise.capture.overlap import Memories, Uses
from shardwise.capture.program import Facts, Program
from shardwise.capture.tape import Call, Geometry, Ref, Unit, refs_of
from shardwise.core.layout import dense_strides
from shardwise.torch_private import tree_map

__all__ = ["with_buckets"]

Placed = tuple[int, Call | Unit]

_aten = torch.ops.aten
_GATHER, _SCATTER, _REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
_EXACT = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT)


class _Member(NamedTuple):
    """A collective that waits for others of its kind."""

    at: int  # its index in the program
    position: int
    call: Call
    uses: Uses
    size: int  # bytes of the larger of its tensors


def with_buckets(program: Program, max_bytes: int, sums: bool = False) -> Program:
    """The program with small collectives joined.

    Args:
        program: what was recorded.
        max_bytes: of a flat buffer; larger tensors stay alone.
        sums: join sums of more than two ranks, too, whose last bits may change.
    """
    buckets = [bucket for bucket in _buckets(program, max_bytes, sums) if len(bucket) > 1]
    if not buckets:
        return program
    last = {bucket[-1].at: bucket for bucket in buckets}
    joined = {member.at for bucket in buckets for member in bucket}
    values = _Values(program.facts)
    calls: list[Placed] = []
    received: dict[int, list[torch.Tensor]] = {}
    for index, (position, call) in enumerate(program.calls):
        if index in last:
            found = _joined(last[index], values)
            if program.received:
                at = next(at for at, each in enumerate(found) if is_collective(each))
                received[len(calls) + at] = _received(last[index], program.received)
            calls += [(position, each) for each in found]
        elif index not in joined:
            calls.append((position, call))
    made = program.with_calls(calls, values.facts())
    made.received = {at: found for at, found in made.received.items() if is_collective(calls[at][1])} | received
    made.recorded = made
    return made


# ---------------------------------------------------------------- which are joined


def _buckets(program: Program, max_bytes: int, sums: bool) -> list[list[_Member]]:
    facts = program.facts
    memories = Memories(facts.memory_of, frozenset(facts.memory_of[number] for number in program.inputs()))
    open_: dict[Hashable, list[_Member]] = {}
    found: list[list[_Member]] = []
    for index, (position, call) in enumerate(program.calls):
        uses = memories.uses(call)
        if uses is None or (is_collective(call) and axes_of(group_ranks(call), facts.meshes)[0] is None):  # pyright: ignore[reportArgumentType]
            found += open_.values()
            open_.clear()
            continue
        for key in [key for key, bucket in open_.items() if any(each.uses.conflicts(uses) for each in bucket)]:
            found.append(open_.pop(key))
        key = _key(call, facts, sums)
        if key is None or not isinstance(call, Call):
            continue
        member = _Member(index, position, call, uses, max(_bytes(facts.geometry[ref.number]) for ref in refs_of(call)))
        if member.size > max_bytes:
            continue
        bucket = open_.get(key, [])
        if bucket and sum(each.size for each in bucket) + member.size > max_bytes:
            found.append(open_.pop(key))
            bucket = []
        open_[key] = [*bucket, member]
    return [*found, *open_.values()]


def _key(call: Call | Unit, facts: Facts, sums: bool) -> Hashable | None:
    """The kind of a collective, equal for those that can be one; None for any other call."""
    if not isinstance(call, Call) or not is_collective(call):
        return None
    name, ranks, refs = call.op._opname, group_ranks(call), refs_of(call)
    if name not in (_GATHER, _SCATTER, _REDUCE) or len(ranks) == 1:
        return None
    if len(refs) != (1 if name == _REDUCE else 2) or len({facts.memory_of[ref.number] for ref in refs}) != len(refs):
        return None
    places = [facts.geometry[ref.number] for ref in refs]
    dtype, reduction = places[0].dtype, None
    if any(place.dtype is not dtype or not _is_dense(place) or 0 in place.shape for place in places):
        return None
    if name != _GATHER:
        reduction = None if call.expected is None else call.expected.reduceOp.op
        rounds = (dtype.is_floating_point or dtype.is_complex) and len(ranks) > 2 and not sums
        if reduction not in _EXACT and (reduction not in _SUMS or rounds):
            return None
    device = facts.device_of.get(facts.memory_of[refs[0].number])
    if device is None:
        return None
    group = dist.ProcessGroup.unbox(bound_arguments(call)["process_group"])
    return name, ranks, group.group_name, dtype, str(reduction), device


def _is_dense(place: Geometry) -> bool:
    dense = dense_strides(place.shape)
    return all(size == 1 or one == other for size, one, other in zip(place.shape, place.stride, dense, strict=True))


def _bytes(place: Geometry) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


# ---------------------------------------------------------------- what takes their place


class _Values:
    """The values of a program, and new ones."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.geometry, self.memory_of = dict(facts.geometry), dict(facts.memory_of)
        self.bytes_of, self.device_of = dict(facts.bytes_of), dict(facts.device_of)
        self._next = max(self.memory_of) + 1

    def facts(self) -> Facts:
        return self._facts._replace(
            geometry=self.geometry, memory_of=self.memory_of, bytes_of=self.bytes_of, device_of=self.device_of
        )

    def _new(self, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Ref:
        number, self._next = self._next, self._next + 1
        self.geometry[number] = Geometry(tuple(shape), tuple(dense_strides(shape)), offset, dtype)
        return Ref(number)

    def fresh(self, shape: Sequence[int], like: Ref) -> Ref:
        """A value in memory of its own."""
        made = self._new(shape, self.geometry[like.number].dtype, 0)
        self.memory_of[made.number] = made.number
        self.bytes_of[made.number] = _bytes(self.geometry[made.number])
        self.device_of[made.number] = self.device_of[self.memory_of[like.number]]
        return made

    def view(self, of: Ref, shape: Sequence[int], line: str) -> Call:
        """The call that makes a view of other sizes."""
        place = self.geometry[of.number]
        made = self._new(shape, place.dtype, place.offset)
        self.memory_of[made.number] = self.memory_of[of.number]
        return Call(_aten.view.default, (of, list(shape)), {}, made, line)

    def empty(self, shape: Sequence[int], like: Ref, line: str) -> Call:
        """The call that allocates."""
        made = self.fresh(shape, like)
        dtype, device = self.geometry[made.number].dtype, self.device_of[made.number]
        return Call(_aten.empty.memory_format, (list(shape),), {"dtype": dtype, "device": device}, made, line)


def _joined(bucket: Sequence[_Member], values: _Values) -> list[Call]:
    """The calls that do what some collectives do, with one."""
    last = bucket[-1].call
    name, ranks, line = last.op._opname, len(group_ranks(last)), last.line
    rows = 1 if name == _REDUCE else ranks
    out = [refs_of(member.call)[0] for member in bucket]
    given = [refs_of(member.call)[-1] for member in bucket]
    sizes = [math.prod(values.geometry[ref.number].shape) for ref in (given if name == _REDUCE else out)]
    sizes = sizes if name != _GATHER else [size // ranks for size in sizes]
    total = sum(sizes)
    spread = {_GATHER: (1, rows), _SCATTER: (rows, 1), _REDUCE: (1, 1)}  # rows of what is given, and of what comes out
    before, after = spread[name]
    calls: list[Call] = []

    def seen(refs: Sequence[Ref], count: int) -> list[Ref]:
        views = [values.view(ref, (count, size), line) for ref, size in zip(refs, sizes, strict=True)]
        calls.extend(views)
        return [view.made for view in views]

    source = values.fresh((before, total), given[0])
    calls.append(Call(_aten.cat.default, (seen(given, before), 1), {}, source, line))
    target = source
    if name != _REDUCE:
        calls.append(values.empty((after, total), given[0], line))
        target = calls[-1].made
    flat = [values.view(ref, (count * total,), line) for ref, count in ((target, after), (source, before))]
    calls += flat if name != _REDUCE else flat[:1]
    names = {refs_of(last)[0].number: flat[0].made, refs_of(last)[-1].number: flat[-1 if name != _REDUCE else 0].made}
    args, kwargs = tree_map(
        lambda leaf: names[leaf.number] if isinstance(leaf, Ref) else leaf, (last.args, last.kwargs)
    )
    written = tuple(dict.fromkeys(ref.number for ref in names.values()))
    calls.append(last._replace(args=args, kwargs=kwargs, writes=written))
    outputs = seen(out, after)
    kwargs = {"out": outputs}
    numbers = tuple(ref.number for ref in outputs)
    calls.append(Call(_aten.split_with_sizes_copy.out, (target, sizes, 1), kwargs, None, line, None, numbers))
    return calls


def _received(bucket: Sequence[_Member], received: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
    """The recorded tensors of a joined collective after it, of those of its members."""
    name, ranks = bucket[0].call.op._opname, len(group_ranks(bucket[0].call))
    rows = {_GATHER: (ranks, 1), _SCATTER: (1, ranks), _REDUCE: (1,)}[name]
    each: list[Any] = [received[member.position] for member in bucket]
    return [torch.cat([found[at].reshape(count, -1) for found in each], 1).reshape(-1) for at, count in enumerate(rows)]
