"""`shardwise checkpoint inspect|verify|reshard|diff`: tools for checkpoints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise import checkpoint
from shardwise.checkpoint import Summary
from shardwise.cli.arguments import Command, parse_mesh
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import TensorMeta, dtype_name
from shardwise.errors import CheckpointError
from shardwise.text import human_bytes, plural

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `checkpoint`: one subparser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    inspect = actions.add_parser("inspect", help="list the contents of a checkpoint")
    verify = actions.add_parser("verify", help="read everything and compare all checksums")
    reshard = actions.add_parser("reshard", help="copy it into the blocks of another mesh")
    diff = actions.add_parser("diff", help="list the differences of two checkpoints; ignores layouts")
    for action in (inspect, verify, reshard, diff):
        action.add_argument("path", help="the directory of the checkpoint")
    reshard.add_argument("out", help="the directory to create")
    reshard.add_argument("--mesh", required=True, help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    diff.add_argument("other", help="the directory of the other checkpoint")
    for action in (inspect, verify, diff):
        action.add_argument("--json", action="store_true", help="print JSON")


def run_checkpoint(arguments: argparse.Namespace) -> None:
    """Execute the action."""
    match arguments.action:
        case "inspect":
            _inspect(checkpoint.inspect(arguments.path), as_json=arguments.json)
        case "verify":
            _verify(arguments.path, as_json=arguments.json)
        case "reshard":
            mesh = parse_mesh(arguments.mesh)
            ranks = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, fabric="virtual")
            checkpoint.reshard(arguments.path, arguments.out, ranks)
            print(f"{arguments.out}: {arguments.path} in the blocks of {mesh.size()} ranks")
        case _:
            _diff(arguments.path, arguments.other, as_json=arguments.json)


def _inspect(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(summary), indent=2))
        return
    blocks = sum(tensor.blocks for tensor in summary.tensors)
    print(
        f"{plural(len(summary.tensors), 'tensor')} of {human_bytes(summary.nbytes)} in {plural(blocks, 'block')} "
        f"and {plural(len(summary.files), 'file')}; {plural(len(summary.objects), 'object')}"
    )
    rows = [
        (t.name, repr(TensorMeta(t.shape, dtype=t.dtype)), human_bytes(t.nbytes), plural(t.blocks, "block"))
        for t in summary.tensors
    ]
    rows += [(name, f"{value!r:.60}", "", "") for name, value in summary.objects.items()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for name, what, size, many in rows:
        print(f"{name:{widths[0]}}  {what:{widths[1]}}  {size:>{widths[2]}}  {many}".rstrip())


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "bytes": summary.nbytes,
        "tensors": [
            {"name": t.name, "dtype": dtype_name(t.dtype), "shape": t.shape, "bytes": t.nbytes, "blocks": t.blocks}
            for t in summary.tensors
        ],
        "objects": {name: repr(value) for name, value in summary.objects.items()},
        "files": summary.files,
    }


def _verify(path: str, *, as_json: bool) -> None:
    problems = checkpoint.verify(path)
    if as_json:
        print(json.dumps({"problems": problems}, indent=2))
    elif not problems:
        print(f"{path} is intact: all checksums match")
    if problems:
        raise CheckpointError(f"{path} is damaged:\n    " + "\n    ".join(problems))


def _diff(a: str, b: str, *, as_json: bool) -> None:
    differences = checkpoint.diff(a, b)
    if as_json:
        print(json.dumps([difference._asdict() for difference in differences], indent=2))
        return
    for name, what in differences:
        print(f"{name} {what}")
    if not differences:
        print("no difference")


COMMAND = Command(
    "inspect, verify, reshard and compare checkpoints",
    add_arguments,
    run_checkpoint,
    """\
examples:
  shardwise checkpoint inspect runs/step-300
  shardwise checkpoint verify runs/step-300
  shardwise checkpoint reshard runs/step-300 runs/step-300-on-8 --mesh dp=2,tp=4
  shardwise checkpoint diff runs/step-300 runs/step-400
""",
)
