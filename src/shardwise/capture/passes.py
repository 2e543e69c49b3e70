"""The passes over a recorded program, in their order.

First those that change which collectives there are, which all ranks must do alike; then those that each rank is free
to take.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.capture.buckets import with_buckets
from shardwise.capture.copy_propagation import without_copies, without_dead_collectives
from shardwise.capture.program import Program
from shardwise.capture.recomputation import recomputed
from shardwise.capture.schedule_check import check_collectives, check_refusals
from shardwise.capture.shared_gathers import with_shared_gathers
from shardwise.errors import UnsupportedError

__all__ = ["Passes"]


class Passes(NamedTuple):
    """Which passes run; the parameters of `captured`."""

    overlap: bool = False
    remove_copies: bool = True
    share_gathers: int = 0
    remove_dead: bool = False
    bucket: int = 0
    bucket_sums: bool = False
    max_bytes: int | None = None

    def apply(self, program: Program) -> Program:
        """The program after all passes. Its `simple` is the one to which `local` applies if this has other bits."""
        if self.share_gathers:
            program = with_shared_gathers(program, self.share_gathers)
        if self.remove_dead:
            program = without_dead_collectives(program)
        if self.bucket:
            program = with_buckets(program, self.bucket, self.bucket_sums)
        changed = [name for name in ("share_gathers", "remove_dead", "bucket") if getattr(self, name)]
        if changed:
            check_collectives(program, " and ".join(changed), moved=bool(self.bucket))
        simple = None
        if self.remove_copies:
            program = without_copies(program)
            simple = program.simple
        program = self._within_bounds(program)
        program.simple = simple
        return program

    def _within_bounds(self, program: Program) -> Program:
        """`local`; if one rank cannot meet `max_bytes`, all refuse: none waits for it in the next step."""
        if self.max_bytes is None:
            return self.local(program)
        refused, made = None, program
        try:
            made = self.local(program)
        except UnsupportedError as error:
            refused = error
        check_refusals(program, refused)
        return made

    def local(self, program: Program) -> Program:
        """The passes after the removal of copies, which leave collectives in their order."""
        if self.max_bytes is not None:
            program = recomputed(program, self.max_bytes)
        return program.overlapped() if self.overlap else program
