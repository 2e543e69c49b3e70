"""Calls that differ from a known one in their sizes alone: what was decided for that one holds for them.

Of pointwise operators, on contiguous operands of one shape, without dims of size one, which would broadcast. Then
neither the layouts that are chosen nor the dtype of the result depend on the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.key import Key
from shardwise.dispatch.signature import Executor

__all__ = ["Recipes"]

MAX_RECIPES = 4096
Make = Callable[[DTensorSpec], Executor]  # the executor whose result lies so


class Recipes:
    """How calls of known layouts are run, whatever their sizes."""

    def __init__(self) -> None:
        self._known: BoundedCache[Key, tuple[DTensorSpec, Make]] = BoundedCache(MAX_RECIPES)

    def find(self, key: Key) -> Executor | None:
        """The executor of a call, if one of other sizes has been worked out."""
        shape, pattern = _pattern(key)
        known = self._known.get(pattern)
        if not shape or known is None:
            return None
        result, make = known
        meta = TensorMeta(shape, None, result.tensor_meta.dtype)
        return make(DTensorSpec.from_dim_axes(result.mesh, result.placements, meta, result.dim_axes))

    def keep(self, key: Key, result: DTensorSpec, make: Make) -> None:
        """Remember how a call was run whose result lies like `result`."""
        shape, pattern = _pattern(key)
        if shape and shape == result.shape and result.tensor_meta.is_contiguous:
            self._known.keep(pattern, (result, make))

    def forget(self) -> None:
        """Drop all of them."""
        self._known.clear()


def _pattern(key: Key) -> tuple[tuple[int, ...] | None, Key]:
    """The one shape of a call's operands, None where they differ, and the key without it."""
    shape: Any = None
    parts: list[Any] = []
    for part in key:
        kind = part.__class__
        if kind is DTensorSpec:
            meta = part.tensor_meta
            if meta.shape != (shape or meta.shape) or min(meta.shape, default=0) < 2 or not meta.is_contiguous:
                return None, ()
            shape = meta.shape
            part = (part.mesh, part.placements, part.dim_axes, meta.dtype)
        elif kind is tuple and part and part[-1].__class__ is TensorMeta:  # a plain tensor, which may broadcast
            return None, ()
        parts.append(part)
    return shape, tuple(parts)
