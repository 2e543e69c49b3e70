"""What one rank does must not depend on the number of ranks: calls are counted on torch's fake process group.

Counts cover functions of Python and C, so a loop over ranks or a kernel for each of them shows.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from bench.counting import calls, fake_world
from bench.data_parallel_ranks import training_step
from bench.weak_scaling import PROGRAMS, World
from shardwise.parallel import MixedPrecisionPolicy

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def step_calls(ranks: int, width: int, shape: tuple[int, ...] | None = None, **options: Any) -> int:
    with fake_world(ranks, rank=ranks // 2):
        names = ("replicas", "shards") if shape else None
        mesh = sw.init_device_mesh("cpu", shape or (ranks,), mesh_dim_names=names)
        step = training_step(sw.fully_shard, mesh, width=width, **options)
        for _ in range(2):
            step()
        return calls(step, of_c=True)


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (64, {}),
        (30, {}),
        (64, {"mp_policy": HALF}),
        (30, {"reshard_after_forward": False}),
        (64, {"granularity": 8}),
    ],
)
def test_a_sharded_step_takes_as_many_calls_on_2048_ranks_as_on_64(width: int, options: dict[str, Any]) -> None:
    few, many, most = (step_calls(ranks, width, **options) for ranks in (48, 2048, 4096))
    assert many == most
    assert many <= 1.05 * few  # on 48 ranks a dim of 64 leaves a short block too, and one of 30 leaves ranks empty


def test_an_even_step_is_shorter_by_what_uneven_blocks_need() -> None:
    assert step_calls(2048, 64) <= 1.2 * step_calls(8, 64)


def test_hybrid_sharding_takes_as_many_calls_on_2048_ranks() -> None:
    assert step_calls(4096, 30, (2, 2048)) <= 1.05 * step_calls(96, 30, (2, 48))


# ---------------------------------------------------------------- planning and binding

MOVES: list[tuple[tuple[int, ...], Sequence[Any], Sequence[Any]]] = [
    ((96, 256), [S0, R], [R, S1]),
    ((96, 256), [S0, S0], [S1, S0]),
    ((96, 256), [P, R], [S0, R]),
    ((96, 256), [P, S1], [R, S1]),
    ((96, 256), [S1, S0], [S0, S1]),
    ((7, 11), [S0, S0], [R, R]),
    ((7, 11), [P, P], [S1, S0]),
]


def move_calls(ranks: int, shape: tuple[int, ...], before: Sequence[Any], after: Sequence[Any]) -> tuple[int, int]:
    """Python calls of the first move, which is planned and bound, and of a later one."""
    with fake_world(ranks, rank=ranks // 3):
        mesh = sw.init_device_mesh("cpu", (ranks // 8, 8), mesh_dim_names=("dp", "tp"))
        spec = sw.DTensorSpec(mesh, before, sw.TensorMeta(shape))
        local = torch.zeros(spec.local_shape(mesh.get_coordinate() or ()))
        x = sw.DTensor.from_local(local, mesh, before, shape=shape, stride=spec.tensor_meta.stride)

        def move() -> object:
            return x.redistribute(placements=after)

        return calls(move), calls(move)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: f"{move[0]} {move[1]} to {move[2]}")
def test_a_move_is_planned_and_run_alike_on_any_number_of_ranks(move: Any) -> None:
    move_calls(64, *move)  # imports, and what is compiled once
    (cold, warm), (cold_many, warm_many) = move_calls(1024, *move), move_calls(16384, *move)
    assert warm_many <= warm + 40, "a later move"
    assert cold_many <= 1.3 * cold + 100, "the first move"


SCALED = (
    "mean_squared_error", "cross_entropy", "covariance", "convolution", "recurrent", "attention", "attention_module",
    "moving_average", "running_sum_of_columns", "softmax_of_columns", "beside_rows", "written_rows", "log_sum_exp",
    "dropout",
)  # fmt: skip


def program_calls(name: str, ranks: int) -> tuple[int, int]:
    """Calls of the first run of a program, forward and backward, and of a later one."""
    with fake_world(ranks, rank=ranks // 2):
        world = World(ranks)

        def run() -> None:
            PROGRAMS[name](world).backward()

        first, _, later = (calls(run, of_c=True) for _ in range(3))
        return first, later


@pytest.mark.parametrize("name", SCALED)
def test_programs_take_as_many_calls_on_4096_ranks_as_on_512(name: str) -> None:
    program_calls(name, 8)  # what is imported or computed once a process
    few, many = program_calls(name, 512), program_calls(name, 4096)
    assert many[0] <= 1.1 * few[0]
    assert many[1] <= 1.02 * few[1]


def test_a_mesh_of_16384_ranks_is_made_and_cut_in_few_calls() -> None:
    def made(ranks: int) -> int:
        with fake_world(ranks, rank=ranks // 3):

            def make() -> None:
                mesh = sw.init_device_mesh("cpu", (ranks // 8, 8), mesh_dim_names=("dp", "tp"))
                assert mesh["tp"].size() == 8
                assert mesh.get_local_rank("dp") == ranks // 3 // 8

            return calls(make)

    made(8)  # what is done once a process
    assert made(16384) <= made(1024) + 10


def test_products_of_experts_take_few_calls() -> None:
    """Short executors run two grouped products and their gradients: 193 calls, and 289 without these."""
    with fake_world(4, rank=1):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        by_rank = [sw.Ragged(0, (3, 4, 0, 5))]
        x = sw.zeros(12, 8, device_mesh=mesh, placements=by_rank).requires_grad_()
        up, down = (sw.zeros(8, 8, 8, device_mesh=mesh, placements=[S0]).requires_grad_() for _ in range(2))
        ends = torch.tensor([4, 7], dtype=torch.int32)
        offs = sw.DTensor.from_local(ends, mesh, [sw.Ragged(0, (2, 2, 2, 2))], shape=(8,), stride=(1,))
        gradient = x.detach()

        def step() -> None:
            F.grouped_mm(F.silu(F.grouped_mm(x, up, offs=offs)), down, offs=offs).backward(gradient)

        for _ in range(3):
            step()
        assert calls(step) <= 200


# ---------------------------------------------------------------- random numbers

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "rand_like": lambda x: torch.rand_like(x),
    "bernoulli": lambda x: torch.bernoulli(x),
}


def draw_calls(ranks: int, draw: Any, shape: tuple[int, int], dim: int) -> int:
    with fake_world(ranks, rank=ranks // 2):
        mesh = sw.init_device_mesh("cpu", (ranks,))
        sizes = [size * ranks if at == dim else size for at, size in enumerate(shape)]
        x = sw.zeros(*sizes, device_mesh=mesh, placements=[sw.Shard(dim)])
        torch.manual_seed(0)
        draw(x)
        return calls(lambda: draw(x), of_c=True)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_takes_as_many_calls_on_2048_ranks_as_on_256(name: str) -> None:
    """The generator's state jumps over the numbers of other ranks; 16,384 are this rank's."""
    few, many = (draw_calls(ranks, DRAWS[name], (64, 256), 0) for ranks in (256, 2048))
    assert many <= 1.1 * few


def test_columns_of_long_rows_are_drawn_alike_too() -> None:
    """Three rows, each with a gap on both sides of this rank's columns."""
    few, many = (draw_calls(ranks, DRAWS["dropout"], (3, 4096), 1) for ranks in (256, 2048))
    assert many <= 1.1 * few


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_on_many_ranks_is_one_devices(name: str) -> None:
    """With jumps of the real distances: 2 million numbers, of which 16,384 are this rank's."""
    torch.manual_seed(3)
    expected = [DRAWS[name](torch.full((64 * 128, 256), 0.5)) for _ in range(2)]
    state = torch.get_rng_state()
    with fake_world(128, rank=45):
        mesh = sw.init_device_mesh("cpu", (128,))
        torch.manual_seed(3)
        for plain in expected:
            x = sw.full((64 * 128, 256), 0.5, device_mesh=mesh, placements=[S0])
            assert torch.equal(DRAWS[name](x).to_local(), plain[64 * 45 : 64 * 46])
        assert torch.equal(torch.get_rng_state(), state)
