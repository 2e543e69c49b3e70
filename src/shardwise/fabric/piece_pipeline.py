"""Runs a route in pieces, so that collectives of several pieces are in flight at once on different links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.fabric.base import BoundStep
from shardwise.plan.route_pieces import Pieces

__all__ = ["run_in_pieces"]


def run_in_pieces(starts: Sequence[Callable[[torch.Tensor], Callable[[], torch.Tensor]]], pieces: Pieces) -> BoundStep:
    """The callable that takes a local through all steps, piece by piece.

    Every rank issues the same collectives in the same order: turn by turn, in each turn by step.

    Args:
        starts: for each step a function that starts it on a piece and returns the function that waits for it.
        pieces: how the local is cut.
    """
    dim, count = pieces

    def move_in_pieces(local: torch.Tensor) -> torch.Tensor:
        size = local.shape[dim] // count
        moving: dict[int, torch.Tensor] = {}
        result = None
        for turn in range(count + len(starts) - 1):
            if turn < count:
                moving[turn] = local.narrow(dim, turn * size, size).contiguous()
            begun = [
                (turn - number, start(moving[turn - number]))
                for number, start in enumerate(starts)
                if turn - number in moving
            ]
            for piece, wait in begun:
                moving[piece] = wait()
            done = turn - len(starts) + 1
            if done >= 0:
                last = moving.pop(done)
                if result is None:
                    shape = list(last.shape)
                    shape[dim] *= count
                    result = last.new_empty(shape)
                result.narrow(dim, done * last.shape[dim], last.shape[dim]).copy_(last)
        assert result is not None, "a route has pieces and steps"
        return result

    return move_in_pieces
