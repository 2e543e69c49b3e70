"""When each action of a schedule runs, given the times of stages: total time, idle time, microbatches in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.pipelines.pipeline_tables import Action, Overlapped, Table, actions_of

__all__ = ["Span", "Timeline", "Times", "timeline_of"]


class Span(NamedTuple):
    """An action, and when it begins and ends."""

    action: Action
    start: float
    stop: float


class Timeline(NamedTuple):
    """The actions of each rank in time. `print` shows a picture of letters, `draw` one of boxes.

    Args:
        ranks: the actions of each rank.
        in_flight: for each stage the largest number of microbatches with activations in memory at once.
    """

    ranks: tuple[tuple[Span, ...], ...]
    in_flight: Mapping[int, int]

    @property
    def seconds(self) -> float:
        """From the first action to the end of the last."""
        return max(spans[-1].stop for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they wait."""
        busy = sum(span.stop - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (self.seconds * len(self.ranks))

    def __str__(self) -> str:
        """A picture: a row for each rank; a forward is a digit, a backward a letter, a dot is idle.

        Of a backward in two parts, the gradients of weights are capital letters.
        """
        unit = min(span.stop - span.start for spans in self.ranks for span in spans)
        lines = []
        for rank, spans in enumerate(self.ranks):
            cells = ["."] * round(self.seconds / unit)
            for action, start, stop in spans:
                mark = _mark(action)
                for at in range(round(start / unit), round(stop / unit)):
                    cells[at] = mark
            lines.append(f"rank {rank}  {''.join(cells)}")
        split = any(span.action.kind == "W" for spans in self.ranks for span in spans)
        weights = ", those of weights A to J" if split else ""
        legend = f"idle {self.bubble:.1%}, forwards 0 to 9, backwards a to j{weights} (microbatch modulo 10)"
        return "\n".join([*lines, legend])


def _mark(action: Action) -> str:
    digit = action.microbatch % 10
    letter = "abcdefghij"[digit]
    return str(digit) if action.kind == "F" else letter.upper() if action.kind == "W" else letter


Times = float | Sequence[float]


def timeline_of(
    table: Table,
    forward: Times = 1.0,
    backward: Times = 2.0,
    send: float = 0.0,
    *,
    weight: Times | None = None,
    overlap: float = 1.0,
) -> Timeline:
    """When the actions of a table run, each as soon as its rank is free and its inputs are available.

    Args:
        table: the actions of each rank.
        forward: seconds of a forward of each stage, or of all.
        backward: seconds of a backward of each stage, or of all.
        send: seconds from the end of an action until another rank has its result.
        weight: the part of a backward's seconds that gradients of weights take; half of it by default.
        overlap: seconds of an overlapped forward and backward, as a fraction of those of both.

    Example:
        >>> from shardwise.pipelines.pipeline_tables import pipeline_table
        >>> print(timeline_of(pipeline_table("1f1b", 3, 3), 1.0, 1.0))
        rank 0  012..a.b.c
        rank 1  .01.a2b.c.
        rank 2  ..0a1b2c..
        idle 40.0%, forwards 0 to 9, backwards a to j (microbatch modulo 10)
        >>> print(timeline_of(pipeline_table("zbv", 2, 3)))
        rank 0  0120aA1bBaA2cCbBcC.
        rank 1  .0011aA2aA2bBbccBCC
        idle 5.3%, forwards 0 to 9, backwards a to j, those of weights A to J (microbatch modulo 10)
    """
    simulation = _Simulation(table, forward, backward, weight, send, overlap)
    at = [0] * len(table)
    while any(position < len(row) for position, row in zip(at, table, strict=True)):
        before = list(at)
        for rank, row in enumerate(table):
            while at[rank] < len(row) and simulation.run(rank, row[at[rank]]):
                at[rank] += 1
        assert at != before, "a table in which every rank waits for another"
    return Timeline(tuple(map(tuple, simulation.spans)), _in_flight(table))


class _Simulation:
    """The actions that have run so far, and when their results are available."""

    def __init__(
        self, table: Table, forward: Times, backward: Times, weight: Times | None, send: float, overlap: float
    ) -> None:
        self.spans: list[list[Span]] = [[] for _ in table]  # of each rank
        self._forward, self._backward, self._weight = forward, backward, weight
        self._send, self._overlap = send, overlap
        self._home = {action.stage: rank for rank, row in enumerate(table) for action in actions_of(row)}
        self._last = max(self._home)
        self._done: dict[tuple[str, int, int], float] = {}  # when results are available; "B" counts as "I"

    def run(self, rank: int, entry: Action | Overlapped) -> bool:
        """Run the next entry of a rank; False if its inputs are not available yet."""
        actions = [entry] if isinstance(entry, Action) else list(entry)
        needs = [need for action in actions for need in _needs(action, self._last)]
        if not all(need in self._done for need in needs):
            return False
        ready = [self._done[need] + (self._send if self._home[need[1]] != rank else 0.0) for need in needs]
        start = max([self.spans[rank][-1].stop if self.spans[rank] else 0.0, *ready])
        share = self._overlap if isinstance(entry, Overlapped) else 1.0
        stop = start + share * sum(map(self._seconds, actions))
        for action in actions:
            end = stop if action is actions[-1] else start + share * self._seconds(action)
            self.spans[rank].append(Span(action, start, end))
            self._done[_result(action)] = stop
            start = end
        return True

    def _seconds(self, action: Action) -> float:
        if action.kind == "F":
            return _of_stage(self._forward, action.stage)
        time = _of_stage(self._backward, action.stage)
        part = time / 2 if self._weight is None else _of_stage(self._weight, action.stage)
        return {"B": time, "I": time - part, "W": part}[action.kind]


def _of_stage(times: Times, stage: int) -> float:
    return float(times) if isinstance(times, float | int) else times[stage]


def _result(action: Action) -> tuple[str, int, int]:
    return "I" if action.kind == "B" else action.kind, action.stage, action.microbatch


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    """The results that an action takes."""
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("I", stage, microbatch)]
    own = ("F", stage, microbatch)
    return [own] if stage == last else [own, ("I", stage + 1, microbatch)]


def _in_flight(table: Table) -> dict[int, int]:
    """For each stage the largest number of microbatches in memory: from a forward to the end of its backward."""
    most: dict[int, int] = {}
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    for row in table:
        count: dict[int, int] = {}
        for action in actions_of(row):
            count[action.stage] = count.get(action.stage, 0) + change[action.kind]
            most[action.stage] = max(most.get(action.stage, 0), count[action.stage])
    return dict(sorted(most.items()))
