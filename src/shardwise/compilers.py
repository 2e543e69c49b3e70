"""What torch's compiler must be told before it traces a program: which of our functions it takes whole into its graph.

Telling means importing the compiler, which takes a second, so it is done when a program is first traced. Knows nothing
of what the functions do.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from shardwise.core.mesh import DeviceMesh
from shardwise.core.opaque import why_not_constant
from shardwise.core.spec import DTensorSpec
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.plan.cost import current_cost_model
from shardwise.rules.registry import USERS_RULES
from shardwise.torch_private import DispatchModeKey, dispatch_mode_of, dynamo_frames

__all__ = [
    "COMPILER",
    "decided_by",
    "mixes_strides",
    "never_traced",
    "not_compiled",
    "refuse_dry",
    "refuse_named",
    "release_importing_frames",
    "taken_whole",
    "tell_compiler",
    "traceable",
]

COMPILER = "torch._dynamo"  # which some of torch's Python functions import when they first run
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
Given = ParamSpec("Given")
Result = TypeVar("Result")
_whole: list[Callable[..., Any]] = []


def taken_whole(function: AnyFunction) -> AnyFunction:
    """Declare a function that stands in a graph as one call: what it does inside is not looked at by Dynamo.

    Call it from traced code after `tell_compiler()`.
    """
    _whole.append(function)
    return function


def traceable(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let a function of ours be called by programs that are compiled: it is taken whole there.

    Example:
        >>> traceable(len)("four")
        4
    """

    @taken_whole
    @functools.wraps(function)
    def whole(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return function(*args, **kwargs)

    @functools.wraps(function)
    def either(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if is_dynamo_compiling():
            tell_compiler()
            return whole(*args, **kwargs)
        return function(*args, **kwargs)

    return either


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


@functools.cache
def release_importing_frames() -> None:
    """Free the frames that were running when Dynamo was imported, once in a process.

    A function of torch that runs during the import stores its own frame in a local variable. This cycle keeps all its
    callers' frames, with their tensors, until the garbage collector runs. A view among them counts as a reference to
    its base, and `torch.utils.swap_tensors` then refuses to replace a parameter (as parametrizations do).
    """
    gc.collect()


@functools.cache
def mixes_strides() -> bool:
    """Whether this torch gives results of compiled code their symbolic sizes for strides, as 2.11 does."""
    schemas: Any = importlib.import_module("torch._functorch._aot_autograd.schemas")
    meta = object.__new__(schemas.SubclassCreationMeta)
    meta.outer_size = meta.outer_stride = (None,)  # one symbolic size and one symbolic stride
    found = meta.compute_outer_size_and_stride([5, 7], curr_start_idx=0)
    return tuple(map(tuple, found)) != ((5,), (7,))


def decided_by() -> tuple[str, ...]:
    """What decides how a program is traced, besides its tensors: our code, the cost model, the rules of users.

    For the keys of caches on disk. What a user's rule says is not known, so with one the key is new in each process.

    Example:
        >>> decided_by() == decided_by()
        True
    """
    return _digest_of_code(), repr(current_cost_model()), _this_process() if USERS_RULES else ""


@functools.cache
def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _this_process() -> str:
    return os.urandom(16).hex()


def never_traced(*functions: Callable[..., Any]) -> None:
    """Mark functions that torch calls for us (dispatch, gradients): neither they nor what they call are compiled.

    Outside of a graph, after a graph break say, Dynamo looks at every Python function that runs.
    """
    try:
        frames = dynamo_frames()
        skip = frames._FrameAction.SKIP
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # another version of torch: slower after graph breaks, not wrong
        return


def refuse_dry(mesh: DeviceMesh) -> None:
    """A dry run has no values, and what it counts is counted as operators run: there is nothing to compile.

    Example:
        >>> refuse_dry(DeviceMesh("cpu", [0, 1]))
    """
    if not fabric_of(mesh).has_values:
        raise UnsupportedError(
            f"torch.compile of a program on {mesh}: a dry run has no values, and counts what operators do as they run",
            hint="run the program without torch.compile; compiled, it communicates the same",
        )


def refuse_named(tensor: torch.Tensor, spec: DTensorSpec) -> None:
    """torch's make_fx names its inputs in the graph; what is inside of a DTensor among them it does not know."""
    mode: Any = dispatch_mode_of(DispatchModeKey.PROXY)
    if mode is not None and tensor in mode.tracer.tensor_tracker:
        raise UnsupportedError(
            f"make_fx was given the DTensor {spec} as an input: its local would become a constant of the graph",
            hint="trace with shardwise.debug.make_fx, or make the DTensor inside, by from_local",
        )


def not_compiled(function: AnyFunction) -> AnyFunction:
    """Mark a function that keeps books of its own (hooks that gather and free parameters): a graph breaks there.

    What stands before and after is compiled; it and what it calls run as they are. With fullgraph=True Dynamo says so.
    """
    never_traced(function)
    marked: Any = function
    marked._torchdynamo_disable = True  # what torch.compiler.disable sets
    marked._torchdynamo_disable_msg = "it keeps books of its own; compile without fullgraph=True"
    return function
