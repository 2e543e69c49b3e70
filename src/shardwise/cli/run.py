"""`shardwise run`: any script on virtual ranks, with the mesh chosen outside it."""

from __future__ import annotations

import argparse

from shardwise.cli.command import Command
from shardwise.cli.scripts import MESHES, add_script_arguments, end_as, run_script

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.add_argument("--mesh", help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the script, and end as it does."""
    end_as(run_script(arguments.script, arguments.args, arguments.mesh))


COMMAND = Command(
    "run a script on virtual ranks in this process, with the mesh preset",
    add_arguments,
    run,
    MESHES
    + """
The status is the script's: what it exits with, or 1 and its traceback where it
fails.

examples:
  shardwise run --mesh 8 train.py
  shardwise run --mesh dp=2,tp=4 train.py --steps 10
""",
)
