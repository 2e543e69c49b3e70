"""A recorded step as a Python function on locals, and its effects.

`source()` shows the text of the function. It has operators and collectives alone; results, gradients and
attributes are put together from its values afterwards.
"""

from __future__ import annotations

import copy
import functools
import itertools
import linecache
import math
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.capture.call_sites import NOWHERE, Site
from shardwise.capture.collective_calls import (
    Collective,
    collective_kind,
    described,
    group_ranks,
    is_collective,
    of_route,
)
from shardwise.capture.groups import issuing, starting
from shardwise.capture.overlap import Memories, issued_early, late_waits
from shardwise.capture.slots import Slots
from shardwise.capture.tape import Call, Const, Geometry, Ref, Tape, Unit, made_by, refs_of
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.errors import AgreementError
from shardwise.fabric.lost_ranks import lost_rank_error
from shardwise.fabric.rank_generators import draws
from shardwise.fabric.rank_tensor import RankTensor
from shardwise.tensor import dtensor_of
from shardwise.text import human_bytes, plural
from shardwise.torch_private import tree_leaves

__all__ = ["Given", "Local", "Made", "Program", "Root", "Same", "Sequenced", "Tabled", "built"]

_numbers = itertools.count()  # of the texts of programs
_DETACH = torch.ops.aten.detach.default


# ---------------------------------------------------------------- objects made of values


class Root(NamedTuple):
    """A tensor that was there before."""

    position: int


class Same(NamedTuple):
    """A value that is the same each time."""

    value: Any


class Given(NamedTuple):
    """A list, dict or set of the arguments."""

    position: int  # among the containers


class Local(NamedTuple):
    """A plain tensor, or the tensors of all virtual ranks."""

    refs: tuple[Ref, ...]
    is_ranks: bool


class Made(NamedTuple):
    """A tensor that the step made."""

    number: int  # among all that it made: the same one may be in several places
    local: Local
    spec: DTensorSpec | None
    requires_grad: bool
    is_spent: bool  # backward has gone through the graph that it came from
    is_inference: bool | None = None  # an inference tensor; None: as the call is made


class Sequenced(NamedTuple):
    """A list or tuple."""

    kind: Callable[..., Any]
    items: tuple[Any, ...]


class Tabled(NamedTuple):
    """A dict."""

    kind: Callable[..., Any]
    items: tuple[tuple[Any, Any], ...]


class _Spent(torch.autograd.Function):
    """Marks a tensor as one that backward has passed."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return make()  # not an argument, of which the result would be a view

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed): the captured step has run backward already. Call backward inside of it, or "
            "retain the graph there"
        )


def built(
    shape: Any, values: dict[int, torch.Tensor], roots: Any, made: dict[Any, Any], slots: Sequence[Slots] = ()
) -> Any:
    """The object of a description, which is the same one in `made` for each place where it is found."""
    match shape:
        case Root(position):
            return roots[position]
        case Same(value):
            return value
        case Made():
            found = made.get(shape.number)
            if found is None:
                found = made[shape.number] = _tensor(shape, values)
            return found
        case Local():
            return _local(shape, values)
        case Given(position):
            return slots[position].holder
        case Sequenced() | Tabled():
            place = ("container", id(shape))
            if place not in made:
                made[place] = _container(shape, lambda item: built(item, values, roots, made, slots))
            return made[place]
        case _:
            raise AssertionError(shape)


def _container(shape: Sequenced | Tabled, make: Callable[[Any], Any]) -> Any:
    if isinstance(shape, Sequenced):
        return shape.kind(map(make, shape.items))
    return shape.kind([(make(key), make(value)) for key, value in shape.items])


def _local(local: Local, values: dict[int, torch.Tensor]) -> torch.Tensor:
    if local.is_ranks:
        return RankTensor([values[ref.number] for ref in local.refs])
    return values[local.refs[0].number]


def _tensor(shape: Made, values: dict[int, torch.Tensor]) -> torch.Tensor:
    held, spec = _local(shape.local, values), shape.spec

    def make() -> torch.Tensor:
        if spec is None:
            return held
        if shape.is_inference in (None, torch.is_inference_mode_enabled()):
            return dtensor_of(spec, held)
        with torch.inference_mode(shape.is_inference):
            return dtensor_of(spec, held)

    if shape.is_spent:
        with torch.enable_grad():
            return _Spent.apply(torch.zeros((), requires_grad=True), make)  # pyright: ignore[reportReturnType]
    return make().requires_grad_() if shape.requires_grad else make()


# ---------------------------------------------------------------- the function


class Facts(NamedTuple):
    """What is known of the calls and values of a program besides what it runs."""

    sites: dict[int, Site]  # of calls, by their positions
    geometry: dict[int, Geometry]  # of values
    memory_of: dict[int, int]  # of values: the first value in the same memory
    bytes_of: dict[int, int]  # of memories
    moves: tuple[Collective, ...]  # collectives that routes announced
    meshes: tuple[DeviceMesh, ...]
    device_of: dict[int, torch.device]  # of memories; empty for a program that was loaded

    @staticmethod
    def of(tape: Tape, meshes: Sequence[DeviceMesh]) -> Facts:
        moves = tuple(of_route(*found) for found in tape.sites.moves)
        known = dict.fromkeys([*meshes, *(move.before.mesh for _, _, move in tape.sites.moves)])
        return Facts(tape.sites.at, tape.geometry, tape.memory_of, tape.bytes_of, moves, tuple(known), tape.device_of)


class Program:
    """The calls of a tape as a function of the plain tensors that exist before.

    Args:
        tape: the recorded calls.
        wanted: the values that are to be returned.
        name: of the function.
        meshes: of the tensors that it is given.
    """

    def __init__(self, tape: Tape, wanted: Sequence[int], name: str, meshes: Sequence[DeviceMesh] = ()) -> None:
        self.wanted = tuple(dict.fromkeys(wanted))
        self.calls = _needed(tape.calls, self.wanted)
        self.received = tape.received
        self.constants = tape.constants
        self.facts = Facts.of(tape, meshes)
        self.name = name
        self.ranks = 1  # how many ranks it runs: all of them where they are virtual
        self.outcome: dict[int, torch.Tensor] = {}  # the wanted values as the step has left them, until verified
        self.recorded = self  # the program before any part of it was compiled
        self.simple: Program | None = None  # the program before passes that each rank is free to take, until verified
        self.overlap = False  # whether collectives are waited for as late as possible
        self._prepare()

    def _prepare(self) -> None:
        self._operators: dict[str, Any] = {}
        self.pool: list[Any] = []
        self._names: dict[int, str] = {}
        self.collectives = self._collectives()
        self.late = self._late() if self.overlap else {}
        for name in ("text", "run"):  # of the program that this is a copy of
            vars(self).pop(name, None)

    @functools.cached_property
    def text(self) -> str:
        """The program in Python. Made when it is asked for: not for a program that a pass takes the place of."""
        return self._text()

    @functools.cached_property
    def run(self) -> Callable[[Any], tuple[torch.Tensor, ...]]:
        """The program as a function of the tensors that it is given, by number."""
        return self._function(self._issuing)

    def _late(self) -> dict[int, int]:
        """The collectives that are waited for later, by position, with the index of the call that needs them."""
        return late_waits(self.calls, self._memories())

    def _memories(self) -> Memories:
        memory_of = self.facts.memory_of
        return Memories(memory_of, frozenset(memory_of[number] for number in self.inputs()))

    def _issuing(self, call: Call, position: int) -> Callable[..., Any]:
        return starting(call) if position in self.late else issuing(call, position)

    def overlapped(self) -> Program:
        """The same program with collectives in flight while operators run that do not need them."""
        self.overlap = True
        made = self.with_calls(issued_early(self.calls, self._memories()))
        made.recorded = made
        return made

    def _collectives(self) -> dict[int, Collective]:
        """The calls of process groups by their positions."""
        facts = self.facts
        return {
            position: described(position, call, facts.sites.get(position), facts.geometry, facts.meshes)
            for position, call in self.calls
            if isinstance(call, Call) and is_collective(call)
        }

    def with_calls(self, calls: Sequence[tuple[int, Call | Unit]], facts: Facts | None = None) -> Program:
        """The same program with other calls, each with the position of the one that it comes from.

        Args:
            calls: the calls.
            facts: what is known of their values, if that is more than of those of this program.
        """
        made = copy.copy(self)
        facts = self.facts if facts is None else facts
        origins = [origin for origin, _ in calls]
        received = {at: self.received[origin] for at, origin in enumerate(origins) if origin in self.received}
        moves = [move._replace(position=_first_from(origins, move.position)) for move in facts.moves]
        made.calls = [(at, call) for at, (_, call) in enumerate(calls)]
        made.received = received
        made.facts = facts._replace(
            sites={at: facts.sites[origin] for at, origin in enumerate(origins) if origin in facts.sites},
            moves=tuple(moves),
        )
        made._prepare()
        return made

    def announce(self, moves: Sequence[Collective]) -> None:
        """Take these as the collectives that routes announced."""
        self.facts = self.facts._replace(moves=tuple(moves))
        vars(self).pop("text", None)

    def settle(self) -> None:
        """Drop what is only needed while the program is compared with the step."""
        for each in (self, self.recorded):
            each.received, each.simple, each.outcome = {}, None, {}

    def communication(self) -> list[Collective]:
        """Its collectives in order. On virtual ranks, where these are copies, those that were announced by routes."""
        return list(self.collectives.values()) or list(self.facts.moves)

    def raise_named(self, error: RuntimeError) -> None:
        """Raise a failure of communication of `run` in the user's terms, if it is one."""
        if not dist.is_initialized():
            return
        found = self._raising(error)
        if found is None:
            operation, ranks = f"a collective of the captured function {self.name}", range(dist.get_world_size())
        else:
            kind, place = found.kind.replace("_", "-"), found.site.place
            operation = f"{kind} over {found.over}{place and f', {place},'} in the captured function {self.name}"
            call = dict(self.calls)[found.position]
            ranks = group_ranks(call) if isinstance(call, Call) else ()
        named = lost_rank_error(error, operation, ranks)
        if named is not None:
            raise named from error

    def _raising(self, error: RuntimeError) -> Collective | None:
        """The collective in whose line of the program an error was raised."""
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code is self.run.__code__:
                line = linecache.getline(frame.f_code.co_filename, number)
                for at, found in self.collectives.items():
                    if f"work_{at}.wait(" in line or f"{found.kind}_{at}(" in line:
                        return found
        return None

    def inputs(self) -> set[int]:
        """The numbers of the tensors that it is given and uses."""
        used = {leaf.number for _, call in self.calls for leaf in refs_of(call)} | set(self.wanted)
        return used - {leaf.number for _, call in self.calls for leaf in made_by(call)}

    def verifying(self) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
        """The same function with the recorded results of collectives, without communication."""
        if not self.collectives:
            return self.run
        return self._function(lambda call, position: _repeating(self.received[position]))

    def _text(self) -> str:
        lines, shown = [f"def {self.name}(inputs):"], None
        last = self._last_uses()
        announced = {} if self.collectives else _by_position(self.facts.moves)
        lines += [f"    v{number} = inputs[{number}]" for number in sorted(self.inputs())]
        waits: dict[int, list[int]] = {}
        for position, index in self.late.items():
            waits.setdefault(index, []).append(position)
        for index, (position, call) in enumerate(self.calls):
            lines += [f"    work_{at}.wait()" for at in waits.get(index, ())]
            site = self.facts.sites.get(position, NOWHERE)
            if site[:2] != shown:
                shown = site[:2]
                lines.append(f"    # {_one_line(site.comment())}")
            for first in [at for at in announced if at <= position]:
                lines += [f"    # {_words(found)}" for found in announced.pop(first)]
            found = self.collectives.get(position)
            lines.append("    " + self._line(position, call) + (f"  # {_words(found)}" if found else ""))
            dead = sorted(n for n in last.get(position, ()) if n not in self.wanted)
            if dead:
                lines.append("    " + " = ".join(f"v{n}" for n in dead) + " = None")
        lines += [f"    work_{at}.wait()" for at in waits.get(len(self.calls), ())]
        lines.append(f"    return ({''.join(f'v{n}, ' for n in self.wanted)})")
        return "\n".join(lines) + "\n"

    def _last_uses(self) -> dict[int, set[int]]:
        last: dict[int, int] = {}
        for position, call in self.calls:
            for ref in (*refs_of(call), *made_by(call)):
                last[ref.number] = position
        for position, call in self.calls:  # what a collective uses lives until it has ended
            if position in self.late:
                end = min(self.late[position], len(self.calls) - 1)
                for ref in refs_of(call):
                    last[ref.number] = max(last[ref.number], self.calls[end][0])
        found: dict[int, set[int]] = {}
        for number, position in last.items():
            found.setdefault(position, set()).add(number)
        return found

    def _line(self, position: int, call: Call | Unit) -> str:
        if isinstance(call, Unit):
            made = "".join(f"v{ref.number}, " for ref in call.made)
            text = f"{_unit_name(call, position)}({', '.join(f'v{ref.number}' for ref in call.reads)})"
            return f"{made.rstrip()} = {text}" if made else text
        if is_collective(call):
            tensors = ", ".join(f"v{ref.number}" for ref in refs_of(call))
            text = f"{collective_kind(call)}_{position}({tensors})"
            return f"work_{position} = {text}" if position in self.late else text
        if call.op is _DETACH:
            return f"v{call.made.number} = {self._show(call.args[0])}"
        arguments = [self._show(arg) for arg in call.args]
        arguments += [f"{name}={self._show(arg)}" for name, arg in call.kwargs.items()]
        name = self._named(call.op._op, str(call.op).removeprefix("aten.").removesuffix(".default").replace(".", "_"))
        text = f"{name}({', '.join(arguments)})"
        if call.expected is not None:
            return f"agreed({text}, {call.expected!r}, {call.line!r})"
        return self._assigned(call, text)

    def _assigned(self, call: Call, text: str) -> str:
        given = {ref.number for ref in refs_of(call)}
        made = call.made
        if isinstance(made, Ref):
            return text if made.number in given else f"v{made.number} = {text}"
        if isinstance(made, tuple | list) and made:
            if all(isinstance(item, Ref) and item.number in given for item in made):
                return text
            targets = [f"v{item.number}" if isinstance(item, Ref) else "_" for item in made]
            if not any(isinstance(item, tuple | list) for item in made):
                return f"{', '.join(targets)}, = {text}" if len(targets) == 1 else f"{', '.join(targets)} = {text}"
            raise AssertionError(f"{call.op} gives a nested result")
        return text

    def _show(self, value: Any) -> str:
        match value:
            case Ref(number):
                return f"v{number}"
            case Const(number):
                return self._pooled(self.constants[number]) + ".clone()"
            case list() | tuple():
                inner = ", ".join(map(self._show, value))
                return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
            case None | bool() | int() | str():
                return repr(value)
            case float() if math.isfinite(value):
                return repr(value)
            case torch.dtype() | torch.layout() | torch.memory_format():
                return repr(value)
            case torch.device():
                return f"torch.{value!r}" if not repr(value).startswith("torch.") else repr(value)
            case _:
                return self._pooled(value)

    def _pooled(self, value: Any) -> str:
        self.pool.append(value)
        return f"constants[{len(self.pool) - 1}]"

    def _named(self, value: Any, name: str) -> str:
        found = self._names.get(id(value))
        if found is None:
            taken = set(self._names.values())
            found = name
            while found in taken or not found.isidentifier():
                found = f"op_{found}" if not found.isidentifier() else found + "_"
            self._names[id(value)] = found
            self.pool.append(value)  # which keeps its identity
            self._operators[found] = value
        return found

    def _function(self, collective: Callable[[Call, int], Callable[..., Any]]) -> Any:
        text = self.text  # which names the operators
        names: dict[str, Any] = {"torch": torch, "constants": self.pool, "agreed": _agreed, "inf": math.inf}
        names |= self._operators
        for position, call in self.calls:
            if isinstance(call, Unit):
                names[_unit_name(call, position)] = call.run
            elif is_collective(call):
                names[f"{collective_kind(call)}_{position}"] = collective(call, position)
        filename = f"<captured {self.name} {next(_numbers)}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        exec(compile(text, filename, "exec"), names)
        function = names[self.name]
        weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False  # its text goes with it
        return function


def _unit_name(unit: Unit, position: int) -> str:
    return f"{unit.name}_{position}"


def _first_from(origins: Sequence[int], position: int) -> int:
    """The index of the first call that comes from a position or a later one."""
    return next((at for at, origin in enumerate(origins) if origin >= position), len(origins))


def _words(found: Collective) -> str:
    """What a comment says of a collective."""
    kind = found.kind.replace("_", "-")
    return _one_line(
        f"{kind} over {found.over} ({plural(found.ranks, 'rank')}): {human_bytes(found.received)} received"
    )


def _one_line(text: str) -> str:
    """Text without line breaks, so that it stays a comment."""
    return " ".join(text.splitlines())


def _by_position(moves: Sequence[Collective]) -> dict[int, list[Collective]]:
    found: dict[int, list[Collective]] = {}
    for move in moves:
        found.setdefault(move.position, []).append(move)
    return found


def _needed(calls: Sequence[Call | Unit], wanted: Sequence[int]) -> list[tuple[int, Call | Unit]]:
    """The calls without those whose results are not used, each with its position. All collectives stay."""
    used, kept = set(wanted), []
    for position in range(len(calls) - 1, -1, -1):
        call = calls[position]
        made = made_by(call)
        gives = isinstance(call, Call) and any(isinstance(leaf, Ref) for leaf in tree_leaves(call.made))
        removable = gives and not call.writes and not draws(call.op)  # pyright: ignore[reportAttributeAccessIssue]
        if removable and not any(ref.number in used for ref in made):
            continue
        used.update(ref.number for ref in refs_of(call))
        kept.append((position, call))
    return kept[::-1]


def _repeating(received: Sequence[torch.Tensor]) -> Callable[..., Any]:
    def repeat(*tensors: torch.Tensor) -> Any:
        for tensor, was in zip(tensors, received, strict=True):
            tensor.copy_(was)
        return _Done

    return repeat


class _Done:
    """A collective that has ended."""

    @staticmethod
    def wait() -> None:
        pass


def _agreed(found: Any, expected: Any, line: str) -> None:
    if found != expected:
        raise AgreementError(
            f"captured: a comparison of ranks at {line} came out as {found}, and as {expected} when it was recorded",
            hint="ranks hold different values where they held the same; run the function without `captured` to see",
        )
