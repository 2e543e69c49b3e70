"""What the user allows: strict mode, implicit replication; and the word about communication nobody asked for.

A mode holds for the thread or task that enters it, and in the backward it starts (`core/mode_stack.py`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.core.mode_stack import ModeStack, mode_context
from shardwise.core.spec import DTensorSpec
from shardwise.errors import ImplicitCommunicationError
from shardwise.plan.route import Route

__all__ = ["ReplicationWarning", "allow_implicit", "implicit_replication", "strict", "user_line"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class ReplicationWarning(UserWarning):
    """An operator without a rule was run on whole tensors on every rank."""


# frozensets of names: operators that may communicate; None: strict mode, none of them
implicit_mode = ModeStack[frozenset[str] | None]("implicit communication")
replication_mode = ModeStack[bool]("implicit replication")
rng_mode = ModeStack[str]("random numbers")
_ALL = frozenset({"*"})

_warned: set[tuple[str, str]] = set()


def in_force() -> tuple[Any, ...]:
    """All that is allowed now, for the keys of what is decided under it.

    Example:
        >>> in_force()
        (None, False, 'one_device')
    """
    allowed = _allowed()
    names = None if allowed is None else tuple(sorted(allowed))
    return names, bool(replication_mode.values()), "indexed" if draws_by_index() else "one_device"


@mode_context
def strict() -> Iterator[None]:
    """Inside, any communication that was not asked for by `redistribute` or `full_tensor` is an error.

    An operator that would have to reduce a Partial is refused whatever happened before, even where its sum is
    remembered from an earlier reading: a program does not become strict by chance.

    Example:
        >>> import shardwise as sw
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> with sw.strict():
        ...     y = x + x
    """
    with implicit_mode.holding(None):
        yield


@mode_context
def allow_implicit(*ops: Any) -> Iterator[None]:
    """Inside strict mode, let these operators communicate: `torch.ops.aten.sort`, "aten.sort", or all if none is named.

    A `strict()` inside of it forbids them again.

    Example:
        >>> with strict(), allow_implicit("aten.sort"):
        ...     pass
    """
    with implicit_mode.holding(frozenset(_name(op) for op in ops) or _ALL):
        yield


def _allowed() -> frozenset[str] | None:
    """The operators that may communicate, those of the innermost strict mode; None: this thread is in none."""
    allowed: frozenset[str] = frozenset()
    for names in reversed(implicit_mode.values()):
        if names is None:
            return allowed
        allowed |= names
    return None


@mode_context
def implicit_replication() -> Iterator[None]:
    """Inside, a plain torch.Tensor among DTensors is taken to be the same on every rank.

    Example:
        >>> import shardwise as sw
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> with implicit_replication():
        ...     (x + torch.arange(4)).full_tensor()
        tensor([1., 2., 3., 4.])
    """
    with replication_mode.holding(True):
        yield


def replicates_implicitly() -> bool:
    """Whether plain tensors are taken as replicated now."""
    return bool(replication_mode.values()) or bool(getattr(_thread, "decomposing", ()))


def draws_by_index() -> bool:
    """Whether random numbers are a function of the global index instead of one device's."""
    return rng_mode.values()[-1:] == ["indexed"]


_thread = threading.local()


@contextlib.contextmanager
def decomposing(op: Any) -> Iterator[None]:
    """While `op` is computed from others: plain tensors that are made on the way are the same on every rank."""
    before = getattr(_thread, "decomposing", ())
    _thread.decomposing = (*before, op)
    try:
        yield
    finally:
        _thread.decomposing = before


def is_decomposing(op: Any) -> bool:
    """Whether `op` is being computed from others on this thread."""
    return op in getattr(_thread, "decomposing", ())


def check_decomposing(route: Route) -> None:
    """A move inside an operator that is computed from others is not one that the user asked for."""
    ops = getattr(_thread, "decomposing", ())
    if ops:
        check_strict(ops[0], [route])


def _name(op: Any) -> str:
    parts = str(op).split(".")
    return ".".join(parts[:2])  # the operator without its overload


def is_library_file(filename: str) -> bool:
    """Whether code of this file is ours or torch's, or made at run time: no line of the user's."""
    return filename.startswith((_OURS, _TORCH, "<"))


def user_line() -> str:
    """The line of the user's own code that is running, as `file:line`."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not is_library_file(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"  # autograd's own thread has no line of the user's


def made_by_torch(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor was made by one of torch's own functions written in Python (svd_lowrank, ...).

    So it is when such a function is running and the user gave it no plain tensor of any size, in an argument or in a
    module: then whatever plain tensor it uses is its own, and the same on every rank.
    """
    frame, outermost = sys._getframe(1), None
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(_TORCH):
            outermost = frame
        elif outermost is not None or not filename.startswith((_OURS, "<")):
            break
        frame = frame.f_back
    if outermost is None:
        return False
    arguments = inspect.getargvalues(outermost)
    named = [*arguments.args, *filter(None, (arguments.varargs, arguments.keywords))]
    given = [arguments.locals.get(name) for name in named]
    return not any(map(_holds_plain, tree_leaves(given, is_leaf=lambda leaf: isinstance(leaf, torch.nn.Module))))


def _holds_plain(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return any(map(_holds_plain, itertools.chain(value.parameters(), value.buffers())))
    return isinstance(value, torch.Tensor) and not hasattr(value, "_spec") and value.numel() != 1


def check_strict(op: Any, routes: Sequence[Route]) -> None:
    """In strict mode, refuse what an operator is about to move."""
    allowed = _allowed()
    if allowed is None or "*" in allowed or _name(op) in allowed:
        return
    moves = "; ".join(f"{route.source} -> {route.target.layout}" for route in routes)
    received = sum(route.received for route in routes)
    raise ImplicitCommunicationError(
        f"strict: {op} at {user_line()} would move {received:.0f} bytes to each rank: {moves}",
        hint="redistribute the operand yourself, choose another layout, or wrap the call in allow_implicit()",
    )


def warn_replicated(op: Any, specs: Sequence[DTensorSpec], routes: Sequence[Route]) -> None:
    """One warning for each operator and line of the user's that ran on whole tensors."""
    line = user_line()
    if (str(op), line) not in _warned:
        _warned.add((str(op), line))
        received = sum(route.received for route in routes)
        layouts = ", ".join(map(str, specs))
        warnings.warn(
            f"{op} at {line} has no rule for {layouts}: it was run on whole tensors on every rank, "
            f"which moved {received:.0f} bytes to each",
            ReplicationWarning,
            stacklevel=2,
        )
