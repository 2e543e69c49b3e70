"""Calls that differ from a known one only in sizes reuse its decisions.

Only for pointwise operators on contiguous operands of one shape, without dims of size one, which would broadcast. Then
neither the chosen layouts nor the dtype of the result depend on the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.signature import Executor, Key

__all__ = ["KnownCalls"]

MAX_CALLS = 4096
Make = Callable[[DTensorSpec], Executor]  # makes the executor for this spec of the result


class KnownCall(NamedTuple):
    """How a call was run: its result, the position of an operand with the same spec in the key, and its `Make`."""

    result: DTensorSpec
    like: int | None
    make: Make

    def spec(self, key: Key, shape: tuple[int, ...]) -> DTensorSpec:
        """The result of a call of another shape."""
        if self.like is not None:
            return key[self.like]
        return DTensorSpec.from_context(self.result.context, TensorMeta(shape, None, self.result.tensor_meta.dtype))


class KnownCalls:
    """How calls of known layouts are executed, for any sizes."""

    def __init__(self) -> None:
        self._known: BoundedCache[Key, KnownCall] = BoundedCache(MAX_CALLS)

    def find(self, key: Key) -> Executor | None:
        """The executor of a call, if a similar call of other sizes is known."""
        shape, pattern = _pattern(key)
        known = self._known.get(pattern)
        return known.make(known.spec(key, shape)) if shape and known is not None else None

    def keep(self, key: Key, result: DTensorSpec, make: Make) -> None:
        """Cache how a call with this result was executed."""
        shape, pattern = _pattern(key)
        if shape and shape == result.shape and result.tensor_meta.is_contiguous:
            like = next((i for i, part in enumerate(key) if part is result), None)
            self._known.keep(pattern, KnownCall(result, like, make))

    def forget(self) -> None:
        """Drop all of them."""
        self._known.clear()


def _pattern(key: Key) -> tuple[tuple[int, ...] | None, Key]:
    """The common shape of a call's operands (None if they differ), and the key without it."""
    shape: Any = None
    parts: list[Any] = []
    for part in key:
        kind = part.__class__
        if kind is DTensorSpec:
            meta = part.tensor_meta
            if part.broadcast or meta.shape != (shape or meta.shape) or min(meta.shape, default=0) < 2:
                return None, ()
            if not meta.is_contiguous:
                return None, ()
            shape = meta.shape
            part = (part.mesh, part.placements, part.dim_axes, meta.dtype)
        elif kind is tuple and part and part[-1].__class__ is TensorMeta:  # a plain tensor, which may broadcast
            return None, ()
        parts.append(part)
    return shape, tuple(parts)
