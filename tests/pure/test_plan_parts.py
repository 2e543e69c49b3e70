"""Parts of the planner and of specs, each by its own statement: links, lower bounds, dims to scatter onto, costs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

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
from shardwise.plan.state_transfer import _windows
from shardwise.rules.attention_blocks import tiles
from shardwise.rules.mask_reach import band_of

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


@pytest.mark.parametrize("offset", [None, *range(-4, 7)])
def test_tiles_of_scores_cover_what_a_causal_mask_shows(offset: int | None) -> None:
    for rows, columns in itertools.product(range(5), range(6)):
        shown = torch.zeros(rows, columns, dtype=torch.int64)
        for tile in tiles(rows, columns, offset):
            part = shown[tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]
            assert part.shape == (tile.rows, tile.columns)  # it is inside
            part += torch.ones_like(part).tril() if tile.causal else torch.ones_like(part)
        expected = torch.ones(rows, columns, dtype=torch.int64)
        assert torch.equal(shown, expected if offset is None else expected.tril(offset))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 3), (1, 2), (6, 6)])
def test_the_band_of_a_mask_is_its_reach_to_both_sides(before: int, after: int) -> None:
    rows = torch.arange(8)
    distance = rows[None, :] - rows[:, None]
    mask = torch.zeros(8, 8).masked_fill((distance < -before) | (distance > after), -math.inf)
    assert band_of(mask) == (before, after)
    mask[3] = -math.inf  # a query that sees nothing reaches nowhere
    assert band_of(mask) == (before, after)


@pytest.mark.parametrize("limit", [16, 100, 512, 4096])
def test_windows_of_a_transfer_cover_a_tensor_within_the_limit(limit: int) -> None:
    source, target = parse_spec("f32[8,16] dp:S0", MESH), parse_spec("f32[8,16] dp:S1 tp:S0", MESH)
    found = list(_windows(source, target, limit))
    if found[0][0] is None:
        assert len(found) == 1
        return
    edges = [(window.start, window.stop) for window, _ in found if window is not None]
    assert edges[0][0] == 0
    assert [stop for _, stop in edges[:-1]] == [start for start, _ in edges[1:]]
    assert edges[-1][1] == source.shape[found[0][0].dim]
    one_row = all(stop - start == 1 for start, stop in edges)
    assert all(staged <= limit for _, staged in found) or one_row
