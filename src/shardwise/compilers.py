"""What torch's compiler must be told before it traces a program: which of our functions it takes whole into its graph.

Telling means importing the compiler, which takes a second, so it is done when a program is first traced. Knows nothing
of what the functions do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardwise.core.opaque import why_not_constant
from shardwise.errors import UnsupportedError

__all__ = ["taken_whole", "tell_compiler"]

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
_whole: list[Callable[..., Any]] = []


def taken_whole(function: AnyFunction) -> AnyFunction:
    """Declare a function that stands in a graph as one call: what it does inside is not looked at by Dynamo.

    Call it from traced code after `tell_compiler()`.
    """
    _whole.append(function)
    return function


def tell_compiler() -> bool:
    """Tell Dynamo what it takes whole. Dynamo runs this itself while it traces, and takes the result as a constant."""
    reason = why_not_constant()
    if reason is not None:
        raise UnsupportedError(
            f"torch.compile of DTensors needs torch 2.11 or later, with constants of our classes; torch "
            f"{torch.__version__} says: {reason}",
            hint="run the program without torch.compile, or on another version of torch",
        )
    compiler = importlib.import_module("torch._dynamo")
    while _whole:
        compiler.allow_in_graph(_whole.pop())
    return True


# what torch.compiler.assume_constant_result sets; calling that would import the compiler
tell_compiler._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
