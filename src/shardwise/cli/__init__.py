"""The command line `shardwise`: the table of commands, and its main function.

Each command is a module `*_command.py` of this package with a `COMMAND`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import torch

import shardwise
from shardwise.cli import (
    bench_command,
    calibrate_command,
    checkpoint_command,
    demo_command,
    doctor_command,
    draw_command,
    explain_command,
    plan_command,
    run_command,
)
from shardwise.cli.arguments import Command
from shardwise.core.mesh import chosen_fabric
from shardwise.errors import ShardwiseError

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS: dict[str, Command] = {
    "demo": demo_command.COMMAND,
    "run": run_command.COMMAND,
    "explain": explain_command.COMMAND,
    "plan": plan_command.COMMAND,
    "draw": draw_command.COMMAND,
    "checkpoint": checkpoint_command.COMMAND,
    "bench": bench_command.COMMAND,
    "calibrate": calibrate_command.COMMAND,
    "doctor": doctor_command.COMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for invalid input, 130 after an interrupt.

    Args:
        argv: the arguments after `shardwise`; by default those of this process.

    Example:
        >>> main(["plan", "f32[8,8] S0 -> Q", "--mesh", "4"])
        2
    """
    arguments = make_parser().parse_args(argv)
    try:
        arguments.execute(arguments)
        sys.stdout.flush()
    except ShardwiseError as error:
        print(f"shardwise {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nshardwise {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader closed the pipe; the interpreter must not write the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def version_line() -> str:
    """Versions of the package, of torch and of Python, and the fabric that a mesh made here would have."""
    versions = f"shardwise {shardwise.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}, fabric {chosen_fabric()}"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, made from `COMMANDS`."""
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Distributed tensors for PyTorch: a demo, runs on virtual ranks, plans, pictures, checkpoints.",
    )
    parser.add_argument("--version", action="version", version=version_line())
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
        made.set_defaults(execute=command.execute)
    return parser
