"""Records the operators and collectives that run on locals, while a step runs as always.

A value of the tape is a plain tensor of one rank. Tensors are distinguished by identity; a new one in known
memory (autograd makes such ones without an operator) is a view of a known value. Anything else is refused.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.capture.call_sites import CallSites
from shardwise.core.dispatch_keys import seeing
from shardwise.errors import UnsupportedError
from shardwise.events import is_library_file, user_line
from shardwise.fabric.rank_generators import draws
from shardwise.fabric.rank_tensor import RankTensor, parts_of
from shardwise.fabric.shared_writes import written_arguments
from shardwise.tensor import DTensor
from shardwise.torch_private import DispatchKey, OpOverload, TorchDispatchMode, tree_flatten, tree_leaves, tree_map

__all__ = ["Call", "Const", "Geometry", "Ref", "Tape", "Unit", "ValueRead", "made_by", "refs_of", "refused"]

_ASSERTED = (
    torch.ops.aten.equal.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,  # the same, called below autograd
)
# Functions of the library that read values only to raise where they are not as they must be.
_CHECKS = frozenset({"agree", "check_agreement", "_gradient", "_same", "_words", "is_sequential"})
_CONSTANT_CHECKS = frozenset(
    {"_is_filled", "laid_out_gradient"}
)  # those whose answer is fixed if the values depend on no tensor before
_HERE, _OWN = (str(folder) for folder in Path(__file__).parents[:2])
_MASKS = (torch.bool, torch.uint8)
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def _is_check(names: frozenset[str] = _CHECKS) -> bool:
    """Whether a value is read by a check of the library, which must come out alike each time."""
    frame = sys._getframe(1)
    while frame is not None:
        filename, name = frame.f_code.co_filename, frame.f_code.co_name
        if name in names and filename.startswith(_OWN):
            return True
        if not is_library_file(filename):
            return False
        frame = frame.f_back
    return False


def refused(what: str, hint: str) -> UnsupportedError:
    """The error for a step that cannot be captured, with the user's line.

    The tape remembers it: the step may catch it, and go on otherwise than it would without `captured`.
    """
    error = UnsupportedError(f"captured: {what} (at {user_line()})", hint=hint)
    if _recording and _recording[-1].refusal is None and _recording[-1].is_own_thread():
        _recording[-1].refusal = error
    return error


@dataclass(frozen=True)  # a leaf of trees, which a named tuple is not
class Ref:
    """A value of the tape, by its number."""

    number: int


@dataclass(frozen=True)
class Const:
    """A tensor that Python numbers were made into; copied for each run if it is written to."""

    number: int


class Geometry(NamedTuple):
    """Shape, strides, offset and dtype of a tensor in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        return Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


class Call(NamedTuple):
    """One operator or collective: its arguments with `Ref` in place of tensors, and the values that it makes."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any  # the structure of the result, with a Ref for each tensor
    line: str
    expected: Any = None  # the result that an operator without tensors must give again; of a collective, its options
    writes: tuple[int, ...] = ()  # numbers of the values that it writes to


class Unit(NamedTuple):
    """Something that runs as Python when the program runs: the step of an optimizer on locals."""

    run: Callable[..., Any]
    reads: tuple[Ref, ...]
    line: str
    writes: tuple[int, ...] = ()
    name: str = "unit"  # what the program calls it
    made: tuple[Ref, ...] = ()  # the values that it returns


class ValueRead(NamedTuple):
    """A value that became one of Python."""

    position: int  # of the next call
    op: Any
    args: tuple[Any, ...]  # with a Ref for each tensor
    value: Any
    line: str


def refs_of(call: Call | Unit) -> list[Ref]:
    """The values that a call is given, in order."""
    if isinstance(call, Unit):
        return list(call.reads)
    found: list[Ref] = []
    _collect_refs(call.args, found)
    _collect_refs(call.kwargs, found)
    return found


def _collect_refs(value: Any, found: list[Ref]) -> None:
    """The values in a tree of arguments. It is asked for often, and torch's trees are general and slow."""
    kind = value.__class__
    if kind is Ref:
        found.append(value)
    elif kind is list or isinstance(value, tuple):
        for item in value:
            _collect_refs(item, found)
    elif kind is dict:
        for item in value.values():
            _collect_refs(item, found)


def made_by(call: Call | Unit) -> list[Ref]:
    """The values that a call makes; not those that it gives back."""
    if isinstance(call, Unit):
        return list(call.made)
    given = {ref.number for ref in refs_of(call)}
    leaves: list[Ref] = []
    _collect_refs(call.made, leaves)
    return [leaf for leaf in leaves if leaf.number not in given]


class _Unwatched:
    """Inside, `Watch` notes nothing: for code of the tape, which runs for each operator and calls none of the program.

    Python calls it at each call and return of Python and of C, which was most of the time that recording took.
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        self._previous = sys.getprofile()
        sys.setprofile(None)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(self._previous)


class _Memory(NamedTuple):
    storage: Any  # a weak reference
    values: list[tuple[int, Geometry]]


class _Given(NamedTuple):
    """The arguments of a call that is to be run."""

    args: Any = ()
    kwargs: Any = None
    is_recorded: bool = False


class Tape(TorchDispatchMode):
    """The mode under which a step is recorded.

    Args:
        inputs: the plain tensors that exist before the step; their numbers are their positions.
        only_checks: refuse calls that cannot be repeated, and record nothing.
        guards_reads: note values that are read from tensors, and do not refuse them.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], only_checks: bool = False, guards_reads: bool = False) -> None:
        super().__init__()
        self.only_checks = only_checks
        self.guards_reads = guards_reads
        self.reads: list[ValueRead] = []
        self.read_count = 0
        self.refusal: UnsupportedError | None = None  # the first
        self._thread = threading.get_ident()
        self.calls: list[Call | Unit] = []
        self.constants: list[torch.Tensor] = []
        self.received: dict[int, list[torch.Tensor]] = {}  # results of collectives, by their position in `calls`
        self.count = 0
        self.memory_of: dict[int, int] = {}  # value -> the value that its memory was first known by
        self.geometry: dict[int, Geometry] = {}  # of each value, when it was made
        self.bytes_of: dict[int, int] = {}  # of each memory, by the value that it was first known by
        self.device_of: dict[int, torch.device] = {}  # of each memory
        self.sites = CallSites()
        self.generators: dict[int, torch.Generator] = {}
        self.options: Any = None  # of the collective that is being issued
        self._flying: list[tuple[int, list[Any]]] = []  # collectives that were issued, with their tensors
        self._lifted: set[int] = set()
        self._paused = 0
        self._put_back: Callable[[], None] = lambda: None
        self._numbers: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._memories: dict[int, _Memory] = {}
        for tensor in inputs:
            self._new(tensor)

    def __enter__(self) -> Tape:
        super().__enter__()
        _recording.append(self)
        return self

    def __exit__(self, *args: Any) -> None:
        _recording.remove(self)
        super().__exit__(*args)

    def is_own_thread(self) -> bool:
        """Whether this thread is the one that is recorded."""
        return threading.get_ident() == self._thread

    # ---------------------------------------------------------------- values

    def _new(self, tensor: torch.Tensor) -> Ref:
        """A new value."""
        number, key = self.count, id(tensor)
        self.count += 1
        numbers, refs = self._numbers, self._refs
        if key not in numbers:

            def forget(_: Any) -> None:
                numbers.pop(key, None)
                refs.pop(key, None)

            numbers[key] = number
            refs[key] = weakref.ref(tensor, forget)
        self._remember(tensor, number)
        return Ref(number)

    def _remember(self, tensor: torch.Tensor, number: int) -> None:
        if tensor.layout is not torch.strided:
            raise refused(f"a tensor of the layout {tensor.layout} is made", "use dense tensors")
        storage = tensor.untyped_storage()
        where = id(storage)
        memory = self._memories.get(where)
        if memory is None:
            memories = self._memories
            memory = _Memory(weakref.ref(storage, lambda _: memories.pop(where, None)), [])
            self._memories[where] = memory
        geometry = self.geometry[number] = Geometry.of(tensor)
        memory.values.append((number, geometry))
        first = self.memory_of[number] = memory.values[0][0]
        self.device_of[first] = tensor.device
        self.bytes_of[first] = max(self.bytes_of.get(first, 0), storage.nbytes())

    def find(self, tensor: torch.Tensor) -> Ref | None:
        """The value of a tensor; a new view if it is in known memory; None if it is unknown."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return Ref(number)
        memory = self._memories.get(id(tensor.untyped_storage()))
        if memory is None:
            return None
        geometry = Geometry.of(tensor)
        for number, known in memory.values:
            if known == geometry:
                return Ref(number)
        for number, known in memory.values:
            if known.dtype is geometry.dtype:
                args = (Ref(number), geometry.shape, geometry.stride, geometry.offset)
                made = self._new(tensor)
                self._append(Call(torch.ops.aten.as_strided.default, args, {}, made, user_line()))
                return made
        return None

    def given(self, func: Any, tensor: torch.Tensor) -> Ref:
        """The value that a tensor is, which must be known."""
        if self.only_checks:
            return Ref(0)
        found = self.find(tensor)
        if found is None:
            raise refused(
                f"{func} is given a tensor of shape {tuple(tensor.shape)} that is neither reachable from the function "
                "nor made by an operator of it",
                "pass the tensor as an argument, or keep it in a variable, module or object that the function uses",
            )
        return found

    # ---------------------------------------------------------------- operators

    def pause(self) -> None:
        """From now on operators run and are not recorded."""
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    # ---------------------------------------------------------------- random states of virtual ranks

    def kept(self, generators: Sequence[torch.Generator]) -> None:
        states: list[torch.Tensor] = []

        def keep() -> None:
            states[:] = [generator.get_state() for generator in generators]

        def put_back() -> None:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

        if not self._paused:
            self._put_back = put_back
            self.generators.update({id(generator): generator for generator in generators})
            self.append_unit(Unit(keep, (), user_line(), name="keep_random_states"))

    def put_back(self) -> None:
        if not self._paused:
            self.append_unit(Unit(self._put_back, (), user_line(), name="put_random_states_back"))

    def same(self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
        self.pause()
        try:
            return all(map(torch.equal, left, right))
        finally:
            self.resume()

    def _append(self, call: Call | Unit) -> None:
        self.sites.note(len(self.calls))
        self.calls.append(call)

    def append_unit(self, unit: Unit) -> None:
        """Something that is repeated as Python."""
        self._append(unit)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor | RankTensor) for kind in types):
            if func in _ASSERTED and not self._paused and not _is_check():
                return self._read_replicated(func, args)
            return NotImplemented  # it comes back here as operators on locals
        if self._paused or func.namespace == "profiler":
            return _run(func, args, kwargs)
        with _Unwatched():
            given = self._given(func, types, args, kwargs)
        if given.__class__ is not _Given:
            return given
        result = _run(func, args, kwargs)
        if given.is_recorded:
            with _Unwatched():
                self._record(func, given.args, given.kwargs, result, args, kwargs)
        return result

    def _given(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The arguments of a call as values of the tape; the result where it is known without running it."""
        for kind in types:
            if kind not in _ORDINARY and not getattr(kind, "is_gathered", False):
                raise refused(f"{func} on a {kind.__name__}", "use other tensors")
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if func in _LIFTS:
            return self._constant(func, args[0])
        if func is torch.ops.aten.detach_.default:  # of a tensor that has no graph here; `torch.tensor` does so
            return _Given()
        if tensors and all(tensor.is_meta for tensor in tensors):
            return _Given()  # sizes are worked out
        if self.guards_reads and func in _ASSERTED and self._is_decision(tensors):
            return self._read(func, args)
        self._check(func, leaves)
        if self.only_checks:
            return _Given()
        known_args, known_kwargs = tree_map(lambda leaf: self._leaf(func, leaf), (args, dict(kwargs)))
        return _Given(known_args, known_kwargs, True)

    def _leaf(self, func: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.given(func, leaf)
        if isinstance(leaf, torch.Generator):
            self.generators[id(leaf)] = leaf
        return leaf

    def _check(self, func: OpOverload, leaves: Sequence[Any]) -> None:
        tags = func.tags
        if func in _ASSERTED and self._is_decision([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
            self.refuse_read()
        dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        if func is torch.ops.aten.index.Tensor:
            dynamic = any(isinstance(leaf, torch.Tensor) and leaf.dtype in _MASKS for leaf in leaves[1:])
        if dynamic and func not in _ASSERTED:
            raise refused(
                f"the sizes or values that {func} gives depend on the values of a tensor",
                "use an operator whose sizes do not (torch.where instead of a boolean mask), or do it outside",
            )
        if torch.Tag.inplace_view in tags:
            raise refused(f"{func} changes the shape of a tensor in place", "use the operator without the underscore")
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            raise refused(f"{func} has symbolic sizes", "do not capture a function that is being traced")

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that becomes a number of Python decides about the step."""
        return not self._paused and self._is_decision([tensor])

    def _is_decision(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether values are read that are neither Python's own nor compared by a check of the library."""
        if all(map(self._is_constant, tensors)) or _is_check():
            return False
        if not _is_check(_CONSTANT_CHECKS):
            return True
        return not self.only_checks and any(map(self._follows_from_state, tensors))

    def _follows_from_state(self, tensor: torch.Tensor) -> bool:
        """Whether a value may be another one on a later call: all but what operators make of no tensor at all."""
        makers = {ref.number: call for call in self.calls for ref in made_by(call)}
        written = {self.memory_of[number] for call in self.calls for number in call.writes}
        waiting = [self.given("a check", tensor).number]
        while waiting:
            number = waiting.pop()
            call = makers.get(number)
            if not isinstance(call, Call) or draws(call.op) or call.op.namespace == "c10d":
                return True
            if self.memory_of[number] in written:
                return True
            waiting += [ref.number for ref in refs_of(call)]
        return False

    def _read(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """Read a value, and note it."""
        given = tuple(self._leaf(func, arg) for arg in args)
        value = func(*args)
        self.read_count += 1
        if not self.only_checks:
            self.reads.append(ValueRead(len(self.calls), func, given, value, user_line()))
        return value

    def _read_replicated(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """Read the value of a DTensor, if each rank has it."""
        if not self.guards_reads:
            self.refuse_read()
        tensor = args[0]
        if len(args) > 1 or tensor.__class__ is not DTensor or not all(p.is_replicate() for p in tensor.placements):
            raise refused(
                "the value of a tensor is read that is not the same on all ranks",
                "give a plain tensor, or one that is replicated, so that ranks need not communicate before each call",
            )
        return self._read(func, (parts_of(tensor._local_tensor)[0],))

    def check_version_read(self) -> None:
        """The version of a tensor is read."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((_HERE, "<@beartype")):
            frame = frame.f_back
        if not self._paused and frame is not None and not is_library_file(frame.f_code.co_filename):
            raise refused("the version of a tensor is read", "do that outside")

    def refuse_read(self) -> None:
        raise refused(
            "the value of a tensor is read (item(), float(), bool(), torch.equal, an if or while on a tensor), and "
            "a decision by it would be fixed",
            "compute with the tensor, return it and read it outside, or see `reads` of `captured`",
        )

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made of Python's numbers."""
        return self._numbers.get(id(tensor)) in self._lifted

    def _constant(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """`torch.tensor(...)`: its numbers are Python's, which the key of the program holds."""
        result = func(tensor)
        position = len(self.constants)
        self.constants.append(tensor.detach().clone())
        made = self._new(result)
        self._lifted.add(made.number)
        self._append(Call(func, (Const(position),), {}, made, user_line()))
        return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, real_args: tuple[Any, ...], real_kwargs: Mapping[str, Any]
    ) -> None:
        writes = _written(func, args, kwargs)
        communicates = func.namespace == "c10d"
        if communicates:
            writes = tuple(leaf.number for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref))
            self._flying.append((len(self.calls), tree_leaves((real_args, real_kwargs))))
            made = None
        else:
            made = tree_map(self._made, result)
        found = tree_leaves(made)
        expected = self.options if communicates else None
        if not communicates and not any(isinstance(leaf, Ref) for leaf in found):
            expected = result if any(leaf is not None for leaf in found) else None
        self._append(Call(func, args, kwargs, made, user_line(), expected, writes))

    def arrived(self) -> None:
        """All collectives that were issued have been waited for."""
        for position, leaves in self._flying:
            self.received[position] = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._flying.clear()

    @property
    def is_flying(self) -> bool:
        """Whether a collective was issued by means that are not known."""
        return bool(self._flying)

    def _made(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        number = self._numbers.get(id(leaf))
        return self._new(leaf) if number is None else Ref(number)


_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


_recording: list[Tape] = []  # the tapes that are being recorded, the innermost last


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator of the program. Zeros without memory are some gradients; torch hides that they have none."""
    if any(isinstance(leaf, torch.Tensor) and leaf._is_zerotensor() for leaf in tree_leaves((args, kwargs))):
        with seeing(DispatchKey.ZeroTensor):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _written(func: OpOverload, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The numbers of the values that an operator writes to."""
    names = written_arguments(func)
    if not names:
        return ()
    bound = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    leaves, _ = tree_flatten([bound.get(name) for name in names])
    return tuple(leaf.number for leaf in leaves if isinstance(leaf, Ref))
