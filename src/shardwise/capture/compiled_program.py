"""A program whose runs of operators are compiled. Collectives, optimizers and random numbers stay between them.

Each compiled function runs once beside the operators that it replaces, on the values of the recorded step: the
layouts of its results in memory must be the same, and their values equal within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from shardwise.capture.cuda_graphs import Replayed
from shardwise.capture.program import Program
from shardwise.capture.segments import Segment, segments_of
from shardwise.capture.tape import Call, Geometry, Ref, Unit
from shardwise.errors import UnsupportedError
from shardwise.torch_private import inductor_compile

__all__ = ["BACKENDS", "compiled_program", "is_rounded", "largest", "wide"]

Function = Callable[..., Sequence[torch.Tensor]]


def _inductor(graph: GraphModule, examples: Sequence[torch.Tensor]) -> Function:
    return inductor_compile()(graph, list(examples))


def _by_operators(graph: GraphModule, examples: Sequence[torch.Tensor]) -> Function:
    return graph


BACKENDS: dict[str, Callable[[GraphModule, Sequence[torch.Tensor]], Function]] = {
    "inductor": _inductor,
    "cudagraphs": _by_operators,  # which are captured later
}


class _Part:
    """A segment while it is compared: the first run compiles it, and runs it beside its operators."""

    def __init__(self, segment: Segment, backend: str, leaves: Sequence[bool], pool: Any) -> None:
        self.segment = segment
        self.backend = backend
        self.leaves = leaves
        self.pool = pool
        self.compiled: Function | None = None

    def __call__(self, *given: torch.Tensor) -> Any:
        others = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in given]
        wanted = self.segment.graph(*given)
        try:
            function = BACKENDS[self.backend](self.segment.graph, others)
            found = function(*others)
        except Exception as error:
            raise UnsupportedError(
                f"captured: the backend {self.backend!r} cannot compile {self.segment.operators} operators of the "
                f"program: {type(error).__name__}: {error}",
                hint="sw.captured(function) without backend runs them as they are",
            ) from error
        if _is_laid_out_alike(found, others, self.segment.geometry):
            _check_values([*found, *others], [*wanted, *given], self.segment.eps, self.backend)
            self.compiled = function
            if self.backend == "cudagraphs":
                on_device = given and all(tensor.is_cuda for tensor in given)  # a graph would fix numbers on the CPU
                self.compiled = Replayed(function, self.leaves, self.pool) if on_device else None
        return wanted


def _is_laid_out_alike(
    found: Sequence[torch.Tensor], given: Sequence[torch.Tensor], geometry: Sequence[Geometry]
) -> bool:
    """Whether results have the recorded shapes and strides, each in memory of its own."""
    for tensor, known in zip(found, geometry, strict=True):
        offset = known.offset if known.offset == 0 else int(tensor.storage_offset())
        if Geometry.of(tensor) != known._replace(offset=offset):
            return False
    places = [tensor.untyped_storage().data_ptr() for tensor in found if tensor.numel()]
    taken = {tensor.untyped_storage().data_ptr() for tensor in given}
    return len(set(places)) == len(places) and not taken & set(places)


def _check_values(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], eps: float, backend: str) -> None:
    """Equal within rounding: of the largest elements of a tensor, and a hundredth of those of all of them.

    A compiler keeps intermediate values in float32 that the operators round to bfloat16, so that a float32 result
    differs by the precision of bfloat16: `eps` is that of the coarsest values that the results were computed with.
    """
    scale = max((largest(tensor) for tensor in wanted if is_rounded(tensor)), default=0.0)
    for one, other in zip(found, wanted, strict=True):
        is_same = torch.equal(one, other)
        if not is_same and is_rounded(other):
            bound = math.sqrt(max(eps, torch.finfo(other.dtype).eps)) * (largest(other) + scale / 100)
            one, other = wide(one), wide(other)
            is_same = torch.equal(torch.isfinite(one), torch.isfinite(other)) and largest(one - other) <= bound
        if not is_same:
            raise UnsupportedError(
                f"captured: the backend {backend!r} gives other values than the operators, beyond rounding, in a "
                f"tensor of shape {tuple(other.shape)}",
                hint="sw.captured(function) without backend runs the operators as they are",
            )


def is_rounded(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value among the finite ones."""
    tensor = wide(tensor)
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compiled_program(
    program: Program, backend: str, run: Callable[[Program], tuple[torch.Tensor, ...]]
) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """The program with compiled runs of operators, and the values of a run of it.

    Args:
        program: what was recorded.
        backend: one of `BACKENDS`.
        run: runs a program from the recorded state, with the recorded results of collectives.
    """
    parts: dict[int, _Part] = {}
    memory_of = program.facts.memory_of
    leaving = {memory_of[number] for number in program.wanted}
    pool = torch.cuda.graph_pool_handle() if backend == "cudagraphs" else None
    calls: list[tuple[int, Call | Unit]] = []
    for found in segments_of(program):
        if not isinstance(found, Segment):
            calls.append(found)
            continue
        part = _Part(found, backend, [memory_of[number] in leaving for number in found.outputs], pool)
        parts[len(calls)] = part
        calls.append((found.origin, _unit(found, part)))
        calls += [(found.origin, view) for view in found.again]
    compared = program.with_calls(calls)
    values = run(compared)
    for at, part in parts.items():
        calls[at] = (calls[at][0], _unit(part.segment, part.compiled or part.segment.graph))
    made = program.with_calls(calls)
    made.recorded = program
    return made, values


def _unit(segment: Segment, run: Callable[..., Any]) -> Unit:
    given, made = (tuple(map(Ref, numbers)) for numbers in (segment.given, segment.outputs))
    name = "operators" if isinstance(run, GraphModule) else "graph" if isinstance(run, Replayed) else "compiled"
    return Unit(run, given, "", name=name, made=made)
