"""Factors named after dims: helpers for rules about the dims of one tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call

__all__ = ["aligned", "along", "kept", "moved", "names", "unnamed", "wrapped"]


def wrapped(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim % ndim if ndim else 0


def names(ndim: int) -> list[str]:
    """A factor for each dim."""
    return [f"d{i}" for i in range(ndim)]


def kept(ndim: int, gone: Collection[int]) -> list[Dim]:
    """A factor for each dim but those of `gone`, which must not be sharded."""
    return [None if d in gone else f"d{d}" for d in range(ndim)]


def aligned(shape: Sequence[int], names: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    """The factors of an operand that broadcasts to a tensor with these factors and sizes."""
    missing = len(sizes) - len(shape)
    return tuple([names[missing + d] if size == sizes[missing + d] else None for d, size in enumerate(shape)])


def moved(operand: Sequence[Dim], result: Sequence[Dim], **more: Any) -> Factors:
    """The factors of an operator with one operand and one result."""
    return Factors((tuple(operand),), (tuple(result),), moves=True, **more)


def along(call: Call, dims: Iterable[int], **facts: Any) -> Factors:
    """The factors of an operator that works along some dims and keeps the shape. Those dims must not be sharded."""
    ndim = len(call.operands[0].shape)
    own = tuple(kept(ndim, [wrapped(dim, ndim) for dim in dims]))
    return Factors((own,) * len(call.operands), (own,) * len(call.results), **facts)


def unnamed(call: Call, **facts: Any) -> Factors:
    """The factors of a call whose tensors must not be sharded."""
    operands, results = (tuple((None,) * len(m.shape) for m in metas) for metas in (call.operands, call.results))
    return Factors(operands, results, **facts)
