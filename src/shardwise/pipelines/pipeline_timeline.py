"""When each action of a schedule runs, given how long stages take: total time, idle time, microbatches in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.pipelines.pipeline_tables import Action, Table

__all__ = ["Span", "Timeline", "timeline_of"]


class Span(NamedTuple):
    """An action, and when it begins and ends."""

    action: Action
    start: float
    stop: float


class Timeline(NamedTuple):
    """The actions of each rank in time.

    Args:
        ranks: the actions of each rank.
        in_flight: for each stage the most microbatches whose activations it holds at once.
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
        """A picture: a row for each rank; a forward is a digit, a backward a letter, a dot is idle."""
        unit = min(span.stop - span.start for spans in self.ranks for span in spans)
        lines = []
        for rank, spans in enumerate(self.ranks):
            cells = ["."] * round(self.seconds / unit)
            for action, start, stop in spans:
                mark = _mark(action)
                for at in range(round(start / unit), round(stop / unit)):
                    cells[at] = mark
            lines.append(f"rank {rank}  {''.join(cells)}")
        return "\n".join([*lines, f"idle {self.bubble:.1%}, forwards 0 to 9, backwards a to j (microbatch modulo 10)"])


def _mark(action: Action) -> str:
    digit = action.microbatch % 10
    return str(digit) if action.kind == "F" else "abcdefghij"[digit]


def timeline_of(
    table: Table,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    send: float = 0.0,
) -> Timeline:
    """When the actions of a table run, each as soon as its rank is free and what it needs is there.

    Args:
        table: the actions of each rank.
        forward: seconds of a forward of each stage, or of all.
        backward: the same of a backward.
        send: seconds from the end of an action until another rank has its result.

    Example:
        >>> from shardwise.pipelines.pipeline_tables import pipeline_table
        >>> print(timeline_of(pipeline_table("1f1b", 3, 3), 1.0, 1.0))
        rank 0  012..a.b.c
        rank 1  .01.a2b.c.
        rank 2  ..0a1b2c..
        idle 40.0%, forwards 0 to 9, backwards a to j (microbatch modulo 10)
    """
    home = {action.stage: rank for rank, actions in enumerate(table) for action in actions}
    last = max(home)
    done: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in table]
    left = sum(map(len, table))
    while left:
        moved = False
        for rank, actions in enumerate(table):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                needs = _needs(action, last)
                if not all(need in done for need in needs):
                    break
                ready = [done[need] + (send if home[need.stage] != rank else 0.0) for need in needs]
                start = max([spans[rank][-1].stop if spans[rank] else 0.0, *ready])
                times = forward if action.kind == "F" else backward
                done[action] = start + (times if isinstance(times, float | int) else times[action.stage])
                spans[rank].append(Span(action, start, done[action]))
                left, moved = left - 1, True
        assert moved, "a table in which every rank waits for another"
    return Timeline(tuple(map(tuple, spans)), _in_flight(table))


def _needs(action: Action, last: int) -> list[Action]:
    """The actions whose results an action takes."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    own = Action("F", stage, microbatch)
    return [own] if stage == last else [own, Action("B", stage + 1, microbatch)]


def _in_flight(table: Table) -> dict[int, int]:
    most: dict[int, int] = {}
    for actions in table:
        held: dict[int, int] = {}
        for action in actions:
            held[action.stage] = held.get(action.stage, 0) + (1 if action.kind == "F" else -1)
            most[action.stage] = max(most.get(action.stage, 0), held[action.stage])
    return dict(sorted(most.items()))
