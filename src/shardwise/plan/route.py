"""DTensorRedistributePlanner: the cheapest sequence of steps from one layout to another.

A shortest-path search over layouts (`DistState`) with the one cost model. Pure: decides, moves nothing.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwise.core.layout import intersect, longest
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta  # noqa: F401  # in the examples
from shardwise.errors import LayoutError, MemoryBoundError, MeshError
from shardwise.plan.cost import CostModel, Link, current_cost_model, group_size
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Slice, Step, Unreduce

__all__ = ["DTensorRedistributePlanner", "DistState", "Route", "StepCost", "plain_route"]

REPLICATE = Replicate()


class Split(NamedTuple):
    """One axis splitting a dim; `rows` as in `StridedShard`, 0 for a plain shard."""

    axis: int
    rows: int = 0


class DistState(NamedTuple):
    """A layout as the planner sees it: for each dim who splits it, major first; and the partial axes. The rest is R."""

    dims: tuple[tuple[Split, ...], ...]
    partial: tuple[tuple[int, Partial], ...]
    arrived: bool = False  # on the target's mesh, where that is another than the source's: the axes are those of it

    @classmethod
    def of(cls, spec: DTensorSpec) -> DistState:
        """The state of a spec. Axes of one rank play no part in it."""
        sizes = spec.mesh.shape
        dims = tuple([tuple([Split(a, spec.rows(a) or 0) for a in axes if sizes[a] > 1]) for axes in spec.dim_axes])
        partial = tuple([(a, spec.placements[a]) for a in spec.partial_axes if sizes[a] > 1])
        return cls(dims, partial)  # pyright: ignore[reportArgumentType]

    def spec(self, like: DTensorSpec) -> DTensorSpec:
        """This layout of the tensor of `like`."""
        placements: list[Placement] = [REPLICATE] * like.mesh.ndim
        for dim, splits in enumerate(self.dims):
            for split in splits:
                placements[split.axis] = StridedShard(dim, split.rows) if split.rows else Shard(dim)
        for axis, placement in self.partial:
            placements[axis] = placement
        dim_axes = (tuple(split.axis for split in splits) for splits in self.dims)
        return DTensorSpec.from_dim_axes(like.mesh, tuple(placements), like.tensor_meta, dim_axes)


class StepCost(NamedTuple):
    """What a step costs in the model: bytes that a rank receives, seconds, bytes that a rank holds afterwards."""

    received: float
    seconds: float
    holds: int


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one layout to another, and what the model says they cost.

    Example:
        >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        >>> spec = DTensorSpec(mesh, [Shard(0)], TensorMeta((8, 4)))
        >>> print(DTensorRedistributePlanner().plan(spec, spec.with_placements([Shard(1)])))
        f32[8,4] S0 -> S1: all-to-all dim 0 -> dim 1 over 0
    """

    source: DTensorSpec
    target: DTensorSpec
    steps: tuple[Step, ...]
    costs: tuple[StepCost, ...]

    @property
    def received(self) -> float:
        """Bytes that a rank receives in all."""
        return sum(cost.received for cost in self.costs)

    @property
    def seconds(self) -> float:
        """Modelled time."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def collectives(self) -> int:
        """How many collectives are issued."""
        return sum(step.collective is not None for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any state of the route, its ends included, holds on a rank."""
        return max([self.source.local_bytes, *(cost.holds for cost in self.costs)])

    def __str__(self) -> str:
        steps = ", then ".join(step.describe() for step in self.steps) or "nothing to do"
        return f"{self.source} -> {self.target.layout}: {steps}"


class _Move(NamedTuple):
    """An edge of the search: where it leads and how to make the step once it is chosen."""

    state: DistState
    kind: type[Step]
    arguments: tuple
    received: float
    seconds: float


class DTensorRedistributePlanner:
    """Finds the cheapest route between two layouts; ties go to fewer collectives, then to less memory.

    Args:
        cost_model: the model to plan with; the current one by default.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> spec = DTensorSpec(mesh, [Shard(0), Shard(1)], TensorMeta((8, 8)))
        >>> route = DTensorRedistributePlanner().plan(spec, spec.with_placements([Shard(1), Shard(0)]))
        >>> route.collectives, route.peak_bytes
        (1, 64)
    """

    def __init__(self, cost_model: CostModel | None = None) -> None:
        self.cost_model = cost_model or current_cost_model()

    def plan(self, source: DTensorSpec, target: DTensorSpec, *, max_bytes: int | None = None) -> Route:
        """The cheapest route from `source` to `target`.

        Args:
            source: the layout now.
            target: the layout wanted; of the same tensor, on the same mesh or another one of the same world.
            max_bytes: no state of the route may hold more than this on a rank.

        Raises:
            LayoutError: a Partial target that the source cannot become.
            MemoryBoundError: no route keeps `max_bytes`; names the smallest bound that would do.
        """
        _check_reachable(source, target)
        if source is target and max_bytes is None:
            return Route(source, target, (), ())
        if max_bytes is None and _only_sliced(source, target):
            return Route(source, target, (Slice(source, target),), (StepCost(0.0, 0.0, target.local_bytes),))
        search = _Search(self.cost_model, source, target)
        found = search.run(max_bytes)
        if found is None:
            smallest = search.smallest_bound()
            raise MemoryBoundError(
                f"no route from {source} to {target.layout} holds at most max_bytes={max_bytes} on a rank",
                hint=f"the smallest bound that would do is {smallest} bytes",
                smallest=smallest,
            )
        return search.route(found)


def _only_sliced(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether the target splits further what the source splits, and changes nothing else: the most frequent route."""
    if source.mesh is not target.mesh or source.partial_axes or target.partial_axes:
        return False
    return all(
        new[: len(old)] == old and all(source.placements[a] is target.placements[a] for a in old)
        for old, new in zip(source.dim_axes, target.dim_axes, strict=True)
    )


def _check_reachable(source: DTensorSpec, target: DTensorSpec) -> None:
    a, b = source.mesh, target.mesh
    if source.tensor_meta.shape != target.tensor_meta.shape:
        raise LayoutError(f"cannot lay {source} out as {target}: the shapes differ")
    if a is not b:
        for what, one, other in (("fabric", a.fabric, b.fabric), ("device type", a.device_type, b.device_type)):
            if one != other:
                raise MeshError(
                    f"{a} and {b} are of different {what}s, so nothing can move between them",
                    hint=f"build both meshes with the same {what}",
                )
        for mesh in (a, b):
            if mesh.size() != mesh.grid_size:
                raise MeshError(
                    f"{mesh} is a slice of a larger mesh: a tensor on it may differ from slice to slice, so its way "
                    f"to {b if mesh is a else a} is not defined",
                    hint=f"take it to its root {mesh.root} by to_local() and from_local() with placements for all axes",
                )
        return
    for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
        if isinstance(new, Partial) and isinstance(old, Shard | StridedShard):
            raise LayoutError(
                f"cannot redistribute {source} to {target.layout}: axis {a.axis_name(axis)!r} would go from "
                f"{old!r} to {new!r}",
                hint="Partial is the layout of results that wait for a reduction; ask for Shard() or Replicate()",
            )


class _Search:
    """One planning problem: the target as a state, the moves out of a state, and their costs."""

    def __init__(self, model: CostModel, source: DTensorSpec, target: DTensorSpec) -> None:
        self.model = model
        self.source = source
        self.target = target
        self.mesh: DeviceMesh = source.mesh
        self.sizes = source.mesh.shape
        self.shape = source.shape
        self.itemsize = source.tensor_meta.dtype.itemsize
        self.same_mesh = source.mesh is target.mesh
        self.goal = DistState.of(target)
        self.start = DistState.of(source)
        self.kept = self._kept_partials()
        self.missing_of: dict[tuple[tuple[Split, ...], ...], float] = {}
        # where the last collective must lead
        self.leaf = DistState(self.goal.dims, tuple(self.kept.items()), arrived=not self.same_mesh)
        self.unreduced = self._without_fresh_partials()
        self.wanted_dim = (
            {split.axis: dim for dim, splits in enumerate(self.goal.dims) for split in splits} if self.same_mesh else {}
        )
        self.links, self.best_link, self.uniform, self.by_speed = _links(model, self.mesh)
        self.link_of: dict[tuple[int, ...], Link] = {}
        self.all_elements = math.prod(self.shape)
        self.goal_elements = self.all_elements / self._parts(self.goal, target.mesh.shape)
        strided = any(isinstance(p, StridedShard) for p in (*source.placements, *target.placements))
        self.plain = self.same_mesh and not strided and bool(self.shape)  # `missing` in closed form
        self.needed: float | None = None
        self.shared_of: dict[tuple[int, tuple[Split, ...]], np.ndarray] = {}

    def _kept_partials(self) -> dict[int, Partial]:
        """The axes that are Partial before and after: they take no part in anything."""
        if not self.same_mesh or not self.goal.partial:
            return {}
        after = dict(self.goal.partial)
        return {
            axis: placement
            for axis, placement in self.start.partial
            if axis in after and (after[axis] is placement or _absorbs(after[axis], placement))
        }

    def _without_fresh_partials(self) -> DTensorSpec:
        """The target before the axes that become Partial do so."""
        fresh = [axis for axis, _ in self.goal.partial if axis not in self.kept]
        if not fresh:
            return self.target
        placements = list(self.target.placements)
        for axis in fresh:
            placements[axis] = REPLICATE
        target = self.target
        return DTensorSpec.from_dim_axes(target.mesh, tuple(placements), target.tensor_meta, target.dim_axes)

    # ---------------------------------------------------------------- the search

    def run(self, max_bytes: int | None) -> list[tuple[DistState, _Move | None]] | None:
        """A* from the source; the moves of the cheapest path, or None if `max_bytes` forbids all."""
        if max_bytes is not None and max(self.holds(self.start), self.target.local_bytes) > max_bytes:
            return None
        first = self.slice_to_goal(self.start)
        order = itertools.count()
        best: dict[DistState, tuple[float, int, int]] = {}  # seconds so far, collectives, peak
        came: dict[DistState, tuple[DistState | None, _Move | None]] = {}
        queue: list[tuple[float, float, int, int, int, DistState]] = []  # the estimate of the whole, best, tie-break
        refined: set[DistState] = set()
        bound = math.inf

        def reach(state: DistState, cost: tuple[float, int, int], left: float, before: Any, move: _Move | None) -> None:
            best[state] = cost
            came[state] = (before, move)
            heapq.heappush(queue, (cost[0] + left, *cost, next(order), state))

        reach(first, (0.0, 0, self.holds(first)), 0.0, None, None)
        for early in self.early_slices(first):
            left = self.seconds_left(early) + self.best_link.alpha
            reach(early, (0.0, 0, self.holds(early)), left, None, None)
        while queue:
            estimate, seconds, collectives, peak, _, state = heapq.heappop(queue)
            if best[state] != (seconds, collectives, peak):  # a better way here was found since
                continue
            if state == self.leaf:
                return self._path(came, state)
            if state not in refined:
                refined.add(state)
                closer = seconds + self.seconds_left_at_least(state)
                if closer > estimate:
                    if closer <= bound:
                        heapq.heappush(queue, (closer, seconds, collectives, peak, next(order), state))
                    continue
            for move in self.moves(state):
                total = seconds + move.seconds
                if total > bound:
                    continue
                holds = self.holds(move.state)
                if max_bytes is not None and holds > max_bytes:
                    continue
                after = self.slice_to_goal(move.state)
                reached = (total, collectives + 1, max(peak, holds))
                left = self.seconds_left(after)
                if total + left > bound or (after in best and best[after] <= reached):
                    continue
                if after == self.leaf:
                    bound = total
                reach(after, reached, left, state, move)
        return None

    def seconds_left(self, state: DistState) -> float:
        """Never more than the way from `state` to the goal really costs: one start-up, and what surely must move."""
        if state == self.leaf:
            return 0.0
        alpha, seconds, held = self._reduction_left(state)
        seconds += max(0.0, self.goal_elements - held) * self.itemsize * self.best_link.beta
        return (alpha + seconds) * (1 - 1e-9)

    def seconds_left_at_least(self, state: DistState) -> float:
        """Like `seconds_left`, closer and slower to work out: what a rank lacks must come, over links it can come by.

        What ranks that the fastest axes connect all lack must cross a slower axis, once for all of them; and so on.
        """
        if state == self.leaf or not self.plain:
            return 0.0
        alpha, seconds, _ = self._reduction_left(state)
        if self.uniform and not seconds:  # the exchange, which comes next, tells
            return 0.0
        lacks = self.missing(state) * self.itemsize
        if seconds and lacks:  # a reduction moves nothing else: another collective must follow
            alpha += self.best_link.alpha
        if self.uniform:
            return (alpha + seconds + lacks * self.best_link.beta) * (1 - 1e-9)
        where = {split.axis: (dim, at) for dim, splits in enumerate(state.dims) for at, split in enumerate(splits)}
        dims = list(state.dims)
        alike, slowest = 1, 0.0
        for beta, axis in self.by_speed:
            seconds += (beta - slowest) * lacks / alike
            slowest = beta
            if axis in where:
                dim, at = where[axis]
                dims[dim] = dims[dim][:at]  # the most that ranks along this axis and the faster ones hold together
                lacks = self.missing(DistState(tuple(dims), ())) * self.itemsize
            if axis not in self.wanted_dim:
                alike *= self.sizes[axis]
        for have, want in zip(state.dims, self.goal.dims, strict=True):
            for split in have[_common(have, want) :]:
                alpha = max(alpha, self.links[split.axis].alpha)
        return (alpha + seconds) * (1 - 1e-9)

    def _reduction_left(self, state: DistState) -> tuple[float, float, float]:
        """The least to reduce what is pending: start-up, seconds for its bytes, and the elements held then.

        Each axis over its own link, the slowest last, when there is the least of it left.
        """
        held = self.all_elements / self._parts(state, self.sizes)
        alpha, seconds = self.best_link.alpha, 0.0
        for beta, axis in self.by_speed if state.partial else ():
            if any(axis == pending and axis not in self.kept for pending, _ in state.partial):
                n = self.sizes[axis]
                seconds += held * (n - 1) / n * self.itemsize * beta
                held /= n
                alpha = max(alpha, self.links[axis].alpha)
        return alpha, seconds, held

    @staticmethod
    def _path(
        parents: dict[DistState, tuple[DistState | None, _Move | None]], state: DistState
    ) -> list[tuple[DistState, _Move | None]]:
        path: list[tuple[DistState, _Move | None]] = []
        at: DistState | None = state
        while at is not None:
            before, move = parents[at]
            path.append((at, move))
            at = before
        return path[::-1]

    def smallest_bound(self) -> int:
        """The least `max_bytes` for which there is a route: found by raising the bound to what the states hold."""
        candidates = {max(self.holds(self.start), self.target.local_bytes)}
        first = self.slice_to_goal(self.start)
        seen = {first, self.leaf}
        queue = [first]
        while queue:
            for move in self.moves(queue.pop()):
                candidates.add(self.holds(move.state))
                after = self.slice_to_goal(move.state)
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
        return next(bound for bound in sorted(candidates) if self.run(bound) is not None)

    # ---------------------------------------------------------------- states

    def slice_to_goal(self, state: DistState) -> DistState:
        """`state` after every slice towards the goal that needs no communication; these never cost anything later."""
        if not self.same_mesh:
            return state
        shorter = [
            dim
            for dim, (have, goal) in enumerate(zip(state.dims, self.goal.dims, strict=True))
            if len(have) < len(goal) and goal[: len(have)] == have
        ]
        if not shorter and not self.kept:
            return state
        used = {axis for axis, _ in state.partial}
        used.update([split.axis for splits in state.dims for split in splits])
        dims = list(state.dims)
        for dim in shorter:
            have, goal = dims[dim], self.goal.dims[dim]
            extra = itertools.takewhile(lambda split: split.axis not in used, goal[len(have) :])
            dims[dim] = (*have, *extra)
        partial = tuple([(axis, self.kept.get(axis, p)) for axis, p in state.partial])
        return DistState(tuple(dims), partial)

    def early_slices(self, state: DistState) -> Iterator[DistState]:
        """`state` with what is replicated sliced, so that less is reduced, or less crosses the slower links; a second
        collective must bring it back."""
        used = {axis for axis, _ in state.partial}
        if used <= set(self.kept) and (self.uniform or not self.same_mesh):
            return
        used.update(split.axis for splits in state.dims for split in splits)
        free = tuple(Split(axis) for axis, n in enumerate(self.sizes) if n > 1 and axis not in used)
        for extra in {free, *((split,) for split in free)} - {()}:
            for dim, splits in enumerate(state.dims):
                yield DistState((*state.dims[:dim], (*splits, *extra), *state.dims[dim + 1 :]), state.partial)

    def holds(self, state: DistState) -> int:
        """The most bytes a rank holds in `state`."""
        return self.target.local_bytes if state.arrived else self.elements(state) * self.itemsize

    def elements(self, state: DistState) -> int:
        """The most elements a rank holds in `state`."""
        elements = 1
        for size, splits in zip(self.shape, state.dims, strict=True):
            elements *= self._part(size, splits) if splits else size
        return elements

    def _part(self, size: int, splits: tuple[Split, ...]) -> int:
        left = size
        for axis, rows in splits:
            if rows:
                return longest(size, [(self.sizes[split.axis], split.rows or None) for split in splits])
            left = -(-left // self.sizes[axis])
        return left

    @staticmethod
    def _parts(state: DistState, sizes: tuple[int, ...]) -> int:
        """Into how many parts the tensor is split."""
        parts = 1
        for splits in state.dims:
            for split in splits:
                parts *= sizes[split.axis]
        return parts

    def seconds(self, axes: tuple[int, ...], received: float) -> float:
        """What the model says of a collective."""
        link = self.link_of.get(axes)
        if link is None:
            link = self.link_of[axes] = self.model.link(self.mesh, axes)
        return link.alpha + received * link.beta

    # ---------------------------------------------------------------- moves

    def moves(self, state: DistState) -> Iterator[_Move]:
        """Every collective that may be the next one."""
        pending = tuple((axis, p) for axis, p in state.partial if axis not in self.kept)
        if pending:
            yield from self.reductions(state, pending)
            return
        if not self.same_mesh:
            yield self.exchange(state)
        elif self.uniform:
            # An exchange moves no more than it must, in one collective: only a native one that does the same in one
            # can be as good.
            direct = list(self.direct_moves(state))
            yield from direct
            least = self.seconds_left(state)
            if not any(move.seconds <= least * (1 + 1e-8) for move in direct):
                yield self.exchange(state)
        else:
            yield self.exchange(state)
            for dim, splits in enumerate(state.dims):
                for first in range(len(splits)):
                    yield self.gather(state, dim, first)
                    yield from (self.all_to_all(state, dim, first, to) for to in range(len(self.shape)) if to != dim)

    def direct_moves(self, state: DistState) -> Iterator[_Move]:
        """The native collectives that lead to the goal at once."""
        firsts = [_common(have, want) for have, want in zip(state.dims, self.goal.dims, strict=True)]
        wrong = [dim for dim, first in enumerate(firsts) if first < len(state.dims[dim])]
        if len(wrong) != 1:  # each takes axes away from one dim
            return
        (dim,) = wrong
        others = [to for to, first in enumerate(firsts) if to != dim and first < len(self.goal.dims[to])]
        moves = [self.gather(state, dim, firsts[dim]), *(self.all_to_all(state, dim, firsts[dim], to) for to in others)]
        yield from (move for move in moves if self.slice_to_goal(move.state) == self.leaf)

    def reductions(self, state: DistState, pending: tuple[tuple[int, Partial], ...]) -> Iterator[_Move]:
        held = self.holds(state)
        for axes in self.reduction_groups(tuple(axis for axis, _ in pending)):
            n = group_size(self.mesh, axes)
            rest = tuple(entry for entry in state.partial if entry[0] not in axes)
            received = 2 * (n - 1) / n * held
            seconds = self.seconds(axes, received)
            yield _Move(DistState(state.dims, rest), AllReduce, (axes,), received, seconds)
            for dim in self.scatter_dims(state, axes, n):
                order = self._order_towards_goal(dim, axes)
                splits = (*state.dims[dim], *(Split(a) for a in order))
                scattered = DistState((*state.dims[:dim], splits, *state.dims[dim + 1 :]), rest)
                received = (n - 1) * self.holds(scattered)
                seconds = self.seconds(axes, received)
                yield _Move(scattered, ReduceScatter, (dim, order), received, seconds)

    def reduction_groups(self, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Which partial axes to reduce in one collective: all, those that the goal treats alike, or each by itself."""
        alike: dict[int | None, tuple[int, ...]] = {}
        for axis in axes:
            wanted = self.wanted_dim.get(axis)
            alike[wanted] = (*alike.get(wanted, ()), axis)
        groups = {axes, *alike.values(), *((axis,) for axis in axes)}
        yield from sorted(groups, key=lambda group: (-len(group), group))

    def scatter_dims(self, state: DistState, axes: tuple[int, ...], n: int) -> Iterator[int]:
        """The dims worth scattering onto: where the goal wants the axes, and the one that divides best.

        Any, where links differ: what is cheap to bring from there depends on who else splits the dim.
        """
        if not self.uniform or not self.shape:
            yield from range(len(self.shape))
            return
        wanted = {self.wanted_dim[a] for a in axes if a in self.wanted_dim}
        local = [self._part(size, splits) for size, splits in zip(self.shape, state.dims, strict=True)]
        best = min(range(len(local)), key=lambda dim: (-(-local[dim] // n) / max(local[dim], 1), len(state.dims[dim])))
        yield from sorted({best, *wanted})

    def _order_towards_goal(self, dim: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        if not self.same_mesh:
            return axes
        wanted = [split.axis for split in self.goal.dims[dim]]
        return tuple(sorted(axes, key=lambda a: wanted.index(a) if a in wanted else len(wanted) + a))

    def gather(self, state: DistState, dim: int, first: int) -> _Move:
        """The axes of `dim` from the `first` on are gathered."""
        splits = state.dims[dim]
        axes = tuple(split.axis for split in splits[first:])
        after = DistState((*state.dims[:dim], splits[:first], *state.dims[dim + 1 :]), state.partial)
        received = (group_size(self.mesh, axes) - 1) * self.holds(state)
        return _Move(after, AllGather, (dim, axes), received, self.seconds(axes, received))

    def all_to_all(self, state: DistState, dim: int, first: int, other: int) -> _Move:
        """The axes of `dim` from the `first` on go over to the dim `other`."""
        moved = tuple(Split(split.axis) for split in state.dims[dim][first:])
        axes = tuple(split.axis for split in moved)
        n = group_size(self.mesh, axes)
        dims = list(state.dims)
        dims[dim], dims[other] = dims[dim][:first], (*dims[other], *moved)
        received = (n - 1) / n * self.holds(state)
        seconds = self.seconds(axes, received)
        return _Move(DistState(tuple(dims), state.partial), AllToAll, (dim, other, axes), received, seconds)

    def exchange(self, state: DistState) -> _Move:
        over = self.exchange_axes(state) if self.same_mesh else ()
        received = self.missing(state) * self.itemsize
        # Among equals a native collective is preferred: it is better tuned than a general exchange.
        seconds = self.seconds(over, received) * (1 + 1e-9)
        return _Move(self.leaf, Exchange, (over,), received, seconds)

    def exchange_axes(self, state: DistState) -> tuple[int, ...]:
        """The axes whose part in the layout changes: those not behind a common beginning of both dims' lists."""
        same: set[int] = set()
        for have, want in zip(state.dims, self.goal.dims, strict=True):
            same.update(split.axis for split in have[: _common(have, want)])
        touched = {split.axis for dims in (state.dims, self.goal.dims) for splits in dims for split in splits}
        return tuple(sorted(touched - same))

    def missing(self, state: DistState) -> float:
        """Elements that a rank lacks for the goal, on average over the ranks: the least that must move."""
        found = self.missing_of.get(state.dims)
        if found is None:
            found = self.missing_of[state.dims] = self._missing(state)
        return found

    def _missing(self, state: DistState) -> float:
        if not self.plain:
            goal = self.leaf.spec(self.source) if self.same_mesh else self.unreduced
            return _missing_by_blocks(state.spec(self.source), goal)
        if self.needed is None:
            self.needed = self._held_of_goal(self.goal.dims)
        return self.needed - self._held_of_goal(state.dims)

    def _held_of_goal(self, dims: Sequence[tuple[Split, ...]]) -> float:
        """How much of its block in the goal a rank holds, on average, when the dims are split so."""
        shared = functools.reduce(np.multiply, [self._shared(dim, splits) for dim, splits in enumerate(dims)])
        return float(shared.sum()) / self.mesh.grid_size

    def _shared(self, dim: int, splits: tuple[Split, ...]) -> np.ndarray:
        """How many indices of its part of `dim` in the goal each rank holds, when `splits` split the dim."""
        found = self.shared_of.get((dim, splits))
        if found is None:
            size = self.shape[dim]
            start, stop = _extents(self.mesh, size, tuple([split.axis for split in splits]))
            goal_start, goal_stop = _extents(self.mesh, size, tuple([split.axis for split in self.goal.dims[dim]]))
            both = np.minimum(stop, goal_stop) - np.maximum(start, goal_start)
            found = self.shared_of[dim, splits] = np.maximum(both, 0)
        return found

    # ---------------------------------------------------------------- the route

    def route(self, path: list[tuple[DistState, _Move | None]]) -> Route:
        """The path as steps, with the local ones between the collectives made explicit."""
        steps: list[Step] = []
        costs: list[StepCost] = []
        at = self.source

        def go(step: Step, received: float = 0.0, seconds: float = 0.0) -> None:
            nonlocal at
            steps.append(step)
            costs.append(StepCost(received, seconds, step.after.local_bytes))
            at = step.after

        for index, (state, move) in enumerate(path):
            if move is not None:
                after = self.unreduced if move.state.arrived else move.state.spec(self.source)
                if index == len(path) - 1 and move.state == state == self.goal:
                    after = self.target
                go(move.kind(at, after, *move.arguments), move.received, move.seconds)
            moved_on = state != self.start if move is None else state != move.state
            if moved_on and not state.arrived and (sliced := state.spec(self.source)) is not at:
                go(Slice(at, sliced))
        if at is not self.target:
            self._finish(at, go)
        return Route(self.source, self.target, tuple(steps), tuple(costs))

    def _finish(self, at: DTensorSpec, go) -> None:
        """The local steps at the end: R -> P, and names that mean the same (axes of one rank, mask for sum)."""
        if self.unreduced is not at:
            go(Slice(at, self.unreduced))
        if self.unreduced is not self.target:
            go(Unreduce(self.unreduced, self.target))


def _common(have: tuple[Split, ...], want: tuple[Split, ...]) -> int:
    """How many entries two lists have in common from the beginning."""
    common = 0
    for a, b in zip(have, want, strict=False):
        if a != b:
            break
        common += 1
    return common


def _absorbs(new: Partial, old: Partial) -> bool:
    """Whether `old` may simply be called `new`: a mask-partial is a sum."""
    return isinstance(old, MaskPartial) and new.reduce_op == "sum"


# ---------------------------------------------------------------- the least that must move


class _Links(NamedTuple):
    """The links of a mesh in a model: of each axis, the best of all, whether all are alike, (beta, axis) by speed."""

    each: tuple[Link, ...]
    best: Link
    uniform: bool
    by_speed: tuple[tuple[float, int], ...]


@functools.lru_cache(maxsize=256)
def _links(model: CostModel, mesh: DeviceMesh) -> _Links:
    each = tuple(model.link(mesh, (axis,)) for axis in range(mesh.ndim))
    known = each or (model.link(mesh, ()),)
    best = Link(min(link.alpha for link in known), min(link.beta for link in known))
    by_speed = sorted((link.beta, axis) for axis, link in enumerate(each) if mesh.shape[axis] > 1)
    return _Links(each, best, len(set(known)) == 1, tuple(by_speed))


@functools.lru_cache(maxsize=4096)
def _extents(mesh: DeviceMesh, size: int, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where the run that each rank holds of a plainly sharded dim begins and ends."""
    start, length = np.zeros(mesh.grid_size, np.int64), np.full(mesh.grid_size, size)
    for axis in axes:
        step = -(-length // mesh.shape[axis])
        begin = np.minimum(mesh.coordinates[:, axis] * step, length)
        start, length = start + begin, np.minimum(begin + step, length) - begin
    return start, start + length


def _missing_by_blocks(source: DTensorSpec, target: DTensorSpec) -> float:
    """Elements of its target block that a rank does not hold, averaged over the ranks of the target mesh."""
    total = 0
    ranks = target.mesh.grid_ranks
    for position, rank in enumerate(ranks):
        want = target.block(target.mesh.coordinates[position].tolist())
        total += math.prod(want.shape)
        coordinate = source.mesh.coordinate_of(rank)
        if coordinate is not None:
            have = source.block(coordinate)
            overlaps = (sum(n for _, _, n in intersect(a, b)) for a, b in zip(have.runs, want.runs, strict=True))
            total -= math.prod(overlaps)
    return total / len(ranks)


# ---------------------------------------------------------------- what one would do by hand


def plain_route(source: DTensorSpec, target: DTensorSpec, cost_model: CostModel | None = None) -> Route:
    """The step-by-step way: reduce each partial axis, gather every axis that changes, slice. For comparison.

    Example:
        >>> mesh = DeviceMesh("cpu", [0, 1])
        >>> spec = DTensorSpec(mesh, [Shard(0)], TensorMeta((4, 4)))
        >>> [step.describe() for step in plain_route(spec, spec.with_placements([Shard(1)])).steps]
        ['all-gather dim 0 over 0', 'slice dim 1 by 0']
    """
    _check_reachable(source, target)
    search = _Search(cost_model or current_cost_model(), source, target)
    path: list[tuple[DistState, _Move | None]] = [(search.start, None)]
    state = search.start
    while True:
        pending = [entry for entry in state.partial if entry[0] not in search.kept]
        if pending:
            move = next(m for m in search.reductions(state, (pending[0],)) if m.kind is AllReduce)
        elif not search.same_mesh:
            if path[-1][1] is not None and path[-1][1].kind is Exchange:
                break
            move = search.exchange(state)
        else:
            wrong = [dim for dim, have in enumerate(state.dims) if have != search.goal.dims[dim][: len(have)]]
            if not wrong:
                break
            move = search.gather(state, wrong[0], len(state.dims[wrong[0]]) - 1)
        path.append((move.state, move))
        state = move.state
    last = search.slice_to_goal(state)
    if last != state:
        path.append((last, None))
    return search.route(path)
