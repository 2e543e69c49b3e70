"""The moves of the search: every collective that may follow a state, with its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardwise.plan.cost import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from shardwise.plan.missing_bytes import missing
from shardwise.plan.state import DistState, Problem, Splits, common_beginning
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Step

__all__ = ["Move", "all_reduce", "exchange", "gather", "last_reductions", "moves"]

ROUNDING = 1 + 1e-8


class Move(NamedTuple):
    """An edge of the search: the next state, and how to make the step once it is chosen."""

    state: DistState
    kind: type[Step]
    arguments: tuple[Any, ...]
    received: float
    seconds: float


def moves(problem: Problem, state: DistState, most_seconds: float = math.inf) -> list[Move]:
    """Every collective that may be the next one; those that take longer than `most_seconds` may be omitted.

    Partial axes are reduced before anything else.
    """
    if state.partial:
        return reductions(problem, state)
    if not problem.same_mesh:
        return [exchange(problem, state)]
    if problem.links.uniform:
        return last_moves(problem, state, most_seconds)
    return [exchange(problem, state), *native_moves(problem, state, most_seconds)]


def last_moves(problem: Problem, state: DistState, most_seconds: float) -> list[Move]:
    """The collectives that lead to the goal. On equal links nothing is better than an exchange, which moves the
    fewest bytes in one collective, or a native one that moves as many."""
    native = native_last_moves(problem, state)
    for move in native:
        if move.state == problem.leaf and problem.divides(state.dims) and problem.divides(move.state.dims):
            return [move]  # every rank receives exactly its missing bytes
    last = exchange(problem, state)
    return [*native, last] if last.seconds <= most_seconds * ROUNDING else []


def native_last_moves(problem: Problem, state: DistState) -> list[Move]:
    """The native collectives that lead to the goal, up to slices. Each removes axes from one dim."""
    firsts = [common_beginning(have, want) for have, want in zip(state.dims, problem.goal, strict=True)]
    wrong = [dim for dim, first in enumerate(firsts) if first < len(state.dims[dim])]
    if len(wrong) != 1:
        return []
    (dim,) = wrong
    others = [to for to, first in enumerate(firsts) if to != dim and first < len(problem.goal[to])]
    found = [gather(problem, state, dim, firsts[dim]), *all_to_all(problem, state, dim, firsts[dim], others)]
    return [move for move in found if problem.slice_to_goal(move.state) == problem.leaf]


def native_moves(problem: Problem, state: DistState, most_seconds: float) -> list[Move]:
    """The native collectives to any layout: the minor axes of a dim are gathered, or move to another dim."""
    found: list[Move] = []
    for dim, splits in enumerate(state.dims):
        others = [to for to in range(len(state.dims)) if to != dim]
        for first in range(len(splits)):
            over = all_to_all(problem, state, dim, first, others)
            if not over or over[0].seconds <= most_seconds:  # a gather over the same axes takes longer
                found += [gather(problem, state, dim, first), *over]
    return found


# ---------------------------------------------------------------- the collectives


def gather(problem: Problem, state: DistState, dim: int, first: int) -> Move:
    """The axes of `dim` from the `first` on are gathered."""
    dims = state.dims
    axes = _axes(problem, dims[dim][first:])
    group = problem.links.group(axes)
    received = all_gather_bytes(group.size, problem.most(dims))
    after = DistState((*dims[:dim], dims[dim][:first], *dims[dim + 1 :]), state.partial)
    return Move(after, AllGather, (dim, axes), received, problem.links.seconds("all_gather", axes, received))


def all_to_all(problem: Problem, state: DistState, dim: int, first: int, others: Iterable[int]) -> list[Move]:
    """The axes of `dim` from the `first` on move to one of the dims `others`."""
    kept, axes = state.dims[dim][:first], _axes(problem, state.dims[dim][first:])
    group = problem.links.group(axes)
    received = all_to_all_bytes(group.size, problem.most(state.dims))
    seconds = problem.links.seconds("all_to_all", axes, received)
    found: list[Move] = []
    for other in others:
        dims = list(state.dims)
        dims[dim], dims[other] = kept, dims[other] + axes
        after = DistState(tuple(dims), state.partial)
        found.append(Move(after, AllToAll, (dim, other, axes), received, seconds))
    return found


def exchange(problem: Problem, state: DistState) -> Move:
    """Each rank receives its missing bytes for the goal from ranks that have them."""
    over = _changed_axes(problem, state) if problem.same_mesh else ()
    received = missing(problem, state.dims)
    # Among equals a native collective is preferred: it is better tuned than a general exchange.
    seconds = problem.links.seconds("all_to_all", over, received) * (1 + 1e-9)
    return Move(problem.leaf, Exchange, (over,), received, seconds)


def _changed_axes(problem: Problem, state: DistState) -> tuple[int, ...]:
    """The axes whose role in the layout changes: those not in a common prefix of both lists of a dim."""
    changed: set[int] = set()
    for have, want in zip(state.dims, problem.goal, strict=True):
        if have != want:
            common = common_beginning(have, want)
            changed.update(_axes(problem, have[common:] + want[common:]))
    return tuple(sorted(changed))


def _axes(problem: Problem, splits: Splits) -> tuple[int, ...]:
    return tuple([split % problem.axes for split in splits]) if problem.strided else splits


# ---------------------------------------------------------------- reductions


def reductions(problem: Problem, state: DistState) -> list[Move]:
    """All-reduces and reduce-scatters of each group of Partial axes that may be reduced at once."""
    found: list[Move] = []
    for axes in reduction_groups(problem, state.partial):
        found.append(all_reduce(problem, state, axes))
        found += [reduce_scatter(problem, state, dim, axes) for dim in scatter_dims(problem, state, axes)]
    return found


def all_reduce(problem: Problem, state: DistState, axes: tuple[int, ...]) -> Move:
    """All-reduce over `axes`."""
    group = problem.links.group(axes)
    received = all_reduce_bytes(group.size, problem.most(state.dims))
    after = DistState(state.dims, _without(state.partial, axes))
    return Move(after, AllReduce, (axes,), received, problem.links.seconds("all_reduce", axes, received))


def reduce_scatter(problem: Problem, state: DistState, dim: int, axes: tuple[int, ...]) -> Move:
    """Reduce-scatter over `axes`, which then split `dim`."""
    group = problem.links.group(axes)
    order = _order_towards_goal(problem, dim, axes)
    dims = (*state.dims[:dim], state.dims[dim] + order, *state.dims[dim + 1 :])
    received = reduce_scatter_bytes(group.size, problem.most(dims))
    after = DistState(dims, _without(state.partial, axes))
    seconds = problem.links.seconds("reduce_scatter", axes, received)
    return Move(after, ReduceScatter, (dim, order), received, seconds)


def _without(partial: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return () if len(partial) == len(axes) else tuple([axis for axis in partial if axis not in axes])


def last_reductions(problem: Problem, state: DistState) -> list[Move]:
    """The reductions of all Partial axes at once that lead to the goal, up to slices."""
    axes = state.partial
    dims = {problem.wanted_dim[axis] for axis in axes if axis in problem.wanted_dim}
    found = [all_reduce(problem, state, axes), *[reduce_scatter(problem, state, dim, axes) for dim in dims]]
    return [move for move in found if problem.slice_to_goal(move.state) == problem.leaf]


def reduction_groups(problem: Problem, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The Partial axes to reduce in one collective: all, those with one role in the goal, or each by itself."""
    if len(axes) == 1:
        return [axes]
    alike: dict[int | None, tuple[int, ...]] = {}
    for axis in axes:
        wanted = problem.wanted_dim.get(axis)
        alike[wanted] = (*alike.get(wanted, ()), axis)
    groups = {axes, *alike.values(), *((axis,) for axis in axes)}
    return sorted(groups, key=lambda group: (-len(group), group))


def scatter_dims(problem: Problem, state: DistState, axes: tuple[int, ...]) -> Iterable[int]:
    """The dims worth scattering onto: those of the axes in the goal, and the one that divides best.

    All dims if links differ: the cost of the next step depends on the other axes that split the dim.
    """
    if not problem.links.uniform or not state.dims:
        return range(len(state.dims))
    chosen = {problem.wanted_dim[a] for a in axes if a in problem.wanted_dim}
    n = problem.links.group(axes).size
    least, best = (2.0, 0), 0
    for dim, splits in enumerate(state.dims):
        local = problem.longest_part(problem.shape[dim], splits)
        key = (-(-local // n) / max(local, 1), len(splits))
        if key < least:
            least, best = key, dim
    chosen.add(best)
    return sorted(chosen)


def _order_towards_goal(problem: Problem, dim: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """`axes` in the order in which the goal has them on `dim`; the others follow."""
    if len(axes) == 1 or not problem.same_mesh:
        return axes
    wanted = _axes(problem, problem.goal[dim])
    return tuple(sorted(axes, key=lambda a: wanted.index(a) if a in wanted else len(wanted) + a))
