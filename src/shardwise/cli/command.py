"""What a command of the command line is: the type that each module of commands fills in."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Command"]


class Command(NamedTuple):
    """A subcommand: one line about it, its arguments, what it does, and examples for its help."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], object]
    examples: str | None = None
