"""`shardwise demo`: the tour of `shardwise.demo`."""

from __future__ import annotations

from shardwise import demo
from shardwise.cli.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    "a tour of the library on virtual ranks, in a few seconds", lambda parser: None, lambda _: demo.main()
)
