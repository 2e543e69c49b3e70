"""DTensorRedistributePlanner: the cheapest sequence of steps from one layout to another.

Converts the path found by the search to steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.mesh import DeviceMesh  # noqa: F401  # in the examples
from shardwise.core.placement import AnyShard, Replicate, norm_order
from shardwise.core.spec import DTensorSpec, TensorMeta  # noqa: F401  # in the examples
from shardwise.errors import LayoutError, MemoryBoundError, MeshError
from shardwise.plan.cost import CostModel, current_cost_model, links_of
from shardwise.plan.host_axes import on_split_mesh, split_by_hosts
from shardwise.plan.line_change import LineChange, line_of
from shardwise.plan.missing_bytes import missing
from shardwise.plan.move import Move, all_reduce, exchange, gather
from shardwise.plan.route_pieces import Pieces, pieces_of
from shardwise.plan.search import Path, cheapest_path
from shardwise.plan.state import DistState, Problem
from shardwise.plan.step import Compact, Exchange, Expand, Slice, Step, Unreduce

__all__ = ["DTensorRedistributePlanner", "DistState", "Route", "StepCost", "check_reachable", "plain_route"]


class StepCost(NamedTuple):
    """The modelled cost of a step: bytes that a rank receives, seconds, bytes that a rank holds afterwards."""

    received: float
    seconds: float
    holds: int


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one layout to another, and their modelled costs.

    Example:
        >>> from shardwise.core.placement import Shard
        >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        >>> spec = DTensorSpec(mesh, [Shard(0)], TensorMeta((8, 4)))
        >>> print(DTensorRedistributePlanner().plan(spec, spec.with_placements([Shard(1)])))
        f32[8,4] S0 -> S1: all-to-all dim 0 -> dim 1 over 0
    """

    source: DTensorSpec
    target: DTensorSpec
    steps: tuple[Step, ...]
    costs: tuple[StepCost, ...]
    pieces: Pieces | None = None  # steps of different pieces run at once; the costs are of all pieces

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
        """The number of collectives."""
        return sum(step.collective is not None for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes on a rank in any state of the route, its ends included."""
        return max([self.source.local_bytes, *(cost.holds for cost in self.costs)])

    def __str__(self) -> str:
        steps = ", then ".join(step.describe() for step in self.steps) or "nothing to do"
        cut = "" if self.pieces is None else f", in {self.pieces.number} pieces of dim {self.pieces.dim}"
        return f"{self.source} -> {self.target.layout}: {steps}{cut}"


class DTensorRedistributePlanner:
    """Finds the cheapest route between two layouts; ties go to fewer collectives, then to less memory.

    Args:
        cost_model: the model to plan with; the current one by default.

    Example:
        >>> from shardwise.core.placement import Shard
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
            source: the current layout.
            target: the wanted layout; of the same tensor, on the same mesh or another one of the same world.
            max_bytes: no state of the route may hold more than this on a rank.

        Raises:
            LayoutError: a Partial target that the source cannot become.
            MemoryBoundError: no route keeps `max_bytes`; names the smallest possible bound.
        """
        check_reachable(source, target)
        if source is target and max_bytes is None:
            return Route(source, target, (), ())
        if source.broadcast:
            return self._plan_compact(source, target, max_bytes)
        assert not target.broadcast, f"{source} is not known to be constant as {target} is"
        if max_bytes is None and _only_sliced(source, target):
            return Route(source, target, (Slice(source, target),), (StepCost(0.0, 0.0, target.local_bytes),))
        if max_bytes is None and (along := line_of(source, target)) is not None:
            return self._along_line(source, target, along)
        if max_bytes is not None and (ends := max(source.local_bytes, target.local_bytes)) > max_bytes:
            raise MemoryBoundError(
                f"no route from {source} to {target.layout} holds at most max_bytes={max_bytes} on a rank",
                hint=f"the smallest bound that would do is {ends} bytes",
                smallest=ends,
            )
        problem = Problem(self.cost_model, source, target)
        if not problem.same_mesh and _is_held(problem):
            return Route(source, target, (Slice(source, target),), (StepCost(0.0, 0.0, target.local_bytes),))
        route = _route(problem, cheapest_path(problem, max_bytes))
        if not self.cost_model.hosts:
            return route
        inside_first = self._by_hosts(source, target, max_bytes)
        routes = [route] if inside_first is None else [route, inside_first]
        if max_bytes is None:  # pieces in flight need additional memory
            routes = [self._in_pieces(one) for one in routes]
        return min(routes, key=lambda one: one.seconds)

    def _by_hosts(self, source: DTensorSpec, target: DTensorSpec, max_bytes: int | None) -> Route | None:
        """The cheapest route over the mesh with its axes split by hosts; None if no axis needs that."""
        hosts = self.cost_model.hosts.get(source.mesh.device_type)
        if hosts is None or source.mesh is not target.mesh or target.partial_axes:
            return None
        gathered = [
            axis for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True))
            if isinstance(old, AnyShard) and isinstance(new, Replicate)
        ]  # fmt: skip
        if not gathered and not source.partial_axes:  # a pure exchange crosses between hosts in any case
            return None
        split = split_by_hosts(source.mesh, hosts)
        if split is None:
            return None
        begin, end = on_split_mesh(source, split), on_split_mesh(target, split)
        if begin is None or end is None:
            return None
        problem = Problem(self.cost_model, begin, end)
        found = _route(problem, cheapest_path(problem, max_bytes))
        return Route(source, target, found.steps, found.costs)

    def _in_pieces(self, route: Route) -> Route:
        """The route in pieces, if its steps use different links and pieces are faster."""
        hosts = self.cost_model.hosts.get(route.source.mesh.device_type)
        times = [cost.seconds for cost in route.costs]
        cut = None if hosts is None else pieces_of(route.source, route.target, route.steps, times, hosts)
        if cut is None:
            return route
        pieces, times = cut
        costs = tuple([cost._replace(seconds=time) for cost, time in zip(route.costs, times, strict=True)])
        return Route(route.source, route.target, route.steps, costs, pieces)

    def _along_line(self, source: DTensorSpec, target: DTensorSpec, along: LineChange) -> Route:
        """An exchange among the ranks of one axis, which moves exactly the missing bytes.

        Given sizes may be new each time, so there is no search.
        """
        holds = target.local_bytes
        if not along.received:  # every rank has its part already
            return Route(source, target, (Slice(source, target),), (StepCost(0.0, 0.0, holds),))
        over = (along.axis,)
        seconds = links_of(self.cost_model, source.mesh).group(over).seconds(along.received)
        step = Exchange(source, target, over, along)
        return Route(source, target, (step,), (StepCost(along.received, seconds, holds),))

    def _plan_compact(self, source: DTensorSpec, target: DTensorSpec, max_bytes: int | None) -> Route:
        """Move stored elements only; along broadcast dims each rank expands its own part of the target."""
        dims, stored = source.broadcast, source.compact()
        placements = tuple([Replicate() if isinstance(p, AnyShard) and p.dim in dims else p for p in target.placements])
        axes = [() if dim in dims else split for dim, split in enumerate(target.dim_axes)]
        goal = DTensorSpec.from_dim_axes(target.mesh, placements, stored.tensor_meta, axes)
        inner = self.plan(stored, goal, max_bytes=max_bytes)
        last = StepCost(0.0, 0.0, target.local_bytes)
        if not inner.steps:
            return Route(source, target, (Expand(source, target, dims),), (last,))
        first = StepCost(0.0, 0.0, stored.local_bytes)
        steps = (Compact(source, stored), *inner.steps, Expand(goal, target, dims))
        return Route(source, target, steps, (first, *inner.costs, last))


def _route(problem: Problem, path: Path) -> Route:
    """The path as steps, with the local ones between the collectives and at the end made explicit."""
    steps: list[Step] = []
    costs: list[StepCost] = []

    def go_locally(kind: type[Step], before: DTensorSpec, after: DTensorSpec) -> DTensorSpec:
        if after is not before:
            steps.append(kind(before, after))
            costs.append(StepCost(0.0, 0.0, after.local_bytes))
        return after

    at = problem.source
    for state, move in path:
        if move is not None:
            after = problem.spec(move.state)
            steps.append(move.kind(at, after, *move.arguments))
            costs.append(StepCost(move.received, move.seconds, problem.most(move.state.dims)))
            at = after
        if move is None or state != move.state:
            at = go_locally(Slice, at, problem.spec(state))
    if at is not problem.target:  # equivalent placements (axes of one rank, mask for sum), and R -> P
        at = go_locally(Slice, at, problem.unreduced())
        go_locally(Unreduce, at, problem.target)
    return Route(problem.source, problem.target, tuple(steps), tuple(costs))


def _is_held(problem: Problem) -> bool:
    """Whether every rank already has its new block, on another mesh of the same ranks in the same order."""
    source, target = problem.source, problem.target
    if source.partial_axes or target.partial_axes or source.mesh.grid_ranks != target.mesh.grid_ranks:
        return False
    if source.tensor_meta.is_symbolic or 0 in source.shape:  # of no elements nothing is missing, but blocks differ
        return False
    return not missing(problem, problem.start.dims)


def _only_sliced(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether the target only adds splits to those of the source: the most frequent route."""
    if source.mesh is not target.mesh or source.partial_axes or target.partial_axes:
        return False
    for old, new in zip(source.placements, target.placements, strict=True):
        if old is not new and not isinstance(old, Replicate):
            return False
    return all(new[: len(old)] == old for old, new in zip(source.dim_axes, target.dim_axes, strict=True))


def check_reachable(source: DTensorSpec, target: DTensorSpec) -> None:
    """Refuse a change of layout that no route can make."""
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
                    f"{mesh} is a slice of a larger mesh: a tensor on it may differ from slice to slice, so its route "
                    f"to {b if mesh is a else a} is not defined",
                    hint=f"take it to its root {mesh.root} by to_local() and from_local() with placements for all axes",
                )
        return
    for axis in target.partial_axes:
        old, new = source.placements[axis], target.placements[axis]
        # a norm loses the sign, so only a norm that is Partial on another axis can become one
        norm = norm_order(new.reduce_op) is not None and new not in source.placements  # pyright: ignore[reportAttributeAccessIssue]
        if norm or isinstance(old, AnyShard):
            raise LayoutError(
                f"cannot redistribute {source} to {target.layout}: axis {a.axis_name(axis)!r} would change from "
                f"{old!r} to {new!r}",
                hint="Partial is the layout of results that wait for a reduction; ask for Shard() or Replicate()",
            )


# ---------------------------------------------------------------- axis by axis, for comparison


def plain_route(source: DTensorSpec, target: DTensorSpec, cost_model: CostModel | None = None) -> Route:
    """The route axis by axis: reduce each Partial axis, gather every axis that changes, slice. For comparison.

    Example:
        >>> from shardwise.core.placement import Shard
        >>> mesh = DeviceMesh("cpu", [0, 1])
        >>> spec = DTensorSpec(mesh, [Shard(0)], TensorMeta((4, 4)))
        >>> [step.describe() for step in plain_route(spec, spec.with_placements([Shard(1)])).steps]
        ['all-gather dim 0 over 0', 'slice dim 1 by 0']
    """
    check_reachable(source, target)
    problem = Problem(cost_model or current_cost_model(), source, target)
    state = problem.start
    path: Path = [(state, None)]
    while (move := _plain_move(problem, state)) is not None:
        state = move.state
        path.append((state, move))
    path.append((problem.slice_to_goal(state), None))
    return _route(problem, path)


def _plain_move(problem: Problem, state: DistState) -> Move | None:
    """The next step, one axis at a time; None if only slices remain."""
    if state.partial:
        return all_reduce(problem, state, state.partial[:1])
    if not problem.same_mesh:
        return None if state == problem.leaf else exchange(problem, state)
    for dim, (have, want) in enumerate(zip(state.dims, problem.goal, strict=True)):
        if have != want[: len(have)]:
            return gather(problem, state, dim, len(have) - 1)
    return None
