"""The user's modes: strict mode, plain tensors among DTensors; and warnings about implicit communication.

A mode is active in the thread or task that enters it, and in the backward that it starts (`core/mode_stack.py`).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwise.core.mode_stack import ModeStack, live_entries, mode_context
from shardwise.core.spec import DTensorSpec
from shardwise.errors import ImplicitCommunicationError, UnsupportedError
from shardwise.events import user_line
from shardwise.plan.route import Route
from shardwise.torch_private import TracingContext, UnsupportedFakeTensorException

__all__ = [
    "ReplicationWarning",
    "allow_implicit",
    "attention",
    "implicit_replication",
    "plain_tensors",
    "set_plain_tensors",
    "strict",
]


class ReplicationWarning(UserWarning):
    """An operator without a rule ran on replicated operands, on every rank."""


# frozensets of names: operators that may communicate; None: strict mode, no operator may
implicit_mode = ModeStack[frozenset[str] | None]("implicit communication")
plain_mode = ModeStack[str]("plain tensors")
rng_mode = ModeStack[str]("random numbers")
attention_mode = ModeStack[tuple[str | None, int | None]]("attention")
recorded_mode = ModeStack[bool]("recorded programs")
ATTENTION_ALGORITHMS = ("ring", "gather", "heads", "halo")
_ALL = frozenset({"*"})
PLAIN_POLICIES = ("verify", "refuse", "replicate")
_plain_default = "verify"
# Called with whether some thread refuses plain tensors, when this may have changed.
on_refusal: list[Callable[[bool], object]] = []

_warned: set[tuple[str, str]] = set()


def in_force() -> tuple[Any, ...]:
    """All active modes, for the keys of decisions that depend on them.

    Example:
        >>> in_force()
        (None, 'verify', 'one_device', None)
    """
    allowed = _allowed()
    names = None if allowed is None else tuple(sorted(allowed))
    algorithm, max_bytes = preferred_attention()
    preferred = algorithm if max_bytes is None else (algorithm, max_bytes)
    return names, plain_policy(), "indexed" if draws_by_index() else "one_device", preferred


_DEFAULT = (None, "verify", "one_device", None)


def changed_modes() -> tuple[Any, ...] | None:
    """The result of `in_force`; None if all of it is the default."""
    if not live_entries and _plain_default == "verify":
        return None
    found = in_force()
    return None if found == _DEFAULT else found


@mode_context
def strict() -> Iterator[None]:
    """Inside, any communication that `redistribute` or `full_tensor` did not request is an error.

    An operator that would reduce a Partial is always refused, even if the sum is cached from an earlier use: whether a
    program is strict does not depend on the cache. Code that was compiled outside is compiled again. Plain tensors
    among DTensors are refused, unless a `plain_tensors` context inside allows them.

    Example:
        >>> import shardwise as sw
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> with sw.strict():
        ...     y = x + x
    """
    with implicit_mode.holding(None), plain_tensors("refuse"):
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
    """The operators that may communicate in the innermost strict mode; None outside of strict mode."""
    allowed: frozenset[str] = frozenset()
    for names in reversed(implicit_mode.values()):
        if names is None:
            return allowed
        allowed |= names
    return None


def is_strict() -> bool:
    """Whether this thread is in strict mode."""
    return _allowed() is not None


@mode_context
def plain_tensors(policy: str) -> Iterator[None]:
    """Set how a plain torch.Tensor among DTensors is interpreted inside. The innermost context applies.

    A plain tensor of one element is a constant and never refused.

    Args:
        policy: "verify", the default: it is treated as replicated, and processes compare digests of it in the
            background; if ranks differ, all of them raise an `AgreementError`. "refuse": it is an error. "replicate":
            it is treated as replicated, without a comparison.

    Example:
        >>> import shardwise as sw
        >>> import torch
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> (x + torch.arange(4)).full_tensor()
        tensor([1., 2., 3., 4.])
        >>> with plain_tensors("refuse"):
        ...     x + torch.arange(4)
        Traceback (most recent call last):
        ...
        shardwise.errors.PlainTensorError: ...
    """
    entry = plain_mode.enter(_known_policy(policy))
    _notify_refusal()
    try:
        yield
    finally:
        plain_mode.leave(entry)
        _notify_refusal()


def set_plain_tensors(policy: str) -> None:
    """Set how plain tensors among DTensors are interpreted outside of any `plain_tensors` context, on all threads.

    Example:
        >>> set_plain_tensors("refuse")
        >>> set_plain_tensors("verify")
    """
    global _plain_default
    _plain_default = _known_policy(policy)
    _notify_refusal()


@mode_context
def implicit_replication() -> Iterator[None]:
    """Inside, a plain torch.Tensor among DTensors is treated as replicated: `plain_tensors("replicate")`.

    Example:
        >>> import shardwise as sw
        >>> import torch
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> with implicit_replication():
        ...     (x + torch.arange(4)).full_tensor()
        tensor([1., 2., 3., 4.])
    """
    with plain_tensors("replicate"):
        yield


def plain_policy() -> str:
    """How plain tensors among DTensors are currently interpreted."""
    policies = plain_mode.values()
    return policies[-1] if policies else _plain_default


def _known_policy(policy: str) -> str:
    if policy not in PLAIN_POLICIES:
        raise UnsupportedError(
            f"unknown policy {policy!r} for plain tensors", hint=f"use one of {', '.join(map(repr, PLAIN_POLICIES))}"
        )
    return policy


def _notify_refusal() -> None:
    anywhere = "refuse" in (_plain_default, *plain_mode.values_anywhere())
    for notify in on_refusal:
        notify(anywhere)


@mode_context
def attention(*, prefer: str | None = None, max_bytes: int | None = None) -> Iterator[None]:
    """Set the preferred algorithm of attention over a sharded sequence inside. Values do not depend on it.

    Outside, the cheapest algorithm is used. Backward uses the context in which it is started. Of nested contexts the
    innermost with an algorithm and the innermost with a bound apply.

    Args:
        prefer: "ring": queries stay, and blocks of keys and values rotate; memory does not grow with the number of
            ranks. "gather": queries stay, and every rank gathers all keys and values. "heads": sequence shards become
            shards of heads and back. "halo": if a replicated mask lets queries see only near keys, ranks exchange
            these. Another algorithm is used where the preferred one is not possible.
        max_bytes: the limit on bytes of keys and values on a rank at once, besides its own. Algorithms that need more
            are not used, even if preferred. If all need more, a `MemoryBoundError` names the smallest bound.

    Example:
        >>> import shardwise as sw
        >>> import torch
        >>> x = torch.rand(1, 2, 8, 4)
        >>> q = sw.distribute_tensor(x, sw.init_device_mesh("cpu", (2,)), [sw.Shard(2)])
        >>> with attention(prefer="ring"):
        ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).placements
        (Shard(2),)
    """
    if prefer is not None and prefer not in ATTENTION_ALGORITHMS:
        raise UnsupportedError(
            f"attention: prefer={prefer!r} is unknown", hint=f"use one of {', '.join(map(repr, ATTENTION_ALGORITHMS))}"
        )
    if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 0):
        raise UnsupportedError(
            f"attention: max_bytes={max_bytes!r} is not a number of bytes", hint="pass an integer of at least 0"
        )
    with attention_mode.holding((prefer, max_bytes)):
        yield


def preferred_attention() -> tuple[str | None, int | None]:
    """The preferred algorithm of attention over a sharded sequence, and the memory limit; None: any."""
    found = attention_mode.values()
    names, bounds = [name for name, _ in found if name is not None], [size for _, size in found if size is not None]
    return names[-1] if names else None, bounds[-1] if bounds else None


@mode_context
def recorded() -> Iterator[None]:
    """Inside, values of tensors decide nothing: the program is recorded, and run again with other values.

    Example:
        >>> with recorded():
        ...     may_read_values()
        False
    """
    with recorded_mode.holding(True):
        yield


def may_read_values() -> bool:
    """Whether the values of a tensor may decide how it is computed with."""
    return not recorded_mode.values()


def draws_by_index() -> bool:
    """Whether random numbers are a function of the global index instead of one device's."""
    return rng_mode.values()[-1:] == ["indexed"]


_thread = threading.local()


@contextlib.contextmanager
def decomposing(op: Any) -> Iterator[None]:
    """Marks that `op` is computed from others inside. Plain tensors among its arguments have been checked."""
    before = getattr(_thread, "decomposing", ())
    _thread.decomposing = (*before, op)
    try:
        yield
    finally:
        _thread.decomposing = before


def is_decomposing(op: Any) -> bool:
    """Whether `op` is being computed from others on this thread."""
    return op in getattr(_thread, "decomposing", ())


def is_nested() -> bool:
    """Whether some operator is being computed from others on this thread."""
    return bool(getattr(_thread, "decomposing", ()))


def check_decomposing(route: Route) -> None:
    """In strict mode, refuse a move inside an operator that is computed from others: it is implicit."""
    ops = getattr(_thread, "decomposing", ())
    if ops:
        check_strict(ops[0], [route])


def _name(op: Any) -> str:
    parts = str(op).split(".")
    return ".".join(parts[:2])  # the operator without its overload


def check_strict(op: Any, routes: Sequence[Route]) -> None:
    """In strict mode, refuse the moves of an operator before they start."""
    allowed = _allowed()
    if allowed is None or "*" in allowed or _name(op) in allowed:
        return
    moves = "; ".join(f"{route.source} -> {route.target.layout}" for route in routes)
    received = sum(route.received for route in routes)
    refused = ImplicitCommunicationError if TracingContext.try_get() is None else _RefusedWhileTracing
    raise refused(
        f"strict: {op} at {user_line()} would move {received:.0f} bytes to each rank: {moves}",
        hint="redistribute the operand yourself, choose another layout, or wrap the call in allow_implicit()",
    )


class _RefusedWhileTracing(ImplicitCommunicationError, UnsupportedFakeTensorException):
    """The error for a compiler: it breaks the graph, and the operator raises when it runs."""

    def __str__(self) -> str:
        return self.reason  # that of the compiler's class, which has the hint too


def warn_replicated(op: Any, specs: Sequence[DTensorSpec], routes: Sequence[Route]) -> None:
    """Warn once for each operator and user's line that ran on replicated operands."""
    line = user_line()
    if (str(op), line) not in _warned:
        _warned.add((str(op), line))
        received = sum(route.received for route in routes)
        layouts = ", ".join(map(str, specs))
        warnings.warn(
            f"{op} at {line} has no rule for {layouts}: its operands were gathered and it ran on every rank, "
            f"which moved {received:.0f} bytes to each",
            ReplicationWarning,
            stacklevel=2,
        )
