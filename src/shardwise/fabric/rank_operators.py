"""Custom operators of scripts whose ranks are threads of one process.

torch has one table of operators for a process. A name that is defined again ends the earlier operator in C++, and a
rank that still calls it would crash. So the first rank that defines a name makes the operator for all, and a call runs
the function that the calling rank has given.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.errors import UnsupportedError

__all__ = ["operators_of_ranks"]

Function = Callable[..., Any]


@contextlib.contextmanager
def operators_of_ranks(running: Callable[[], int | None]) -> Iterator[None]:
    """Let ranks define the same operators with `torch.library.custom_op`. `running()`: the rank that runs now."""
    define = torch.library.custom_op
    made: dict[str, tuple[str, Any]] = {}  # by name: the schema and the operator
    functions: dict[str, dict[int | None, Function]] = {}

    def custom_op(name: str, fn: Function | None = None, /, **options: Any) -> Any:
        if fn is None:
            return functools.partial(custom_op, name, **options)
        schema = options.get("schema") or torch.library.infer_schema(fn, mutates_args=options["mutates_args"])
        own = functions.setdefault(name, {})
        own[running()] = fn
        if name not in made:

            @functools.wraps(fn)
            def of_rank(*args: Any, **kwargs: Any) -> Any:
                return own.get(running(), fn)(*args, **kwargs)  # modules that ranks share define it once

            made[name] = schema, define(name, of_rank, **options)
        if made[name][0] != schema:
            raise UnsupportedError(
                f"custom operator {name}: defined as {made[name][0]} before, and as {schema} now",
                hint="ranks that are threads share their operators: define it alike on each, and once",
            )
        return made[name][1]

    torch.library.custom_op = custom_op
    try:
        yield
    finally:
        torch.library.custom_op = define
