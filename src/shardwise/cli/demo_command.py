"""`shardwise demo`: runs the demo of `shardwise.demo`."""

from __future__ import annotations

import argparse

from shardwise import demo
from shardwise.cli.arguments import Command, parse_count, writable

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `demo`."""
    parser.add_argument("--steps", metavar="N", default=str(demo.STEPS), help="steps to train (default: %(default)s)")
    parser.add_argument(
        "--html", metavar="FILE", nargs="?", const="shardwise-demo.html",
        help="also write the report of one step as a page (default: %(const)s)",
    )  # fmt: skip


def run_demo(arguments: argparse.Namespace) -> None:
    """Run the demo."""
    steps = parse_count(arguments.steps, "steps")
    demo.main(steps, None if arguments.html is None else writable(arguments.html))


COMMAND = Command(
    "train a small transformer on eight virtual devices, in under a minute",
    add_arguments,
    run_demo,
    """\
A character-level transformer is trained on a play of Shakespeare on a mesh
dp=2 x tp=4, fully sharded on dp, tensor and sequence parallel on tp, and the
same model on one device. The demo shows the sharding of a parameter, the
communication of a step, communication and memory on 1,024 devices, text written
by the model, and a checkpoint loaded on three devices. No cluster is needed:
the devices are virtual ranks in this process.

examples:
  shardwise demo
  shardwise demo --html report.html
  shardwise demo --steps 1000
""",
)
