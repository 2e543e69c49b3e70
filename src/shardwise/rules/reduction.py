"""Reductions: a sharded dim that is reduced over gives a Partial, or must not be sharded.

Reductions that need a full dim and can be computed from other reductions are decomposed (`decompose/`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import intersect
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Partial
from shardwise.core.spec import DTensorSpec
from shardwise.rules.dims import names, wrapped
from shardwise.rules.engine import FIRST, Dim, Factors, Row
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten

Sizes = tuple[int, ...] | list[int]
Dims = int | Sizes | None


# ---------------------------------------------------------------- reduced dims


def reduced_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The reduced dims, counted from the front; all of them if none is given."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(ndim))
    chosen = [dim] if isinstance(dim, int) else dim
    return tuple(sorted({wrapped(d, ndim) for d in chosen})) if ndim else ()


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    """`shape` after the reduction."""
    return [1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims]


def dims_of(call: Call) -> tuple[int, ...]:
    """The dims that a call reduces over."""
    return reduced_dims(call.get("dim"), len(call["self"].shape))


def reducing(call: Call, unsharded: bool = False, **facts: Any) -> Factors | None:
    """The factors of a reduction: results lack the dims that are reduced over, or have them with size one."""
    shape, dims, keepdim = call["self"].shape, dims_of(call), bool(call.get("keepdim"))
    if any(list(meta.shape) != reduced_shape(shape, dims, keepdim) for meta in call.results):
        return None  # an operator for which an empty list of dims means no dims
    own: list[Dim] = list(names(len(shape)))
    result = tuple(None if d in dims else own[d] for d in range(len(own)) if keepdim or d not in dims)
    kept = frozenset(f"d{d}" for d in dims) if unsharded else frozenset()
    return Factors((tuple(own),), (result,) * len(call.results), unsharded=kept, **facts)


def by(call: Call, reduction: str) -> dict[str, str]:
    """`reduction` for every dim that is reduced over."""
    return {f"d{d}": reduction for d in dims_of(call)}


def passing(*reductions: str) -> tuple[Row, ...]:
    """Rows by which these kinds of Partial pass unchanged."""
    return tuple(Row((Partial(one),), (Partial(one),)) for one in reductions)


def sums_pass(call: Call) -> dict[str, Any]:
    """The fields of `Factors` by which a Partial sum passes: none if the elements are rounded to integers first."""
    given, result = call["self"].dtype, call.results[0].dtype
    if result.is_floating_point or result.is_complex:
        return {"linear": FIRST}
    return {} if given.is_floating_point or given.is_complex else {"rows": passing("sum")}


# ---------------------------------------------------------------- sums, products, extremes


@rule(aten.sum.default, aten.sum.dim_IntList)
def summing(call: Call) -> Factors | None:
    """A sum of shards is a sum."""
    return reducing(call, **sums_pass(call))


@rule(aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def counting(call: Call) -> Factors | None:
    """A sum of terms that are not linear in the elements."""
    return reducing(call)


def local_share(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local share of the elements of a mean."""
    count, total = inputs[0].share(coordinate, dims_of(call))
    return {"share": count / total if total else 1.0}


def mean_of_share(local: torch.Tensor, *args: Any, share: float, **kwargs: Any) -> torch.Tensor:
    """A rank's addend of a mean: its own mean, weighted. A sum of many elements could overflow."""
    if share == 0:
        return torch.sum(local, *args, **kwargs)
    mean = torch.mean(local, *args, **kwargs)
    return mean if share == 1 else mean * share


@rule(aten.mean.default, aten.mean.dim, localize=local_share, local_op=mean_of_share)
def averaging(call: Call) -> Factors | None:
    """A mean is the sum of the ranks' means, weighted by their numbers of elements."""
    return reducing(call, linear=FIRST)


@rule(aten.prod.default, aten.prod.dim_int)
def multiplying(call: Call) -> Factors | None:
    """A product of shards is a product."""
    given, result = call["self"].dtype, call.results[0].dtype
    if result.is_complex:  # the backends cannot multiply complex numbers
        return reducing(call, unsharded=True)
    exact = given is result or not given.is_floating_point
    return reducing(call, reduce=by(call, "product"), rows=passing("product") if exact else ())


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The smallest number of a dtype."""
    if dtype.is_floating_point:
        return -math.inf
    return torch.iinfo(dtype).min if dtype is not torch.bool else False


def highest(dtype: torch.dtype) -> float | int | bool:
    """The largest number of a dtype."""
    if dtype.is_floating_point:
        return math.inf
    return torch.iinfo(dtype).max if dtype is not torch.bool else True


def neutral(local: torch.Tensor, dim: Dims, keepdim: bool, value: float | int | bool) -> torch.Tensor | None:
    """The result of a reduction over an empty shard; None if the shard is not empty."""
    dims = reduced_dims(dim, local.dim())
    if all(local.shape[d] for d in dims):
        return None
    return local.new_full(reduced_shape(local.shape, dims, keepdim), value)


def local_amax(local: torch.Tensor, dim: Dims = (), keepdim: bool = False) -> torch.Tensor:
    """The largest elements of a shard that may be empty."""
    empty = neutral(local, dim, keepdim, lowest(local.dtype))
    return aten.amax.default(local, reduced_dims(dim, local.dim()), keepdim) if empty is None else empty


def local_amin(local: torch.Tensor, dim: Dims = (), keepdim: bool = False) -> torch.Tensor:
    """The smallest elements of a shard that may be empty."""
    empty = neutral(local, dim, keepdim, highest(local.dtype))
    return aten.amin.default(local, reduced_dims(dim, local.dim()), keepdim) if empty is None else empty


@rule(aten.amax.default, aten.max.default, local_op=local_amax)
def largest(call: Call) -> Factors | None:
    """The largest of the ranks' largest."""
    return reducing(call, reduce=by(call, "max"), rows=passing("max"))


@rule(aten.amin.default, aten.min.default, local_op=local_amin)
def smallest(call: Call) -> Factors | None:
    """The smallest of the ranks' smallest."""
    return reducing(call, reduce=by(call, "min"), rows=passing("min"))


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def some(call: Call) -> Factors | None:
    """True is the largest bool."""
    return reducing(call, reduce=by(call, "max"), rows=passing("max") if call["self"].dtype is torch.bool else ())


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def every(call: Call) -> Factors | None:
    """False is the smallest bool."""
    return reducing(call, reduce=by(call, "min"), rows=passing("min") if call["self"].dtype is torch.bool else ())


# ---------------------------------------------------------------- reduced dims that must not be sharded


@rule(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.median.default, aten.nanmedian.default,
    aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, aten.logsumexp.default,
)  # fmt: skip
def reducing_unsharded(call: Call) -> Factors | None:
    """A reduction whose reduced dims must not be sharded."""
    return reducing(call, unsharded=True)


@rule(aten.renorm.default)
def renorm(call: Call) -> Factors:
    """Slices of one dim, each scaled by its own norm."""
    ndim = len(call["self"].shape)
    own = tuple("d" if d == wrapped(call["dim"], ndim) else None for d in range(ndim))
    return Factors((own,), (own,))


# ---------------------------------------------------------------- the diagonal


def local_diagonals(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The parts of the global diagonal in a rank's block: (row, column, length) of each."""
    rows, columns = inputs[0].block(coordinate).runs
    return {"pieces": intersect(rows, columns)}


def sum_of_pieces(local: torch.Tensor, pieces: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """The sum of a block's parts of the diagonal."""
    found = [local[row : row + n, column : column + n].diagonal() for row, column, n in pieces]
    return torch.cat(found or [local.new_empty(0)]).sum()


@rule(aten.trace.default, localize=local_diagonals, local_op=sum_of_pieces)
def trace(call: Call) -> Factors:
    """Every rank adds its part of the diagonal."""
    return Factors((("m", "n"),), ((),), linear=FIRST)
