"""The recorder: creates a record of every DTensor operator and redistribution while a listener is active.

Without a listener nothing is observed, at no cost.
Listeners receive events of all threads, because backward may run on any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise import modes
from shardwise.core.cache import BoundedCache
from shardwise.core.mode_stack import ModeStack
from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.debug.recording.module_tracker import ModuleTracker
from shardwise.debug.recording.records import (
    NO_LINE,
    MoveRecord,
    Operand,
    Record,
    SourceLine,
    moves_of_route,
    scatter_move,
)
from shardwise.debug.recording.user_lines import stack_lines
from shardwise.dispatch.decision import Decision
from shardwise.dispatch.signature import tensor_slots
from shardwise.events import route_started, scatter_started
from shardwise.fabric.base import rank_state
from shardwise.fabric.rank_threads import rank_threads
from shardwise.plan.cost import current_cost_model
from shardwise.plan.route import Route
from shardwise.plan.step import SendState
from shardwise.schema import op_info
from shardwise.tensor import DTensor, dispatcher, intercepted
from shardwise.torch_private import autograd_sequence_number, current_autograd_node, tree_leaves

__all__ = ["Listener", "listening"]

MAX_KNOWN = 16384
MAX_NODES = 2**20
EXPLICIT = ("redistribute", "full_tensor", "to_local", "from_local")
_LEAF = 2**63  # nodes that accumulate gradients have a number larger than all others


class Listener:
    """Receives the recorder's events. Base class: ignores all of them."""

    def begin(self, record: Record) -> None:
        """A record was created. Its outputs are filled in when the operator returns."""

    def move(self, record: Record, move: MoveRecord) -> None:
        """A collective of the record is about to be issued; raising an exception prevents it."""

    def module(self, module: nn.Module, path: str) -> None:
        """The forward of a module begins."""


class _State:
    """State of one recording."""

    def __init__(self) -> None:
        self.count = 0
        self.decisions: BoundedCache[Any, Decision] = BoundedCache(MAX_KNOWN)  # by key and cost model
        # by the sequence number of the forward operator's autograd node
        self.by_node: BoundedCache[int, Record] = BoundedCache(MAX_NODES)
        # by id: tensors, and the index of the record that made them
        self.made: BoundedCache[int, tuple[weakref.ref[torch.Tensor], int]] = BoundedCache(MAX_KNOWN)
        self.thread = threading.local()

    @property
    def open(self) -> list[Record]:
        """The records of operators now running on this thread, innermost last."""
        thread = self.thread
        if not hasattr(thread, "open"):
            thread.open, thread.nodes = [], autograd_sequence_number()
        return thread.open


modules = ModuleTracker()
_listeners = ModeStack[Listener]("listeners")
_lock = threading.RLock()
_state = _State()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send events to `listener`. The first listener on any thread switches recording on, the last one off."""
    with _lock:
        if not _listeners.values_anywhere():
            _switch_on()
        elif rank_threads() is not None and not _listeners.values():
            _exchange_state(None)
        entry = _listeners.enter(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.leave(entry)
            if not _listeners.values_anywhere():
                _switch_off()


def _switch_on() -> None:
    global _state
    _state = _State()
    assert _state.open == []
    for name, around in _around.items():
        intercepted[name].add(around, outermost=True)
    route_started.append(_on_route)
    scatter_started.append(_on_scatter)
    modules.start(_module_entered)


def _active_listeners() -> Iterable[Listener]:
    """The listeners of all threads, or of this thread's rank when ranks are threads; each once."""
    return dict.fromkeys(_listeners.values_anywhere() if rank_threads() is None else _listeners.values())


def _exchange_state(state: _State | None) -> _State:
    """Record into `state`, or into a new one for None. Returns the former state."""
    global _state
    former, _state = _state, state or _State()
    return former


rank_state.append(_exchange_state)


def _module_entered(module: nn.Module, path: str) -> None:
    for listener in _active_listeners():
        listener.module(module, path)


def _switch_off() -> None:
    global _state
    for name, around in _around.items():
        intercepted[name].remove(around)
    route_started.remove(_on_route)
    scatter_started.remove(_on_scatter)
    modules.stop()
    _state = _State()


# ---------------------------------------------------------------- around DTensor's methods


def _around_operator(
    run: Callable[..., Any], cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    if is_tracing():
        return run(cls, func, types, args, kwargs)
    state = _state
    record = _begin_record(state, str(func), "operator", *_describe_call(state, func, args, kwargs or {}))
    record.directly = modes.is_decomposing(func)
    _remember_node(state, record)
    return _execute_recorded(state, record, lambda: run(cls, func, types, args, kwargs))


def _around_explicit(name: str) -> Callable[..., Any]:
    """Recording of an explicit redistribution. Explicit calls inside it belong to the same record."""

    def around_explicit(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = _state
        if is_tracing() or (state.open and state.open[-1].kind == "explicit"):
            return run(*args, **kwargs)
        tensor = args[0] if args else None
        operands = (_operand(state, "self", tensor),) if isinstance(tensor, DTensor) else ()
        record = _begin_record(state, name, "explicit", operands, None)
        first = autograd_sequence_number()
        try:
            return _execute_recorded(state, record, lambda: run(*args, **kwargs))
        finally:
            for number in range(first, autograd_sequence_number()):
                state.by_node.setdefault(number, record)
            state.thread.nodes = autograd_sequence_number()

    return around_explicit


_around = {"__torch_dispatch__": _around_operator} | {name: _around_explicit(name) for name in EXPLICIT}


def _execute_recorded(state: _State, record: Record, call: Callable[[], Any]) -> Any:
    running = state.open
    running.append(record)
    try:
        result = call()
    except BaseException as error:
        record.error = type(error).__name__
        raise
    finally:
        record.ended = time.perf_counter()
        if running and running[-1] is record:
            running.pop()
    record.outputs = tuple(_note_results(state, record, result))
    return result


def _note_results(state: _State, record: Record, result: Any) -> Iterator[DTensorSpec]:
    for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
        if isinstance(tensor, DTensor):
            state.made.keep(id(tensor), (weakref.ref(tensor), record.index))
            yield tensor._spec


# ---------------------------------------------------------------- creating a record


def _begin_record(
    state: _State, name: str, kind: str, operands: tuple[Operand, ...], decision: Decision | None
) -> Record:  # fmt: skip
    running = state.open
    outer = running[-1] if running else None
    with _lock:
        index, state.count = state.count, state.count + 1
    phase, where, called, module, parent, cause = _call_context(state, outer)
    record = Record(
        index, name, kind, phase, where, called, module, parent, cause, operands, decision, started=time.perf_counter()
    )
    if outer is not None:
        outer.children.append(index)
    for listener in _active_listeners():
        listener.begin(record)
    return record


def _call_context(
    state: _State, outer: Record | None
) -> tuple[str, SourceLine, SourceLine, str, int | None, int | None]:
    """Phase, lines, module, parent and cause."""
    if outer is not None:  # part of a decomposition: inherits the context of the decomposed operator
        return outer.phase, outer.where, outer.called, outer.module, outer.index, outer.cause
    node: Any = current_autograd_node()
    inner, called, recomputing = stack_lines(node is not None)
    if node is None or recomputing:
        return "forward" if node is None else "recompute", inner, called, modules.current, None, None
    number = node._sequence_nr()
    cause = state.by_node.get(number)
    if cause is not None:
        return "backward", cause.where if inner is NO_LINE else inner, called, cause.module, None, cause.index
    owner = modules.owner_of(node.variable)[0] if number >= _LEAF else ""
    return "backward", called if inner is NO_LINE else inner, called, owner, None, None


def _describe_call(
    state: _State, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Operand, ...], Decision]:
    """The operands and the decision of a call. Keeps no reference to the tensors."""
    key = dispatcher.key(func, args, kwargs), current_cost_model()
    decision = state.decisions.get(key)
    if decision is None:
        decision = dispatcher.explain(key[0], func, args, kwargs)
        if not decision.by_values:
            state.decisions.keep(key, decision)
    found = tensor_slots(op_info(func), args, kwargs)
    operands = [_operand(state, _slot_name(slot), tensor) for slot, tensor in found if isinstance(tensor, DTensor)]
    return tuple(operands), decision


def _slot_name(slot: Any) -> str:
    return slot.name if slot.item is None else f"{slot.name}[{slot.item}]"


def _operand(state: _State, name: str, tensor: Any) -> Operand:
    module, parameter = modules.owner_of(tensor)
    made = state.made.get(id(tensor))
    made_by = made[1] if made is not None and made[0]() is tensor else None
    return Operand(name, tensor._spec, f"{module}.{parameter}" if parameter else "", made_by)


def _remember_node(state: _State, record: Record) -> None:
    """Map the autograd node of this operator to its record: autograd creates the node just before it dispatches."""
    nodes = autograd_sequence_number()
    if record.parent is None and nodes > state.thread.nodes and nodes - 1 not in state.by_node:
        state.by_node.keep(nodes - 1, record)
    state.thread.nodes = nodes


# ---------------------------------------------------------------- collectives


def _on_route(route: Route) -> None:
    """Add a route's collectives to the innermost record, or to a new one, as in backward of a redistribution."""
    if not is_tracing():
        name = "transfer" if any(isinstance(step, SendState) for step in route.steps) else route.steps[0].title
        _note_moves(moves_of_route(route), name, route.source, route.target).routes.append(route)


def _on_scatter(spec: DTensorSpec) -> None:
    _note_moves((scatter_move(spec),), "distribute_tensor", None, spec)


def _note_moves(moves: tuple[MoveRecord, ...], name: str, source: DTensorSpec | None, target: DTensorSpec) -> Record:
    state = _state
    running = state.open
    if running:
        record = running[-1]
    else:
        operands = () if source is None else (Operand("self", source, "", None),)
        record = _begin_record(state, name, "explicit", operands, None)
        record.outputs, record.ended = (target,), record.started
    for move in moves:
        for listener in _active_listeners():
            listener.move(record, move)
        record.moves.append(move)
        for outer in running[:-1]:
            outer.received_inside += move.received
    return record
