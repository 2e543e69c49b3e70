"""`shardwise checkpoint inspect|verify|reshard|diff`: what one does with a checkpoint without a program."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise import checkpoint
from shardwise.checkpoint import Summary
from shardwise.cli.command import Command
from shardwise.cli.words import parse_mesh
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import TensorMeta, dtype_name
from shardwise.errors import CheckpointError
from shardwise.text import human_bytes

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `checkpoint`: one action each."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    inspect = actions.add_parser("inspect", help="list what a checkpoint holds")
    verify = actions.add_parser("verify", help="read all of it and compare every checksum")
    reshard = actions.add_parser("reshard", help="write it anew as the ranks of another mesh would have saved it")
    diff = actions.add_parser("diff", help="in what two checkpoints differ; layouts do not count")
    for action in (inspect, verify, reshard, diff):
        action.add_argument("path", help="the directory of the checkpoint")
    reshard.add_argument("out", help="the directory to make")
    reshard.add_argument("--mesh", required=True, help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    diff.add_argument("other", help="the directory of the other checkpoint")
    for action in (inspect, verify, diff):
        action.add_argument("--json", action="store_true", help="for programs: the same as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Do what the action says."""
    match arguments.action:
        case "inspect":
            _inspect(checkpoint.inspect(arguments.path), as_json=arguments.json)
        case "verify":
            _verify(arguments.path, as_json=arguments.json)
        case "reshard":
            mesh = parse_mesh(arguments.mesh)
            ranks = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, fabric="virtual")
            checkpoint.reshard(arguments.path, arguments.out, ranks)
            print(f"{arguments.out} is {arguments.path} as {mesh.size()} ranks would have saved it")
        case _:
            _diff(arguments.path, arguments.other, as_json=arguments.json)


def _inspect(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(summary), indent=2))
        return
    blocks = sum(tensor.blocks for tensor in summary.tensors)
    print(
        f"{_many(len(summary.tensors), 'tensor')} of {human_bytes(summary.nbytes)} in {_many(blocks, 'block')} "
        f"and {_many(len(summary.files), 'file')}; {_many(len(summary.objects), 'object')}"
    )
    rows = [
        (t.name, repr(TensorMeta(t.shape, dtype=t.dtype)), human_bytes(t.nbytes), _many(t.blocks, "block"))
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
        print(f"{path} is whole: every checksum is as it was saved")
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


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


COMMAND = Command(
    "inspect, verify, reshard and compare checkpoints",
    add_arguments,
    run,
    """\
examples:
  shardwise checkpoint inspect runs/step-300
  shardwise checkpoint verify runs/step-300
  shardwise checkpoint reshard runs/step-300 runs/step-300-on-8 --mesh dp=2,tp=4
  shardwise checkpoint diff runs/step-300 runs/step-400
""",
)
