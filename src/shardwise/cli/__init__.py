"""The command `shardwise`: what the library knows, for a shell. Holds no logic of the library itself.

Each command is a module of this package with a `COMMAND`; here they stand in one table and are run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import shardwise
from shardwise.cli import bench, checkpoint, demo, draw, explain, plan, run
from shardwise.cli.command import Command
from shardwise.errors import ShardwiseError

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS: dict[str, Command] = {
    "demo": demo.COMMAND,
    "run": run.COMMAND,
    "explain": explain.COMMAND,
    "plan": plan.COMMAND,
    "draw": draw.COMMAND,
    "checkpoint": checkpoint.COMMAND,
    "bench": bench.COMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for input that cannot be, 130 where it is interrupted.

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
    except KeyboardInterrupt:
        print(f"\nshardwise {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read this has seen enough; the interpreter must not try to write the rest when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, made from `COMMANDS`."""
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Distributed tensors for PyTorch: a demo, runs on virtual ranks, plans, pictures, checkpoints.",
    )
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
