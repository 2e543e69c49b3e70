"""A sample of the compiled programs of many sizes; `python -m tests.gloo.compiled_sizes --programs 200` runs more."""

import subprocess
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.gloo.compiled_sizes import Pair, Program, check, run
from tests.gloo.processes import ProcessPool

R, S = sw.Replicate(), sw.Shard
UNEVEN_TWICE = Program(
    seed=0, mesh=(2, 2), layers=(("layer_norm", 8, 8), ("linear", 8, 6)),
    placements=((R, R), (R, R), (S(1), R), (R, R)), given=(S(0), R), length=None, sizes=(7, 5), dynamic=None,
)  # fmt: skip


def test_a_second_uneven_batch(gloo4: ProcessPool) -> None:
    assert gloo4.run(run, UNEVEN_TWICE, "aot_eager", timeout=120) == [None] * 4


def test_random_layers_layouts_and_sizes(gloo4: ProcessPool) -> None:
    assert not check(range(2), gloo4)


def test_a_dynamic_program_on_virtual_ranks() -> None:
    """In a process of its own: the compiler cannot follow the checks of types that are made in this one."""
    assert Program.of(11).dynamic
    command = (sys.executable, "-m", "tests.gloo.compiled_sizes", "--virtual", "--programs", "1", "--seed", "11")
    made = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def graphs_of_blocks() -> int:
    """How many graphs three blocks under a plan take that are compiled one by one."""
    torch._dynamo.reset()
    counters.clear()
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(*(Pair(8, 8) for _ in range(3)))
    parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    model(torch.ones(4, 8, requires_grad=True)).sum().backward()
    return counters["stats"]["unique_graphs"]


def test_blocks_under_a_plan_share_a_graph(gloo4: ProcessPool) -> None:
    assert gloo4.run(graphs_of_blocks, timeout=120) == [1] * 4


def symbolic_strides() -> list[tuple[int, ...]]:
    """Of results whose strides hold maxima of sizes."""
    torch._dynamo.reset()
    mesh = sw.init_device_mesh("cpu", (4,))

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 16, -1, 8).transpose(1, 2).contiguous().transpose(1, 2).clone()

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for width in (32, 64):
        x = sw.distribute_tensor(torch.ones(2, 16, width), mesh, [R]).requires_grad_()
        found.append(compiled(x).stride())
    return found


def test_strides_of_symbolic_results(gloo4: ProcessPool) -> None:
    assert gloo4.run(symbolic_strides, timeout=120) == [[(512, 8, 128, 1), (1024, 8, 128, 1)]] * 4


def test_programs_are_the_same_every_time() -> None:
    assert Program.of(3) == Program.of(3)
    assert Program.of(3) != Program.of(4)
