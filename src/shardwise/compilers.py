"""Declarations for torch's compiler: which of our functions are single nodes of a graph, and which are never compiled.

They import the compiler, which takes a second, so they are made when a program is first traced.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.opaque import why_not_constant
from shardwise.core.spec import DTensorSpec
from shardwise.core.symbolic import unrecorded
from shardwise.core.tracing import is_dynamo_compiling, proxy_mode
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of, on_later_world
from shardwise.plan.cost import current_cost_model
from shardwise.rules.registry import USERS_RULES
from shardwise.torch_private import TracingContext, dynamo_frames, track_constant, tree_leaves

__all__ = [
    "COMPILER",
    "decided_by",
    "declare_to_compiler",
    "forget_compiled",
    "is_node",
    "mixes_strides",
    "never_traced",
    "not_compiled",
    "refuse_dry",
    "refuse_named",
    "release_importing_frames",
    "single_node",
    "traceable",
]

COMPILER = "torch._dynamo"  # imported by some of torch's Python functions when they first run
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
Given = ParamSpec("Given")
Result = TypeVar("Result")
_single_nodes: list[Callable[..., Any]] = []


def single_node(function: AnyFunction) -> AnyFunction:
    """Declare a function as a single node of a graph: Dynamo does not trace its body.

    Call it from traced code after `declare_to_compiler()`.
    """
    _single_nodes.append(function)
    return function


def traceable(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Allow compiled programs to call a function of ours: it is a single node there.

    Example:
        >>> traceable(len)("four")
        4
    """

    @single_node
    @functools.wraps(function)
    def traced(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return function(*args, **kwargs)

    @functools.wraps(function)
    def either(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if is_dynamo_compiling():
            declare_to_compiler()
            return traced(*args, **kwargs)
        return function(*args, **kwargs)

    return either


def declare_to_compiler() -> bool:
    """Declare all such functions. Dynamo runs this itself while it traces, and treats the result as a constant."""
    reason = why_not_constant()
    if reason is not None:
        raise UnsupportedError(
            f"torch.compile of DTensors needs torch 2.11 or later, with constants of our classes; torch "
            f"{torch.__version__} reports: {reason}",
            hint="run the program without torch.compile, or on another version of torch",
        )
    compiler = importlib.import_module("torch._dynamo")
    while _single_nodes:
        compiler.allow_in_graph(_single_nodes.pop())
    return True


# the attribute of torch.compiler.assume_constant_result; calling that would import the compiler
declare_to_compiler._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def forget_compiled() -> None:
    """Drop compiled code: it has the rank and the process groups of a former world.

    Unless code is compiled right now, which is of the new world.
    """
    if COMPILER in sys.modules and TracingContext.try_get() is None:
        torch.compiler.reset()


on_later_world.append(forget_compiled)


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
    """Whether this torch uses symbolic sizes as strides in results of compiled code, as torch 2.11 does."""
    schemas: Any = importlib.import_module("torch._functorch._aot_autograd.schemas")
    meta = object.__new__(schemas.SubclassCreationMeta)
    meta.outer_size = meta.outer_stride = (None,)  # one symbolic size and one symbolic stride
    found = meta.compute_outer_size_and_stride([5, 7], curr_start_idx=0)
    return tuple(map(tuple, found)) != ((5,), (7,))


def decided_by() -> tuple[str, ...]:
    """Everything except tensors that determines how a program is traced: our code, the cost model, the users' rules.

    Used in keys of caches on disk. The contents of a user's rule are unknown, so the key is new in each process then.

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


def never_traced(*functions: Callable[..., Any], callees: bool = False) -> None:
    """Mark functions that torch calls for us (dispatch, gradients): neither they nor their callees are compiled.

    Outside of a graph, for example after a graph break, Dynamo examines every Python function that runs.

    Args:
        functions: the functions.
        callees: compile what they call.
    """
    try:
        frames = dynamo_frames()
        actions = frames._FrameAction
        strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT if callees else actions.SKIP)
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:  # another version of torch: slower after graph breaks, not wrong
        return


def refuse_dry(mesh: DeviceMesh) -> None:
    """Refuse to compile a dry run: it has no values, and counts while operators run.

    Example:
        >>> refuse_dry(DeviceMesh("cpu", [0, 1]))
    """
    if not fabric_of(mesh).has_values:
        raise UnsupportedError(
            f"torch.compile of a program on {mesh}: a dry run has no values, and counts while operators run",
            hint="run the program without torch.compile; compiled, it communicates the same",
        )


def refuse_named(tensor: torch.Tensor, spec: DTensorSpec) -> None:
    """Refuse a DTensor as an input of torch's make_fx, which does not see the local inside it."""
    mode = proxy_mode()
    if mode is not None and tensor in mode.tracer.tensor_tracker:
        raise UnsupportedError(
            f"make_fx was given the DTensor {spec} as an input: its local would become a constant of the graph",
            hint="trace with shardwise.debug.make_fx, or make the DTensor inside, by from_local",
        )


def is_node(tensor_class: type[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is one node of the graph that is traced, because a DTensor among its operands is a node.

    It is where torch traces a function of DTensors as one of tensors (make_fx, `torch.func.linearize`). Its tracer
    leaves a call to the class of a tensor that it does not know: a DTensor from outside of the function. That becomes a
    constant of the graph here, as a plain tensor does, so that the tracer records the call.
    """
    mode = proxy_mode()
    if mode is None:
        return False
    tracer = mode.tracer
    operands = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, tensor_class)]
    unknown = [operand for operand in operands if operand not in tracer.tensor_tracker]
    if not unknown or len(unknown) == len(operands):
        return False
    with unrecorded():
        for operand in unknown:
            track_constant(operand, tracer)
    return True


def not_compiled(function: AnyFunction) -> AnyFunction:
    """Mark a function that changes Python state (hooks that gather and free parameters): a graph breaks there.

    Code before and after it is compiled; the function and its callees are not. With fullgraph=True Dynamo reports that.
    """
    never_traced(function)
    marked: Any = function
    marked._torchdynamo_disable = True  # the attribute of torch.compiler.disable
    marked._torchdynamo_disable_msg = "it changes Python state and cannot be traced; compile without fullgraph=True"
    return function
