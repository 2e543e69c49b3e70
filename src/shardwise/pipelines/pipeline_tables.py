"""Schedules of pipelines as data: for each rank the forwards and backwards of its stages, in order.

Stage `s` is on rank `s % ranks`. In schedules in the shape of a V the second half of the stages goes back from the last
rank to the first. A table has no times and no communication: an action waits for its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardwise.errors import LayoutError

__all__ = [
    "SCHEDULES",
    "Action",
    "Overlapped",
    "Table",
    "actions_of",
    "pipeline_table",
    "stage_ranks",
    "stages_on_each",
]


class Action(NamedTuple):
    """The forward, the backward, or a part of the backward of one microbatch through one stage.

    Example:
        >>> str(Action("F", 2, 0))
        '2F0'
    """

    kind: str  # "F", "B", or the parts of "B": "I" for the gradients of inputs, "W" for those of weights
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlapped(NamedTuple):
    """A forward and a backward of different stages of a rank, which may run at the same time.

    Example:
        >>> str(Overlapped(Action("F", 0, 2), Action("B", 3, 0)))
        '(0F2;3B0)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Table = list[list[Action | Overlapped]]  # the actions of each rank
V_SHAPED = frozenset({"zbv", "dualpipev"})
SEVERAL_STAGES = frozenset({"interleaved", "zb1p"})


def actions_of(row: Iterable[Action | Overlapped]) -> Iterator[Action]:
    """The actions of a rank one by one; an overlapped pair as forward, then backward."""
    for entry in row:
        if isinstance(entry, Action):
            yield entry
        else:
            yield from entry


def stages_on_each(schedule: str, stages_per_rank: int | None) -> int:
    """The number of stages of a rank: as requested, or as the schedule needs.

    Example:
        >>> stages_on_each("zbv", None), stages_on_each("1f1b", None), stages_on_each("interleaved", 3)
        (2, 1, 3)
    """
    if schedule not in SCHEDULES:
        raise LayoutError(f"no schedule named {schedule!r}", hint=f"there are {', '.join(SCHEDULES)}")
    wanted = 2 if schedule in V_SHAPED else 1
    if stages_per_rank is None:
        return wanted
    if stages_per_rank != wanted and schedule not in SEVERAL_STAGES:
        number = "two stages" if wanted == 2 else "one stage"
        raise LayoutError(
            f"the schedule {schedule!r} has {number} on each rank, not {stages_per_rank}",
            hint=f"use schedule='interleaved' or 'zb1p', or split the model into {wanted} x ranks stages",
        )
    return stages_per_rank


def stage_ranks(schedule: str, ranks: int, stages: int) -> list[int]:
    """The rank of each stage.

    Example:
        >>> stage_ranks("interleaved", 2, 4), stage_ranks("zbv", 2, 4)
        ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    if schedule in V_SHAPED:
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % ranks for stage in range(stages)]


def pipeline_table(schedule: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Table:
    """The actions of each rank.

    Args:
        schedule: "gpipe", "1f1b", "interleaved", "zb1p", "zbv" or "dualpipev".
        ranks: the number of ranks that have stages.
        microbatches: the number of parts of a batch.
        stages_per_rank: how many stages a rank has, for "interleaved" and "zb1p"; "zbv" and "dualpipev" have two, the
            others one.

    Example:
        >>> for actions in pipeline_table("1f1b", 2, 3):
        ...     print(*actions)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    each = stages_on_each(schedule, stages_per_rank)
    if min(ranks, microbatches, each) < 1:
        raise LayoutError(
            f"{ranks} ranks, {microbatches} microbatches, {each} stages on each", hint="at least 1 of each"
        )
    return SCHEDULES[schedule](ranks, microbatches, each)


def _gpipe(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """All forwards, then all backwards."""
    return [[Action(kind, rank, m) for kind in "FB" for m in range(microbatches)] for rank in range(ranks)]


def _one_forward_one_backward(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """A forward for each stage from this one to the last, then backwards and forwards in turn."""
    table: Table = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        actions: list[Action | Overlapped] = [Action("F", rank, m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action("B", rank, m))
            if m + ahead < microbatches:
                actions.append(Action("F", rank, m + ahead))
        table.append(actions)
    return table


def _interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """1F1B with several stages on each rank: microbatches go through them in rounds of one for each rank."""
    table: Table = []
    for rank in range(ranks):
        forwards, backwards = _in_rounds(rank, ranks, microbatches, stages_per_rank, "B")
        ahead = min(len(forwards), _ahead(ranks, microbatches, stages_per_rank) + 2 * (ranks - 1 - rank))
        row: list[Action | Overlapped] = [*forwards[:ahead]]
        for number, backward in enumerate(backwards):
            row += [*forwards[number + ahead : number + ahead + 1], backward]
        table.append(row)
    return table


def _zero_bubble(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """Interleaved, with fewer forwards ahead; rank r computes gradients of weights r backwards later."""
    table: Table = []
    for rank in range(ranks):
        forwards, backwards = _in_rounds(rank, ranks, microbatches, stages_per_rank, "I")
        ahead = min(len(forwards), _ahead(ranks, microbatches, stages_per_rank) + ranks - 1 - rank)
        weights = [action._replace(kind="W") for action in backwards]
        row: list[Action | Overlapped] = [*forwards[:ahead]]
        for number, backward in enumerate(backwards):
            row += [*forwards[number + ahead : number + ahead + 1], backward]
            row += weights[number - rank : number - rank + 1] if number >= rank else []
        table.append(row + weights[max(0, len(weights) - rank) :])
    return table


def _width(ranks: int, microbatches: int) -> int:
    """The number of microbatches in a round."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise LayoutError(
            f"{microbatches} microbatches do not make {rounds} equal rounds over {ranks} ranks",
            hint=f"use a multiple of {ranks}, or fewer than {2 * ranks}",
        )
    return microbatches // rounds


def _ahead(ranks: int, microbatches: int, stages_per_rank: int) -> int:
    """The number of forwards that the last rank runs before its first backward."""
    return (stages_per_rank - 1) * _width(ranks, microbatches)


def _in_rounds(rank: int, ranks: int, microbatches: int, each: int, kind: str) -> tuple[list[Action], list[Action]]:
    """The forwards and backwards of a rank with several stages, each in order."""
    width = _width(ranks, microbatches)
    order = [
        (chunk, first + at) for first in range(0, microbatches, width) for chunk in range(each) for at in range(width)
    ]
    forwards = [Action("F", chunk * ranks + rank, microbatch) for chunk, microbatch in order]
    backwards = [Action(kind, (each - 1 - chunk) * ranks + rank, microbatch) for chunk, microbatch in order]
    return forwards, backwards


class _VRow:
    """The actions of a rank with two stages of a V, one on each leg; microbatches in order.

    Args:
        down: the stage on the first leg, called 0 below.
        up: the stage on the second leg, called 1.
    """

    def __init__(self, down: int, up: int) -> None:
        self.actions: list[Action | Overlapped] = []
        self._stages = (down, up)
        self._counts: dict[str, int] = {}
        self._split: list[Action] = []  # gradients of weights that are still to be computed

    def add(self, program: Sequence[str], times: int = 1) -> None:
        """Append steps: "F0", "I1", "B0", "W" (the oldest that waits), "W1", or an overlapped pair, "F0B1"."""
        for _ in range(times):
            for step in program:
                if len(step) == 4:
                    self.actions.append(Overlapped(self._next(step[:2]), self._next(step[2:])))
                elif step == "W":
                    self.actions.append(self._split.pop(0)._replace(kind="W"))
                else:
                    self.actions.append(self._next(step))

    def _next(self, step: str) -> Action:
        counted = step.replace("B", "I")  # a full backward includes that of the inputs
        number = self._counts[counted] = self._counts.get(counted, 0) + 1
        action = Action(step[0], self._stages[int(step[1])], number - 1)
        if step[0] == "I":
            self._split.append(action)
        return action


def _zbv(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """Zero bubble in the shape of a V: no rank waits if forward and both parts of backward take equally long."""
    count = max(microbatches, 2 * ranks - 1)  # for fewer microbatches, actions of missing ones are removed
    table: Table = []
    for rank in range(ranks):
        after = ranks - rank
        row = _VRow(rank, 2 * ranks - 1 - rank)
        row.add(["F0"], 2 * after - 1)
        row.add(["F1", "F0"], rank)
        row.add(["F1", "I1", "W1"], after)
        both = count - 2 * ranks + rank + 1
        row.add(["F0", "I0", "W0", "F1", "I1", "W1"], both)
        row.add(["I0", "W0", "F1", "I1", "W1"], count - ranks - both)
        row.add(["I0", "I1"], rank)
        row.add(["I0", "W0"], after)
        row.add(["W1"], rank)
        row.add(["W0"], rank)
        table.append([action for action in actions_of(row.actions) if action.microbatch < microbatches])
    return table


def _dualpipev(ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    """A V in which forwards of one of a rank's stages overlap with backwards of the other."""
    if microbatches < 2 * ranks:
        raise LayoutError(
            f"the schedule 'dualpipev' needs a microbatch for each of its {2 * ranks} stages, not {microbatches}",
            hint=f"use at least {2 * ranks} microbatches, or schedule='zbv'",
        )
    table: Table = []
    for rank in range(ranks):
        after = ranks - 1 - rank
        row = _VRow(rank, 2 * ranks - 1 - rank)
        row.add(["F0"], 2 * after)
        row.add(["F0", "F1"], rank + 1)
        row.add(["I1", "W", "F1"], after)
        steady = microbatches - 2 * ranks + rank + 1
        if not after:  # the last rank has nothing to overlap its first backward with
            row.add(["F0", "B1", "F1B0"])
            steady -= 1
        row.add(["F0B1", "F1B0"], steady)
        row.add(["B1", "F1B0"], after)
        ends = ["B1", "B0"] * (rank + 1)
        row.add(ends[: rank + 1])
        row.add([step.replace("B", "I") for step in ends[rank + 1 :]])
        row.add(["W", "I0"], after)
        row.add(["W"], rank + 1)
        table.append(row.actions)
    return table


SCHEDULES: dict[str, Callable[[int, int, int], Table]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb1p": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
