"""`captured`: a function of DTensors that runs as a program of local operators from its third call on.

The first call runs as always, and shows which code of the program runs. A later call with a new key is recorded while
it runs. A key is all that the function can read: layouts, shapes, Python values, modes of torch and of the library.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from shardwise import modes
from shardwise.capture.binding import Binding, arguments_key
from shardwise.capture.captured_report import CapturedReport
from shardwise.capture.compiled_program import BACKENDS, compiled_program, is_rounded, largest, wide
from shardwise.capture.groups import recording_collectives
from shardwise.capture.leaving import Effect, Leaving, Unsettled
from shardwise.capture.local_optimizer import LocalStep, is_elementwise, recording_steps, state_shape
from shardwise.capture.program import Program, built
from shardwise.capture.program_file import SavedProgram
from shardwise.capture.program_folder import save_program
from shardwise.capture.reachable import Reachable, Slots, code_inside, global_hooks, is_own_code
from shardwise.capture.recorded_states import recording_states
from shardwise.capture.roots import RootFact, facts_of, shape_of
from shardwise.capture.snapshot import Snapshot, local_of, random_states
from shardwise.capture.tape import Call, Tape, Unit
from shardwise.capture.timeline import timeline_of
from shardwise.capture.value_reads import hooked_node, outside_randomness, refusing_conversions
from shardwise.capture.watch import Watch
from shardwise.core.cache import BoundedCache
from shardwise.debug.pictures.draw_timeline import Timeline
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.events import decision_made, route_started, scatter_started, tensor_entered, tensor_moved
from shardwise.fabric.base import on_new_world
from shardwise.fabric.nondeterministic import own_results
from shardwise.fabric.rank_generators import draws, listen_to_states
from shardwise.fabric.rank_threads import rank_threads
from shardwise.fabric.shared_writes import agree
from shardwise.fabric.virtual import parts_of
from shardwise.plan.cost import current_cost_model
from shardwise.tensor import DTensor, intercepted
from shardwise.torch_private import (
    dispatch_mode_count,
    function_mode_count,
    saved_tensor_hooks,
    transforms_active,
)

__all__ = ["Captured", "captured", "is_watched", "left_behind"]

_all: weakref.WeakSet[Any] = weakref.WeakSet()
_recording = threading.RLock()  # recording replaces functions of torch: one thread at a time
on_new_world.append(lambda: [each.forget() for each in list(_all)])
Result = TypeVar("Result")


MANY_UNSETTLED = 8  # calls in a row, after which there is a warning
REPEATS = 3  # runs of a program that differs from its function, to see whether it differs from itself


class _Entry(NamedTuple):
    """A program with the descriptions of its results."""

    program: Program
    result: Any
    effects: tuple[Effect, ...]
    written: tuple[int, ...]  # positions of tensors whose memory it writes to
    renewed: tuple[tuple[int, int], ...]  # positions of tensors that get another gradient in place of one
    changes_slots: bool  # whether it changes more than values and gradients
    reads_states: bool  # whether it reads states of optimizers besides their steps, which the fast guard passes over
    roots: tuple[RootFact, ...]  # facts of the tensors that it was recorded with
    arguments: Any  # the description of the arguments
    kept: Any  # the objects that its key names by identity


class Captured(Generic[Result]):
    """A captured function; made by `captured`."""

    is_captured = True

    def __init__(
        self,
        function: Callable[..., Result],
        max_programs: int,
        verify: bool,
        backend: str | None = None,
        overlap: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.verify = verify
        self.backend = backend
        self.overlap = overlap
        self.programs: BoundedCache[Any, _Entry] = BoundedCache(max_programs)
        self._codes: dict[Any, None] = {}
        self._last: _Entry | None = None
        self._binding: Binding | None = None
        self._unsettled = 0
        _all.add(self)

    def forget(self) -> None:
        """Drop all programs."""
        self.programs = BoundedCache(self.programs.limit)
        self._binding = None

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
        entry = self._ran_last()
        program, roots = entry.program.recorded, dict(enumerate(entry.roots))
        recorded = SavedProgram(program, {}, roots, entry.arguments, entry.result, entry.effects, entry.written)
        save_program(path, recorded, objects)

    def _ran_last(self) -> _Entry:
        if self._last is None:
            raise UnsupportedError(
                "there is no program yet", hint="the first call of a captured function runs as always; call it twice"
            )
        return self._last

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if is_watched():
            return self.function(*args, **kwargs)
        ambient, binding = _ambient(), self._binding
        if binding is None or not binding.holds():
            binding = self._binding = None
        if binding is not None and not kwargs and (quick := arguments_key(args, binding.state)) is not None:
            entry = binding.entries.get((ambient, quick))
            if entry is not None:
                return self._run(entry, binding, args, ())
        state = self._reach() if binding is None else binding.state
        given = Reachable(self._codes, self._is_tuned, state)
        given.visit(args, "arguments")
        given.visit(kwargs, "arguments")
        key = (ambient, state.key, given.key)
        entry = self.programs.get(key)
        if entry is None:
            self._binding = None
            return self._first(key, state, given, args, kwargs)
        if binding is None:
            binding = self._binding = Binding(state)
        if not kwargs and (quick := arguments_key(args, state)) is not None:
            binding.entries[ambient, quick] = entry
        return self._run(entry, binding, given.tensors, given.slots)

    def _is_tuned(self, optimizer: Any) -> bool:
        return is_elementwise(optimizer) and not any("param_groups" in code.co_names for code in self._codes)

    def _reach(self) -> Reachable:
        found = Reachable(self._codes, self._is_tuned)
        found.visit(self.function, getattr(self.function, "__name__", "function"))
        for table in global_hooks():
            found.visit(table, "hooks of all modules and optimizers")
        return found

    def _run(self, entry: _Entry, binding: Binding, given: Sequence[Any], slots: Sequence[Slots]) -> Any:
        """Execute a program, and build the objects that it leaves."""
        self._last = entry
        state = binding.state
        roots = [*state.tensors, *given]
        inputs = [*binding.inputs, *(part for tensor in given for part in parts_of(local_of(tensor)))]
        with torch.no_grad():
            values = entry.program.run(inputs)
        result = left_behind(entry, values, roots, [*state.slots, *slots] if entry.changes_slots else ())
        if entry.changes_slots or entry.reads_states or (entry.renewed and not binding.renew(entry.renewed)):
            self._binding = None
        return result

    # ---------------------------------------------------------------- recording

    def _first(self, key: Any, state: Reachable, given: Reachable, args: Any, kwargs: Any) -> Any:
        """Run as always, and record. The call after which all code of the program is known is the first recorded."""
        code = getattr(self.function, "__code__", None)
        knows = bool(self._codes)
        if not knows and code is not None:
            self._codes[code] = None
            state = self._reach()
            given = Reachable(self._codes, self._is_tuned, state)
            given.visit((args, kwargs), "arguments")
        if knows and (problems := [*state.problems, *given.problems]):
            raise UnsupportedError(
                f"captured: the function can read {problems[0]}; changes of it cannot be detected",
                hint="pass plain data and tensors, and do not use such objects in the captured function",
            )
        roots = [*state.tensors, *given.tensors]
        slots = [*state.slots, *given.slots]
        if any(part.is_meta for root in roots for part in parts_of(local_of(root))):  # a dry run
            return self.function(*args, **kwargs)
        stepped = [*state.stepped, *given.stepped]
        for each in stepped:
            each.settle()
        if any(map(hooked_node, roots)):
            raise UnsupportedError(
                "captured: there are hooks on the node of autograd that adds to the gradient of a tensor, which cannot "
                "be compared from call to call",
                hint="use tensor.register_hook or tensor.register_post_accumulate_grad_hook",
            )
        before = Snapshot(slots, roots)
        tape = Tape(before.parts, only_checks=not knows)
        shape = state_shape(state.optimizers)
        randomness = outside_randomness()
        try:
            with (
                _recording,
                torch.autograd.set_multithreading_enabled(False),  # so that hooks run where they are watched
                recording_steps(tape),
                recording_collectives(tape),
                listen_to_states(tape),
                own_results(),
                modes.recorded(),
                tape.sites.tracking(),
                recording_states(tape),
                refusing_conversions(tape),
                tape,
                Watch(lambda: tape.is_paused) as watch,
            ):
                result = self.function(*args, **kwargs)
                for each in stepped:
                    each.settle()
            if tape.refusal is not None:
                raise tape.refusal
            if tape.is_flying:
                raise UnsupportedError(
                    "captured: a collective is issued by other means than the methods of a process group",
                    hint="use torch.distributed or shardwise for it",
                )
            if watch.problem is not None:
                what, line, hint = watch.problem
                raise UnsupportedError(f"captured: {what} (at {line})", hint=hint)
            if knows and outside_randomness() != randomness:  # the first call may import modules that draw some
                raise UnsupportedError(
                    "captured: random numbers of numpy are drawn, which a program would not repeat",
                    hint="draw them outside and pass tensors, or use torch's random operators",
                )
            new = [code for code in watch.codes if code not in self._codes]
            if not new and knows:
                self._check_reached(watch, state, given)
            if new or not knows or shape != state_shape(state.optimizers):
                if new:
                    self._codes.update(watch.codes)
                    self.forget()
                return result
            try:
                entry = self._entry(tape, watch, state, given, before, slots, roots, result)
            except Unsettled as unsettled:
                self._unsettle(str(unsettled))
                return result
            positions = {id(root): at for at, root in enumerate(roots)}
            entry = entry._replace(arguments=shape_of((args, kwargs), positions))
            received = dict(entry.program.received)
            if self.verify:
                result = self._verify(entry, tape, before, roots)
            if self.backend is not None:
                entry, result = self._compile(entry, self.backend, received, before, roots)
        except ShardwiseError:
            for each in stepped:
                each.abandon()
            before.restore()
            raise
        self._unsettled = 0
        self.programs.keep(key, entry)
        self._last = entry
        return result

    @staticmethod
    def _check_reached(watch: Watch, *reached: Reachable) -> None:
        """All code of the program that runs must be that of functions which were reached, whose values are guarded."""
        known = code_inside(function.__code__ for each in reached for function in each.functions)
        for code in watch.codes:
            if code not in known and not is_own_code(code.co_filename):
                raise UnsupportedError(
                    f"captured: the function calls {code.co_name} "
                    f"({code.co_filename}:{code.co_firstlineno}), which it does not reach by its variables, so that "
                    "changes of what that reads cannot be detected",
                    hint="call it by a name, an attribute or an item of a list or dict",
                )

    def _unsettle(self, why: str) -> None:
        """The step was not recorded. Caches fill once; a value that changes on every call would prevent it for ever."""
        self._unsettled += 1
        if self._unsettled == MANY_UNSETTLED:
            warnings.warn(
                f"captured: {self._unsettled} calls could not be recorded and ran as always; the last because {why}",
                stacklevel=4,
            )

    def _entry(
        self,
        tape: Tape,
        watch: Watch,
        state: Reachable,
        given: Reachable,
        before: Snapshot,
        slots: Sequence[Slots],
        roots: Sequence[torch.Tensor],
        result: Any,
    ) -> _Entry:
        random = any(isinstance(call, Call) and draws(call.op) for call in tape.calls)
        if watch.sets_state and random:
            raise UnsupportedError(
                "captured: random numbers are drawn, and a random state is put back that is not recorded",
                hint="only CPU states that torch keeps itself are recorded; elsewhere use preserve_rng_state=False",
            )
        for generator in tape.generators.values():
            known = any(id(generator) in reached._seen for reached in (state, given))
            if not known and all(generator is not other for other, _ in random_states()):
                raise Unsettled("a generator of random numbers is made by it")
        leaving = Leaving(tape, state, roots, watch.spent)
        described = leaving.describe(result, "the result")
        effects = tuple(leaving.changes(before, slots))
        meshes = [root._spec.mesh for root in roots if isinstance(root, DTensor)]
        program = Program(tape, tuple(leaving.values), _name(self.function), meshes)
        program.ranks = max((len(was.parts) for was in before.held), default=1)
        if self.overlap:
            program = program.overlapped()
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
            any(effect.kind != "grad" for effect in effects),
            _reads(program, state.states, before),
            facts_of(before.held, before.numbers, state.count),
            None,
            (state._kept, given._kept),
        )

    def _verify(self, entry: _Entry, tape: Tape, before: Snapshot, roots: list[torch.Tensor]) -> Any:
        """Run the program from the same state, and compare everything that it leaves with the result of the step."""
        program = entry.program
        wanted = {number: value.detach().clone() for number, value in program.outcome.items()}
        program.outcome = {}
        left = [part.detach().clone() for part in before.parts]
        random = random_states()

        def run() -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
            """The results of the program from the same state, and everything that it leaves."""
            values = _run_from(before, program)
            return values, [*values, *before.parts, *[state for _, state in random_states()]]

        expected = [*[wanted[number] for number in program.wanted], *left, *[state for _, state in random]]
        values, found = run()
        if not all(map(agree, found, expected)):
            first = [tensor.detach().clone() for tensor in found]
            is_noisy = False
            for _ in range(REPEATS):
                values, found = run()
                is_noisy = not all(map(agree, found, first))
                if is_noisy:
                    break
            for one, other, want in zip(first, found, expected, strict=True):
                if not agree(other, want) and not (is_noisy and is_within_noise(one, other, want)):
                    raise UnsupportedError(
                        f"captured: the recorded program gives other values than the function, in a tensor of shape "
                        f"{tuple(want.shape)}: it did something that is not an operator of torch",
                        hint="run the function as it is; writes to memory besides torch's operators cannot be captured",
                    )
        program.received = tape.received = {}
        return left_behind(entry, values, roots, before.slots)

    def _compile(
        self, entry: _Entry, backend: str, received: dict[int, Any], before: Snapshot, roots: list[torch.Tensor]
    ) -> tuple[_Entry, Any]:
        """Compile a program while it runs once more from the same state, and return it with what that run leaves."""
        entry.program.received = received
        program, values = compiled_program(entry.program, backend, functools.partial(_run_from, before))
        program.received = entry.program.received = {}
        entry = entry._replace(program=program)
        return entry, left_behind(entry, values, roots, before.slots)


def _run_from(before: Snapshot, program: Program) -> tuple[torch.Tensor, ...]:
    """The results of a program from a state, with the recorded results of collectives."""
    before.restore()
    with torch.no_grad():
        return program.verifying()(before.parts)


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
    result = built(entry.result, found, roots, made)
    for kind, target, value in entry.effects:
        if kind == "grad":
            roots[target].grad = built(value, found, roots, made)
        elif kind == "local":
            roots[target]._local_tensor = built(value[0], found, roots, made)  # pyright: ignore[reportAttributeAccessIssue]
            roots[target]._spec = value[1]  # pyright: ignore[reportAttributeAccessIssue]
        else:
            slots[target].put(built(value, found, roots, made))
    if entry.written:
        torch.autograd.graph.increment_version([roots[at] for at in entry.written])
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
        or any(each.is_active for each in intercepted.values())
        or any((route_started, scatter_started, decision_made, tensor_moved, tensor_entered))
        or rank_threads() is not None
        or torch.compiler.is_compiling()
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
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
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
) -> Captured[Result]:
    """Return `function` as one that runs as a program of local operators and collectives, without dispatch of DTensors.

    Args:
        function: a training step, an inference, any function of DTensors.
        max_programs: how many programs are kept, one for each combination of shapes, layouts and Python values.
        verify: compare a new program with the function, bit by bit, before it is used. A call that is recorded then
            takes the memory of the state twice more.
        backend: "inductor" compiles the operators between collectives. Values are then those of eager within rounding,
            which is checked when a program is recorded, and not its bits. "cudagraphs" launches them as CUDA graphs.
        overlap: wait for a collective only before the first operator that needs it. They are issued in the same order.

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
    return Captured(function, max_programs, verify, backend, overlap)
