"""`shardwise plan`: the route from one layout to another, and the cost of each step."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli.arguments import Command, parse_change, parse_mesh
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import dtype_name
from shardwise.fabric.machine_file import load_machine
from shardwise.plan.cost import current_cost_model
from shardwise.plan.route import DTensorRedistributePlanner, Route, StepCost, plain_route
from shardwise.plan.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    Unreduce,
    reduction,
)
from shardwise.text import human_bytes, human_seconds, parse_bytes, print_lines, slim_table

__all__ = ["COMMAND", "in_words", "plan_as_json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `plan`."""
    parser.add_argument("change", help="the two layouts: 'DTYPE[SIZES] LAYOUT -> LAYOUT'")
    parser.add_argument("--mesh", required=True, help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    parser.add_argument(
        "--to-mesh", metavar="MESH", help="the mesh of the second layout, on other ranks than those of --mesh: tp=3"
    )
    devices = sorted(current_cost_model().devices)
    parser.add_argument("--device", choices=devices, default="cpu", help="the device of the link model (default: cpu)")
    parser.add_argument("--machine", metavar="FILE", help="the links of a machine file (shardwise calibrate)")
    parser.add_argument("--max-bytes", metavar="N", help="memory limit of a rank during the route: 1000, 64MiB, 1GB")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_plan(arguments: argparse.Namespace) -> None:
    """Plan the route, and print it with the step-by-step route."""
    mesh = parse_mesh(arguments.mesh, arguments.device)
    other = None if arguments.to_mesh is None else parse_mesh(arguments.to_mesh, arguments.device, mesh.size())
    source, target = parse_change(arguments.change, mesh, other)
    max_bytes = None if arguments.max_bytes is None else parse_bytes(arguments.max_bytes)
    model = None if arguments.machine is None else load_machine(arguments.machine)
    route = DTensorRedistributePlanner(model).plan(source, target, max_bytes=max_bytes)
    plain = plain_route(source, target, model)
    if arguments.json:
        print(json.dumps(plan_as_json(route, plain, max_bytes), indent=2))
    else:
        print_plan(route, plain, max_bytes)


def plan_as_json(route: Route, plain: Route, max_bytes: int | None) -> dict[str, Any]:
    """The output of `plan --json`. Keys are stable; new ones may be added."""
    spec = route.source
    meta = spec.tensor_meta
    return {
        "mesh": _mesh_as_json(spec.mesh),
        "target_mesh": _mesh_as_json(route.target.mesh),
        "tensor": {"dtype": dtype_name(meta.dtype), "shape": list(meta.shape), "bytes": meta.nbytes},
        "source": {"layout": route.source.layout, "held_bytes": route.source.local_bytes},
        "target": {"layout": route.target.layout, "held_bytes": route.target.local_bytes},
        "max_bytes": max_bytes,
        "route": _route_as_json(route),
        "step_by_step": _route_as_json(plain),
        "ratios": {
            "received_bytes": _ratio(plain.received, route.received),
            "seconds": _ratio(plain.seconds, route.seconds),
            "peak_bytes": _ratio(plain.peak_bytes, route.peak_bytes),
        },
    }


def _mesh_as_json(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "axes": [mesh.axis_name(axis) for axis in range(mesh.ndim)],
        "shape": list(mesh.shape),
        "ranks": mesh.size(),
        "device": mesh.device_type,
    }


def _route_as_json(route: Route) -> dict[str, Any]:
    return {
        "steps": [
            {
                "step": step.describe(),
                "collective": step.collective,
                "does": in_words(step),
                "axes": [step.before.mesh.axis_name(axis) for axis in step.axes],
                "received_bytes": cost.received,
                "seconds": cost.seconds,
                "held_bytes": cost.holds,
                "layout": step.after.layout,
            }
            for step, cost in zip(route.steps, route.costs, strict=True)
        ],
        "collectives": route.collectives,
        "received_bytes": route.received,
        "seconds": route.seconds,
        "peak_bytes": route.peak_bytes,
    }


def _ratio(plain: float, ours: float) -> float | None:
    """The ratio of the step-by-step route to the planned one; None for an infinite ratio."""
    if ours:
        return plain / ours
    return None if plain else 1.0


def in_words(step: Step) -> str:
    """The effect of a step, without the names of collectives."""
    match step:
        case AllGather(dim=dim):
            return f"join the parts of dim {dim}"
        case AllReduce():
            return f"{_REDUCE[reduction(step)]} of the ranks, on each"
        case ReduceScatter(dim=dim):
            return f"{_REDUCE[reduction(step)]}, split along dim {dim}"
        case AllToAll(source_dim=source, target_dim=target):
            return f"join dim {source}, split dim {target}"
        case Exchange():
            return "send each rank missing parts"
        case Unreduce():
            return "keep the value on one rank"
        case Slice() if step.describe() != "relabel":
            return "keep a local slice"
        case _:
            return "no change of values"


_REDUCE = {
    "sum": "sum",
    "avg": "average",
    "min": "least",
    "max": "greatest",
    "product": "product",
}


def print_plan(route: Route, plain: Route, max_bytes: int | None) -> None:
    """Print both routes as tables, and their comparison."""
    from rich.text import Text

    spec, mesh = route.source, route.source.mesh
    total = human_bytes(spec.tensor_meta.nbytes)
    page: list[Any] = [
        Text(f"{spec} -> {route.target.layout}", "bold"),
        f"mesh {_axes_text(mesh)}: {mesh.size():,} ranks of {mesh.device_type}; the global tensor is {total}",
    ]
    if route.target.mesh is not mesh:
        page.append(f"to mesh {_axes_text(route.target.mesh)}: {route.target.mesh.size():,} other ranks")
    if max_bytes is not None:
        page.append(f"memory limit of a rank: {human_bytes(max_bytes)}")
    page.append("")
    if not route.steps:
        page.append("Nothing to do: the layouts are the same.")
    else:
        page += [*_table("the route", route), ""]
        page += _comparison(route, plain, max_bytes)
    print_lines(*page)


def _axes_text(mesh: DeviceMesh) -> str:
    sizes = (f"{mesh.axis_name(a)}={n}" if mesh.mesh_dim_names else str(n) for a, n in enumerate(mesh.shape))
    return " x ".join(sizes)


def _comparison(route: Route, plain: Route, max_bytes: int | None) -> list[Any]:
    if [step.describe() for step in plain.steps] == [step.describe() for step in route.steps]:
        return ["The step-by-step route is the same."]
    over = max_bytes is not None and plain.peak_bytes > max_bytes
    return [
        *_table("step by step: reduce, gather changed dims, slice", plain),
        "",
        f"Step by step, a rank receives {_times(plain.received, route.received)} the bytes, takes "
        f"{_times(plain.seconds, route.seconds)} the time and holds "
        f"{_times(plain.peak_bytes, route.peak_bytes)} as much" + (", over the limit." if over else "."),
    ]


def _table(title: str, route: Route) -> list[Any]:
    from rich.text import Text

    table = slim_table(expand=True)
    table.add_column("collective", no_wrap=True)
    table.add_column("what it does", ratio=1)
    table.add_column("over", max_width=12)
    for heading in ("receives", "time", "then holds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step, cost in zip(route.steps, route.costs, strict=True):
        axes = " x ".join(step.before.mesh.axis_name(axis) for axis in step.axes)
        table.add_row(step.collective or "(none)", in_words(step), axes, *_numbers(cost))
    many = "1 collective" if route.collectives == 1 else f"{route.collectives} collectives"
    total = (
        f"{many}, {human_bytes(route.received)} received in {human_seconds(route.seconds)}; "
        f"a rank holds {human_bytes(route.peak_bytes)} at the peak"
    )
    return [Text(title, "bold"), table, total]


def _numbers(cost: StepCost) -> tuple[str, str, str]:
    if not cost.received and not cost.seconds:
        return "-", "-", human_bytes(cost.holds)
    return human_bytes(cost.received), human_seconds(cost.seconds), human_bytes(cost.holds)


def _times(plain: float, ours: float) -> str:
    ratio = _ratio(plain, ours)
    return "infinitely many times" if ratio is None else f"{ratio:,.2f} times" if ratio < 100 else f"{ratio:,.0f} times"


COMMAND = Command(
    "show the cheapest route from one layout to another, and its cost",
    add_arguments,
    run_plan,
    """\
A layout has a placement for each axis; omitted axes are replicated:
  R      every rank along the axis has the same values
  S1     dim 1 is sharded over the axis
  S0/4   dim 0 is four rows, each of which is sharded
  S0(5,0,3)   dim 0 is sharded into parts of these sizes
  Z0     dim 0 is cut into twice as many blocks as ranks; each has one from the
         front and one from the back
  O0(2)  all of dim 0 is on rank 2 of the axis; it is empty on the others
  P      the value is the sum over the ranks; also P(avg), P(min), P(max),
         P(product), and P(norm2) for a norm
  M      as P, where at most one rank has each element and the others have zeros
  order 0:tp>dp   dim 0 is sharded by tp first, then by dp

examples:
  shardwise plan "f32[64,4096,4096] dp:S0 -> tp:S2" --mesh dp=2,tp=4
  shardwise plan "bf16[8192,8192] S0 S1 -> S1 S0" --mesh 128x128 --device cuda
  shardwise plan "f32[4096,4096] S0 -> R" --mesh 8 --max-bytes 64MiB --json
  shardwise plan "f32[96,64] dp:S0 -> tp:S1" --mesh dp=2,tp=4 --to-mesh tp=3
""",
)
