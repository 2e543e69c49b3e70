"""Parts of the planner and of specs, each by its own statement: links, lower bounds, dims to scatter onto, costs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shardwise.core.layout import Run
from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.placement import Partial, Placement, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.random_ops import _kept
from shardwise.errors import LayoutError
from shardwise.plan.cost import CostModel, Link, all_reduce_bytes, current_cost_model, links_of
from shardwise.plan.decomposing import _seconds
from shardwise.plan.heuristic import SAFELY, seconds_left, seconds_left_at_least
from shardwise.plan.move import scatter_dims
from shardwise.plan.propagate import OpSchema, ShardingPropagator
from shardwise.plan.route import DTensorRedistributePlanner
from shardwise.plan.route_pieces import Pieces, piece_of
from shardwise.plan.sequence_attention import choose_attention
from shardwise.plan.state import Problem
from shardwise.plan.state_transfer import IndexRange, _staged, _windows
from shardwise.rules.attention_blocks import tiles
from shardwise.rules.engine import Factors, candidates
from shardwise.rules.mask_reach import Reach, reach_of
from shardwise.rules.padding import rows_padded
from shardwise.rules.registry import Call
from shardwise.rules.shapes import _concatenated
from shardwise.schema import load_rules, op_info

MESH = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), fabric="virtual")
LINE = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",), fabric="virtual")
FAST, SLOW = Link(alpha=2e-6, beta=3e-9), Link(alpha=1e-6, beta=5e-9)  # one starts later, the other has less bandwidth
UNEQUAL = CostModel(axes={"dp": FAST, "tp": SLOW})
TRANSFERRED = ["", "dp:S0", "dp:S1 tp:S0", "dp:S0 tp:S1", "tp:S1"]
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
    one = [[Run(0, 8)]]  # all tokens on one rank
    assert reach_of(mask, one, one) == Reach((before, after), (0,))
    mask[3] = -math.inf  # a query without visible keys does not count
    assert reach_of(mask, one, one) == Reach((before, after), (0,))


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


@pytest.mark.parametrize("target", TRANSFERRED)
@pytest.mark.parametrize("source", TRANSFERRED)
def test_windows_are_as_large_as_the_limit_allows(source: str, target: str) -> None:
    before, after = (parse_spec(f"f32[8,16] {layout}", MESH) for layout in (source, target))
    for limit in (8, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 300, 384, 512, 1000):
        found = list(_windows(before, after, limit))
        if found[0][0] is None:
            assert found == [(None, before.local_bytes + after.local_bytes)]  # ranks of one mesh send and receive
            assert found[0][1] <= limit
            continue
        window = found[0][0]
        step, size = window.stop, before.shape[window.dim]
        assert step == 1 or all(staged <= limit for _, staged in found)
        count = -(-(before.local_bytes + after.local_bytes) // limit)
        larger = [IndexRange(window.dim, 0, n) for n in (2 * step, 2 * step + 1)]
        assert step == max(size // count, 1) or any(_staged(before, after, each) > limit for each in larger)


def test_ranks_that_send_or_receive_stage_one_side() -> None:
    far = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("dp", "tp"), fabric="virtual")
    source, target = parse_spec("f32[8,16] dp:S0", MESH), parse_spec("f32[8,16] dp:S1 tp:S0", far)
    assert list(_windows(source, target, 256)) == [(None, 256)]
    assert [staged for _, staged in _windows(source, target, 128)] == [128] * 2


def test_a_dim_with_two_indices_for_each_window_is_long_enough() -> None:
    replicated = parse_spec("f32[8,16]", MESH)
    assert [window.dim for window, _ in _windows(replicated, replicated, 256) if window is not None] == [0] * 4
    assert [window.dim for window, _ in _windows(replicated, replicated, 128) if window is not None] == [1] * 8


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_have_the_layout_of_their_tensor(dim: int) -> None:
    """Over all placements: the local of a piece is a piece of the local, where the dim is not sharded."""
    placements = [Replicate(), Shard(1 - dim), Partial()]
    for pair in itertools.product(placements, repeat=2):
        tensor = DTensorSpec(MESH, pair, TensorMeta((8, 16), dtype=torch.bfloat16))
        piece = piece_of(tensor, Pieces(dim, 4))
        assert (piece.placements, piece.mesh, piece.tensor_meta.dtype) == (tensor.placements, MESH, torch.bfloat16)
        for coordinate in itertools.product(range(2), repeat=2):
            expected = list(tensor.local_shape(coordinate))
            expected[dim] //= 4
            assert list(piece.local_shape(coordinate)) == expected


def test_the_cost_of_a_row_counts_moved_operands_and_replicated_bytes() -> None:
    """Over all rows of a product and all layouts of its operands: nothing for an operand that stays."""
    placements = [Replicate(), Shard(0), Shard(1), Partial()]
    metas = [TensorMeta((8, 16)), TensorMeta((16, 4))]
    rows = candidates(Factors((("m", "k"), ("k", "n")), (("m", "n"),), linear=((0,), (1,))))
    held = [512, 256]
    for given, row in itertools.product(itertools.product(placements, repeat=2), rows):
        specs = [DTensorSpec(LINE, [placement], meta) for placement, meta in zip(given, metas, strict=True)]
        seconds, left, against = ShardingPropagator().row_cost(specs, 0, held, row)
        stay = [have is want for have, want in zip(given, row.inputs, strict=True)]
        is_free = [at or isinstance(have, Replicate) for at, have in zip(stay, given, strict=True)]
        assert (seconds == 0) == all(is_free), (given, row)
        full = [isinstance(want, Replicate | Partial) for want in row.inputs]
        assert left == sum(size for size, is_full in zip(held, full, strict=True) if is_full)
        made = [want.is_partial() and not at for want, at in zip(row.inputs, stay, strict=True)]
        assert against == sum(made)


# ---------------------------------------------------------------- attention over a sharded sequence


def attention_call(*layouts: str, keys: int = 64, values: int = 64, backward: bool = False) -> OpSchema:
    """A call of attention in the layouts of queries, keys and values, of four ranks along `tp`."""
    load_rules()
    shapes = [f"f32[2,4,{length},8] {layout}" for length, layout in zip((64, keys, values), layouts, strict=True)]
    query, key, value = (parse_spec(shape, LINE) for shape in shapes)
    sums = query.with_meta(TensorMeta((2, 4, 64))).with_placements(query.placements)
    aten = torch.ops.aten
    if backward:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        named = {"grad_out": query, "query": query, "key": key, "value": value, "out": query, "logsumexp": sums}
    else:
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        named = {"query": query, "key": key, "value": value}
    specs = tuple(named.values())
    return OpSchema(op, {**named, "dropout_p": 0.0, "is_causal": False}, specs, op_info(op).rule)


def attention_metas(schema: OpSchema) -> tuple[TensorMeta, ...]:
    given = {name: spec.tensor_meta for name, spec in schema.arguments.items() if isinstance(spec, DTensorSpec)}
    if "out" in given:
        return given["query"], given["key"], given["value"]
    return given["query"], TensorMeta((2, 4, 64))


@pytest.mark.parametrize("backward", [False, True])
def test_bytes_held_by_algorithms_of_attention(backward: bool) -> None:
    """A ring: a block that is computed with, and one that arrives. Gathering: all but the own. Backward: twice that."""
    schema = attention_call("tp:S2", "tp:S2", "tp:S2", backward=backward)
    block = 2 * 4 * 16 * 8 * 4  # of keys or of values, on each of four ranks
    for algorithm, held in (("ring", 2 * 2 * block), ("gather", 2 * 3 * block)):
        choice = choose_attention(schema, attention_metas(schema), algorithm)
        assert choice is not None
        assert choice.algorithm == algorithm
        assert choice.held == held * (2 if backward else 1)


def test_results_of_attention_have_the_layouts_of_their_operands() -> None:
    schema = attention_call("tp:S2", "tp:S1", "tp:S2", backward=True)
    for algorithm in ("ring", "gather"):
        choice = choose_attention(schema, attention_metas(schema), algorithm)
        assert choice is not None
        assert [str(spec.placements) for spec in choice.returns] == [
            str(schema.arguments[name].placements) for name in ("query", "key", "value")
        ]


def test_attention_with_keys_and_values_of_different_lengths_is_left_to_the_kernel() -> None:
    for values, taken in ((64, True), (32, False)):
        schema = attention_call("tp:S2", "tp:S2", "tp:S2", values=values)
        assert (choose_attention(schema, attention_metas(schema)) is not None) == taken


def test_keys_near_the_queries_and_sinks_are_received() -> None:
    """A band of one key and four sinks: less than a ring moves, in one exchange of keys and values, near and far."""
    schema = attention_call("tp:S2", "tp:S2", "tp:S2")
    for far in ((), ((), (Run(0, 4),), (Run(0, 4),), (Run(0, 4),))):
        reach = Reach(band=(1, 0), turns=(0, 1, 2, 3), causal=True, far=far)
        choice = choose_attention(schema, attention_metas(schema), None, reach)
        assert choice is not None
        assert choice.algorithm == "halo"
        (exchange,) = choice.halo
        assert exchange.operands == (schema.specs[1], schema.specs[2])
        sources = {(s.operand, s.result) for s in exchange.segments}
        assert sources == ({(0, 0), (1, 1), (0, 2), (1, 3)} if far else {(0, 0), (1, 1)})
        sinks = [(s.first, s.at, s.length) for s in exchange.segments if s.result == 3]
        assert sinks == ([(0, 0, 4), (0, 4, 4), (0, 8, 4)] if far else [])
        row = 2 * 4 * 8 * 4
        assert choice.held == 2 * row * (1 + (4 if far else 0))


def test_a_turn_that_no_query_needs_is_found_in_a_mask_that_shows_much() -> None:
    """Two blocks that see themselves alone, half of all keys, beside one that is seen from everywhere."""
    mask = torch.full((8, 8), -math.inf)
    mask[:4, :4] = mask[4:, 4:] = 0
    mask[0, 0] = mask[7, 0] = mask[0, 7] = 0
    halves = [[Run(0, 4)], [Run(4, 4)]]
    assert reach_of(mask, halves, halves) is None  # its corners show that both turns are needed
    mask[7, 0] = mask[0, 7] = -math.inf
    found = reach_of(mask, halves, halves)
    assert found is not None
    assert found.turns == (0,)


# ---------------------------------------------------------------- others


def test_an_axis_goes_before_a_flattened_axis_of_its_name() -> None:
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("x", "y"), fabric="virtual")
    own = grid.flatten(["x", "y"], name="xy")
    grid["y", "x"]._flatten("xy")  # which the grid has under this name from now on
    assert grid["xy"].axes == ((1, 0),)
    assert own["xy"].axes == ((0, 1),)


@pytest.mark.parametrize("pad", list(itertools.product(range(-3, 4), repeat=2)))
def test_rows_of_a_padded_dim_are_those_of_one_device(pad: tuple[int, int]) -> None:
    load_rules()
    x = torch.arange(1.0, 5.0).view(4, 1)
    if sum(pad) + 4 < 0:
        return
    meta = TensorMeta((4, 1))
    call = Call(torch.ops.aten.constant_pad_nd.default, {"self": meta, "pad": [0, 0, *pad], "value": 0}, (meta,), ())
    made = torch.zeros(4 + sum(pad), 1)
    for segment in rows_padded(call, 0).segments:
        made[segment.at : segment.at + segment.length] = x[segment.first : segment.first + segment.length]
    assert torch.equal(made, torch.nn.functional.pad(x, (0, 0, *pad)))


@pytest.mark.parametrize("named", [{}, {"dim": 0}, {"dim": 1}, {"dim": -1}, {"dim": -2}])
def test_the_shape_of_a_concatenation_is_that_of_torch(named: dict[str, int]) -> None:
    for shapes in ([(2, 3), (2, 3)], [(2, 3), (4, 3)], [(2, 3), (2, 5)]):
        try:
            expected = torch.cat([torch.empty(shape) for shape in shapes], **named).shape
        except RuntimeError:
            expected = None
        found = _concatenated({"tensors": [TensorMeta(shape) for shape in shapes], **named})
        assert (None if found is None else tuple(found)) == (None if expected is None else tuple(expected))


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
def test_dropout_scales_what_it_keeps(p: float) -> None:
    x, keep = torch.arange(1.0, 9.0), torch.arange(8) % 2 == 0
    expected = torch.zeros(8) if p == 1 else torch.where(keep, x / (1 - p), 0)
    torch.testing.assert_close(_kept(x, keep, p), expected)
