"""Whose line is running, in forward and in backward. Reads Python's frames; knows nothing of operators."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch

from shardwise import modes
from shardwise.debug.records import NOWHERE, Where

__all__ = ["Standing", "standing"]

CHECKPOINTS = os.path.join(os.path.dirname(torch.__file__), "utils", "checkpoint.py")


class Standing(NamedTuple):
    """Where the program stands.

    Args:
        inner: the innermost line of the user's, up to where backward was started; NOWHERE if there is none.
        called: the line of the user's that started backward; NOWHERE in forward.
        recomputing: whether a checkpointed forward is run again.
    """

    inner: Where
    called: Where
    recomputing: bool


def standing(in_backward: bool) -> Standing:
    """The user's lines on the stack of this thread."""
    frame = sys._getframe(1)
    inner, called, recomputing, past_engine = NOWHERE, NOWHERE, False, False
    while frame is not None:
        code = frame.f_code
        if modes.is_library_file(code.co_filename):
            if in_backward and not past_engine:
                recomputing |= inner is not NOWHERE and code.co_filename == CHECKPOINTS
                past_engine = code.co_name == "_engine_run_backward"
        elif past_engine:
            called = _where(frame)
            break
        elif inner is NOWHERE:
            inner = _where(frame)
            if not in_backward:
                break
        frame = frame.f_back
    return Standing(inner, called, recomputing)


def _where(frame: Any) -> Where:
    return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
