"""Routes: they chain, cost no more than the plain way, move what must move, are the cheapest, and keep a bound."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shardwise.core.layout import runs_of
from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.placement import Partial, Placement, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta, default_shard_order
from shardwise.errors import LayoutError, MemoryBoundError, MeshError
from shardwise.plan import search
from shardwise.plan.cost import CostModel, Link, current_cost_model, set_cost_model
from shardwise.plan.heuristic import seconds_left, seconds_left_at_least
from shardwise.plan.route import DTensorRedistributePlanner, Route, plain_route
from shardwise.plan.search import Path, cheapest_path
from shardwise.plan.state import Problem
from shardwise.plan.step import AllGather, AllReduce, Exchange, ReduceScatter, Slice
from tests.pure.layouts import average_lack, cells, plain_pairs, spec_pairs

Pair = tuple[DTensorSpec, DTensorSpec]
SLOW_START = Link(alpha=1e-3, beta=1e-9)  # starting a collective is what costs
SLOW_BYTES = Link(alpha=1e-9, beta=1e-3)  # bytes are what costs


def plan(source: DTensorSpec, target: DTensorSpec, model: CostModel | None = None, **options: int) -> Route:
    return DTensorRedistributePlanner(model).plan(source, target, **options)


def specs(text: str, *, shape: Sequence[int] = (2, 2), names: Sequence[str] = ("dp", "tp")) -> Pair:
    """Two layouts written as `f32[8,8] dp:S0 -> tp:S1`."""
    mesh = DeviceMesh("cpu", np.arange(math.prod(shape)).reshape(shape), mesh_dim_names=names, fabric="virtual")
    before, after = text.split("->")
    source = parse_spec(before, mesh)
    return source, parse_spec(after.strip(), mesh, meta=source.tensor_meta)


# ---------------------------------------------------------------- what holds for every route


def assert_chains(route: Route, source: DTensorSpec, target: DTensorSpec) -> None:
    ends = [source, *(step.after for step in route.steps)]
    assert [step.before for step in route.steps] == ends[:-1]
    assert ends[-1] is target
    assert len(route.steps) == len(route.costs)
    assert all(step.before is not step.after for step in route.steps)
    for step, cost in zip(route.steps, route.costs, strict=True):
        assert cost.holds == step.after.local_bytes
        assert (step.collective is None) == (cost.seconds == 0.0)


@settings(max_examples=150)
@given(spec_pairs())
def test_steps_chain_and_cost_no_more_than_the_plain_way(pair: Pair) -> None:
    route, plain = plan(*pair), plain_route(*pair)
    for made in (route, plain):
        assert_chains(made, *pair)
    assert route.seconds <= plain.seconds * (1 + 1e-8)


@settings(max_examples=60)
@given(spec_pairs(two_meshes=True, max_ranks=8))
def test_steps_chain_between_two_meshes(pair: Pair) -> None:
    route, plain = plan(*pair), plain_route(*pair)
    for made in (route, plain):
        assert_chains(made, *pair)
    assert route.seconds <= plain.seconds * (1 + 1e-8)
    if pair[0].mesh is not pair[1].mesh:
        (crossing,) = [step for step in route.steps if step.before.mesh is not step.after.mesh]
        # what every rank has already is not sent
        assert (isinstance(crossing, Exchange) and not crossing.over) or average_lack(*pair) == 0


@settings(max_examples=100)
@given(plain_pairs(max_ndim=3))
def test_without_partial_one_collective_moves_exactly_what_ranks_lack(pair: Pair) -> None:
    route = plan(*pair)
    assert route.collectives <= 1
    assert route.received == pytest.approx(average_lack(*pair), rel=1e-12)


@settings(max_examples=40)
@given(plain_pairs(two_meshes=True, max_ranks=8, max_ndim=2))
def test_between_two_meshes_the_exchange_moves_exactly_what_ranks_lack(pair: Pair) -> None:
    assert plan(*pair).received == pytest.approx(average_lack(*pair), rel=1e-12)


@settings(max_examples=40)
@given(spec_pairs(max_ndim=3))
def test_what_a_state_holds_is_what_its_largest_rank_holds(pair: Pair) -> None:
    for step in plan(*pair).steps:
        largest = max(len(cells(step.after, rank)) for rank in step.after.mesh.grid_ranks)
        # the sizes of each dim are bounded one by one, and no rank need be largest in all of them
        assert largest * step.after.tensor_meta.dtype.itemsize <= step.after.local_bytes


@settings(max_examples=70)
@given(spec_pairs(max_ndim=3))
def test_the_smallest_bound_is_kept_and_is_the_smallest(pair: Pair) -> None:
    with pytest.raises(MemoryBoundError) as refused:
        plan(*pair, max_bytes=-1)
    smallest = refused.value.smallest
    assert f"the smallest bound that would do is {smallest} bytes" in str(refused.value)
    assert "max_bytes=-1" in str(refused.value)
    kept = plan(*pair, max_bytes=smallest)
    assert kept.peak_bytes <= smallest
    assert_chains(kept, *pair)
    assert kept.seconds >= plan(*pair).seconds * (1 - 1e-8)
    with pytest.raises(MemoryBoundError) as again:
        plan(*pair, max_bytes=smallest - 1)
    assert again.value.smallest == smallest


# ---------------------------------------------------------------- the cheapest of all, by trying everything

Dims = tuple[tuple[int, ...], ...]
State = tuple[Dims, frozenset[int]]


class EveryRoute:
    """Every sequence of the moves in the design's table, by Dijkstra over all layouts. Plain shards and sums only.

    Sizes divide evenly, so that each rank of a layout holds the same number of elements.
    """

    def __init__(self, shape: Sequence[int], sizes: Sequence[int], links: Sequence[Link], itemsize: int = 4) -> None:
        self.shape, self.sizes, self.links, self.itemsize = shape, sizes, links, itemsize
        self.lacks: dict[tuple[Dims, Dims], float] = {}

    def cost(self, start: State, goal: State, *, exchange_to_goal_only: bool) -> float:
        dist = {start: 0.0}
        queue = [(0.0, 0, start)]
        order = itertools.count(1)
        while queue:
            seconds, _, state = heapq.heappop(queue)
            if state == goal:
                return seconds
            if seconds > dist[state]:
                continue
            for after, more in self.moves(state, goal, exchange_to_goal_only):
                if seconds + more < dist.get(after, math.inf):
                    dist[after] = seconds + more
                    heapq.heappush(queue, (seconds + more, next(order), after))
        raise AssertionError("the goal cannot be reached")

    def moves(self, state: State, goal: State, exchange_to_goal_only: bool) -> Iterator[tuple[State, float]]:
        dims, partial = state
        held = self.held(dims)
        used = partial.union(*dims)
        for axis in set(range(len(self.sizes))) - used:
            for dim in range(len(dims)):  # slice
                yield (self.put(dims, dim, (*dims[dim], axis)), partial), 0.0
            if axis in goal[1]:  # make partial
                yield (dims, partial | {axis}), 0.0
        for dim, axes in enumerate(dims):
            for first in range(len(axes)):
                moved, n = axes[first:], self.ranks(axes[first:])
                rest = self.put(dims, dim, axes[:first])
                yield (rest, partial), self.seconds(moved, (n - 1) * held)  # all-gather
                for other in set(range(len(dims))) - {dim}:  # all-to-all
                    after = self.put(rest, other, (*dims[other], *moved))
                    yield (after, partial), self.seconds(moved, (n - 1) / n * held)
        for count in range(1, len(partial) + 1):
            for axes in itertools.permutations(sorted(partial), count):
                n, rest = self.ranks(axes), partial - set(axes)
                yield (dims, rest), self.seconds(axes, 2 * (n - 1) / n * held)  # all-reduce
                for dim in range(len(dims)):  # reduce-scatter
                    yield (self.put(dims, dim, (*dims[dim], *axes)), rest), self.seconds(axes, (n - 1) / n * held)
        for other in [goal[0]] if exchange_to_goal_only else self.layouts(partial):
            if other != dims and not any(partial.intersection(axes) for axes in other):
                yield (other, partial), self.seconds(self.changed(dims, other), self.lack(dims, other))

    def layouts(self, partial: frozenset[int]) -> Iterator[Dims]:
        free = sorted(set(range(len(self.sizes))) - partial)
        for where in itertools.product(range(-1, len(self.shape)), repeat=len(free)):
            chosen = [[a for a, at in zip(free, where, strict=True) if at == dim] for dim in range(len(self.shape))]
            yield from itertools.product(*map(itertools.permutations, chosen))  # pyright: ignore[reportReturnType]

    @staticmethod
    def put(dims: Dims, dim: int, axes: tuple[int, ...]) -> Dims:
        return (*dims[:dim], axes, *dims[dim + 1 :])

    @staticmethod
    def changed(dims: Dims, other: Dims) -> tuple[int, ...]:
        """The axes that do not split the same dim behind the same axes before and after."""
        same: set[int] = set()
        for a, b in zip(dims, other, strict=True):
            same.update(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        return tuple(set().union(*dims, *other) - same)

    def ranks(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def held(self, dims: Dims) -> float:
        return math.prod(self.shape) * self.itemsize / self.ranks([axis for axes in dims for axis in axes])

    def seconds(self, axes: Sequence[int], received: float) -> float:
        return max(self.links[a].alpha for a in axes) + received * max(self.links[a].beta for a in axes)

    def lack(self, dims: Dims, other: Dims) -> float:
        if (dims, other) not in self.lacks:
            mesh = DeviceMesh("cpu", np.arange(math.prod(self.sizes)).reshape(self.sizes), fabric="virtual")
            pair = [spec_of(mesh, each, (), self.shape) for each in (dims, other)]
            self.lacks[dims, other] = average_lack(*pair)
        return self.lacks[dims, other]


def spec_of(mesh: DeviceMesh, dims: Dims, partial: Sequence[int], shape: Sequence[int]) -> DTensorSpec:
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, axes in enumerate(dims):
        for axis in axes:
            placements[axis] = Shard(dim)
    for axis in partial:
        placements[axis] = Partial()
    order = [(dim, axes) for dim, axes in enumerate(dims) if axes]
    return DTensorSpec(mesh, placements, TensorMeta(shape), order)


def every_layout(mesh: DeviceMesh, shape: Sequence[int], *, partial: bool) -> list[DTensorSpec]:
    """All layouts of a tensor over a mesh: plain shards in every order, replicas and, if wanted, sums."""
    choices = [Replicate(), *map(Shard, range(len(shape))), *([Partial()] if partial else [])]
    found = []
    for chosen in itertools.product(choices, repeat=mesh.ndim):
        entries = [
            [(dim, order) for order in itertools.permutations(axes)] for dim, axes in default_shard_order(chosen)
        ]
        found += [DTensorSpec(mesh, chosen, TensorMeta(shape), order) for order in itertools.product(*entries)]
    return found


def assert_cheapest(
    sizes: Sequence[int],
    shape: Sequence[int],
    links: Sequence[Link],
    *,
    partial: bool,
    count: int,
    only_last: bool = False,
) -> None:
    names = ("x", "y")[: len(sizes)]
    mesh = DeviceMesh("cpu", np.arange(math.prod(sizes)).reshape(sizes), mesh_dim_names=names, fabric="virtual")
    model = CostModel(axes=dict(zip(names, links, strict=True)))
    oracle = EveryRoute(shape, sizes, links)
    layouts = every_layout(mesh, shape, partial=partial)
    pairs = list(itertools.product(layouts, layouts))
    for source, target in random.Random(0).sample(pairs, min(count, len(pairs))):
        states = [(spec.dim_axes, frozenset(spec.partial_axes)) for spec in (source, target)]
        if any(axis in target.partial_axes for axes in source.dim_axes for axis in axes):
            continue  # nothing that is sharded becomes Partial
        route = plan(source, target, model)
        best = oracle.cost(*states, exchange_to_goal_only=only_last)
        assert route.seconds == pytest.approx(best, rel=1e-6), str(route)


@pytest.mark.parametrize("beta", [5e-10, 5e-7, 5e-5])
@pytest.mark.parametrize("size", [2, 4])
def test_no_sequence_of_moves_is_cheaper_on_one_axis(size: int, beta: float) -> None:
    assert_cheapest((size,), (8, 16), [Link(4e-5, beta)], partial=True, count=100)


@pytest.mark.parametrize("beta", [5e-10, 5e-7, 5e-5])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4)])
def test_no_sequence_of_moves_is_cheaper_on_two_axes(sizes: tuple[int, int], beta: float) -> None:
    assert_cheapest(sizes, (8, 16), [Link(4e-5, beta)] * 2, partial=True, count=60)


@pytest.mark.parametrize("slow", [Link(4e-5, 5e-6), Link(4e-4, 5e-7), Link(4e-4, 5e-5)])
def test_no_sequence_of_native_moves_is_cheaper_where_links_differ(slow: Link) -> None:
    links = [slow, Link(4e-5, 5e-7)]
    assert_cheapest((2, 4), (8, 16), links, partial=False, count=60, only_last=True)


# ---------------------------------------------------------------- the search leaves out nothing, and looks at little

UNEQUAL = {"w": Link(1e-5, 2e-9), "x": Link(4e-5, 1e-9), "y": Link(2e-5, 5e-7), "z": Link(1e-6, 1e-7)}


def names_of(axes: int) -> tuple[str, ...]:
    return ("w", "x", "y", "z")[:axes]


def on_unequal_links(pair: Pair) -> Problem:
    """The problem of a pair on a mesh whose axes all have a link of their own."""
    root = pair[0].mesh
    mesh = DeviceMesh("cpu", np.arange(root.size()).reshape(root.shape), mesh_dim_names=names_of(root.ndim))
    source, target = (DTensorSpec(mesh, spec.placements, spec.tensor_meta, spec.shard_order) for spec in pair)
    return Problem(CostModel(axes=UNEQUAL), source, target)


def problems(pair: Pair) -> list[Problem]:
    """The problem of a pair where starting is what costs, where bytes are, and where links differ."""
    alike = [Problem(CostModel(devices={"cpu": link}), *pair) for link in (SLOW_START, SLOW_BYTES)]
    return [*alike, on_unequal_links(pair)]


def seconds_of(path: Path) -> float:
    return sum(move.seconds for _, move in path if move is not None)


def on_four_axes(shape: Sequence[int], sizes: Sequence[int], before: str, after: str) -> Pair:
    mesh = DeviceMesh("cpu", np.arange(math.prod(sizes)).reshape(sizes), fabric="virtual")
    words = {"R": Replicate(), "P": Partial(), **{f"S{dim}": Shard(dim) for dim in range(len(shape))}}
    source = DTensorSpec(mesh, [words[word] for word in before.split()], TensorMeta(shape))
    return source, source.with_placements([words[word] for word in after.split()])


def assert_nothing_left_out(problem: Problem) -> None:
    found = cheapest_path(problem)
    with mock.patch.multiple(search, seconds_left=lambda *_: 0.0, seconds_left_at_least=lambda *_: 0.0):
        everything = cheapest_path(problem)
    assert seconds_of(found) == pytest.approx(seconds_of(everything), rel=1e-8, abs=1e-12)


@settings(max_examples=100)
@given(spec_pairs(max_ndim=2) | spec_pairs(max_axes=3, max_ndim=3))
def test_bounds_leave_out_no_cheaper_way(pair: Pair) -> None:
    for problem in problems(pair):
        assert_nothing_left_out(problem)


@pytest.mark.parametrize("decades", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 0, 1, 1), (0, 0, 0, 0)])
def test_bounds_leave_out_no_cheaper_way_where_bytes_are_what_costs(decades: Sequence[int]) -> None:
    """Small latencies, so that routes of many collectives may be cheapest, and links of very different speeds."""
    rng = random.Random(0)
    model = CostModel(axes={str(axis): Link(1e-7, 1e-9 * 10**decade) for axis, decade in enumerate(decades)})
    words = ("R", "S0", "S1")
    for _ in range(25):
        before, after = (" ".join(rng.choice(choices) for _ in range(4)) for choices in ((*words, "P", "P"), words))
        assert_nothing_left_out(Problem(model, *on_four_axes((64, 32), (2, 2, 2, 2), before, after)))


@settings(max_examples=40)
@given(spec_pairs(two_meshes=True, max_axes=3, max_ranks=8, max_ndim=3))
def test_bounds_leave_out_no_cheaper_way_between_meshes(pair: Pair) -> None:
    for link in (SLOW_START, SLOW_BYTES):
        assert_nothing_left_out(Problem(CostModel(devices={"cpu": link}), *pair))


@settings(max_examples=60)
@given(spec_pairs(max_ndim=3))
def test_bounds_are_never_more_than_what_is_left(pair: Pair) -> None:
    for problem in problems(pair):
        left = 0.0
        for state, move in reversed(cheapest_path(problem)):
            assert seconds_left(problem, state) <= left * (1 + 1e-8)
            assert seconds_left_at_least(problem, state) <= left * (1 + 1e-8)
            left += move.seconds if move is not None else 0.0


def bench_links(axes: int) -> CostModel:
    """A link of its own for each axis: fast ones start fast."""
    return CostModel(axes={str(axis): Link(1e-5 * (axis + 1), 1 / (1e9 * (4 - axis))) for axis in range(axes)})


def expanded(source: DTensorSpec, target: DTensorSpec, model: CostModel) -> int:
    problem = Problem(model, source, target)
    looking = search.Search(problem, math.inf)
    looking.run(problem.slice_to_goal(problem.start))
    return looking.expanded


def test_few_states_are_expanded_where_links_differ() -> None:
    """The hardest of 3,000 random pairs, and one of the frequent kind."""
    hard = on_four_axes((64, 24, 64), (2, 2, 2, 2), "S0 S0 P P", "R R R S0")
    assert expanded(*hard, bench_links(4)) <= 140
    usual = on_four_axes((24, 32, 32), (2, 3, 2, 4), "S1 P R S2", "S0 R S2 R")
    assert expanded(*usual, bench_links(4)) <= 20


def test_few_states_are_expanded_where_links_are_alike() -> None:
    assert expanded(*on_four_axes((64, 24, 64), (2, 2, 2, 2), "S0 S0 P P", "R R R S0"), CostModel()) <= 12
    assert expanded(*specs("f32[64,48] dp:P tp:S1 -> dp:S1 tp:R"), CostModel()) <= 4
    assert expanded(*specs("f32[64,48] dp:P tp:P -> dp:R tp:S0"), CostModel()) <= 3


def test_specs_are_made_for_the_chosen_way_alone() -> None:
    for pair in (
        on_four_axes((64, 24, 64), (2, 2, 2, 2), "S0 S0 P P", "R R R S0"),
        specs("f32[8,8] dp:S0 tp:S1 -> dp:S1 tp:S0"),
        specs("f32[8,8] dp:P tp:S1/2 -> dp:S0 tp:R"),
    ):
        with mock.patch.object(DTensorSpec, "from_dim_axes", wraps=DTensorSpec.from_dim_axes) as made:
            route = plan(*pair, bench_links(4))
        assert made.call_count == len(route.steps) - 1


@pytest.mark.parametrize("after", ["S0", "S1", "S0/8", "R"])
def test_ranks_are_not_gone_through_one_by_one(after: str) -> None:
    """Thousands of ranks with strided blocks: no block is worked out in Python."""
    mesh = DeviceMesh("cpu", np.arange(16384).reshape(128, 128), mesh_dim_names=("dp", "tp"), fabric="dry")
    source = parse_spec("f32[65536,4096] dp:S0/4 tp:R", mesh)
    target = parse_spec(f"dp:{after} tp:R", mesh, meta=source.tensor_meta)
    runs_of.cache_clear()
    with mock.patch.object(DTensorSpec, "runs", autospec=True) as asked:
        assert plan(source, target).collectives == 1
    assert (asked.call_count, runs_of.cache_info().misses) == (0, 0)


# ---------------------------------------------------------------- cases worth their own name


def test_swapping_two_sharded_dims_is_one_exchange_at_the_size_of_a_shard() -> None:
    source, target = specs("f32[8,8] dp:S0 tp:S1 -> dp:S1 tp:S0")
    route = plan(source, target)
    assert (route.collectives, route.peak_bytes) == (1, source.local_bytes)
    # of the four ranks the two on the diagonal keep all they have, the two others nothing
    assert route.received == source.local_bytes / 2
    assert plan(source, target, max_bytes=source.local_bytes) == route
    plain = plain_route(source, target)
    assert (plain.collectives, plain.peak_bytes) == (2, 4 * source.local_bytes)


def test_two_dims_into_a_third_in_the_other_order_is_one_exchange() -> None:
    source, target = specs("f32[4,8,4] x:S2 y:S0 -> x:S1 y:S1", names=("x", "y"))
    route = plan(source, target)
    assert (route.collectives, route.peak_bytes) == (1, source.local_bytes)
    assert route.received == average_lack(source, target)


def test_several_axes_of_a_dim_are_gathered_at_once() -> None:
    (step,) = plan(*specs("f32[8,8] dp:S0 tp:S0 -> dp:R tp:R")).steps
    assert isinstance(step, AllGather)
    assert (step.dim, step.over) == (0, (0, 1))
    assert step.describe() == "all-gather dim 0 over dp x tp"


def test_sums_over_several_axes_are_reduced_at_once() -> None:
    (reduced,) = plan(*specs("f32[8,8] dp:P tp:P -> dp:R tp:R")).steps
    assert isinstance(reduced, AllReduce)
    (scattered,) = plan(*specs("f32[8,8] dp:P tp:P -> dp:S0 tp:S0")).steps
    assert isinstance(scattered, ReduceScatter)
    assert reduced.over == scattered.over == (0, 1)


def test_what_both_layouts_leave_partial_takes_no_part() -> None:
    (step,) = plan(*specs("f32[8,8] dp:S0 tp:P -> dp:S1 tp:P")).steps
    assert step.collective == "all_to_all"
    assert step.axes == (0,)


def test_slices_come_before_a_reduction() -> None:
    steps = plan(*specs("f32[8,8] dp:P tp:R -> dp:R tp:S0")).steps
    assert [type(step) for step in steps] == [Slice, AllReduce]


def test_replicas_share_a_reduction_where_bytes_are_what_costs() -> None:
    """Each replica reduces a part and they gather: dearer to start, cheaper by the byte."""
    pair = specs("f32[64,64] dp:P tp:R -> dp:R tp:R", shape=(8, 2))
    started = plan(*pair, CostModel(devices={"cpu": SLOW_START}))
    carried = plan(*pair, CostModel(devices={"cpu": SLOW_BYTES}))
    assert started.collectives == 1
    assert carried.collectives > 1
    assert carried.received < started.received


def test_a_slow_axis_carries_less() -> None:
    def over_dp(route: Route) -> float:
        return sum(cost.received for step, cost in zip(route.steps, route.costs, strict=True) if 0 in step.axes)

    pair = specs("f32[64,64] dp:S0 tp:S0 -> dp:R tp:R", shape=(4, 4))
    fast = Link(1e-6, 1e-9)
    alike = plan(*pair, CostModel(axes={"dp": fast, "tp": fast}))
    slow = plan(*pair, CostModel(axes={"dp": Link(1e-6, 1e-6), "tp": fast}))
    assert alike.collectives == 1
    assert slow.collectives > 1
    assert over_dp(slow) < over_dp(alike) / 2
    late = plan(*pair, CostModel(axes={"dp": Link(1.0, 1e-9), "tp": fast}))
    assert sum(0 in step.axes for step in late.steps) == 1  # it is started once, whatever it carries


def test_the_current_model_is_planned_with() -> None:
    pair = specs("f32[64,64] dp:P tp:R -> dp:R tp:R", shape=(8, 2))
    before = set_cost_model(CostModel(devices={"cpu": SLOW_BYTES}))
    try:
        assert plan(*pair).collectives > 1
    finally:
        set_cost_model(before)
    assert plan(*pair).collectives == 1
    assert current_cost_model() is before


def test_axes_of_one_rank_cost_nothing() -> None:
    route = plan(*specs("f32[8,8] dp:S0 tp:P -> dp:S1 tp:R", shape=(1, 1)))
    assert (route.collectives, route.received, route.seconds) == (0, 0, 0)
    assert [type(step) for step in route.steps] == [Slice]


def test_a_layout_becomes_itself_by_nothing() -> None:
    source, target = specs("f32[8,8] dp:S0 tp:P -> dp:S0 tp:P")
    assert plan(source, target).steps == ()
    assert str(plan(source, target)).endswith("nothing to do")


def test_a_permuted_mesh_is_another_mesh() -> None:
    """The same placements on the same ranks in another order: blocks must travel."""
    source = DTensorSpec(DeviceMesh("cpu", [0, 1, 2], fabric="virtual"), [Shard(0)], TensorMeta((6,)))
    target = source.with_placements([Shard(0)], mesh=DeviceMesh("cpu", [2, 1, 0], fabric="virtual"))
    (step,) = plan(source, target).steps
    assert isinstance(step, Exchange)
    assert plan(source, target).received == 2 / 3 * source.local_bytes


# ---------------------------------------------------------------- what cannot be


def test_sharded_cannot_become_partial() -> None:
    with pytest.raises(LayoutError, match=r"axis 'tp' would change from Shard\(1\) to Partial\(sum\)"):
        plan(*specs("f32[8,8] dp:R tp:S1 -> dp:P tp:P"))
    with pytest.raises(LayoutError, match=r"StridedShard\(1, split_factor=2\)"):
        plan(*specs("f32[8,8] dp:R tp:S1/2 -> dp:R tp:P"))


def test_shapes_must_be_the_same() -> None:
    mesh = DeviceMesh("cpu", [0, 1], fabric="virtual")
    a, b = (DTensorSpec(mesh, [Shard(0)], TensorMeta(shape)) for shape in ((4,), (5,)))
    with pytest.raises(LayoutError, match="the shapes differ"):
        plan(a, b)


@pytest.mark.parametrize(
    ("device", "fabric", "words"), [("cuda", "virtual", "different device types"), ("cpu", "dry", "different fabrics")]
)
def test_nothing_moves_between_worlds(device: str, fabric: str, words: str) -> None:
    source = DTensorSpec(DeviceMesh("cpu", [0, 1], fabric="virtual"), [Shard(0)], TensorMeta((4,)))
    with pytest.raises(MeshError, match=words):
        plan(source, source.with_placements([Shard(0)], mesh=DeviceMesh(device, [0, 1], fabric=fabric)))


def test_nothing_moves_between_a_slice_and_its_root() -> None:
    root = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), fabric="virtual")
    whole = DTensorSpec(root, [Replicate(), Shard(0)], TensorMeta((4,)))
    part = whole.with_placements([Shard(0)], mesh=root["tp"])
    for pair in ((whole, part), (part, whole), (part, whole.with_placements([Shard(0)], mesh=root["dp"]))):
        with pytest.raises(MeshError, match="is a slice of a larger mesh"):
            plan(*pair)


def test_strided_blocks_are_counted_as_they_are() -> None:
    """Seven indices in two blocks, each of three rows: the longer block leaves a rank no more than the shorter one."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], fabric="virtual")
    source = DTensorSpec(mesh, [Shard(0), StridedShard(0, 3)], TensorMeta((7,), dtype=torch.float32))
    target = source.with_placements([Shard(0), Shard(0)])
    with pytest.raises(MemoryBoundError) as refused:
        plan(source, target, max_bytes=0)
    assert refused.value.smallest == source.local_bytes == 12
