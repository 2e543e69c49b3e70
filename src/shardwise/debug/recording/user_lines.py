"""The user's line of a call, in forward and in backward: by Python's frames and autograd's sequence numbers."""

from __future__ import annotations

import os
from types import FrameType
from typing import NamedTuple

import torch

from shardwise.core.cache import BoundedCache
from shardwise.debug.recording.records import NO_LINE, SourceLine
from shardwise.events import user_frame, user_line
from shardwise.torch_private import autograd_sequence_number, current_autograd_node

__all__ = ["BackwardLines", "StackLines", "stack_lines"]

MOST_LINES = 65536
CHECKPOINTS = os.path.join(os.path.dirname(torch.__file__), "utils", "checkpoint.py")


class StackLines(NamedTuple):
    """The user's lines on the Python stack.

    Args:
        inner: the innermost user line, up to the start of backward; NO_LINE if there is none.
        called: the user line that started backward; NO_LINE in forward.
        recomputing: whether a checkpointed forward is recomputed.
    """

    inner: SourceLine
    called: SourceLine
    recomputing: bool


def stack_lines(in_backward: bool) -> StackLines:
    """The user's lines on this thread's stack."""
    inner, recomputing, past_engine = NO_LINE, False, False

    def passing(frame: FrameType) -> None:
        nonlocal recomputing, past_engine
        if in_backward and not past_engine:
            recomputing |= inner is not NO_LINE and frame.f_code.co_filename == CHECKPOINTS
            past_engine = frame.f_code.co_name == "_engine_run_backward"

    frame = user_frame(passing=passing)
    while frame is not None and not past_engine:
        inner = _source_line(frame) if inner is NO_LINE else inner
        frame = user_frame(frame.f_back, passing) if in_backward and frame.f_back is not None else None
    return StackLines(inner, NO_LINE if frame is None else _source_line(frame), recomputing)


def _source_line(frame: FrameType) -> SourceLine:
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


class BackwardLines:
    """Maps the autograd sequence number of each forward operator to the user's line that called it."""

    def __init__(self) -> None:
        self._lines: BoundedCache[int, str] = BoundedCache(MOST_LINES)

    def note(self) -> None:
        """Store the line of the forward operator that just ran: autograd numbered its node last."""
        if _node() is not None:
            return
        number = autograd_sequence_number() - 1
        if number not in self._lines:  # operators without a gradient repeat the last number: keep the first line
            self._lines.keep(number, user_line())

    def here(self) -> tuple[str, bool]:
        """The current user line (in backward the line of the forward operator), and whether this is backward."""
        node = _node()
        if node is None:
            return user_line(), False
        return self._lines.get(node._sequence_nr(), user_line()), True


def _node() -> torch.autograd.graph.Node | None:
    return current_autograd_node()
