"""The command `shardwise`: what the library knows, for a shell. `plan` shows how a layout becomes another one.

Each command is a function that adds its arguments and one that runs them, in the table `COMMANDS`. Holds no logic of
the library itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import shardwise
from shardwise import demo
from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.spec import DTensorSpec, dtype_name
from shardwise.errors import NotationError, ShardwiseError
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

__all__ = ["main", "parse_bytes", "parse_change", "parse_mesh"]

MOST_RANKS = 2**20
WIDTH = 80  # of what is not a terminal
WIDEST = 100  # on one that is wider


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 for input that cannot be.

    Args:
        argv: the words after `shardwise`; those of this process by default.

    Example:
        >>> main(["plan", "f32[8,8] S0 -> Q", "--mesh", "4"])
        2
    """
    arguments = make_parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except ShardwiseError as error:
        print(f"shardwise {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # whoever read this has seen enough; the interpreter must not try to write the rest when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, made from `COMMANDS`."""
    parser = argparse.ArgumentParser(prog="shardwise", description="Distributed tensors for PyTorch: plans and a tour.")
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        made = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(made)
        made.set_defaults(run=command.run)
    return parser


# ---------------------------------------------------------------- what people write


_BYTES = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]*)")
UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_mesh(text: str, device_type: str = "cpu") -> DeviceMesh:
    """The mesh that `dp=2,tp=4` or, without names, `2x4` describes. It is of the dry fabric: no rank runs.

    Args:
        text: the axes with their sizes.
        device_type: "cpu" or "cuda".

    Example:
        >>> parse_mesh("dp=2,tp=4"), parse_mesh("2x4")
        (DeviceMesh(cpu dp=2 tp=4, dry), DeviceMesh(cpu 2 4, dry))
    """
    named = "=" in text
    names: list[str] = []
    sizes: list[int] = []
    at = 0
    for part in text.split("," if named else "x"):
        name, equals, size = part.partition("=") if named else ("", "", part)
        where = at + len(part) - len(part.lstrip())
        if named and (not equals or not name.strip().isidentifier()):
            raise NotationError.at(text, where, f"expected an axis such as dp=2, found {part.strip()!r}")
        if name.strip() in names:
            raise NotationError.at(text, where, f"axis {name.strip()} is named twice")
        value = at + len(name) + len(equals) + len(size) - len(size.lstrip())
        if not re.fullmatch(r"[0-9]{1,9}", size.strip()) or not int(size):
            problem = f"expected a number of ranks, found {size.strip()!r}"
            raise NotationError.at(text, value, problem, hint="a mesh is written dp=2,tp=4 or, without names, 2x4")
        sizes.append(int(size))
        if math.prod(sizes) > MOST_RANKS:
            raise NotationError.at(text, value, f"a mesh of more than {MOST_RANKS:,} ranks")
        names += [name.strip()] if named else []
        at += len(part) + 1
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names or None, fabric="dry")


def parse_change(text: str, mesh: DeviceMesh) -> tuple[DTensorSpec, DTensorSpec]:
    """The two layouts of `f32[8,32] dp:S0 -> tp:S1`. The tensor is named once, before the arrow.

    Args:
        text: a layout with dtype and sizes, an arrow, and the layout to go to.
        mesh: whose axes are meant.

    Example:
        >>> parse_change("f32[8,32] dp:S0 -> tp:S1", parse_mesh("dp=2,tp=4"))
        (f32[8,32] dp:S0 tp:R, f32[8,32] dp:R tp:S1)
    """
    before, arrow, _ = text.partition("->")
    if not arrow:
        raise NotationError.at(text, len(text), "expected '->' and the layout to go to")
    try:
        source = parse_spec(before, mesh)
    except NotationError as error:
        # the caret stands where it stood: show the whole of what was written above it
        raise NotationError(error.problem.replace(f"\n  {before}\n", f"\n  {text}\n"), hint=error.hint) from None
    return source, parse_spec(text, mesh, meta=source.tensor_meta, start=len(before) + len(arrow))


def parse_bytes(text: str) -> int:
    """A number of bytes: `1000`, `64MiB`, `1.5GB`.

    Args:
        text: a number, and a unit of 1000s (kB, MB, GB, TB) or 1024s (KiB, MiB, GiB, TiB).

    Example:
        >>> parse_bytes("64MiB"), parse_bytes("1.5 GB"), parse_bytes("100")
        (67108864, 1500000000, 100)
    """
    found = _BYTES.fullmatch(text.strip())
    unit = UNITS.get(found["unit"].lower()) if found else None
    if found is None or unit is None:
        where = 0 if found is None else len(text) - len(text.lstrip()) + found.start("unit")
        raise NotationError.at(text, where, f"{text!r} is not a number of bytes", hint="as in 1000, 64MiB or 1.5GB")
    return int(float(found["number"]) * unit) if "." in found["number"] else int(found["number"]) * unit


# ---------------------------------------------------------------- shardwise plan


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `plan`."""
    parser.add_argument("change", help="the two layouts: 'DTYPE[SIZES] LAYOUT -> LAYOUT'")
    parser.add_argument("--mesh", required=True, help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    devices = sorted(current_cost_model().devices)
    parser.add_argument("--device", choices=devices, default="cpu", help="whose links are modelled (default: cpu)")
    parser.add_argument("--max-bytes", metavar="N", help="what a rank may hold at most on the way: 1000, 64MiB, 1GB")
    parser.add_argument("--json", action="store_true", help="for programs: the same as JSON")


def run_plan(arguments: argparse.Namespace) -> None:
    """Plan the route and print it beside the step-by-step one."""
    mesh = parse_mesh(arguments.mesh, arguments.device)
    source, target = parse_change(arguments.change, mesh)
    max_bytes = None if arguments.max_bytes is None else parse_bytes(arguments.max_bytes)
    route = DTensorRedistributePlanner().plan(source, target, max_bytes=max_bytes)
    plain = plain_route(source, target)
    if arguments.json:
        print(json.dumps(plan_as_json(route, plain, max_bytes), indent=2))
    else:
        print_plan(route, plain, max_bytes)


def plan_as_json(route: Route, plain: Route, max_bytes: int | None) -> dict[str, Any]:
    """What `plan --json` prints. The keys are stable; new ones may be added."""
    spec = route.source
    mesh, meta = spec.mesh, spec.tensor_meta
    return {
        "mesh": {
            "axes": [mesh.axis_name(axis) for axis in range(mesh.ndim)],
            "shape": list(mesh.shape),
            "ranks": mesh.size(),
            "device": mesh.device_type,
        },
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
    """How many times as much the step-by-step way takes; None where it takes something and we nothing."""
    if ours:
        return plain / ours
    return None if plain else 1.0


def in_words(step: Step) -> str:
    """What a step does, for someone who does not know the names of collectives."""
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
            return "send each rank what it lacks"
        case Unreduce():
            return "keep the value on one rank"
        case Slice() if step.describe() != "relabel":
            return "keep a part of what is held"
        case _:
            return "the same by another name"


_REDUCE = {
    "sum": "sum",
    "avg": "average",
    "min": "least",
    "max": "greatest",
    "product": "product",
}


def print_plan(route: Route, plain: Route, max_bytes: int | None) -> None:
    """The route and the step-by-step one as tables, and how they compare."""
    from rich.console import Console, Group
    from rich.text import Text

    spec, mesh = route.source, route.source.mesh
    sizes = (f"{mesh.axis_name(a)}={n}" if mesh.mesh_dim_names else str(n) for a, n in enumerate(mesh.shape))
    whole = human_bytes(spec.tensor_meta.nbytes)
    page: list[Any] = [
        Text(f"{spec} -> {route.target.layout}", "bold"),
        Text(f"mesh {' x '.join(sizes)}: {mesh.size():,} ranks of {mesh.device_type}; the whole tensor is {whole}"),
    ]
    if max_bytes is not None:
        page.append(Text(f"no rank may hold more than {human_bytes(max_bytes)} on the way"))
    page.append("")
    if not route.steps:
        page.append(Text("Nothing to do: the layouts are the same."))
    else:
        page += [*_table("the route", route), ""]
        page += _comparison(route, plain, max_bytes)
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=min(Console().width, WIDEST) if terminal else WIDTH)
    if terminal:
        console.print(Group(*page))
        return
    with console.capture() as printed:
        console.print(Group(*page))
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _comparison(route: Route, plain: Route, max_bytes: int | None) -> list[Any]:
    from rich.text import Text

    if [step.describe() for step in plain.steps] == [step.describe() for step in route.steps]:
        return [Text("Step by step, the way would be the same.")]
    over = max_bytes is not None and plain.peak_bytes > max_bytes
    return [
        *_table("step by step: reduce, gather what changes, slice", plain),
        "",
        Text(
            f"Step by step, a rank receives {_times(plain.received, route.received)} the bytes, takes "
            f"{_times(plain.seconds, route.seconds)} the time and holds "
            f"{_times(plain.peak_bytes, route.peak_bytes)} as much" + (", more than it may." if over else ".")
        ),
    ]


def _table(title: str, route: Route) -> list[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
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
    return [Text(title, "bold"), table, Text(total)]


def _numbers(cost: StepCost) -> tuple[str, str, str]:
    if not cost.received and not cost.seconds:
        return "-", "-", human_bytes(cost.holds)
    return human_bytes(cost.received), human_seconds(cost.seconds), human_bytes(cost.holds)


def _times(plain: float, ours: float) -> str:
    ratio = _ratio(plain, ours)
    return "infinitely many times" if ratio is None else f"{ratio:,.2f} times" if ratio < 100 else f"{ratio:,.0f} times"


def human_bytes(count: float) -> str:
    """Bytes for people, in 1024s.

    Example:
        >>> human_bytes(512), human_bytes(3 * 2**29), human_bytes(33292288)
        ('512 B', '1.50 GiB', '31.75 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = max((p for p in range(len(units)) if count >= 1024**p), default=0)
    number = f"{count:.0f}" if power == 0 else f"{count / 1024**power:.2f}"
    return f"{number} {units[power]}"


def human_seconds(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> human_seconds(2.5), human_seconds(0.0284), human_seconds(4e-5)
        ('2.50 s', '28.40 ms', '40.00 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us" if seconds else "0 s"


# ---------------------------------------------------------------- the table of commands


class Command(NamedTuple):
    """A subcommand: one line about it, its arguments, what it does, and examples for its help."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], object]
    examples: str | None = None


COMMANDS: dict[str, Command] = {
    "plan": Command(
        "show the cheapest route from one layout to another, and what it costs",
        add_plan_arguments,
        run_plan,
        """\
A layout names a placement for each axis; axes left out are replicated:
  R      every rank along the axis holds the same
  S1     dim 1 is split over the axis
  S0/4   dim 0 is four rows, each of which is split
  P      the value is the sum of what the ranks hold; also P(avg), P(min), ...
  order 0:tp>dp   dim 0 is split by tp first, then by dp

examples:
  shardwise plan "f32[64,4096,4096] dp:S0 -> tp:S2" --mesh dp=2,tp=4
  shardwise plan "bf16[8192,8192] S0 S1 -> S1 S0" --mesh 128x128 --device cuda
  shardwise plan "f32[4096,4096] S0 -> R" --mesh 8 --max-bytes 64MiB --json
""",
    ),
    "demo": Command(
        "a tour of the library on virtual ranks, in a few seconds", lambda parser: None, lambda _: demo.main()
    ),
}
