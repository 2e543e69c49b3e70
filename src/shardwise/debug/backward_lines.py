"""The user's line of an operator in backward: that of the forward operator whose gradient it computes."""

from __future__ import annotations

import torch

from shardwise import modes

__all__ = ["BackwardLines"]

MOST = 65536


class BackwardLines:
    """Remembers under which number autograd filed each forward operator, and the line that called it."""

    def __init__(self) -> None:
        self._lines: dict[int, str] = {}

    def note(self) -> None:
        """A forward operator has run: its node, if it has one, is the last that autograd numbered."""
        if _node() is not None:
            return
        number = torch.autograd._get_sequence_nr() - 1
        if number not in self._lines:  # an operator without a gradient comes after its node: the first one is it
            if len(self._lines) >= MOST:
                del self._lines[next(iter(self._lines))]
            self._lines[number] = modes.user_line()

    def here(self) -> tuple[str, bool]:
        """The line that runs now, or in backward the line that caused it, and whether this is backward."""
        node = _node()
        if node is None:
            return modes.user_line(), False
        return self._lines.get(node._sequence_nr(), modes.user_line()), True


def _node() -> torch.autograd.graph.Node | None:
    return torch._C._current_autograd_node()
