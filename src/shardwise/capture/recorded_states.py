"""Random states that checkpointing keeps in forward and puts back for a recomputation: as steps of a program.

A program draws from the generators as they are when it runs. So a state is kept and put back each time, where the
recorded call did; no state is part of a program.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch

from shardwise.capture.tape import Tape, Unit
from shardwise.events import user_line

__all__ = ["KeptState", "is_put_back", "recording_states"]


class KeptState:
    """The state of the CPU's default generator at one point of a program."""

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None

    def keep(self) -> None:
        """Remember the state."""
        self._state = torch.default_generator.get_state()

    def put_back(self) -> None:
        """Be in the state that was remembered."""
        assert self._state is not None
        torch.default_generator.set_state(self._state)


def is_put_back(frame: types.FrameType | None) -> bool:
    """Whether a random state is read or set by torch's `fork_rng` or by checkpointing."""
    for _ in range(5):
        if frame is None:
            return False
        if frame.f_code.co_name == "fork_rng" or frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def recording_states(tape: Tape) -> Iterator[None]:
    """Inside, states that checkpointing keeps and puts back are recorded.

    A state is known by the tensor that torch gave. Another one is put back and not recorded.
    """
    get, put = torch.get_rng_state, torch.set_rng_state
    known: dict[int, tuple[torch.Tensor, KeptState]] = {}  # with the tensors, so that identities stay theirs

    def get_rng_state() -> torch.Tensor:
        state = get()
        if tape.is_own_thread() and is_put_back(sys._getframe(1)) and not tape.is_paused:
            kept = KeptState()
            known[id(state)] = state, kept
            tape.append_unit(Unit(kept.keep, (), user_line(), name="keep_random_states"))
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        found = known.get(id(new_state))
        if found is None or tape.is_paused or not tape.is_own_thread():
            put(new_state)
        else:
            torch.default_generator.set_state(new_state)  # `Watch` recognizes calls from this file as recorded
            tape.append_unit(Unit(found[1].put_back, (), user_line(), name="put_random_states_back"))

    torch.get_rng_state, torch.set_rng_state = get_rng_state, set_rng_state
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = get, put
