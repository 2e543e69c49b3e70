"""An inference program as a `torch.export.ExportedProgram` of local operators and functional collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.capture.collective_calls import bound_arguments, collective_kind, group_ranks, is_collective
from shardwise.capture.leaving import Effect
from shardwise.capture.program import Given, Local, Made, Program, Root, Same, Sequenced, Tabled
from shardwise.capture.roots import NamedMemories, RootFact
from shardwise.capture.tape import Call, Geometry, Unit
from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_generators import draws

__all__ = ["exported_program"]

_functional = torch.ops._c10d_functional


def _refused(what: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"export: the program {what}", hint=hint)


def exported_program(
    program: Program, roots: Sequence[RootFact], result: Any, effects: Sequence[Effect], objects: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    """Export a program that computes results and changes nothing.

    Args:
        program: local operators and collectives.
        roots: facts of the tensors that it was recorded with.
        result: the description of what it returns.
        effects: what it changes.
        objects: what holds the tensors that are no arguments, by name.
    """
    _check(program, effects)
    module = _Exported(program, roots, result, NamedMemories(objects))
    examples = [_example(part, fact.device) for fact in roots if fact.memories is None for part in fact.parts]
    with torch.no_grad():
        return torch.export.export(module, tuple(examples), strict=False)


def _check(program: Program, effects: Sequence[Effect]) -> None:
    hint = "export a function that computes without backward, optimizers and writes to its arguments"
    if effects:
        raise _refused(f"sets {'gradients' if effects[0].kind == 'grad' else 'attributes'}", hint)
    memory_of = program.facts.memory_of
    given = {memory_of[number] for number in program.inputs()}
    for _, call in program.calls:
        if isinstance(call, Unit):
            raise _refused(f"runs {call.name}, which is no operator", hint)
        if is_collective(call) and call.op._opname not in _COLLECTIVES:
            raise _refused(f"has the collective {collective_kind(call)}", "use all-gather, all-reduce or all-to-all")
        if draws(call.op):
            raise _refused("draws random numbers", "call model.eval() before it is captured")
        if not is_collective(call) and any(memory_of[number] in given for number in call.writes):
            raise _refused("writes to a tensor that it is given", hint)


def _example(geometry: Geometry, device: torch.device) -> torch.Tensor:
    shape, stride, _, dtype = geometry
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class _Exported(nn.Module):
    """The program as a module: locals of parameters are its buffers, locals of arguments its inputs."""

    def __init__(self, program: Program, roots: Sequence[RootFact], result: Any, names: NamedMemories) -> None:
        super().__init__()
        computing = [(at, call) for at, call in program.calls if not _is_check(call)]
        self._wanted = program.wanted
        self._run = program.with_calls(computing)._function(functional)
        self._result = result
        self._numbers = [fact.numbers for fact in roots]
        self._arguments = [number for fact in roots if fact.memories is None for number in fact.numbers]
        self._held: list[tuple[int, str]] = []
        used = program.inputs() | {n for at in _returned(result) for n in roots[at].numbers}
        for at, fact in enumerate(roots):
            if fact.memories is None or not used & set(fact.numbers):
                continue
            parts = fact.locals()
            if parts is None:
                raise _refused(
                    "uses a tensor that is not there any more", "call the function once more, then export it"
                )
            held = names.find(fact) or f"state.tensor{at}"
            for rank, (number, part) in enumerate(zip(fact.numbers, parts, strict=True)):
                name = held + (f".rank{rank}" if len(parts) > 1 else "")
                _register(self, name, part)
                self._held.append((number, name))

    def forward(self, *given: torch.Tensor) -> Any:
        inputs = dict(zip(self._arguments, given, strict=True))
        inputs |= {number: self.get_buffer(name) for number, name in self._held}
        values = dict(zip(self._wanted, self._run(inputs), strict=True))
        return _locals(self._result, values, inputs, self._numbers)


def _is_check(call: Call | Unit) -> bool:
    return isinstance(call, Call) and call.expected is not None and not is_collective(call)


def _register(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A buffer with a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    module.register_buffer(last, tensor)


def _returned(shape: Any) -> set[int]:
    """The positions of tensors that are returned as they were given."""
    match shape:
        case Root(position):
            return {position}
        case Sequenced(_, items):
            return {at for item in items for at in _returned(item)}
        case Tabled(_, items):
            return {at for _, item in items for at in _returned(item)}
        case _:
            return set()


def _locals(shape: Any, values: Mapping[int, Any], inputs: Mapping[int, Any], numbers: Sequence[Any]) -> Any:
    """The result with locals in place of DTensors; where ranks are virtual, lists of them."""
    match shape:
        case Root(position):
            found = [inputs[number] for number in numbers[position]]
            return found[0].clone() if len(found) == 1 else [part.clone() for part in found]
        case Same(value):
            return value
        case Made(local=Local(refs, is_ranks)) | Local(refs, is_ranks):
            found = [values[ref.number] for ref in refs]
            return found if is_ranks else found[0]
        case Sequenced(kind, items):
            return kind(_locals(item, values, inputs, numbers) for item in items)
        case Tabled(kind, items):
            return kind((name.value, _locals(item, values, inputs, numbers)) for name, item in items)
        case Given():
            raise UnsupportedError(
                "export: a list or dict of the arguments is returned", hint="return a new one in the captured function"
            )
        case _:
            raise AssertionError(shape)


# ---------------------------------------------------------------- collectives as operators of graphs


def functional(call: Call, position: int) -> Callable[..., Any]:
    """The function of tensors that runs a recorded collective by an operator that graphs can hold.

    Args:
        call: the recorded operator of c10d.
        position: where it is in the program; unused.
    """
    bound = bound_arguments(call)
    ranks = len(group_ranks(call))
    return _COLLECTIVES[call.op._opname](bound, call.expected, ranks, _name_of(bound))


def _name_of(bound: Mapping[str, Any]) -> str:
    return dist.ProcessGroup.unbox(bound["process_group"]).group_name


def _reduction(options: Any) -> str:
    return options.reduceOp.op.name.lower()


def _put(target: torch.Tensor, found: torch.Tensor) -> None:
    target.copy_(_functional.wait_tensor(found).view(target.shape))


def _all_gather(bound: Any, options: Any, ranks: int, name: str) -> Callable[..., None]:
    return lambda out, given: _put(out, _functional.all_gather_into_tensor(given.reshape(-1), ranks, name))


def _reduce_scatter(bound: Any, options: Any, ranks: int, name: str) -> Callable[..., None]:
    kind = _reduction(options)
    return lambda out, given: _put(out, _functional.reduce_scatter_tensor(given.reshape(-1), kind, ranks, name))


def _all_reduce(bound: Any, options: Any, ranks: int, name: str) -> Callable[..., None]:
    kind = _reduction(options)

    def reduce(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            _put(tensor, _functional.all_reduce(tensor, kind, name))

    return reduce


def _all_to_all(bound: Any, options: Any, ranks: int, name: str) -> Callable[..., None]:
    got, sent = list(bound["output_split_sizes"]), list(bound["input_split_sizes"])

    def exchange(out: torch.Tensor, given: torch.Tensor) -> None:
        outgoing, incoming = sent or [given.shape[0] // ranks] * ranks, got or [out.shape[0] // ranks] * ranks
        _put(out, _functional.all_to_all_single(given, incoming, outgoing, name))

    return exchange


_COLLECTIVES: dict[str, Callable[[Any, Any, int, str], Callable[..., None]]] = {
    "_allgather_base_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
    "allreduce_": _all_reduce,
    "alltoall_base_": _all_to_all,
}
