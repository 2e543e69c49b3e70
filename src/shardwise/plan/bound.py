"""Lower bounds: never more than the rest of a way can cost, so that a search may leave out what cannot win.

Knows what every way has in common, and nothing of single moves.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.lack import missing
from shardwise.plan.state import DistState, Problem, common_beginning

__all__ = ["seconds_left", "seconds_left_at_least"]

SAFELY = 1 - 1e-9  # rounding must not make a bound exceed what it bounds


class Reduction(NamedTuple):
    """The least to reduce what is pending: start-up, seconds for the bytes, and the bytes held afterwards."""

    alpha: float
    seconds: float
    held: float


def seconds_left(problem: Problem, state: DistState) -> float:
    """The least that the way from `state` to the goal costs: start-ups, and what surely must move."""
    if state == problem.leaf:
        return 0.0
    alpha, seconds, held = _reduction_left(problem, state)
    best = problem.links.best
    lacks = problem.goal_mean - held
    if lacks > 0:
        seconds += lacks * best.beta
    return (max(alpha, best.alpha) + seconds) * SAFELY


def seconds_left_at_least(problem: Problem, state: DistState) -> float:
    """Like `seconds_left`, closer and slower to work out: what a rank lacks must come, over links it can come by."""
    if state == problem.leaf or not problem.same_mesh:
        return 0.0
    if problem.links.uniform and not state.partial:  # the exchange, which comes next, tells
        return 0.0
    alpha, seconds, _ = _reduction_left(problem, state)
    if missing(problem, state.dims):  # a reduction moves nothing else: another collective brings it
        alpha += _start_up(problem, state)
        seconds += _seconds_to_bring(problem, state)
    return (alpha + seconds) * SAFELY


def _reduction_left(problem: Problem, state: DistState) -> Reduction:
    """Each axis over its own link, the slowest last, when there is the least of it left."""
    held = problem.mean(state.dims)
    alpha = seconds = 0.0
    if state.partial:
        links = problem.links
        for axis in links.by_speed:
            if axis in state.partial:
                n = problem.sizes[axis]
                seconds += held * (n - 1) / n * links.each[axis].beta
                held /= n
                alpha = max(alpha, links.each[axis].alpha)
    return Reduction(alpha, seconds, held)


def _start_up(problem: Problem, state: DistState) -> float:
    """The slowest start among the axes that must leave their dims: some collective goes over it."""
    links = problem.links
    alpha = links.best.alpha
    if not links.uniform:
        for have, want in zip(state.dims, problem.goal, strict=True):
            for split in have[common_beginning(have, want) :]:
                alpha = max(alpha, links.each[split % problem.axes].alpha)
    return alpha


def _seconds_to_bring(problem: Problem, state: DistState) -> float:
    """What ranks that the fastest axes connect all lack must cross a slower axis, once for all of them; and so on."""
    links = problem.links
    lacks = missing(problem, state.dims)
    if links.uniform:
        return lacks * links.best.beta
    where = {
        split % problem.axes: (dim, at) for dim, splits in enumerate(state.dims) for at, split in enumerate(splits)
    }
    dims = list(state.dims)
    seconds = slowest = 0.0
    alike = 1
    for axis in links.by_speed:
        beta = links.each[axis].beta
        seconds += (beta - slowest) * lacks / alike
        slowest = beta
        if axis in where:
            dim, at = where[axis]
            dims[dim] = dims[dim][:at]  # the most that ranks along this axis and the faster ones hold together
            lacks = missing(problem, tuple(dims))
        if axis not in problem.wanted_dim:
            alike *= problem.sizes[axis]
    return seconds
