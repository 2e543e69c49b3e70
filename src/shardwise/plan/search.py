"""The search: the cheapest sequence of moves from one layout to another, by A* over states."""

from __future__ import annotations

import heapq
import itertools
import math

from shardwise.plan.heuristic import seconds_left, seconds_left_at_least
from shardwise.plan.move import Move, last_reductions, moves
from shardwise.plan.state import DistState, Problem

__all__ = ["Path", "cheapest_path"]

Path = list[tuple[DistState, Move | None]]  # states, slices towards the goal included, and the moves that led there
Cost = tuple[float, int, int]  # seconds, collectives, peak of bytes: what is compared, in this order


def cheapest_path(problem: Problem, max_bytes: int | None = None) -> Path:
    """The cheapest path from the start to the goal on which no state holds more than `max_bytes`, which both ends keep.

    There is one: reductions never hold more than the start, and an exchange leads from there to the goal.
    """
    limit = math.inf if max_bytes is None else max_bytes
    first = problem.slice_to_goal(problem.start)
    if first == problem.leaf:
        return [(first, None)]
    last = _one_collective(problem, first, limit)
    return [(first, None), (problem.leaf, last)] if last is not None else Search(problem, limit).run(first)


def _one_collective(problem: Problem, first: DistState, limit: float) -> Move | None:
    """The cheapest path of one collective, if no longer path can be cheaper."""
    if first.partial:
        found = last_reductions(problem, first) if problem.same_mesh else []
        below = 2 * problem.links.best.alpha  # the start-ups of two collectives
    else:
        found = moves(problem, first) if problem.links.uniform or not problem.same_mesh else []
        below = math.inf  # these lead to the goal, and no path moves less
    allowed = [move for move in found if move.seconds <= below and problem.most(move.state.dims) <= limit]
    return min(allowed, key=lambda move: (move.seconds, problem.most(move.state.dims)), default=None)


class Search:
    """A*: states are expanded in the order of the lower bounds of paths through them."""

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem = problem
        self.limit = limit
        self.best: dict[DistState, Cost] = {}
        self.came: dict[DistState, tuple[DistState | None, Move | None]] = {}
        self.left: dict[DistState, float] = {}  # a lower bound, as tight as computed so far
        self.looked_at: set[DistState] = set()
        self.queue: list[tuple[float, float, int, int, int, DistState]] = []
        self.order = itertools.count()  # among equals the one found first
        self.expanded = 0
        self.bound = math.inf  # the cheapest path found so far

    def run(self, first: DistState) -> Path:
        """The path from `first`, or from a slice of it."""
        problem = self.problem
        self.left[first] = seconds_left(problem, first)
        self._reach(first, (0.0, 0, problem.most(first.dims)), self.left[first], None, None)
        self.looked_at.add(first)  # the search begins there in any case
        while True:
            estimate, seconds, collectives, peak, _, state = heapq.heappop(self.queue)
            cost = (seconds, collectives, peak)
            if self.best[state] != cost:  # a better path to this state was found since
                continue
            if state == problem.leaf:
                return self._path()
            closer = seconds + self._left_at_least(state)
            if closer > estimate:
                if closer <= self.bound:
                    heapq.heappush(self.queue, (closer, *cost, next(self.order), state))
                continue
            self._expand(state, cost)
            if state is first:
                self._slice_early(first)

    def _slice_early(self, first: DistState) -> None:
        for early in self.problem.early_slices(first):
            left = self.left[early] = seconds_left(self.problem, early)
            if left <= self.bound:
                self._reach(early, (0.0, 0, self.problem.most(early.dims)), left, None, None)

    def _left_at_least(self, state: DistState) -> float:
        """The tighter bound, computed only for states about to be expanded."""
        if state not in self.looked_at:
            self.looked_at.add(state)
            self.left[state] = max(self.left[state], seconds_left_at_least(self.problem, state))
        return self.left[state]

    def _expand(self, state: DistState, cost: Cost) -> None:
        problem = self.problem
        seconds, collectives, peak = cost
        self.expanded += 1
        for move in moves(problem, state, self.bound - seconds):
            total = seconds + move.seconds
            if total > self.bound:
                continue
            holds = problem.most(move.state.dims)
            if holds > self.limit:
                continue
            after = problem.slice_to_goal(move.state)
            reached = (total, collectives + 1, max(peak, holds))
            known = self.best.get(after)
            if known is not None and known <= reached:
                continue
            left = self.left.get(after)
            if left is None:
                left = self.left[after] = seconds_left(problem, after)
            if total + left > self.bound:
                continue
            if after == problem.leaf:
                self.bound = total
            self._reach(after, reached, left, state, move)

    def _reach(self, state: DistState, cost: Cost, left: float, before: DistState | None, move: Move | None) -> None:
        self.best[state] = cost
        self.came[state] = (before, move)
        heapq.heappush(self.queue, (cost[0] + left, *cost, next(self.order), state))

    def _path(self) -> Path:
        path: Path = []
        at: DistState | None = self.problem.leaf
        while at is not None:
            before, move = self.came[at]
            path.append((at, move))
            at = before
        return path[::-1]
