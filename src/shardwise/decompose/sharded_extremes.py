"""Extremes along a sharded dim and their indices: a reduced extreme, then a reduced minimum of positions."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.decompose.layout_helpers import HALVES, reduced, split_axes, widened, without_partial
from shardwise.rules.reduction import Dims, Sizes, reduced_dims
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.aminmax.default)
def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """Both extremes; a Partial sum is reduced once for the two."""
    dims = () if dim is None else (dim,)
    if dim is None and keepdim:
        dims = tuple(range(x.dim()))
    x = without_partial(x, reduced_dims(dims, x.dim()))
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


decomposition(aten._aminmax.default)(lambda x: aminmax(x))
decomposition(aten._aminmax.dim)(lambda x, dim, keepdim=False: aminmax(x, dim=dim, keepdim=keepdim))


def first_index(match: Any, dims: Sizes, keepdim: bool) -> Any:
    """The first position, counted over `dims`, at which `match` is true: a sharded count and a small minimum."""
    position: Any = torch.zeros_like(match, dtype=torch.int64)
    step = 1
    for dim in reversed(dims):
        position = position + torch.ops.shardwise.positions.default(match, dim) * step
        step *= match.shape[dim]
    return torch.amin(position.masked_fill(~match, step), dims, keepdim)


def at_extreme(x: Any, extreme: Any) -> Any:
    """The mask of extreme elements of `x`; NaN is more extreme than any number."""
    match = x == extreme
    return match | (x != x) if x.is_floating_point() else match


def extreme_and_index(op: Any, reduce: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    """The extremes along a dim and their first positions."""
    dims = reduced_dims(dim, x.dim())
    x = without_partial(x, dims)
    if not split_axes(x, dims):
        return op(x, dim, keepdim)
    extreme = reduced(reduce(x, dims, True))
    index = first_index(at_extreme(x, extreme), dims, keepdim)
    return (extreme if keepdim else extreme.squeeze(dims)), index


def index_of_extreme(op: Any, reduce: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The first positions of the extremes along a dim, or of all elements."""
    dims = reduced_dims(dim, x.dim())
    x = without_partial(x, dims)
    if not split_axes(x, dims):
        return op(x, dim, keepdim)
    return first_index(at_extreme(x, reduced(reduce(x, dims, True))), dims, keepdim)


def _declare_extreme(compute: Any, op: Any, reduce: Any) -> None:
    decomposition(op, reductions=2)(lambda *args, **kwargs: compute(op, reduce, *args, **kwargs))


_declare_extreme(extreme_and_index, aten.max.dim, torch.amax)
_declare_extreme(extreme_and_index, aten.min.dim, torch.amin)
_declare_extreme(index_of_extreme, aten.argmax.default, torch.amax)
_declare_extreme(index_of_extreme, aten.argmin.default, torch.amin)


@decomposition(aten.logsumexp.default, reductions=2)
def logsumexp(x: Any, dim: Dims, keepdim: bool = False) -> Any:
    """The logarithm of a sum of exponentials, shifted by the largest: two small reductions."""
    dims = reduced_dims(dim, x.dim())
    x = without_partial(x, dims)
    if not split_axes(x, dims):
        return aten.logsumexp.default(x, dim, keepdim)
    wide = widened(x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype()))
    top = reduced(torch.amax(torch.real(wide) if wide.is_complex() else wide, dims, True))
    top = top.masked_fill(top.abs() == math.inf, 0)
    result = reduced((wide - top).exp().sum(dims, keepdim=True)).log() + top
    result = result.to(x.dtype) if x.dtype in HALVES else result
    return result if keepdim else result.squeeze(dims)
