"""`shardwise run`: any script on virtual ranks, with the mesh chosen outside it."""

from __future__ import annotations

import argparse

from shardwise.cli.command import Command
from shardwise.cli.scripts import MESHES, add_script_arguments, end_as, run_script, run_script_in_threads
from shardwise.cli.words import parse_count

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.add_argument("--mesh", help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    parser.add_argument(
        "-n", "--ranks", metavar="N", help="give each of N ranks a thread, as torchrun gives it a process"
    )
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the script, and end as it does."""
    if arguments.ranks is None:
        end_as(run_script(arguments.script, arguments.args, arguments.mesh))
    else:
        ranks = parse_count(arguments.ranks, "ranks")
        end_as(run_script_in_threads(arguments.script, arguments.args, ranks, arguments.mesh))


COMMAND = Command(
    "run a script on ranks in this process: in lockstep, or a thread for each",
    add_arguments,
    run,
    MESHES
    + """
With -n each rank is a thread of this process, and the script runs as under
torchrun: it finds RANK, LOCAL_RANK and the others in its environment, and
torch.distributed as it is, with process groups inside the process. One rank
runs at a time. Ranks that wait for ever get an error that says where.

Without -n the script runs once, for all ranks in lockstep. WORLD_SIZE and
LOCAL_WORLD_SIZE are set, and a line that asks for a rank of its own (RANK,
torch.distributed.get_rank(), mesh.get_rank()) is refused. What one rank does
goes under `if shardwise.is_main():`, which holds under torchrun too.

The status is the script's: what it exits with, or 1 and its traceback where it
fails.

examples:
  shardwise run -n 8 train.py
  shardwise run --mesh dp=2,tp=4 train.py --steps 10
""",
)
