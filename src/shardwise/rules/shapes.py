"""The shapes of results, for operators that are called with new sizes most often.

This saves running the operator on meta tensors. Functions return None for unusual arguments, so that torch raises its
own error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import normalize_dim
from shardwise.rules.registry import overloads
from shardwise.torch_private import OpOverload

__all__ = ["SHAPES", "broadcast_shape"]

aten = torch.ops.aten
Shape = Sequence[int]
# From the arguments by name (specs in the place of tensors) to the shape of the one result.
ShapeOf = Callable[[Mapping[str, Any]], Shape | None]


def broadcast_shape(shapes: Sequence[Shape]) -> Shape | None:
    """The broadcast shape."""
    result: list[int] = []
    for own in shapes:
        result[:0] = own[: len(own) - len(result)] if len(own) > len(result) else ()
        for dim in range(1, len(own) + 1):
            if own[-dim] != 1:
                if result[-dim] not in (1, own[-dim]):
                    return None
                result[-dim] = own[-dim]
    return result


def _same(arguments: Mapping[str, Any]) -> Shape | None:
    shape = arguments["self"].shape
    return None if normalize_dim(arguments["dim"], len(shape)) is None else shape


def _reduced(arguments: Mapping[str, Any]) -> Shape | None:
    shape, dims = arguments["self"].shape, arguments.get("dim")
    if dims is None or dims == []:
        dims = range(len(shape))
    chosen = {normalize_dim(dim, len(shape)) for dim in ([dims] if isinstance(dims, int) else dims)}
    if None in chosen or 0 in shape:
        return None
    keep = arguments.get("keepdim", False)
    return [1 if dim in chosen else size for dim, size in enumerate(shape) if keep or dim not in chosen]


def _product(arguments: Mapping[str, Any]) -> Shape | None:
    first, second = arguments.get("mat1", arguments["self"]).shape, arguments["mat2"].shape
    if len(first) != len(second) or first[:-2] != second[:-2] or first[-1] != second[-2]:
        return None
    result = (*first[:-1], second[-1])
    if "mat1" in arguments and broadcast_shape([arguments["self"].shape, result]) != list(result):
        return None
    return result


def _concatenated(arguments: Mapping[str, Any]) -> Shape | None:
    shapes = [spec.shape for spec in arguments["tensors"]]
    dim = normalize_dim(arguments.get("dim", 0), len(shapes[0]))
    if dim is None or any(len(s) != len(shapes[0]) or s[:dim] != shapes[0][:dim] for s in shapes):
        return None
    if any(s[dim + 1 :] != shapes[0][dim + 1 :] for s in shapes):
        return None
    return (*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :])


def _viewed(arguments: Mapping[str, Any]) -> Shape | None:
    shape, size = arguments["self"].shape, list(arguments["size"])
    total = math.prod(shape)
    if size.count(-1) == 1:
        known = -math.prod(size)
        if known <= 0 or total % known:
            return None
        size[size.index(-1)] = total // known
    return size if math.prod(size) == total and all(n >= 0 for n in size) else None


SHAPES: dict[OpOverload, ShapeOf] = {
    op: shape_of
    for shape_of, ops in (
        (_same, (aten._softmax.default, aten._log_softmax.default)),
        (
            _reduced,
            (
                aten.sum.default,
                aten.sum.dim_IntList,
                aten.mean.default,
                aten.mean.dim,
                aten.amax,
                aten.amin,
                aten.linalg_vector_norm.default,
            ),
        ),
        (_product, (aten.mm.default, aten.addmm.default, aten.bmm.default)),
        (_concatenated, (aten.cat.default,)),
        (_viewed, (aten.view.default, aten._unsafe_view.default)),
    )
    for op in overloads(ops)
    if not op._schema.is_mutable
}
