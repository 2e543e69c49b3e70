"""`shardwise demo`: the run that `shardwise.demo` tells about."""

from __future__ import annotations

import argparse

from shardwise import demo
from shardwise.cli.command import Command
from shardwise.cli.words import parse_count, writable

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `demo`."""
    parser.add_argument("--steps", metavar="N", default=str(demo.STEPS), help="steps to train (default: %(default)s)")
    parser.add_argument(
        "--html", metavar="FILE", nargs="?", const="shardwise-demo.html",
        help="also write the page of what one step moved (default: %(const)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Show it."""
    steps = parse_count(arguments.steps, "steps")
    demo.main(steps, None if arguments.html is None else writable(arguments.html))


COMMAND = Command(
    "train a small transformer on eight virtual devices, in under a minute",
    add_arguments,
    run,
    """\
A character-level transformer reads a play of Shakespeare on a mesh dp=2 x tp=4,
fully sharded on dp, tensor and sequence parallel on tp, beside the same model
on one device. Shown are one parameter's sharding, what a step moves, what 1,024
devices would move and hold, text that the model writes, and a checkpoint loaded
on three devices. No cluster is needed: the devices live in this process.

examples:
  shardwise demo
  shardwise demo --html report.html
  shardwise demo --steps 1000
""",
)
