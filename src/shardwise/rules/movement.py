"""Operators that only move elements: permute, transpose, squeeze, expand, slice, split, cat, flip, ...

Every dim that stays as it is is a factor; a dim whose indices change must be whole. Any Partial passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.rules.notation import Dim, Factors
from shardwise.rules.registry import Call, rule
from shardwise.rules.view import local_size

aten = torch.ops.aten


def names(ndim: int) -> list[str]:
    """A factor for each dim."""
    return [f"d{i}" for i in range(ndim)]


def moved(operand: Sequence[Dim], result: Sequence[Dim], **more: Any) -> Factors:
    """The factors of an operator with one operand and one result."""
    return Factors((tuple(operand),), (tuple(result),), moves=True, **more)


def wrapped(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim % ndim if ndim else 0


@rule(aten.permute.default)
def permute(call: Call) -> Factors:
    """Dims in another order."""
    own = names(len(call["self"].shape))
    return moved(own, [own[d] for d in call["dims"]])


@rule(aten.transpose.int)
def transpose(call: Call) -> Factors:
    """Two dims change places."""
    own = names(len(call["self"].shape))
    result = list(own)
    if own:
        a, b = wrapped(call["dim0"], len(own)), wrapped(call["dim1"], len(own))
        result[a], result[b] = result[b], result[a]
    return moved(own, result)


@rule(aten.t.default)
def t(call: Call) -> Factors:
    """The transpose of a matrix."""
    own = names(len(call["self"].shape))
    return moved(own, own[::-1])


@rule(aten.unsqueeze.default)
def unsqueeze(call: Call) -> Factors:
    """A new dim of size one."""
    own = names(len(call["self"].shape))
    at = wrapped(call["dim"], len(own) + 1)
    return moved(own, [*own[:at], None, *own[at:]])


@rule(aten.expand.default, localize=local_size)
def expand(call: Call) -> Factors:
    """Dims of size one repeated, new dims in front."""
    shape, result = call["self"].shape, call.results[0].shape
    new = len(result) - len(shape)
    own: list[Dim] = [f"d{i}" if size == result[new + i] else None for i, size in enumerate(shape)]
    return moved(own, [None] * new + own)


def squeezed(call: Call) -> list[int]:
    """The dims that a squeeze removes."""
    shape = call["self"].shape
    dims = call.get("dim")
    if dims is None:
        return [d for d, size in enumerate(shape) if size == 1]
    chosen = [dims] if isinstance(dims, int) else dims
    return [d for d in {wrapped(d, len(shape)) for d in chosen} if shape and shape[d] == 1]


def local_squeeze(local: torch.Tensor, dim: Sequence[int] = ()) -> torch.Tensor:
    """Squeeze the dims that the whole tensor loses: a shard may have size one in others."""
    return aten.squeeze.dims(local, list(dim))


def squeezed_dims(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: tuple[int, ...]
) -> Mapping[str, Any]:
    """The dims that are squeezed, named."""
    return {"dim": squeezed(call)}


def squeeze(call: Call) -> Factors:
    """Dims of size one removed; they must be whole."""
    gone = squeezed(call)
    own: list[Dim] = [None if d in gone else f"d{d}" for d in range(len(call["self"].shape))]
    return moved(own, [name for d, name in enumerate(own) if d not in gone])


rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, localize=squeezed_dims, local_op=local_squeeze)(squeeze)
