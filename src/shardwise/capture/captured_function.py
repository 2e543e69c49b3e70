"""`captured`: a function of DTensors that runs as a program of local operators from its third call on.

The first call runs as always, and shows which code of the program runs. A later call with a new key is recorded while
it runs. A key is all that the function can read: layouts, shapes, Python values, modes of torch and of the library.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.nn.parameter import is_lazy

from shardwise import modes
from shardwise.capture.binding import Binding, arguments_key
from shardwise.capture.captured_report import CapturedReport
from shardwise.capture.compiled_program import BACKENDS, compiled_program, is_rounded, largest, wide
from shardwise.capture.exported_program import exported_program
from shardwise.capture.leaving import Effect, Leaving, Unsettled
from shardwise.capture.local_optimizer import LocalStep, is_elementwise
from shardwise.capture.passes import Passes
from shardwise.capture.program import Program, built
from shardwise.capture.program_code import attributes_of
from shardwise.capture.program_file import SavedProgram
from shardwise.capture.program_folder import save_program
from shardwise.capture.reachable import Reachable, global_hooks
from shardwise.capture.read_guards import ReadGuard, guards_of
from shardwise.capture.recorded_call import RecordedCall
from shardwise.capture.roots import RootFact, facts_of, shape_of
from shardwise.capture.slots import Slots
from shardwise.capture.snapshot import Snapshot, local_of
from shardwise.capture.tape import Call, Tape, Unit
from shardwise.capture.timeline import timeline_of
from shardwise.core.cache import BoundedCache
from shardwise.core.tracing import is_dynamo_compiling
from shardwise.debug.pictures.draw_timeline import Timeline
from shardwise.dispatch.views import CopiedView, memory_of, version_of
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.events import decision_made, route_started, scatter_started, tensor_entered, tensor_moved
from shardwise.fabric.base import on_new_world
from shardwise.fabric.rank_generators import draws
from shardwise.fabric.rank_tensor import parts_of
from shardwise.fabric.rank_threads import rank_threads
from shardwise.fabric.shared_writes import agree
from shardwise.plan.cost import current_cost_model
from shardwise.tensor import DTensor, intercepted
from shardwise.torch_private import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    cudnn_enabled,
    dispatch_mode_count,
    forward_ad,
    function_mode_count,
    mkldnn_enabled,
    parametrize,
    saved_tensor_hooks,
    transforms_active,
)

__all__ = ["Captured", "captured", "is_watched", "left_behind"]

_all: weakref.WeakSet[Any] = weakref.WeakSet()
on_new_world.append(lambda: [each.forget() for each in list(_all)])
Result = TypeVar("Result")
# Casts of autocast are operators of a program, which must not be cast once more.
_CASTING = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
# Names by which code of the program reads hyperparameters of optimizers, which then are part of the key.
_HYPERPARAMETERS = frozenset({"param_groups", "state_dict", "defaults", "add_param_group"})
_INTERCEPTED, _IS_ACTIVE = tuple(intercepted.values()), operator.attrgetter("is_active")

MANY_UNSETTLED = 8  # calls in a row, after which there is a warning
REPEATS = 3  # runs of a program that differs from its function, to see whether it differs from itself


class _Entry(NamedTuple):
    """A program with the descriptions of its results."""

    program: Program
    result: Any
    effects: tuple[Effect, ...]
    written: tuple[int, ...]  # positions of tensors whose memory it writes to
    renewed: tuple[tuple[int, int], ...]  # positions of tensors that get another gradient in place of one
    uses_slots: bool  # whether it changes more than values and gradients, or returns a container that it is given
    reads_states: bool  # whether it reads states of optimizers besides their steps, which the fast guard passes over
    roots: tuple[RootFact, ...]  # facts of the tensors that it was recorded with
    arguments: Any  # the description of the arguments
    kept: Any  # the objects that its key names by identity
    reads: tuple[ReadGuard, ...] = ()  # values that were read from tensors, in order
    key: Any = None  # of all programs that differ in such values alone


class Captured(Generic[Result]):
    """A captured function; made by `captured`."""

    is_captured = True

    def __init__(
        self,
        function: Callable[..., Result],
        max_programs: int,
        verify: bool,
        backend: str | None,
        passes: Passes,
        reads: str = "refuse",
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.verify = verify
        self.backend = backend
        self.passes = passes
        self.reads = reads
        self._read_values: dict[Any, list[tuple[str, ...]]] = {}  # of each key those that programs are kept for
        self.programs: BoundedCache[Any, _Entry] = BoundedCache(max_programs)
        self._codes: dict[Any, None] = {}
        self._last: _Entry | None = None
        self._binding: Binding | None = None
        self._unsettled = 0
        self._lock = threading.RLock()  # one thread at a time records, and learns which code runs
        _all.add(self)

    def forget(self) -> None:
        """Drop all programs."""
        self.programs = BoundedCache(self.programs.limit)
        self._read_values = {}
        self._binding = self._last = None

    def source(self) -> str:
        """The program that ran last, as Python text: local operators, collectives, and the lines they come from."""
        return self._ran_last().program.text

    def explain(self) -> CapturedReport:
        """Collectives, bytes, modelled seconds and memory of the program that ran last, by line and module.

        On process groups these are the collectives that the program issues; on virtual ranks, those that the step
        announced when it was recorded.
        """
        return CapturedReport.of(self._ran_last().program.recorded)

    def timeline(self) -> Timeline:
        """The program that ran last in the order of its calls; `draw(step)` is its picture."""
        return timeline_of(self._ran_last().program.recorded)

    def save(self, path: str | os.PathLike[str], **objects: Any) -> None:
        """Write the program that ran last into the folder `path`, one file for each rank; `load_captured` reads it.

        A file is JSON: the names of operators, their arguments, the layouts and shapes of all tensors. It holds no code
        and no values of tensors besides constants.

        Args:
            path: the folder, made if it is not there.
            objects: the modules, tensors (also in lists and dicts) and optimizers that the program uses, by any names.
        """
        entry = self._without_reads("save")
        program, roots = entry.program.recorded, dict(enumerate(entry.roots))
        recorded = SavedProgram(program, {}, roots, entry.arguments, entry.result, entry.effects, entry.written)
        save_program(path, recorded, objects)

    def export(self, **objects: Any) -> torch.export.ExportedProgram:
        """The program that ran last as an exported program of local operators and functional collectives.

        It takes the locals of the tensors that were arguments, in their order, and returns those of the results; where
        ranks are virtual, the locals of all of them. Locals of other tensors are its buffers. `torch.export.save`
        writes it, for this rank; process groups are found by their names again.

        Args:
            objects: modules and tensors (also in lists and dicts) that give names to the buffers.
        """
        entry = self._without_reads("export")
        return exported_program(entry.program.recorded, entry.roots, entry.result, entry.effects, objects)

    def _ran_last(self) -> _Entry:
        if self._last is None:
            raise UnsupportedError(
                "there is no program yet", hint="the first call of a captured function runs as always; call it twice"
            )
        return self._last

    def _without_reads(self, what: str) -> _Entry:
        """The program that ran last, which must hold for any values."""
        entry = self._ran_last()
        if entry.reads:
            raise UnsupportedError(
                f"{what}: the program holds for the value that was read from a tensor at {entry.reads[0].line}",
                hint="capture the function without such reads",
            )
        return entry

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of a class it is a method, as functions are."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        """A copy, also one of a module that holds it, has the same function, or its own, and no programs."""
        return Captured, (self.function, self.programs.limit, self.verify, self.backend, self.passes, self.reads)

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if is_watched():
            return self.function(*args, **kwargs)
        ambient, binding = _ambient(), self._binding
        if binding is None or not binding.holds():
            binding = self._binding = None
        if binding is not None and not kwargs and (quick := arguments_key(args, binding.state)) is not None:
            entry = binding.entries.get((ambient, quick))
            if entry is not None and entry.reads:
                entry = self._matching(entry.key, _inputs(binding.inputs, args))
            if entry is not None and not entry.uses_slots:  # containers of the arguments are not looked at here
                return self._run(entry, binding, args, ())
        with self._lock:
            state = self._reach() if binding is None else binding.state
            given = self._reached_by(args, kwargs, state)
            key = (ambient, state.key, given.key)
            entry = self.programs.get(key)
            if entry is None and key in self._read_values:
                entry = self._matching(key, _inputs(_inputs((), state.tensors), given.tensors))
            if entry is None:
                self._binding = None
                return self._first(key, state, given, args, kwargs)
            if binding is None:
                binding = self._binding = Binding(state)
            if not kwargs and not entry.uses_slots and (quick := arguments_key(args, state)) is not None:
                binding.entries[ambient, quick] = entry
        return self._run(entry, binding, given.tensors, given.slots)

    def _reached_by(self, args: Any, kwargs: Any, state: Reachable) -> Reachable:
        """What the arguments reach besides the state."""
        given = Reachable(self._codes, self._is_tuned, state)
        given.visit(args, "arguments")
        given.visit(kwargs, "arguments")
        return given

    def _is_tuned(self, optimizer: Any) -> bool:
        return is_elementwise(optimizer) and all(map(_HYPERPARAMETERS.isdisjoint, map(attributes_of, self._codes)))

    def _reach(self) -> Reachable:
        found = Reachable(self._codes, self._is_tuned)
        found.visit(self.function, getattr(self.function, "__name__", "function"))
        found.functions_of(torch.nn.functional)
        for table in global_hooks():
            found.visit(table, "hooks of all modules and optimizers")
        return found

    def _run(self, entry: _Entry, binding: Binding, given: Sequence[Any], slots: Sequence[Slots]) -> Any:
        """Execute a program, and build the objects that it leaves."""
        self._last = entry
        state = binding.state
        roots = [*state.tensors, *given]
        inputs = _inputs(binding.inputs, given)
        try:
            with torch.no_grad(), ExcludeDispatchKeyGuard(_CASTING):
                values = entry.program.run(inputs)
        except RuntimeError as error:
            entry.program.raise_named(error)
            raise
        result = left_behind(entry, values, roots, [*state.slots, *slots] if entry.uses_slots else ())
        if entry.uses_slots or entry.reads_states or (entry.renewed and not binding.renew(entry.renewed)):
            self._binding = None
        return result

    # ---------------------------------------------------------------- recording

    def _first(self, key: Any, state: Reachable, given: Reachable, args: Any, kwargs: Any) -> Any:
        """Run as always, and record. The call after which all code of the program is known is the first recorded."""
        knows = bool(self._codes)
        if knows:
            _refuse_problems(state, given)
        else:
            state, given = self._with_own_code(state, given, args, kwargs)
        roots = [*state.tensors, *given.tensors]
        if any(map(is_lazy, roots)) or any(part.is_meta for root in roots for part in parts_of(local_of(root))):
            return self.function(*args, **kwargs)  # parameters without values, or a dry run
        ambient = _ambient()
        call = RecordedCall(state, given, knows, self.reads == "guard")
        has_run = False
        try:
            result = call.run(self.function, args, kwargs)
            has_run = True
            if not self._is_settled(call):
                return result
            try:
                if _ambient() != ambient:
                    raise Unsettled("a setting of torch or of the library is left with another value")
                entry = self._entry(call, result)
            except Unsettled as unsettled:
                self._unsettle(str(unsettled))
                return result
            positions = {id(root): at for at, root in enumerate(call.roots)}
            entry = entry._replace(arguments=shape_of((args, kwargs), positions))
            if self.verify:
                entry, values = self._verify(entry, call.before)
                if not self._is_put_back(call, args, kwargs):
                    self._unsettle("it changes an object in a way that cannot be repeated, as its class")
                    return left_behind(entry, values, call.roots, call.slots)
                result = left_behind(entry, values, call.roots, call.slots)
            if self.backend is not None:
                entry, result = self._compile(entry, self.backend, call.before, call.roots)
            call.tape.received = {}
            entry.program.settle()
        except BaseException as error:
            if has_run or isinstance(
                error, ShardwiseError
            ):  # interrupted while a program was compared: not half a step
                call.abandon()
            raise
        finally:
            call.watch.spent.clear()  # Python's collector of cycles does not free what nodes of autograd refer to
        self._unsettled = 0
        self._keep(key, entry)
        return result

    def _with_own_code(self, state: Reachable, given: Reachable, args: Any, kwargs: Any) -> tuple[Reachable, Reachable]:
        """Before the first call: what is reached if the function itself is followed."""
        code = getattr(self.function, "__code__", None)
        if code is None:
            return state, given
        self._codes[code] = None
        state = self._reach()
        return state, self._reached_by(args, kwargs, state)

    def _is_settled(self, call: RecordedCall) -> bool:
        """Whether a call can be recorded: all of its code was known before, and states of optimizers were there."""
        new = any(code not in self._codes for code in call.watch.codes)
        if new:
            self._codes.update(call.watch.codes)
            self.forget()
        elif call.knows:
            call.check_reached()
        return call.knows and not new and not call.makes_states

    def _is_put_back(self, call: RecordedCall, args: Any, kwargs: Any) -> bool:
        """Whether everything can be read as it was before the call, whose changes are undone."""
        state = self._reach()
        given = self._reached_by(args, kwargs, state)
        return (state.key, given.key) == (call.state.key, call.given.key)

    def _keep(self, key: Any, entry: _Entry) -> None:
        """Keep a program for a key; where values were read, for these."""
        self._last = entry
        if not entry.reads:
            self.programs.keep(key, entry)
            return
        values = tuple(read.value for read in entry.reads)
        self.programs.keep((key, values), entry._replace(key=key))
        self._read_values.setdefault(key, []).append(values)
        for each, known in list(self._read_values.items()):  # programs that were dropped
            self._read_values[each] = kept = [one for one in known if (each, one) in self.programs]
            if not kept:
                del self._read_values[each]
        if len(self._read_values.get(key, ())) == self.programs.limit:
            warnings.warn(
                f"captured: {self.programs.limit} programs that differ only in a value that is read from a tensor (at "
                f"{entry.reads[-1].line}); each is recorded, and the oldest are dropped",
                stacklevel=4,
            )

    def _matching(self, key: Any, inputs: Sequence[torch.Tensor]) -> _Entry | None:
        """The program of a key whose values would be read again."""
        with torch.no_grad(), ExcludeDispatchKeyGuard(_CASTING):
            for values in self._read_values.get(key, ()):
                entry = self.programs.get((key, values))
                if entry is not None and all(read.holds(inputs) for read in entry.reads):
                    return entry
        return None

    def _unsettle(self, why: str) -> None:
        """The step was not recorded. Caches fill once; a value that changes on every call would prevent it for ever."""
        self._unsettled += 1
        if self._unsettled == MANY_UNSETTLED:
            warnings.warn(
                f"captured: {self._unsettled} calls could not be recorded and ran as always; the last because {why}",
                stacklevel=4,
            )

    def _entry(self, call: RecordedCall, result: Any) -> _Entry:
        """The program of a recorded call, and the descriptions of what it leaves."""
        tape, watch, state, before, roots = call.tape, call.watch, call.state, call.before, call.roots
        reads = guards_of(tape, before)
        random = any(isinstance(each, Call) and draws(each.op) for each in tape.calls)
        if watch.sets_state and random:
            raise UnsupportedError(
                "captured: random numbers are drawn, and a random state is put back that is not recorded",
                hint="only CPU states that torch keeps itself are recorded; elsewhere use preserve_rng_state=False",
            )
        for generator in tape.generators.values():
            if all(_address(generator) != _address(other) for other, _ in before.random):
                raise Unsettled("a generator of random numbers is made by it")
        _refuse_inference_writes(tape, before)
        leaving = Leaving(tape, state, roots, watch.spent, call.slots)
        described = leaving.describe(result, "the result")
        effects = (*leaving.changes(before, call.slots), *leaving.views(before))
        meshes = [root._spec.mesh for root in roots if isinstance(root, DTensor)]
        program = Program(tape, tuple(leaving.values), _name(self.function), meshes)
        program.ranks = max((len(was.parts) for was in before.held), default=1)
        program = self.passes.apply(program)
        program.outcome = leaving.values
        renewed = [
            (effect.target, state.position(before.held[effect.target].grad))
            for effect in effects
            if effect.kind == "grad"
        ]
        return _Entry(
            program,
            described,
            effects,
            _written(tape, before),
            tuple((owner, at) for owner, at in renewed if at is not None and owner < state.count),
            leaving.gives_container or any(effect.kind not in ("grad", "view") for effect in effects),
            _reads(program, state.states, before),
            facts_of(before.held, before.numbers, state.count),
            None,
            (state._kept, call.given._kept),
            reads,
        )

    def _verify(self, entry: _Entry, before: Snapshot) -> tuple[_Entry, tuple[torch.Tensor, ...]]:
        """Run the program from the same state, and compare everything that it leaves with the result of the step.

        Where that differs because of passes that each rank is free to take, the program without them is used.
        """
        outcome = entry.program.outcome
        wanted = [outcome[number].detach().clone() for number in entry.program.wanted]
        expected = [*wanted, *[part.detach().clone() for part in before.parts], *_states(before)]
        entry.program.outcome = {}
        values, differs = _agreement(entry.program, before, expected)
        simple = entry.program.simple
        if differs is not None and simple is not None:
            entry = entry._replace(program=self.passes.local(simple))
            values, differs = _agreement(entry.program, before, expected)
        if differs is not None:
            raise UnsupportedError(
                f"captured: the recorded program gives other values than the function, in a tensor of shape "
                f"{tuple(differs.shape)}: it did something that is not an operator of torch",
                hint="run the function as it is; writes to memory besides torch's operators cannot be captured",
            )
        return entry, values

    def _compile(self, entry: _Entry, backend: str, before: Snapshot, roots: list[torch.Tensor]) -> tuple[_Entry, Any]:
        """Compile a program while it runs once more from the same state, and return it with what that run leaves."""
        program, values = compiled_program(entry.program, backend, functools.partial(_run_from, before))
        entry = entry._replace(program=program)
        return entry, left_behind(entry, values, roots, before.slots)


def _inputs(known: Sequence[torch.Tensor], tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The locals that a program is given: known ones, and those of other tensors."""
    return [*known, *(part for tensor in tensors for part in parts_of(local_of(tensor)))]


def _refuse_problems(*reached: Reachable) -> None:
    """Raise where changes of an object could not be detected."""
    for problem in (problem for each in reached for problem in each.problems):
        raise UnsupportedError(
            f"captured: the function can read {problem}; changes of it cannot be detected",
            hint="pass plain data and tensors, and do not use such objects in the captured function",
        )


def _address(generator: Any) -> int:
    """Where torch keeps a generator, which it wraps in more than one object."""
    return generator._cdata


def _states(before: Snapshot) -> list[torch.Tensor]:
    """The states of random generators now."""
    return [state for _, state in before.random_states()]


def _run_from(before: Snapshot, program: Program) -> tuple[torch.Tensor, ...]:
    """The results of a program from a state, with the recorded results of collectives."""
    before.restore()
    with torch.no_grad(), ExcludeDispatchKeyGuard(_CASTING):
        return program.verifying()(before.parts)


def _agreement(
    program: Program, before: Snapshot, expected: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """The results of a program from a state, and the first of the expected tensors that it does not leave so."""

    def run() -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        values = _run_from(before, program)
        return values, [*values, *before.parts, *_states(before)]

    values, found = run()
    if all(map(agree, found, expected)):
        return values, None
    first = [tensor.detach().clone() for tensor in found]
    is_noisy = False
    for _ in range(REPEATS):
        values, found = run()
        is_noisy = not all(map(agree, found, first))
        if is_noisy:
            break
    for one, other, want in zip(first, found, expected, strict=True):
        if not agree(other, want) and not (is_noisy and is_within_noise(one, other, want)):
            return values, want
    return values, None


def is_within_noise(first: torch.Tensor, second: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a tensor of a program differs from that of the function about as much as two runs of the program differ.

    For programs with kernels that add in no fixed order: they have other last bits in each run, not in every tensor.
    """
    if not is_rounded(wanted) or not torch.equal(wanted.isfinite(), second.isfinite()):
        return False
    noise, scale = largest(wide(first) - wide(second)), largest(wanted)
    return largest(wide(second) - wide(wanted)) <= 4 * noise + 8 * torch.finfo(wanted.dtype).eps * scale


def left_behind(entry: Any, values: tuple[torch.Tensor, ...], roots: Any, slots: Sequence[Slots]) -> Any:
    """Put results, gradients and attributes together.

    Args:
        entry: the program and what is made of its values.
        values: what it has returned.
        roots: the tensors that were there before, by their positions.
        slots: the containers.
    """
    found = dict(zip(entry.program.wanted, values, strict=True))
    made: dict[int, Any] = {}
    result = built(entry.result, found, roots, made, slots)
    if entry.written:
        torch.autograd.graph.increment_version([roots[at] for at in entry.written])
    for kind, target, value in entry.effects:
        if kind == "grad":
            roots[target].grad = built(value, found, roots, made, slots)
        elif kind == "local":
            roots[target]._local_tensor = built(value[0], found, roots, made, slots)  # pyright: ignore[reportAttributeAccessIssue]
            roots[target]._spec = value[1]  # pyright: ignore[reportAttributeAccessIssue]
        elif kind == "view":  # the last ones, so that the versions of bases are those after the call
            args, kwargs = built(value[1], found, roots, made, slots)
            base = args[0]
            made[target]._mark_copied(CopiedView(value[0], args, kwargs, value[2], version_of(base), memory_of(base)))
        else:
            slots[target].put(built(value, found, roots, made, slots))
    return result


def _written(tape: Tape, before: Snapshot) -> tuple[int, ...]:
    """The positions of DTensors whose memory is written to; plain tensors count their versions themselves."""
    memories = {tape.memory_of[number] for call in tape.calls for number in call.writes}
    found: list[int] = []
    touched: set[int] = set()
    for call in tape.calls:
        if isinstance(call, Unit) and isinstance(call.run, LocalStep):
            touched.update(map(id, call.run.tensors()))
    for at, (was, numbers) in enumerate(zip(before.held, before.numbers, strict=True)):
        is_written = id(was.tensor) in touched or any(tape.memory_of[n] in memories for n in numbers)
        if is_written and was.tensor.__class__ is DTensor and not was.tensor.is_inference():
            found.append(at)
    return tuple(found)


def _refuse_inference_writes(tape: Tape, before: Snapshot) -> None:
    """Raise where a step enters inference mode to write to an inference tensor: a program runs in the caller's mode."""
    frozen = {tape.memory_of[number] for number, part in enumerate(before.parts) if part.is_inference()}
    if frozen and not torch.is_inference_mode_enabled():
        for call in tape.calls:
            if any(tape.memory_of[number] in frozen for number in call.writes):
                raise UnsupportedError(
                    f"captured: an inference tensor is written to in inference mode (at {call.line}), which the "
                    "function enters itself",
                    hint="call the captured function inside torch.inference_mode()",
                )


def _reads(program: Program, positions: set[int], before: Snapshot) -> bool:
    """Whether a program is given any of the tensors at these positions."""
    used = program.inputs()
    return any(number in used for at in positions for number in before.numbers[at])


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "step")
    return name if name.isidentifier() else "step"


# ---------------------------------------------------------------- settings of torch and the library


def is_watched() -> bool:
    """Whether the run is observed, traced or transformed: then nothing is replaced."""
    return bool(
        dispatch_mode_count()
        or function_mode_count()
        or transforms_active()
        or forward_ad._current_level >= 0
        or parametrize._cache_enabled
        or route_started
        or scatter_started
        or decision_made
        or tensor_moved
        or tensor_entered
        or any(map(_IS_ACTIVE, _INTERCEPTED))
        or rank_threads() is not None
        or is_dynamo_compiling()
        or torch.is_anomaly_enabled()
        or saved_tensor_hooks._top_saved_tensors_default_hooks(True) is not None
    )


def _ambient() -> tuple[Any, ...]:
    """The settings that decide which operators run."""
    cuda = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        mkldnn_enabled(),
        cudnn_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        modes.changed_modes(),
        current_cost_model(),
    )


def captured(
    function: Callable[..., Result],
    *,
    max_programs: int = 16,
    verify: bool = True,
    backend: str | None = None,
    overlap: bool = False,
    remove_copies: bool = True,
    share_gathers: int = 0,
    reads: str = "refuse",
    remove_dead: bool = False,
    bucket: int = 0,
    bucket_sums: bool = False,
    max_bytes: int | None = None,
) -> Captured[Result]:
    """Return `function` as one that runs as a program of local operators and collectives, without dispatch of DTensors.

    Args:
        function: a training step, an inference, any function of DTensors.
        max_programs: how many programs are kept, one for each combination of shapes, layouts and Python values.
        verify: compare a new program with the function, bit by bit, before it is used, and see that the step changes
            nothing in a way that cannot be repeated. A call that is recorded then takes the memory of the state twice
            more.
        backend: "inductor" compiles the operators between collectives. Values are then those of eager within rounding,
            which is checked when a program is recorded, and not its bits. "cudagraphs" launches them as CUDA graphs.
        overlap: wait for a collective only before the first operator that needs it. They are issued in the same order.
        remove_copies: leave out copies that cannot be told from what they were copied from: into and out of the flat
            buffers of `fully_shard`, and collectives of one rank.
        share_gathers: bytes that may be kept so that what was gathered before is not gathered again, as parameters of
            `fully_shard` in backward. Ranks compare their collectives when a call is recorded: all must record it.
        reads: what a value means that the function reads from a tensor (`if mask.all()`): "refuse", or "guard": it is
            computed again before each call, from the tensors that exist then, and another value is another program.
        remove_dead: leave out collectives whose results nobody uses. Ranks compare their collectives, as above.
        bucket: bytes of flat buffers in which small collectives of one group, kind and dtype are issued as one. Ranks
            compare their collectives, as above. Sums of floating point numbers over more than two ranks stay alone.
        bucket_sums: join those, too; the last bits of sums may differ from those of eager.
        max_bytes: for the values that a program makes, on a rank, at the peak. Cheap operators are run again before
            later uses of their results until that is met; `UnsupportedError` says what can be reached if it is not.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> weight = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> step = captured(lambda x: (x @ weight.t()).sum().full_tensor())
        >>> x = sw.ones(2, 4, device_mesh=mesh)
        >>> [step(x).item() for _ in range(3)]
        [32.0, 32.0, 32.0]
    """
    if backend is not None and backend not in BACKENDS:
        raise UnsupportedError(f"captured has no backend {backend!r}", hint=f"one of {list(BACKENDS)}, or None")
    if backend == "cudagraphs" and not torch.cuda.is_available():
        raise UnsupportedError("captured: CUDA graphs need a GPU", hint="sw.captured(function) runs the operators")
    if reads not in ("refuse", "guard"):
        raise UnsupportedError(f"captured has no reads={reads!r}", hint="'refuse' or 'guard'")
    if backend is not None and max_bytes is not None:
        raise UnsupportedError(
            "captured: a compiled program does not keep to max_bytes", hint="use max_bytes without backend"
        )
    passes = Passes(overlap, remove_copies, share_gathers, remove_dead, bucket, bucket_sums, max_bytes)
    return Captured(function, max_programs, verify, backend, passes, reads)
