"""Schedules of pipelines as data: for each rank the forwards and backwards of its stages, in order.

Stage `s` is on rank `s % ranks`. A table says nothing about time or communication: an action waits for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.errors import LayoutError

__all__ = ["SCHEDULES", "Action", "Table", "pipeline_table"]


class Action(NamedTuple):
    """The forward or backward of one microbatch through one stage.

    Example:
        >>> str(Action("F", 2, 0))
        '2F0'
    """

    kind: str  # "F" or "B"
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Table = list[list[Action]]  # the actions of each rank


def pipeline_table(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Table:
    """The actions of each rank.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        ranks: how many ranks the stages are on.
        microbatches: into how many parts a batch is split.
        stages_per_rank: how many stages a rank has; more than one for "interleaved" alone.

    Example:
        >>> for actions in pipeline_table("1f1b", 2, 3):
        ...     print(*actions)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    if schedule not in SCHEDULES:
        raise LayoutError(f"no schedule named {schedule!r}", hint=f"there are {', '.join(SCHEDULES)}")
    if min(ranks, microbatches, stages_per_rank) < 1:
        raise LayoutError(
            f"{ranks} ranks, {microbatches} microbatches, {stages_per_rank} stages on each", hint="at least 1 of each"
        )
    if stages_per_rank > 1 and schedule != "interleaved":
        raise LayoutError(
            f"the schedule {schedule!r} has one stage on each rank, not {stages_per_rank}",
            hint="use schedule='interleaved', or split the model into as many stages as there are ranks",
        )
    return SCHEDULES[schedule](ranks, microbatches, stages_per_rank)


def _gpipe(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """All forwards, then all backwards."""
    return [[Action(kind, rank, m) for kind in "FB" for m in range(microbatches)] for rank in range(ranks)]


def _one_forward_one_backward(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """As many forwards as there are stages from here to the end, then a backward and a forward in turn."""
    table = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        actions = [Action("F", rank, m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action("B", rank, m))
            if m + ahead < microbatches:
                actions.append(Action("F", rank, m + ahead))
        table.append(actions)
    return table


def _interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """1F1B where each rank has several stages: microbatches go through them in rounds of as many as there are ranks."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise LayoutError(
            f"{microbatches} microbatches do not make {rounds} equal rounds over {ranks} ranks",
            hint=f"use a multiple of {ranks}, or fewer than {2 * ranks}",
        )
    width, total = microbatches // rounds, microbatches * stages_per_rank

    def action(kind: str, rank: int, number: int) -> Action:
        chunk = number // width % stages_per_rank
        chunk = chunk if kind == "F" else stages_per_rank - 1 - chunk
        return Action(kind, chunk * ranks + rank, number // (width * stages_per_rank) * width + number % width)

    table = []
    for rank in range(ranks):
        ahead = min(total, (stages_per_rank - 1) * width + 2 * (ranks - 1 - rank))
        actions = [action("F", rank, number) for number in range(ahead)]
        for number in range(total):
            if number + ahead < total:
                actions.append(action("F", rank, number + ahead))
            actions.append(action("B", rank, number))
        table.append(actions)
    return table


SCHEDULES: dict[str, Callable[[int, int, int], Table]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
}
