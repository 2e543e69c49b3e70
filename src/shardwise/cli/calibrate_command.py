"""`shardwise calibrate`, under torchrun: measures links, writes a machine file, and compares predictions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from shardwise.api import distribute_tensor
from shardwise.cli.arguments import Command, writable
from shardwise.cli.bench_command import route_runner
from shardwise.core.mesh import DeviceMesh, chosen_fabric
from shardwise.core.notation import parse_axes, parse_spec
from shardwise.errors import MeshError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.link_measurements import destroy_when_all_done, measure_machine, slowest_seconds, timed_collective
from shardwise.fabric.machine_file import COLLECTIVES, Machine, write_machine
from shardwise.fabric.world import dry_run, init_device_mesh, is_main, virtual
from shardwise.parallel import fully_shard
from shardwise.plan.cost import CostModel, set_cost_model
from shardwise.plan.route import DTensorRedistributePlanner
from shardwise.text import human_bytes, human_seconds, parse_bytes, print_lines, slim_table

__all__ = ["COMMAND", "compare_axes", "compare_routes", "compare_step"]

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
CHANGES = ("P -> R", "S0 -> R", "P -> S0", "S0 -> S1")
WIDTH, ROWS = 256, 64  # of the network whose step is predicted
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `calibrate`."""
    parser.add_argument("out", metavar="FILE", help="the machine file to write, on the host of rank 0")
    parser.add_argument("--mesh", help="the mesh of the program: dp=2,tp=4; predictions are compared on it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--largest", metavar="N", default="8MiB", help="the largest tensor (default: 8MiB)")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")


def run_calibrate(arguments: argparse.Namespace) -> None:
    """Measure, write the file, and print predicted and measured times."""
    if chosen_fabric() != "c10d":
        raise UnsupportedError(
            "calibrate measures the links of several processes",
            hint="torchrun --nproc-per-node 4 -m shardwise calibrate machine.json",
        )
    world = init_device_mesh(arguments.device)
    if is_main():
        writable(arguments.out)
    mesh = _program_mesh(arguments.mesh, world)
    sizes = [size for size in SIZES if size < parse_bytes(arguments.largest)] + [parse_bytes(arguments.largest)]
    machine = measure_machine(arguments.device, sizes, _progress)
    if is_main():
        write_machine(machine, arguments.out)
    before = set_cost_model(machine.cost_model)
    try:
        report = {
            "axes": compare_axes(mesh, machine.cost_model, max(sizes) // 3),
            "routes": compare_routes(mesh, max(sizes) // 2),
            "step": compare_step(mesh),
        }
    finally:
        set_cost_model(before)
    main = is_main()
    destroy_when_all_done()
    if not main:
        return
    if arguments.json:
        print(json.dumps({"machine": asdict(machine), **report}, indent=2))
    else:
        _print(machine, mesh, report, arguments.out)


def _program_mesh(text: str | None, world: DeviceMesh) -> DeviceMesh:
    if text is None:
        return world
    shape, names = parse_axes(text)
    mesh = init_device_mesh(world.device_type, shape, mesh_dim_names=names)
    if mesh.size() != world.size():
        raise MeshError(
            f"calibrate: {mesh} has {mesh.size()} ranks, the job has {world.size()}", hint="give a --mesh of all ranks"
        )
    return mesh


def _progress(text: str) -> None:
    if is_main():
        print(f"measuring {text}", file=sys.stderr, flush=True)


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


# ---------------------------------------------------------------- predictions beside measurements


def compare_axes(mesh: DeviceMesh, model: CostModel, size: int) -> list[Row]:
    """Each collective over each axis and over all axes, at a size that was not used to fit the links."""
    wide = [(axis,) for axis, ranks in enumerate(mesh.shape) if ranks > 1]
    rows: list[Row] = []
    for axes in [*wide, *([tuple(range(mesh.ndim))] if len(wide) > 1 else [])]:
        link, group = model.link(mesh, axes), fabric_of(mesh).group(mesh, axes)
        for collective in COLLECTIVES:
            call, received = timed_collective(collective, group, size, _device(mesh))
            rows.append(
                {
                    "axes": " x ".join(map(mesh.axis_name, axes)),
                    "collective": collective,
                    "received": received,
                    "predicted": link.seconds(collective, received),
                    "measured": slowest_seconds(call, _device(mesh)),
                }
            )
    return rows


def compare_routes(mesh: DeviceMesh, size: int) -> list[Row]:
    """Changes of layout on all axes: planned with the measured links, and with equal links."""
    rows: list[Row] = []
    side = max(mesh.size(), int((size / 4) ** 0.5) // mesh.size() * mesh.size())
    for change in CHANGES:
        old, _, new = (f"f32[{side},{side}] {' '.join([part] * mesh.ndim)}" for part in change.partition(" -> "))
        source, target = parse_spec(old, mesh), parse_spec(new, mesh)
        plain = CostModel()
        planned, flat = (DTensorRedistributePlanner(model).plan(source, target) for model in (None, plain))
        local = torch.ones(source.local_shape((0,) * mesh.ndim), device=_device(mesh))
        calls = [route_runner(route, local) for route in (planned, flat)]
        rows.append(
            {
                "change": f"{change} of {human_bytes(side * side * 4)}",
                "steps": ", then ".join(step.describe() for step in planned.steps),
                "predicted": planned.seconds,
                "measured": slowest_seconds(calls[0], _device(mesh)),
                "flat": slowest_seconds(calls[1], _device(mesh)),
            }
        )
    return rows


def compare_step(mesh: DeviceMesh) -> Row:
    """A training step of a network that is fully sharded over all ranks.

    Predicted: its communication by a dry run, plus the computation measured on one rank.
    """
    device = _device(mesh)
    with virtual():
        alone = init_device_mesh(mesh.device_type, (1,), mesh_dim_names=("dp",))
        computing = slowest_seconds(_training_step(alone, device, mesh.size()), device)
    with dry_run() as run:
        _training_step(init_device_mesh(mesh.device_type, (mesh.size(),)), torch.device("meta"), mesh.size())()
    world = init_device_mesh(mesh.device_type, (mesh.size(),))
    measured = slowest_seconds(_training_step(world, device, mesh.size()), device)
    return {"communication": run.seconds, "computation": computing, "measured": measured}


def _training_step(mesh: DeviceMesh, device: torch.device, ranks: int) -> Callable[[], object]:
    """One step. The batch has the same number of rows for each rank."""
    rows = ROWS * mesh.size()
    with torch.device(device):
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        x = torch.ones(rows, WIDTH)
    model = fully_shard(model, mesh)
    placed = distribute_tensor(x, mesh, parse_spec("f32[1] S0", mesh).placements, src_data_rank=None)

    def step() -> None:
        model(placed).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


# ---------------------------------------------------------------- the report


def _print(machine: Machine, mesh: DeviceMesh, report: dict[str, Any], out: str) -> None:
    count = len(machine.hosts)
    print_lines(
        f"{count} host{'s' if count > 1 else ''} ({', '.join(machine.hosts[:4])}{', ...' if count > 4 else ''}), "
        f"{machine.ranks_per_host} ranks on each; written to {out}",
        "",
    )
    links = slim_table("link", "latency", "bandwidth", "slower collectives")
    for kind in ("inside", "across", "mixed"):
        link = getattr(machine, kind)
        slower = ", ".join(f"{name} x{factor:.1f}" for name, factor in link.factors if factor > 1.1)
        speed = "-" if link.beta == 0 else f"{human_bytes(1 / link.beta)}/s"
        links.add_row(kind, human_seconds(link.alpha), speed, slower or "-")
    axes = slim_table(f"on {mesh}", "collective", "received", "predicted", "measured", "ratio")
    for row in report["axes"]:
        numbers = human_seconds(row["predicted"]), human_seconds(row["measured"])
        ratio = f"{row['predicted'] / row['measured']:.2f}"
        axes.add_row(row["axes"], row["collective"], human_bytes(row["received"]), *numbers, ratio)
    routes = slim_table("change of layout", "route", "predicted", "measured", "on equal links", "ratio to it")
    for row in report["routes"]:
        times = [human_seconds(row[key]) for key in ("predicted", "measured", "flat")]
        routes.add_row(row["change"], row["steps"], *times, f"{row['measured'] / row['flat']:.2f}")
    step = report["step"]
    print_lines(
        links, "", axes, "", routes, "",
        f"A step of a fully sharded network: predicted {human_seconds(step['communication'] + step['computation'])} "
        f"({human_seconds(step['communication'])} of communication), measured {human_seconds(step['measured'])}.",
    )  # fmt: skip


COMMAND = Command(
    "measure the links of a cluster for the planner, under torchrun",
    add_arguments,
    run_calibrate,
    """\
Every process measures collectives at several sizes: inside hosts, across
hosts (one rank of each, all at once), and over everything. The file is read by
`shardwise plan --machine FILE`, and in programs, on every rank, by
`shardwise.set_cost_model(shardwise.load_machine(FILE))`; dry runs use it too.

examples:
  torchrun --nproc-per-node 4 -m shardwise calibrate machine.json
  torchrun --nnodes 2 ... -m shardwise calibrate m.json --mesh dp=2,tp=4
""",
)
