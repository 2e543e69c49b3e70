"""A call of a captured function that runs as always and is recorded: its state before, and what it is refused for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from shardwise import modes
from shardwise.capture.groups import recording_collectives
from shardwise.capture.local_optimizer import recording_steps, state_shape
from shardwise.capture.program_code import code_inside, is_own_code
from shardwise.capture.reachable import Reachable
from shardwise.capture.recorded_states import recording_states
from shardwise.capture.snapshot import Snapshot
from shardwise.capture.tape import Tape
from shardwise.capture.value_reads import guarding_conversions, hooked_node, outside_randomness
from shardwise.capture.watch import Watch
from shardwise.errors import UnsupportedError
from shardwise.fabric.nondeterministic import own_results
from shardwise.fabric.rank_generators import listen_to_states
from shardwise.tensor import DTensor
from shardwise.torch_private import tree_leaves

__all__ = ["RecordedCall"]

_recording = threading.RLock()  # recording replaces functions of torch: one thread at a time


class RecordedCall:
    """A call with the state that it starts from, its tape, and the code that it ran.

    Args:
        state: everything that the function reaches.
        given: everything that its arguments reach.
        knows: whether code of the program has run before; otherwise nothing is recorded.
        guards_reads: whether values may be read from tensors, to be compared on later calls.
    """

    def __init__(self, state: Reachable, given: Reachable, knows: bool, guards_reads: bool) -> None:
        self.state, self.given, self.knows = state, given, knows
        self.roots = [*state.tensors, *given.tensors]
        self.slots = [*state.slots, *given.slots]
        self._stepped = [*state.stepped, *given.stepped]
        self._settle()
        if any(map(hooked_node, self.roots)):
            raise UnsupportedError(
                "captured: there are hooks on the node of autograd that adds to the gradient of a tensor, which cannot "
                "be compared from call to call",
                hint="use tensor.register_hook or tensor.register_post_accumulate_grad_hook",
            )
        self.before = Snapshot(self.slots, self.roots, [*state.generators, *given.generators])
        self.tape = Tape(self.before.parts, only_checks=not knows, guards_reads=guards_reads)
        self.watch = Watch(lambda: self.tape.is_paused)
        self._shape = state_shape(state.optimizers)
        self._randomness = outside_randomness()

    def _settle(self) -> None:
        for each in self._stepped:
            each.settle()

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of the function. Raises where a program could not repeat the call."""
        tape = self.tape
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
            guarding_conversions(tape),
            tape,
            self.watch,
        ):
            result = function(*args, **kwargs)
            for leaf in tree_leaves(result):
                if isinstance(leaf, DTensor):
                    _ = leaf._local_tensor  # a view whose base was written to is computed again at its next use
            self._settle()
        self._refuse()
        return result

    def _refuse(self) -> None:
        if self.tape.refusal is not None:
            raise self.tape.refusal
        if self.tape.is_flying:
            raise UnsupportedError(
                "captured: a collective is issued by other means than the methods of a process group",
                hint="use torch.distributed or shardwise for it",
            )
        if self.watch.problem is not None:
            what, line, hint = self.watch.problem
            raise UnsupportedError(f"captured: {what} (at {line})", hint=hint)
        if self.knows and outside_randomness() != self._randomness:  # the first call may import modules that draw some
            raise UnsupportedError(
                "captured: random numbers of numpy are drawn, which a program would not repeat",
                hint="draw them outside and pass tensors, or use torch's random operators",
            )

    @property
    def makes_states(self) -> bool:
        """Whether states of optimizers were made, as the first step does."""
        return self._shape != state_shape(self.state.optimizers)

    def check_reached(self) -> None:
        """All code of the program that ran must be that of functions which were reached, whose values are guarded."""
        reached = (self.state, self.given)
        known = code_inside(function.__code__ for each in reached for function in each.functions)
        for code in self.watch.codes:
            if code not in known and not is_own_code(code.co_filename):
                raise UnsupportedError(
                    f"captured: the function calls {code.co_name} "
                    f"({code.co_filename}:{code.co_firstlineno}), which it does not reach by its variables, so that "
                    "changes of what that reads cannot be detected",
                    hint="call it by a name, an attribute or an item of a list or dict",
                )
        for variable, line in self.watch.variables.items():
            if not any(each.knows(variable) for each in reached):
                raise UnsupportedError(
                    f"captured: the ContextVar {variable.name!r} is used (at {line}), which the function does not "
                    "reach by its variables, so that changes of it cannot be detected",
                    hint="keep it in a global name, an attribute or a closure",
                )

    def abandon(self) -> None:
        """Put everything back as it was before the call."""
        for each in self._stepped:
            each.abandon()
        self.before.restore()
