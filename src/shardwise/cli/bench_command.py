"""`shardwise bench`: short measurements on this machine, without a clone of the repository.

Compares operators on DTensors with plain torch on the same blocks, and routes with step-by-step routes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.api import distribute_tensor
from shardwise.cli.arguments import Command, parse_change, parse_mesh
from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.spec import DTensorSpec
from shardwise.errors import NotationError
from shardwise.fabric.base import fabric_of
from shardwise.plan.route import DTensorRedistributePlanner, Route, plain_route
from shardwise.tensor import DTensor
from shardwise.text import human_bytes, human_seconds, print_lines, slim_table

__all__ = ["BENCHES", "COMMAND"]

SAMPLES = 15
AT_LEAST = 0.01  # seconds of each sample
MESH = "dp=2,tp=4"
Row = dict[str, Any]


def seconds_for(call: Callable[[], object]) -> float:
    """The median time of a warm call."""
    call()
    begin = time.perf_counter()
    call()
    repeats = max(1, int(AT_LEAST / max(time.perf_counter() - begin, 1e-7)))
    samples: list[float] = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - begin) / repeats)
    return median(samples)


def virtual_mesh() -> DeviceMesh:
    """The virtual mesh of the measurements."""
    mesh = parse_mesh(MESH)
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, fabric="virtual")


# ---------------------------------------------------------------- operators

OPERATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "x + y": (torch.add, ("f32[64,64] dp:S0 tp:S1", "f32[64,64] dp:S0 tp:S1")),
    "x * 2": (lambda x: x * 2, ("f32[64,64] dp:S0 tp:S1",)),
    "x @ y": (torch.mm, ("f32[64,64] dp:S0", "f32[64,64] tp:S1")),
    "relu(x)": (torch.relu, ("f32[64,64] dp:S0 tp:S1",)),
    "softmax(x)": (lambda x: F.softmax(x, -1), ("f32[64,64] dp:S0",)),
    "x.sum()": (torch.sum, ("f32[64,64] dp:S0 tp:S1",)),
}


def bench_operators() -> list[Row]:
    """Warm operators without communication: on DTensors, and on each rank's block with plain torch."""
    mesh = virtual_mesh()
    rows: list[Row] = []
    for name, (operator, layouts) in OPERATORS.items():
        given = [laid_out(parse_spec(layout, mesh)) for layout in layouts]
        blocks = list(zip(*(tensor.to_local().tensors for tensor in given), strict=True))  # pyright: ignore[reportAttributeAccessIssue]
        ours = seconds_for(lambda operator=operator, given=given: operator(*given))
        plain = seconds_for(lambda operator=operator, blocks=blocks: [operator(*block) for block in blocks])
        rows.append({"operator": name, "dtensor_seconds": ours, "plain_seconds": plain, "ratio": ours / plain})
    return rows


def laid_out(spec: DTensorSpec) -> DTensor:
    """A random tensor with the layout of `spec`."""
    torch.manual_seed(0)
    return distribute_tensor(torch.randn(spec.tensor_meta.shape), spec.mesh, spec.placements)


def operators_table(rows: list[Row]) -> Any:
    """The results of `bench_operators` as a table."""
    table = numbers_table("operator, warm", "DTensor", "torch on each block", "times")
    for row in rows:
        table.add_row(
            row["operator"],
            human_seconds(row["dtensor_seconds"]),
            human_seconds(row["plain_seconds"]),
            f"{row['ratio']:.2f}",
        )
    return table


# ---------------------------------------------------------------- routes

CHANGES = (
    "f32[512,512] dp:S0 tp:S1 -> dp:S1 tp:S0",
    "f32[512,512] dp:S0 -> tp:S1",
    "f32[512,512] dp:P tp:S0 -> dp:S0 tp:S1",
    "f32[512,512] dp:S0 tp:S0 -> R R",
)


def bench_redistribute() -> list[Row]:
    """Planned and step-by-step routes: bytes received by a rank, and time on virtual ranks."""
    mesh = virtual_mesh()
    rows: list[Row] = []
    for change in CHANGES:
        source, target = parse_change(change, mesh)
        route, plain = DTensorRedistributePlanner().plan(source, target), plain_route(source, target)
        local = laid_out(source)._local_tensor
        rows.append(
            {
                "change": change,
                "received_bytes": route.received,
                "step_by_step_received_bytes": plain.received,
                "seconds": seconds_for(route_runner(route, local)),
                "step_by_step_seconds": seconds_for(route_runner(plain, local)),
            }
        )
    return rows


def route_runner(route: Route, local: torch.Tensor) -> Callable[[], object]:
    """A function that executes a route on a local tensor."""
    bound = fabric_of(route.source.mesh).bind_route(route)
    return lambda: bound(local)


def redistribute_table(rows: list[Row]) -> Any:
    """The results of `bench_redistribute` as a table."""
    table = numbers_table("redistribute", "receives", "step by step", "takes", "step by step")
    for row in rows:
        table.add_row(
            row["change"].replace("f32[512,512] ", ""),
            human_bytes(row["received_bytes"]),
            human_bytes(row["step_by_step_received_bytes"]),
            human_seconds(row["seconds"]),
            human_seconds(row["step_by_step_seconds"]),
        )
    return table


# ---------------------------------------------------------------- plans

PLANS = (
    ("f32[4096,4096] dp:S0 tp:S1 -> dp:S1 tp:S0", "dp=2,tp=4"),
    ("bf16[16384,53248] dp:S0 tp:S1 pp:P -> dp:S1 tp:S0", "dp=8,pp=4,tp=8"),
    ("bf16[16384,53248] dp:S0 tp:S1 pp:P -> dp:S1 tp:S0", "dp=64,pp=32,tp=8"),
)


def bench_plan() -> list[Row]:
    """The time of the planner for a new route."""
    rows: list[Row] = []
    for change, axes in PLANS:
        source, target = parse_change(change, parse_mesh(axes))
        spent = seconds_for(lambda source=source, target=target: DTensorRedistributePlanner().plan(source, target))
        rows.append({"change": change, "mesh": axes, "ranks": source.mesh.size(), "seconds": spent})
    return rows


def plan_table(rows: list[Row]) -> Any:
    """The results of `bench_plan` as a table."""
    table = numbers_table("plan a route", "ranks", "takes")
    for row in rows:
        table.add_row(row["change"], f"{row['ranks']:,}", human_seconds(row["seconds"]))
    return table


# ---------------------------------------------------------------- the command

BENCHES: dict[str, tuple[Callable[[], list[Row]], Callable[[list[Row]], Any]]] = {
    "operators": (bench_operators, operators_table),
    "redistribute": (bench_redistribute, redistribute_table),
    "plan": (bench_plan, plan_table),
}


def numbers_table(first: str, *headings: str) -> Any:
    """An empty table: a text column, then number columns."""
    table = slim_table()
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def machine() -> dict[str, Any]:
    """Versions and machine of the measurement."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bench`."""
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure, and print one table for each name."""
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown:
        raise NotationError(f"unknown bench {unknown[0]!r}", hint=f"there are {', '.join(BENCHES)}")
    names = arguments.names or list(BENCHES)
    if arguments.json:
        print(json.dumps({"machine": machine(), "benches": {name: BENCHES[name][0]() for name in names}}, indent=2))
        return
    print_lines(", ".join(f"{name} {value}" for name, value in machine().items()))
    for name in names:
        measure, show = BENCHES[name]
        print_lines("", show(measure()))


COMMAND = Command(
    "measure operators, redistribution and planning on this machine",
    add_arguments,
    run_bench,
    f"""\
Operators and routes run on {MESH}, virtual ranks in this process: eight
blocks in sequence. Times are medians of warm calls; plans are not cached, but
the planner's tables are warm. For ratios to torch.distributed.tensor run
`make bench` in a clone of the repository.

examples:
  shardwise bench
  shardwise bench operators --json
""",
)
