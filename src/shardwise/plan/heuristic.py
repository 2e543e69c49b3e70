"""Admissible heuristics: lower bounds on the remaining cost, used to prune the search."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from shardwise.plan.cost import all_gather_bytes, all_to_all_bytes
from shardwise.plan.missing_bytes import missing
from shardwise.plan.state import Dims, DistState, Problem, Splits, common_beginning

__all__ = ["seconds_left", "seconds_left_at_least"]

SAFELY = 1 - 1e-9  # rounding must not make a bound exceed the cost


def seconds_left(problem: Problem, state: DistState) -> float:
    """A lower bound on the seconds from `state` to the goal: start-ups, and bytes that must move in any case."""
    if state == problem.leaf:
        return 0.0
    if not problem.same_mesh:  # the last collective is between the meshes, whose ranks may hold any part of the goal
        between = problem.links.group(())
        return (between.alpha + (_reducing(problem, state) if state.partial else 0.0)) * SAFELY
    best, held = problem.links.best, problem.mean(state.dims)
    moving = _leaving(problem, state.dims).alpha
    if not state.partial or problem.goal_mean > held * (1 + 1e-9):  # more follows than reductions
        moving = max(moving, best.alpha)
    reducing = 0.0
    if state.partial:
        reducing = _reducing(problem, state)
        held /= problem.links.group(state.partial).size
    moving += max(0.0, problem.goal_mean - held) * best.beta
    return (reducing + max(moving, _gathering_left(problem, state))) * SAFELY


def seconds_left_at_least(problem: Problem, state: DistState) -> float:
    """Like `seconds_left`, tighter and slower: missing bytes of ranks cross the links by which they can arrive."""
    if state == problem.leaf or not problem.same_mesh:
        return 0.0
    if problem.links.uniform and not state.partial:  # the exchange comes next and has the exact cost
        return 0.0
    seconds = _reducing(problem, state) if state.partial else 0.0
    if missing(problem, state.dims):  # a reduction moves nothing else: this takes another collective
        seconds += _bringing(problem, state)
    return seconds * SAFELY


# ---------------------------------------------------------------- reductions


def _reducing(problem: Problem, state: DistState) -> float:
    """Partial axes are reduced in one collective, over the slowest of their links; or else in two or more."""
    links, held = problem.links, problem.mean(state.dims)
    group = links.group(state.partial)
    at_once = group.seconds(all_to_all_bytes(group.size, held))
    if len(state.partial) == 1:
        return at_once
    each = [links.each[axis] for axis in state.partial]
    sizes = [problem.sizes[axis] for axis in state.partial]
    first = min([held * (n - 1) / n * link.beta for n, link in zip(sizes, each, strict=True)])
    apart = max(first, _by_single_axes(problem, state, held / _waiting(problem, state)))
    return min(at_once, group.alpha + min([link.alpha for link in each]) + apart)


def _waiting(problem: Problem, state: DistState) -> int:
    """The number of further parts into which the goal splits by unused axes, once the axes before them are in place.

    A first reduction may make these slices possible, so that later ones have less to reduce.
    """
    used = problem.used_axes(state)
    return math.prod([problem.sizes[axis] for axis in problem.wanted_dim if axis not in used])


def _by_single_axes(problem: Problem, state: DistState, held: float) -> float:
    """The seconds for the bytes if each axis had its own collective, the slowest last."""
    seconds = 0.0
    for axis in problem.links.by_speed:
        if axis in state.partial:
            n = problem.sizes[axis]
            seconds += held * (n - 1) / n * problem.links.each[axis].beta
            held /= n
    return seconds


# ---------------------------------------------------------------- movements


class Leaving(NamedTuple):
    """The axes that must leave their dims.

    Their slowest start-up and slowest link; if they leave several dims, the start-up of the dim with the fastest one;
    and the axes that split nothing in the goal.
    """

    alpha: float
    beta: float
    least_alpha: float
    unwanted: tuple[int, ...]


def _leaving(problem: Problem, dims: Dims) -> Leaving:
    found = problem.bounds.get(("leaving", dims))
    if found is None:
        found = problem.bounds["leaving", dims] = _find_leaving(problem, dims)
    return found


def _find_leaving(problem: Problem, dims: Dims) -> Leaving:
    each = problem.links.each
    alpha = beta = 0.0
    by_dim: list[float] = []
    unwanted: list[int] = []
    for have, want in zip(dims, problem.goal, strict=True):
        if have != want[: len(have)]:
            start = 0.0
            for split in have[common_beginning(have, want) :]:
                axis = split % problem.axes
                start, beta = max(start, each[axis].alpha), max(beta, each[axis].beta)
                if axis not in problem.wanted_dim:
                    unwanted.append(axis)
            alpha = max(alpha, start)
            by_dim.append(start)
    return Leaving(alpha, beta, min(by_dim) if len(by_dim) > 1 else 0.0, tuple(sorted(unwanted)))


def _gathering_left(problem: Problem, state: DistState) -> float:
    """A lower bound on gathering axes that split nothing in the goal; a reduction may scatter onto such axes."""
    axes = _leaving(problem, state.dims).unwanted
    if not axes or not state.partial:
        return _gathering(problem, axes)
    pending = [axis for axis in state.partial if axis not in problem.wanted_dim]
    scattered = [c for count in range(len(pending) + 1) for c in itertools.combinations(pending, count)]
    return min([_gathering(problem, tuple(sorted(axes + more))) for more in scattered])


def _gathering(problem: Problem, axes: tuple[int, ...]) -> float:
    """Parts of ranks along `axes` that each of them needs in the goal: some of the axes are gathered first.

    Before that a rank has at most this part of its block in the goal, since later collectives at most double it.
    """
    if not axes:
        return 0.0
    found = problem.bounds.get(("gathering", axes))
    if found is None:
        held = problem.goal_mean / problem.links.group(axes).size
        found = math.inf
        for count in range(1, len(axes) + 1):
            for first in itertools.combinations(axes, count):
                group = problem.links.group(first)
                rest = tuple([axis for axis in axes if axis not in first])
                found = min(found, group.seconds(all_gather_bytes(group.size, held)) + _gathering(problem, rest))
        problem.bounds["gathering", axes] = found
    return found


def _bringing(problem: Problem, state: DistState) -> float:
    """One collective over all axes that must leave their dims moves the missing bytes; or else there are two or more.

    A native one frees one dim, and an exchange the others.
    """
    best, lacks = problem.links.best, missing(problem, state.dims)
    if problem.links.uniform:
        return best.alpha + lacks * best.beta
    alpha, beta, least, _ = _leaving(problem, state.dims)
    at_once, in_two = lacks * max(beta, best.beta), max(least, best.alpha) + _by_speed(problem, state)
    return max(alpha, best.alpha) + min(at_once, in_two)


def _by_speed(problem: Problem, state: DistState) -> float:
    """Bytes that all ranks connected by the fastest axes lack must cross a slower axis, once for all; and so on."""
    links = problem.links
    lacks = missing(problem, state.dims)
    where = {split % problem.axes: dim for dim, splits in enumerate(state.dims) for split in splits}
    dims = list(state.dims)
    seconds = slowest = 0.0
    alike = 1
    for axis in links.by_speed:
        beta = links.each[axis].beta
        seconds += (beta - slowest) * lacks / alike
        slowest = beta
        if axis in where:
            dim = where[axis]
            dims[dim] = _pooled(problem, dims[dim], axis)
            lacks = missing(problem, tuple(dims))
        if axis not in problem.wanted_dim:
            alike *= problem.sizes[axis]
    return seconds


def _pooled(problem: Problem, splits: Splits, axis: int) -> Splits:
    """The splits of the union of the parts along `axis` of a dim; a superset of it, if it is no run of the dim."""
    axes = tuple([split % problem.axes for split in splits]) if problem.strided else splits
    return splits[: axes.index(axis)] if axis in axes else splits
