"""Runs of operators between collectives as functions of their own, for a compiler.

A compiler may give results that share memory otherwise than the operators did. So of each memory that a run makes only
one value leaves it; other views are made again from that one, where their places in memory are known. What a compiler
must not see stays as it is: collectives, random numbers, steps of optimizers, and writes to tensors of the caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from shardwise.capture.collective_calls import is_collective
from shardwise.capture.program import Program
from shardwise.capture.tape import Call, Const, Geometry, Ref, Unit, made_by, refs_of
from shardwise.fabric.rank_generators import draws
from shardwise.torch_private import tree_leaves, tree_map

__all__ = ["Segment", "segments_of"]

MIN_OPERATORS = 4  # fewer are not worth the call of a compiled function
_DETACH, _AS_STRIDED = torch.ops.aten.detach.default, torch.ops.aten.as_strided.default
_DATA = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, Ref)
_ALLOCATING = ("resize", "set_", "_resize_output")


class Segment(NamedTuple):
    """A run of operators as one function.

    Args:
        graph: the function of the values `given`.
        given: the numbers of the values that it takes.
        outputs: the numbers of the values that it returns.
        geometry: how these lie in memory; where a value is the whole of its memory, its offset is 0.
        again: the views of them that are made again after it, as calls.
        origin: the position of its first call.
        operators: how many calls it replaces.
        eps: the precision of the coarsest floating point values in it, given and made.
    """

    graph: GraphModule
    given: tuple[int, ...]
    outputs: tuple[int, ...]
    geometry: tuple[Geometry, ...]
    again: tuple[Call, ...]
    origin: int
    operators: int
    eps: float


class _NotSeparable(Exception):
    """The memory of a run cannot be told apart from that of the rest."""


def segments_of(program: Program) -> list[tuple[int, Call | Unit] | Segment]:
    """The calls of a program, with runs of operators as segments."""
    found: list[tuple[int, Call | Unit] | Segment] = []
    run: list[tuple[int, Call]] = []
    splitting = _Splitting(program)

    def flush(index: int) -> None:
        if run:
            found.extend(splitting.segment(list(run), index))
            run.clear()

    for index, (position, call) in enumerate(program.calls):
        if isinstance(call, Call) and splitting.is_constant(call):
            if {ref.number for ref in refs_of(call)} & {ref.number for _, one in run for ref in made_by(one)}:
                flush(index)
            found.append((position, call))  # before the run that it is in, of which it uses nothing
        elif isinstance(call, Call) and splitting.is_compilable(call):
            run.append((position, call))
        else:
            flush(index)
            found.append((position, call))
    flush(len(program.calls))
    return found


class _Splitting:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory_of, self.geometry = program.facts.memory_of, program.facts.geometry
        self.bytes_of = program.facts.bytes_of
        self.roots = {self.memory_of[number] for number in program.inputs()}
        self.last: dict[int, int] = dict.fromkeys(program.wanted, len(program.calls))
        self.placed: dict[int, int] = {}  # memories: the index of the last call that goes by places in them
        for index, (_, call) in enumerate(program.calls):
            for ref in refs_of(call):
                self.last[ref.number] = max(self.last.get(ref.number, 0), index)
            for number in call.writes if isinstance(call, Call) else ():
                memory = self.memory_of[number]  # a segment with this call is given all of the memory
                self.last[memory] = max(self.last.get(memory, 0), index)
            if isinstance(call, Call) and call.op is _AS_STRIDED:
                self.placed[self.memory_of[refs_of(call)[0].number]] = index

    def is_constant(self, call: Call) -> bool:
        """Whether a call only gives memory: of Python numbers, or without values, which may leave a run as it is."""
        holds = any(isinstance(leaf, Const) for leaf in tree_leaves((call.args, call.kwargs)))
        return holds or call.op._opname.startswith(("empty", "new_empty"))

    def is_compilable(self, call: Call) -> bool:
        leaves = tree_leaves((call.args, call.kwargs))
        return not (
            is_collective(call)
            or call.expected is not None
            or draws(call.op)
            or call.op.namespace != "aten"
            or call.op._opname.startswith(_ALLOCATING)
            or not all(isinstance(leaf, _DATA) for leaf in leaves)
            or not any(isinstance(leaf, Ref) for leaf in tree_leaves(call.made))
            or any(self.memory_of[number] in self.roots for number in call.writes)
        )

    def segment(self, run: list[tuple[int, Call]], end: int) -> list[Any]:
        """A run as a segment; as it is where that is not safe, or not worth it."""
        computing = [call for _, call in run if not call.op.is_view]
        if len(computing) < MIN_OPERATORS:
            return list(run)
        try:
            return [self._segment(run, end)]
        except _NotSeparable:
            return list(run)

    def _segment(self, run: list[tuple[int, Call]], end: int) -> Segment:
        calls = [call for _, call in run]
        made = list(dict.fromkeys(ref.number for call in calls for ref in made_by(call)))
        own = set(made)
        given = list(dict.fromkeys(r.number for call in calls for r in refs_of(call) if r.number not in own))
        outside = {self.memory_of[number] for number in given}
        written = {self.memory_of[number] for call in calls for number in call.writes} & outside
        given = [n for n in given if self.memory_of[n] not in written or self.memory_of[n] == n]
        given += [memory for memory in sorted(written) if memory not in given]
        for memory in written:
            self._check_base(memory)
        graph = _Graph(given)
        for number in dict.fromkeys(r.number for call in calls for r in refs_of(call)):
            if number not in own and number not in given:
                self._check_same_dtype(number, self.memory_of[number])
                graph.place(number, self.memory_of[number], self.geometry[number])
        for call in calls:
            graph.add(call)
        outputs, again = self._leaving([number for number in made if self.last.get(number, -1) >= end], given, end)
        return Segment(
            graph.module(outputs), tuple(given), tuple(outputs), tuple(self.geometry[n] for n in outputs), tuple(again),
            run[0][0], len(run), self._eps([*given, *made]),
        )  # fmt: skip

    def _eps(self, numbers: Sequence[int]) -> float:
        dtypes = {self.geometry[number].dtype for number in numbers}
        rounded = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        return max((torch.finfo(dtype).eps for dtype in rounded), default=0.0)

    def _leaving(self, escaping: Sequence[int], given: Sequence[int], end: int) -> tuple[list[int], list[Call]]:
        """The values that a run returns, and the views that are made again from these."""
        outputs: list[int] = []
        again: list[Call] = []
        by_memory: dict[int, list[int]] = {}
        for number in escaping:
            by_memory.setdefault(self.memory_of[number], []).append(number)
        known = {self.memory_of[number]: number for number in reversed(given)}
        for memory, numbers in by_memory.items():
            base = known.get(memory)
            if base is None:
                if len(numbers) == 1 and self.placed.get(memory, -1) < end:
                    outputs.append(numbers[0])
                    continue
                self._check_base(memory)
                base = memory
                outputs.append(memory)
            for number in numbers:
                if number != base:
                    self._check_same_dtype(number, base)
                    again.append(self._view(number, base))
        return outputs, again

    def _view(self, number: int, base: int) -> Call:
        shape, stride, offset, _ = self.geometry[number]
        if self.geometry[number] == self.geometry[base]:
            return Call(_DETACH, (Ref(base),), {}, Ref(number), "")
        return Call(_AS_STRIDED, (Ref(base), shape, stride, offset), {}, Ref(number), "")

    def _check_base(self, memory: int) -> None:
        """The first value of a memory must be all of it, so that others can be found in it."""
        geometry = self.geometry[memory]
        if geometry.offset or math.prod(geometry.shape) * geometry.dtype.itemsize != self.bytes_of[memory]:
            raise _NotSeparable

    def _check_same_dtype(self, number: int, base: int) -> None:
        if self.geometry[number].dtype is not self.geometry[base].dtype:
            raise _NotSeparable


class _Graph:
    """Builds the graph of a run."""

    def __init__(self, given: Sequence[int]) -> None:
        self.graph = Graph()
        self.nodes: dict[int, Node] = {number: self.graph.placeholder(f"v{number}") for number in given}

    def place(self, number: int, base: int, geometry: Geometry) -> None:
        """A view of a given value."""
        shape, stride, offset, _ = geometry
        args = (self.nodes[base], list(shape), list(stride), offset)
        self.nodes[number] = self.graph.call_function(_AS_STRIDED, args)

    def add(self, call: Call) -> None:
        if call.op is _DETACH:
            self.nodes[call.made.number] = self.nodes[refs_of(call)[0].number]
            return
        args, kwargs = tree_map(
            lambda leaf: self.nodes[leaf.number] if isinstance(leaf, Ref) else leaf, (call.args, call.kwargs)
        )
        node = self.graph.call_function(call.op, args, kwargs)
        new = {ref.number for ref in made_by(call)}
        if isinstance(call.made, Ref):
            if call.made.number in new:
                self.nodes[call.made.number] = node
            return
        for at, leaf in enumerate(call.made):
            if isinstance(leaf, Ref) and leaf.number in new:
                self.nodes[leaf.number] = self.graph.call_function(operator.getitem, (node, at))

    def module(self, outputs: Sequence[int]) -> GraphModule:
        self.graph.output(tuple(self.nodes[number] for number in outputs))
        return GraphModule({}, self.graph)
