"""`shardwise run`: runs a script on virtual ranks, with a mesh from the command line."""

from __future__ import annotations

import argparse

from shardwise.cli.arguments import Command, parse_count
from shardwise.cli.script_runner import MESHES, add_script_arguments, end_as, run_script, run_script_in_threads

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.add_argument("--mesh", help="the axes and their sizes: dp=2,tp=4 or, without names, 2x4")
    parser.add_argument("-n", "--ranks", metavar="N", help="run N ranks as threads, as torchrun runs processes")
    add_script_arguments(parser)


def run_run(arguments: argparse.Namespace) -> None:
    """Run the script, and exit with its status."""
    if arguments.ranks is None:
        end_as(run_script(arguments.script, arguments.args, arguments.mesh))
    else:
        ranks = parse_count(arguments.ranks, "ranks")
        end_as(run_script_in_threads(arguments.script, arguments.args, ranks, arguments.mesh))


COMMAND = Command(
    "run a script on ranks in this process: in lockstep, or a thread for each",
    add_arguments,
    run_run,
    MESHES
    + """
With -n each rank is a thread of this process, and the script runs as under
torchrun: with RANK, LOCAL_RANK and the others in its environment, and with
process groups of torch.distributed inside the process. One rank runs at a time.
A deadlock is an error that names the waiting lines.

Without -n the script runs once, for all ranks in lockstep. WORLD_SIZE and
LOCAL_WORLD_SIZE are set, and a line that reads its rank (RANK,
torch.distributed.get_rank(), mesh.get_rank()) is refused. Put the work of a
single rank under `if shardwise.is_main():`, which also works under torchrun.

The exit status is the script's, or 1 after an exception, with its traceback.

examples:
  shardwise run -n 8 train.py
  shardwise run --mesh dp=2,tp=4 train.py --steps 10
""",
)
