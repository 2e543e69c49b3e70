"""Uneven shards on virtual ranks, compiled against one device: values, gradients and the number of graphs.

    python -m tests.virtual.compiled_uneven --backend inductor

A program of its own, because torch's compiler does not trace the run-time type checks of the tests.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

import shardwise as sw
from tests.gloo.compiled_sizes import Program, run

R, S = sw.Replicate(), sw.Shard
NORM = ("layer_norm", 8, 8), ("linear", 8, 6)
PROGRAMS = {
    # each uneven size is compiled once; of the even ones the first, and all others together
    "batches": (2 + 2, Program(0, (2, 2), NORM, ((R, R), (R, R), (S(1), R), (R, R)), (S(0), R), None,
                               (7, 5, 7, 5, 8, 4, 6, 10), None)),
    "weights": (1, Program(1, (4,), (("pair", 6, 10),), ((S(0),), (S(0),), (S(1),), (R,)), (R,), 3, (4, 4), None)),
    "empty shards": (2, Program(2, (4,), (("rms_norm", 6, 6),), ((S(0),),), (S(0),), None, (2, 5, 2), True)),
    # one row a rank in backward alone: a compiler fixes that size when forward has been traced
    "one row": (2, Program(3, (2, 2), (("pair", 8, 8), ("layer_norm", 8, 8)),
                           ((S(-1), R), (R, S(-1)), (S(0), R), (R, R), (S(-1), S(-1)), (R, R)), (R, R), None,
                           (5, 2), True)),
}  # fmt: skip


def check(name: str, backend: str) -> str:
    """Compares a program with one device, and its graphs with the number that it should need."""
    wanted, program = PROGRAMS[name]
    counters.clear()
    error = run(program, backend)
    assert error is None, (name, error)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == wanted, (name, graphs)
    return f"{name}, {backend}: {graphs} graphs"


def refused(program: Callable[[Any], Any], given: Any) -> str:
    torch._dynamo.reset()
    try:
        torch.compile(program, backend="aot_eager", fullgraph=True)(given)
    except Exception as error:
        return str(error)
    return "not refused"


def check_refused() -> None:
    """Functions that need one shape of a local raise, with a hint."""
    x = sw.distribute_tensor(torch.ones(7, 2), sw.init_device_mesh("cpu", (4,)), [S(0)])
    said = refused(lambda x: x.to_local() * 2, x)
    assert "to_local() of f32[7,2] S0 in a compiled program" in said, said
    assert "compute on the DTensor" in said, said
    said = refused(lambda x: x * 2, x.to_local())
    assert "torch.compile of a RankTensor of shape (2/2/2/1, 2)" in said, said
    assert "make it a DTensor" in said, said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    options = parser.parse_args()
    for name in options.programs:
        print(check(name, options.backend))
    check_refused()
    print("the rest is refused")


if __name__ == "__main__":
    main()
