"""Copies that a program does not need: values are read where they were copied from.

`fully_shard` copies parameters into a flat buffer, gathers it, and copies the result out; gradients go the same way
back. Over one rank the collective is a copy as well, and so is an all-reduce of tensor parallelism. A memory that holds
nothing but copies is dissolved: each of its values becomes a view of the memory that it was copied from, if nobody
can tell the two apart:

- the source is not written to until the last use of the copy;
- the copy is written to only where the source is not used any more;
- what leaves the program has memory of its own, and not the caller's;
- no memory is kept longer by it than it saves.

Calls keep their order, and collectives of several ranks stay as they are, so each rank decides alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.capture.collective_calls import bound_arguments, group_ranks, is_collective
from shardwise.capture.overlap import Memories, filled_by
from shardwise.capture.program import Program
from shardwise.capture.tape import Call, Geometry, Ref, Unit, made_by, refs_of
from shardwise.fabric.rank_generators import draws
from shardwise.torch_private import tree_leaves, tree_map

__all__ = ["copied_bytes", "live_calls", "without_copies", "without_dead_collectives", "writes_roots"]

Placed = tuple[int, Call | Unit]  # a call with its position

_aten = torch.ops.aten
_DETACH, _AS_STRIDED = _aten.detach.default, _aten.as_strided.default
_ALIGNMENT = 64  # bytes; kernels may go by it
_RANDOM_STATES = ("random_states", "random_states_back")  # names of units that use no tensors
_ALONE = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_")


# ---------------------------------------------------------------- what is a copy


def writes_roots(unit: Unit) -> bool:
    """Whether a unit may write to tensors of the caller."""
    return not unit.name.endswith(_RANDOM_STATES)


class Copied(NamedTuple):
    """One tensor that a call copies, in the memories of both."""

    target: int  # numbers of values
    source: int
    to: Geometry  # the part of them that is copied
    of: Geometry


def _narrowed(geometry: Geometry, dim: int, start: int, length: int) -> Geometry:
    shape = (*geometry.shape[:dim], length, *geometry.shape[dim + 1 :])
    return geometry._replace(shape=shape, offset=geometry.offset + start * geometry.stride[dim])


def copies_of(call: Call | Unit, geometry: dict[int, Geometry]) -> list[Copied]:
    """What a call copies, if it does nothing else; else nothing."""
    if not isinstance(call, Call) or call.op.namespace != "aten" or call.expected is not None:
        return []
    bound = bound_arguments(call)

    def joined(tensors: Sequence[Ref], dim: int, out: Ref) -> Iterator[Copied]:
        whole, at = geometry[out.number], 0
        for ref in tensors:
            one = geometry[ref.number]
            if one.shape == (0,):
                continue
            length = one.shape[dim]
            yield Copied(out.number, ref.number, _narrowed(whole, dim % len(one.shape), at, length), one)
            at += length

    def split(source: Ref, sizes: Sequence[int], dim: int, out: Sequence[Ref]) -> Iterator[Copied]:
        whole, at = geometry[source.number], 0
        for ref, size in zip(out, sizes, strict=True):
            part = _narrowed(whole, dim % len(whole.shape), at, size)
            yield Copied(ref.number, source.number, geometry[ref.number], part)
            at += size

    def single(target: Any, source: Any) -> list[Copied]:
        if not isinstance(target, Ref) or not isinstance(source, Ref):
            return []
        return [Copied(target.number, source.number, geometry[target.number], geometry[source.number])]

    match call.op:
        case _aten.clone.default | _aten._to_copy.default:
            return single(call.made, bound["self"])
        case _aten.copy_.default:
            return single(bound["self"], bound["src"])
        case _aten.cat.default:
            return list(joined(bound["tensors"], bound.get("dim", 0), call.made))
        case _aten.cat.out:
            return list(joined(bound["tensors"], bound.get("dim", 0), bound["out"]))
        case _aten.split_with_sizes_copy.out:
            return list(split(bound["self"], bound["split_sizes"], bound.get("dim", 0), bound["out"]))
        case _aten._foreach_copy_.default:
            pairs = zip(bound["self"], bound["src"], strict=True)
            return [each for target, source in pairs for each in single(target, source)]
        case _:
            return []


def _is_linear(one: Geometry, other: Geometry) -> bool:
    """Whether elements are one after the other in the same order in both."""
    if one.dtype is not other.dtype or one.shape != other.shape or one.dtype.is_complex:
        return False
    dims = [dim for dim, size in enumerate(one.shape) if size != 1]
    if any(one.stride[dim] != other.stride[dim] for dim in dims):
        return False
    expected = 1
    for stride, size in sorted((one.stride[dim], one.shape[dim]) for dim in dims):
        if stride != expected:
            return False
        expected *= size
    return True


def _extent(geometry: Geometry) -> tuple[int, int]:
    """The first element of a value in its memory, and the one after its last."""
    if 0 in geometry.shape:
        return geometry.offset, geometry.offset
    last = sum((size - 1) * stride for size, stride in zip(geometry.shape, geometry.stride, strict=True))
    return geometry.offset, geometry.offset + last + 1


def copied_bytes(program: Program) -> int:
    """The bytes that calls write which only copy."""
    facts = program.facts
    found = [
        each.to
        for _, call in program.calls
        for each in copies_of(call, facts.geometry)
        if each.to.dtype is each.of.dtype
    ]
    return sum(math.prod(to.shape) * to.dtype.itemsize for to in found)


# ---------------------------------------------------------------- where values come from


class _Piece(NamedTuple):
    """A part of a memory, in elements, that is a copy."""

    start: int
    end: int
    source: int  # the memory
    at: int  # the element of the source
    when: int  # the index of the call


class _Origin(NamedTuple):
    memory: int
    shift: int  # of elements, from the memory of the copy
    when: int  # the index of the call that read it first


class _Copies:
    """The memories of a program, what they are copies of, and who uses them."""

    def __init__(self, program: Program) -> None:
        self.calls = program.calls
        facts = program.facts
        self.memory_of, self.geometry, self.bytes_of = (
            dict(facts.memory_of), dict(facts.geometry), dict(facts.bytes_of),
        )  # fmt: skip
        self.device_of = facts.device_of
        inputs = program.inputs()
        self.roots = {self.memory_of[number] for number in inputs}
        self.wanted = set(program.wanted)
        self.leaving = {self.memory_of[number] for number in self.wanted}
        self.end = len(self.calls)
        self.defined: dict[int, int] = dict.fromkeys(inputs, -1)
        self.values: dict[int, list[int]] = {}  # of memories
        self.pieces: dict[int, list[_Piece]] = {}
        self.writes: dict[int, list[int]] = {}  # indices of calls that write to a memory otherwise than by pieces
        self.root_writes: list[int] = []
        self.last: dict[int, int] = {}
        self.builders: dict[int, set[int]] = {}  # calls that make values of a memory or copy pieces into it
        self.readers: dict[int, list[tuple[int, int]]] = {}  # all other uses: index and number
        self.odd: set[int] = set()  # memories that are left alone
        self.dissolved: set[int] = set()
        self.pinned: set[int] = set()  # memories that others have become views of
        self.aliases: dict[int, list[Call]] = {}  # by the index of the call that they come after
        self.renamed: dict[int, dict[int, int]] = {}  # by the index of calls
        self._collect(Memories(self.memory_of, frozenset(self.roots)))

    def _collect(self, memories: Memories) -> None:
        for index, (_, call) in enumerate(self.calls):
            made = {ref.number for ref in made_by(call)}
            self.defined.update(dict.fromkeys(made, index))
            copied = self._pieces(index, call)
            built = {self.memory_of[number] for number in made} | copied
            for memory in built:
                self.builders.setdefault(memory, set()).add(index)
            uses = memories.uses(call)
            for number in [ref.number for ref in refs_of(call)]:
                memory = self.memory_of[number]
                self.last[memory] = index
                if memory not in built:
                    self.readers.setdefault(memory, []).append((index, number))
            written = {self.memory_of[n] for n in (call.writes if isinstance(call, Call) else ())}
            if isinstance(call, Unit):
                written |= {self.memory_of[ref.number] for ref in call.reads}
                if writes_roots(call):
                    self.root_writes.append(index)
            elif uses is not None and is_collective(call):
                written = {m for m in written if m in uses.written or (m in self.roots and -1 in uses.written)}
            for memory in written - copied:
                self.writes.setdefault(memory, []).append(index)
            if written & self.roots:
                self.root_writes.append(index)
        for number in dict.fromkeys((*self.defined, *self.wanted)):
            self.values.setdefault(self.memory_of[number], []).append(number)
        for memory in self.leaving:
            self.last[memory] = self.end
        for memory, numbers in self.values.items():
            if len({self.geometry[number].dtype for number in numbers}) > 1:
                self.odd.add(memory)

    def _pieces(self, index: int, call: Call | Unit) -> set[int]:
        """Note the pieces that a call copies. Returns the memories that it fills so."""
        found = copies_of(call, self.geometry)
        by_memory: dict[int, list[Copied]] = {}
        for each in found:
            by_memory.setdefault(self.memory_of[each.target], []).append(each)
        filled: set[int] = set()
        for memory, parts in by_memory.items():
            if memory in self.roots or not all(self._is_plain(each) for each in parts):
                continue
            filled.add(memory)
            for each in parts:
                (start, end), (at, _) = _extent(each.to), _extent(each.of)
                source = self.memory_of[each.source]
                self.pieces.setdefault(memory, []).append(_Piece(start, end, source, at, index))
        return filled

    def _is_plain(self, copied: Copied) -> bool:
        target, source = self.memory_of[copied.target], self.memory_of[copied.source]
        same = self.device_of.get(target) is not None and self.device_of.get(target) == self.device_of.get(source)
        return same and target != source and _is_linear(copied.to, copied.of)

    # ---------------------------------------------------------------- one memory

    def origin(self, memory: int, start: int, end: int, before: int) -> _Origin | None:
        """Where the elements of a part of a memory were first, as they are before a call."""
        if memory in self.odd:
            return None
        touching = [p for p in self.pieces.get(memory, ()) if p.start < end and start < p.end and p.when < before]
        if len(touching) != 1 or touching[0].start > start or end > touching[0].end:
            return None
        piece = touching[0]
        if before < self.end and any(piece.when < at < before for at in self.writes.get(memory, ())):
            return None
        shift = piece.at - piece.start
        deeper = self.origin(piece.source, start + shift, end + shift, piece.when)
        if deeper is not None:
            return deeper._replace(shift=deeper.shift + shift)
        return None if piece.source in self.odd else _Origin(piece.source, shift, piece.when)

    def dissolve(self, memory: int) -> bool:
        """Make the values of a memory views of what they are copies of, if that is safe."""
        pieces = self.pieces[memory]
        readers = self.readers.get(memory, [])
        leaving = [number for number in self.values[memory] if number in self.wanted]
        needed = list(dict.fromkeys([*(number for _, number in readers), *leaving]))
        if memory in self.roots or memory in self.odd or memory in self.pinned or not needed:
            return False
        ready = max(piece.when for piece in pieces)
        if any(index <= ready for index, _ in readers):
            return False
        last = self.end if leaving else max(index for index, _ in readers)
        written = self.writes.get(memory, [])
        origins: dict[int, _Origin] = {}
        for number in needed:
            found = self._safe_origin(memory, number, last, written, bool(leaving))
            if found is None:
                return False
            origins[number] = found
        if (leaving or written) and not self._are_apart(origins):
            return False
        bases = {
            number: self._alias(number, found, max(ready, self.defined[number])) for number, found in origins.items()
        }
        if any(base is None for base in bases.values()):
            return False
        self._rename(memory)
        for number, alias in bases.items():
            assert alias is not None
            self.aliases.setdefault(max(ready, self.defined[number]), []).append(alias)
            found = origins[number]
            self.pinned.add(found.memory)
            geometry = self.geometry[number]
            self.geometry[number] = geometry._replace(offset=geometry.offset + found.shift)
            self.memory_of[number] = found.memory
            self.values[found.memory].append(number)
            self.defined[number] = max(ready, self.defined[number])
            self.last[found.memory] = max(self.last.get(found.memory, 0), last)
            self.writes.setdefault(found.memory, []).extend(written)
            if leaving:
                self.leaving.add(found.memory)
        self.dissolved.add(memory)
        return True

    def _safe_origin(self, memory: int, number: int, last: int, written: Sequence[int], leaves: bool) -> _Origin | None:
        geometry = self.geometry[number]
        start, end = _extent(geometry)
        if start == end:
            return None
        found = self.origin(memory, start, end, self.end)
        if found is None or found.memory in self.dissolved:
            return None
        source, is_root = found.memory, found.memory in self.roots
        changed = (
            self.root_writes
            if is_root
            else [*self.writes.get(source, ()), *(p.when for p in self.pieces.get(source, ()))]
        )
        if any(found.when < index <= last for index in changed):
            return None
        if leaves and (is_root or source in self.leaving):
            return None
        if written and (is_root or self.last.get(source, -1) >= min(written)):
            return None
        if not is_root and self.bytes_of[source] > self.bytes_of[memory] and self.last.get(source, -1) < last:
            return None  # a large memory would be kept for a part of it
        size = geometry.dtype.itemsize
        if geometry.offset * size % _ALIGNMENT == 0 and (geometry.offset + found.shift) * size % _ALIGNMENT:
            return None
        return found

    def _are_apart(self, origins: dict[int, _Origin]) -> bool:
        """Whether values that did not share memory do not share it now."""
        places = [(found.memory, found.shift, *_extent(self.geometry[number])) for number, found in origins.items()]
        for at, (memory, shift, start, end) in enumerate(places):
            for other, moved, first, stop in places[:at]:
                if memory == other and shift != moved and start + shift < stop + moved and first + moved < end + shift:
                    return False
        return True

    def _alias(self, number: int, origin: _Origin, index: int) -> Call | None:
        """The call that makes a value as a view of its origin, after the call of an index."""
        geometry = self.geometry[number]
        place = geometry._replace(offset=geometry.offset + origin.shift)
        known = [n for n in self.values[origin.memory] if self.defined.get(n, self.end) <= index and n != number]
        known = [n for n in known if self.memory_of[n] == origin.memory and self.geometry[n].dtype is place.dtype]
        for one in known:
            if self.geometry[one] == place:
                return Call(_DETACH, (Ref(one),), {}, Ref(number), "")
        if len(place.shape) == 2:
            turned = place._replace(shape=place.shape[::-1], stride=place.stride[::-1])
            for one in known:
                if self.geometry[one] == turned:
                    return Call(_aten.t.default, (Ref(one),), {}, Ref(number), "")
        if not known:
            return None
        return Call(_AS_STRIDED, (Ref(known[0]), place.shape, place.stride, place.offset), {}, Ref(number), "")

    def _rename(self, memory: int) -> None:
        """Give the values other names where the memory is filled; these calls go if nobody needs them any more."""
        first = max(self.memory_of) + 1
        fresh = {number: first + at for at, number in enumerate(sorted(set(self.values[memory])))}
        base = fresh.get(memory, first)
        for number, other in fresh.items():
            self.memory_of[other], self.geometry[other] = base, self.geometry[number]
        self.bytes_of[base] = self.bytes_of[memory]
        for index in self.builders[memory]:
            self.renamed.setdefault(index, {}).update(fresh)

    # ---------------------------------------------------------------- the result

    def rewritten(self) -> list[Placed]:
        found: list[Placed] = []
        for index, (position, call) in enumerate(self.calls):
            names = self.renamed.get(index)
            found.append((position, _with_names(call, names) if names and isinstance(call, Call) else call))
            found += [(position, alias) for alias in self.aliases.get(index, ())]
        return found


def _with_names(call: Call, names: dict[int, int]) -> Call:
    def renamed(leaf: Any) -> Any:
        return Ref(names[leaf.number]) if isinstance(leaf, Ref) and leaf.number in names else leaf

    args, kwargs, made = tree_map(renamed, (call.args, call.kwargs, call.made))
    return call._replace(args=args, kwargs=kwargs, made=made, writes=tuple(names.get(n, n) for n in call.writes))


def live_calls(
    calls: Sequence[Placed],
    memory_of: dict[int, int],
    roots: set[int],
    wanted: Sequence[int],
    *,
    collectives: bool = False,
) -> list[Placed]:
    """The calls without those that only fill memory which nobody reads.

    Args:
        calls: with their positions.
        memory_of: the memories of values.
        roots: the memories of the caller's tensors.
        wanted: the values that are returned.
        collectives: leave out collectives, too; else all of them stay.
    """
    used = set(wanted)
    read = {memory_of[number] for number in wanted}
    kept: list[Placed] = []
    for position, call in reversed(calls):
        if isinstance(call, Call) and _is_removable(call, collectives):
            writes = filled_by(call) if is_collective(call) else call.writes
            gives = any(isinstance(leaf, Ref) for leaf in tree_leaves(call.made)) or writes
            is_read = any(ref.number in used for ref in made_by(call))
            is_read = is_read or any(memory_of[n] in read or memory_of[n] in roots for n in writes)
            if gives and not is_read:
                continue
        numbers = [ref.number for ref in refs_of(call)]
        used.update(numbers)
        read.update(memory_of[number] for number in numbers)
        kept.append((position, call))
    return kept[::-1]


def _is_removable(call: Call, collectives: bool) -> bool:
    """Whether a call does nothing but give values."""
    if is_collective(call):
        return collectives and call.op._opname in _ALONE
    return not draws(call.op) and call.expected is None


def without_dead_collectives(program: Program) -> Program:
    """The program without collectives whose results nobody reads, and without what only these need."""
    roots = {program.facts.memory_of[number] for number in program.inputs()}
    calls = live_calls(program.calls, program.facts.memory_of, roots, program.wanted, collectives=True)
    if sum(is_collective(call) for _, call in calls) == len(program.collectives):
        return program
    made = program.with_calls(calls, program.facts._replace(moves=()))  # announced, and not all of them issued
    made.recorded = made
    return made


# ---------------------------------------------------------------- collectives of one rank


def _alone(program: Program) -> Program:
    """The program with copies in place of collectives that have one rank."""
    calls: list[Placed] = []
    geometry, found = program.facts.geometry, False
    for position, call in program.calls:
        copy = None
        if isinstance(call, Call) and is_collective(call) and call.op._opname in _ALONE and len(group_ranks(call)) == 1:
            copy = _one_rank(call, geometry)
        found = found or copy is not None
        calls += [(position, each) for each in ((call,) if copy is None else copy)]
    return program.with_calls(calls) if found else program


def _one_rank(call: Call, geometry: dict[int, Geometry]) -> list[Call] | None:
    """What a collective of one rank does; None where that is not known."""
    bound = bound_arguments(call)
    if call.op._opname in ("allreduce_", "_reduce_scatter_base_"):
        if call.expected is None or call.expected.reduceOp.op == dist.ReduceOp.PREMUL_SUM:
            return None
        if call.op._opname == "allreduce_":
            return []
    target, source = (leaf for leaf in tree_leaves(list(bound.values())) if isinstance(leaf, Ref))
    if geometry[target.number].shape != geometry[source.number].shape:
        return None
    return [Call(_aten.copy_.default, (target, source), {}, target, call.line, None, (target.number,))]


def without_copies(program: Program) -> Program:
    """The program without copies that nobody can tell from what they were copied from."""
    program, recorded = _alone(program), program
    copies = _Copies(program)
    for memory in sorted(copies.pieces, key=lambda memory: copies.pieces[memory][0].when):
        copies.dissolve(memory)
    calls = live_calls(copies.rewritten(), copies.memory_of, copies.roots, program.wanted)
    if not copies.dissolved and len(calls) == len(program.calls):
        program.simple = None if program is recorded else recorded
        return program
    facts = program.facts._replace(memory_of=copies.memory_of, geometry=copies.geometry, bytes_of=copies.bytes_of)
    made = program.with_calls(calls, facts)
    made.recorded, made.simple = made, recorded
    return made
