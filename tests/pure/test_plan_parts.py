"""Parts of the planner and of specs, each by its own statement: links, lower bounds, dims to scatter onto, costs."""

from __future__ import annotations

import pytest

from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.placement import Placement, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError
from shardwise.plan.cost import CostModel, Link, all_reduce_bytes, current_cost_model, links_of
from shardwise.plan.decomposing import _seconds
from shardwise.plan.heuristic import SAFELY, seconds_left, seconds_left_at_least
from shardwise.plan.move import scatter_dims
from shardwise.plan.route import DTensorRedistributePlanner
from shardwise.plan.state import Problem

MESH = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), fabric="virtual")
FAST, SLOW = Link(alpha=2e-6, beta=3e-9), Link(alpha=1e-6, beta=5e-9)  # one starts later, the other has less bandwidth
UNEQUAL = CostModel(axes={"dp": FAST, "tp": SLOW})
LAYOUTS = ["dp:S0", "dp:S1 tp:S0", "dp:P", "dp:P tp:P", "dp:P tp:S1", "dp:S0 tp:P"]


def spec(layout: str) -> DTensorSpec:
    return parse_spec(f"f32[8,16] {layout}", MESH)


@pytest.mark.parametrize("model", [CostModel(), UNEQUAL, CostModel(devices={"cpu": Link(alpha=1.0, beta=1e-12)})])
def test_lower_bounds_do_not_exceed_the_cost_of_a_route(model: CostModel) -> None:
    for before, after in [*((layout, "") for layout in LAYOUTS), ("dp:P", "dp:S0"), ("dp:P tp:P", "dp:S1 tp:S0")]:
        problem = Problem(model, spec(before), spec(after))
        seconds = DTensorRedistributePlanner(model).plan(spec(before), spec(after)).seconds
        assert seconds_left(problem, problem.start) <= seconds, (before, after)
        assert seconds_left_at_least(problem, problem.start) <= seconds, (before, after)


def test_a_bound_counts_the_start_of_a_collective() -> None:
    problem = Problem(CostModel(devices={"cpu": Link(alpha=1.0, beta=0.0)}), spec("dp:S0"), spec(""))
    assert seconds_left(problem, problem.start) >= SAFELY


def test_the_best_link_has_the_least_of_each_cost() -> None:
    assert links_of(UNEQUAL, MESH).best == Link(alpha=1e-6, beta=3e-9)
    assert links_of(UNEQUAL, MESH).by_speed == (0, 1)
    assert not links_of(UNEQUAL, MESH).uniform


def test_dims_to_scatter_onto() -> None:
    alike = Problem(CostModel(), parse_spec("f32[3,16,5] dp:P", MESH), parse_spec("f32[3,16,5] dp:S0", MESH))
    assert list(scatter_dims(alike, alike.start, (0,))) == [0, 1]  # that of the goal, and the one that divides best
    differ = Problem(UNEQUAL, parse_spec("f32[3,16,5] dp:P", MESH), parse_spec("f32[3,16,5] dp:S0", MESH))
    assert list(scatter_dims(differ, differ.start, (0,))) == [0, 1, 2]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_reductions_of_a_decomposition_are_of_one_element_for_each_row(rows: int) -> None:
    mesh = DeviceMesh("cpu", range(4), fabric="virtual")
    sharded = DTensorSpec(mesh, (Shard(0),), TensorMeta((4 * rows, 64)))
    received = all_reduce_bytes(4, 64 * 4)
    expected = 3 * current_cost_model().seconds(mesh, (0,), received)
    assert _seconds([sharded], 0, {0: 0}, 3) == pytest.approx(expected)


@pytest.mark.parametrize("other", [Replicate(), Shard(1)])
def test_given_sizes_are_checked_beside_any_other_placement(other: Placement) -> None:
    assert DTensorSpec(MESH, (Ragged(0, (3, 5)), other), TensorMeta((8, 16))).is_ragged
    with pytest.raises(LayoutError):
        DTensorSpec(MESH, (Ragged(0, (3, 4)), other), TensorMeta((8, 16)))
