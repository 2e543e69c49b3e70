"""Reductions: a dim that is reduced over may be sharded and leaves a Partial; what does not fit that is decomposed.

Decompositions reduce something small in place of gathering the operand. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import intersect
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Partial, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec
from shardwise.rules.movement import names, wrapped
from shardwise.rules.notation import Dim, Factors, Row
from shardwise.rules.registry import Call, decomposition, rule

aten = torch.ops.aten

Sizes = tuple[int, ...] | list[int]
Dims = int | Sizes | None
FIRST = ((0,),)  # linear in the first operand
HALVES = (torch.float16, torch.bfloat16)


# ---------------------------------------------------------------- what is reduced over


def reduced_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The dims that a reduction runs over, counted from the front; all of them where none is named."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(ndim))
    chosen = [dim] if isinstance(dim, int) else dim
    return tuple(sorted({wrapped(d, ndim) for d in chosen})) if ndim else ()


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    """The shape that is left of `shape`."""
    return [1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims]


def dims_of(call: Call) -> tuple[int, ...]:
    """The dims that a call reduces over."""
    return reduced_dims(call.get("dim"), len(call["self"].shape))


def reducing(call: Call, whole: bool = False, **facts: Any) -> Factors | None:
    """The factors of a reduction: results lack the dims that are reduced over, or have them with size one."""
    shape, dims, keepdim = call["self"].shape, dims_of(call), bool(call.get("keepdim"))
    if any(list(meta.shape) != reduced_shape(shape, dims, keepdim) for meta in call.results):
        return None  # an operator that reads "no dims" differently
    own: list[Dim] = list(names(len(shape)))
    result = tuple(None if d in dims else own[d] for d in range(len(own)) if keepdim or d not in dims)
    kept = frozenset(f"d{d}" for d in dims) if whole else frozenset()
    return Factors((tuple(own),), (result,) * len(call.results), whole=kept, **facts)


def by(call: Call, reduction: str) -> dict[str, str]:
    """`reduction` for every dim that is reduced over."""
    return {f"d{d}": reduction for d in dims_of(call)}


def passing(*reductions: str) -> tuple[Row, ...]:
    """Rows by which these kinds of Partial pass unchanged."""
    return tuple(Row((Partial(one),), (Partial(one),)) for one in reductions)


def sums_pass(call: Call) -> dict[str, Any]:
    """How a sum of ranks' shares passes an operator that adds: not where the elements are rounded to integers first."""
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
    """A sum of something that is not linear in the elements."""
    return reducing(call)


def local_share(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """How much of what a mean runs over lies on a rank."""
    shape, local, dims = inputs[0].shape, inputs[0].local_shape(coordinate), dims_of(call)
    total = math.prod(shape[d] for d in dims)
    return {"share": math.prod(local[d] for d in dims) / total if total else 1.0}


def mean_of_share(local: torch.Tensor, *args: Any, share: float, **kwargs: Any) -> torch.Tensor:
    """A rank's summand of a mean: its own mean, weighted. Sums of many elements could overflow."""
    if share == 0:
        return aten.sum(local, *args, **kwargs)
    mean = aten.mean(local, *args, **kwargs)
    return mean if share == 1 else mean * share


@rule(aten.mean.default, aten.mean.dim, localize=local_share, local_op=mean_of_share)
def averaging(call: Call) -> Factors | None:
    """A mean is a sum of the ranks' means weighted by how many elements each holds, even and uneven."""
    return reducing(call, linear=FIRST)


@rule(aten.prod.default, aten.prod.dim_int)
def multiplying(call: Call) -> Factors | None:
    """A product of shards is a product."""
    given, result = call["self"].dtype, call.results[0].dtype
    if result.is_complex:  # the backends cannot multiply complex numbers
        return reducing(call, whole=True)
    exact = given is result or not given.is_floating_point
    return reducing(call, reduce=by(call, "product"), rows=passing("product") if exact else ())


def lowest(dtype: torch.dtype) -> float | int | bool:
    """What every number of a dtype is at least."""
    if dtype.is_floating_point:
        return -math.inf
    return torch.iinfo(dtype).min if dtype is not torch.bool else False


def highest(dtype: torch.dtype) -> float | int | bool:
    """What every number of a dtype is at most."""
    if dtype.is_floating_point:
        return math.inf
    return torch.iinfo(dtype).max if dtype is not torch.bool else True


def neutral(local: torch.Tensor, dim: Dims, keepdim: bool, value: float | int | bool) -> torch.Tensor | None:
    """The result of a reduction over nothing, on a rank with an empty shard; None where there is something."""
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


@decomposition(aten.aminmax.default)
def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """Both extremes; a sum is added up once for the two."""
    dims = () if dim is None else (dim,)
    if dim is None and keepdim:
        dims = tuple(range(x.dim()))
    x = settled(x, reduced_dims(dims, x.dim()))
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


decomposition(aten._aminmax.default)(lambda x: aminmax(x))
decomposition(aten._aminmax.dim)(lambda x, dim, keepdim=False: aminmax(x, dim=dim, keepdim=keepdim))


@decomposition(aten.equal.default)
def equal(a: Any, b: Any) -> bool:
    """Whether two tensors are the same: each rank compares what it has."""
    if a.dtype != b.dtype:
        return NotImplemented
    return a.shape == b.shape and bool((a == b).all())


# ---------------------------------------------------------------- a dim that must be whole


@rule(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.median.default, aten.nanmedian.default,
    aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, aten.logsumexp.default,
)  # fmt: skip
def reducing_whole(call: Call) -> Factors | None:
    """A reduction that must see all of what it reduces."""
    return reducing(call, whole=True)


def along(call: Call, dim: int, **facts: Any) -> Factors:
    """The factors of an operator that mixes the elements along one dim and keeps the shape."""
    ndim = len(call.operands[0].shape)
    own = tuple(None if d == wrapped(dim, ndim) else f"d{d}" for d in range(ndim))
    return Factors((own,) * len(call.operands), (own,) * len(call.results), **facts)


@rule(
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten._logcumsumexp.default,
)
def scanning(call: Call) -> Factors:
    """Each element depends on those before it."""
    return along(call, call["dim"])


@rule(aten.cumsum.default)
def summing_up(call: Call) -> Factors:
    """Sums of the elements so far."""
    return along(call, call["dim"], **sums_pass(call))


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
    """Where the diagonal of the whole matrix lies in a rank's block: (row, column, length) of each piece."""
    rows, columns = inputs[0].block(coordinate).runs
    return {"pieces": intersect(rows, columns)}


def sum_of_pieces(local: torch.Tensor, pieces: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """The sum of a block's pieces of the diagonal."""
    found = [local[row : row + n, column : column + n].diagonal() for row, column, n in pieces]
    return torch.cat(found or [local.new_empty(0)]).sum()


@rule(aten.trace.default, localize=local_diagonals, local_op=sum_of_pieces)
def trace(call: Call) -> Factors:
    """Every rank adds what it holds of the diagonal."""
    return Factors((("m", "n"),), ((),), linear=FIRST)


# ---------------------------------------------------------------- on the way: layouts inside decompositions


def split_axes(x: Any, dims: Sequence[int]) -> list[int]:
    """The mesh axes that split some of these dims."""
    placements = getattr(x, "placements", ())
    return [a for a, p in enumerate(placements) if isinstance(p, Shard | StridedShard) and p.dim in dims]


def settled(x: Any, dims: Sequence[int] = ()) -> Any:
    """`x` with nothing Partial: sharded by a dim that is free and not among `dims` where that is even, else whole."""
    placements: list[Any] = list(getattr(x, "placements", ()))
    if not x.numel():  # nothing to move, and no extreme to be found
        return moved_to(x, [Replicate()] * len(placements))
    partial = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    if not partial:
        return x
    for axis in partial:
        free = (
            d for d, size in enumerate(x.shape)
            if d not in dims and size % x.device_mesh.shape[axis] == 0 and not _splits(placements, d)
        )  # fmt: skip
        dim = next(free, None)
        placements[axis] = Replicate() if dim is None else Shard(dim)
    return moved_to(x, placements)


def _splits(placements: Sequence[Any], dim: int) -> bool:
    return any(isinstance(p, Shard | StridedShard) and p.dim == dim for p in placements)


def reduced(x: Any) -> Any:
    """`x` with Partial made whole: for something small that is used more than once."""
    placements = getattr(x, "placements", ())
    return moved_to(x, [Replicate() if isinstance(p, Partial) else p for p in placements])


def moved_to(x: Any, placements: Sequence[Any]) -> Any:
    """`x` with these placements, outside of autograd; plain tensors and None as they are."""
    if not hasattr(x, "placements") or tuple(placements) == x.placements:
        return x
    order = [entry for entry in x.spec.shard_order if _same_axes(entry, placements)]
    with torch.no_grad():
        return x.redistribute(placements=placements, shard_order=order)


def _same_axes(entry: Any, placements: Sequence[Any]) -> bool:
    axes = [a for a, p in enumerate(placements) if isinstance(p, Shard | StridedShard) and p.dim == entry.dim]
    return sorted(entry.axes) == axes


def widened(x: Any) -> Any:
    """`x` in the dtype that one device computes in."""
    return x.to(torch.float32) if x.dtype in HALVES else x


# ---------------------------------------------------------------- norms


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("power_sum(Tensor self, Scalar ord, int[]? dim, bool keepdim, *, ScalarType? dtype=None) -> Tensor")


def power_sum(
    local: torch.Tensor,
    ord: float,  # noqa: A002  as torch has it
    dim: Sizes | None,
    keepdim: bool,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum of powers of absolute values, without a temporary of the operand's size."""
    dims = reduced_dims(dim, local.dim())
    if not all(local.shape[d] for d in dims):  # most norms of nothing are not defined
        return aten.linalg_vector_norm.default(local, 0, dims, keepdim, dtype=dtype)
    return aten.linalg_vector_norm.default(local, ord, dims, keepdim, dtype=dtype).pow(ord)


_library.impl("power_sum", power_sum, "CompositeExplicitAutograd")
rule(torch.ops.shardwise.power_sum.default, local_op=power_sum)(counting)


def local_vector_norm(
    local: torch.Tensor,
    ord: float = 2,  # noqa: A002  as torch has it
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The norm of a shard that may be empty."""
    dims = reduced_dims(dim, local.dim())
    if all(local.shape[d] for d in dims):
        return aten.linalg_vector_norm.default(local, ord, dims, keepdim, dtype=dtype)
    nothing = aten.linalg_vector_norm.default(local, 0, dims, keepdim, dtype=dtype)
    return nothing if ord >= 0 else nothing.fill_(math.inf)


NORM_REDUCTIONS = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}


@rule(aten.linalg_vector_norm.default, reads=("ord",), local_op=local_vector_norm)
def vector_norm(call: Call) -> Factors | None:
    """Norms that are a sum or an extreme reduce as such; the others must see all of a dim, or are decomposed."""
    reduction = NORM_REDUCTIONS.get(call["ord"])
    return reducing(call, whole=True) if reduction is None else reducing(call, reduce=by(call, reduction))


@decomposition(aten.linalg_vector_norm.default)
def vector_norm_of_shards(
    x: Any,
    ord: float = 2,  # noqa: A002  as torch has it
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The root of a sum of powers: only that sum is reduced."""
    dims = reduced_dims(dim, x.dim())
    x = settled(x, dims)
    if not split_axes(x, dims) or ord in NORM_REDUCTIONS:
        return aten.linalg_vector_norm.default(x, ord, dims if x.dim() else dim, keepdim, dtype=dtype)
    wanted = dtype or x.dtype
    wide = torch.float32 if wanted in HALVES else dtype
    powers = reduced(torch.ops.shardwise.power_sum.default(x, ord, dims, keepdim, dtype=wide))
    norm = powers.sqrt() if ord == 2 else powers.pow(1 / ord)
    return norm.to(wanted) if wanted in HALVES else norm


def any_norm(x: Any, p: float | None, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    """The old name of a norm."""
    return aten.linalg_vector_norm.default(x, 2 if p is None else p, dim or None, keepdim, dtype=dtype)


decomposition(aten.norm.Scalar)(lambda x, p=2: any_norm(x, p))
decomposition(aten.norm.ScalarOpt_dtype)(lambda x, p, *, dtype: any_norm(x, p, dtype=dtype))
decomposition(aten.norm.ScalarOpt_dim)(lambda x, p, dim, keepdim=False: any_norm(x, p, dim, keepdim))
decomposition(aten.norm.ScalarOpt_dim_dtype)(lambda x, p, dim, keepdim, *, dtype: any_norm(x, p, dim, keepdim, dtype))
decomposition(aten.dist.default)(lambda x, other, p=2: any_norm(x - other, p))


# ---------------------------------------------------------------- variances


def moments(x: Any, dims: Sequence[int], correction: float) -> tuple[Any, Any]:
    """Variance and mean over `dims`, which stay with size one: computed wide, in two passes."""
    wide = widened(x)
    mean = reduced(wide.mean(dims, keepdim=True))
    squares = torch.ops.shardwise.power_sum.default(wide - mean, 2, dims, True)
    return squares / max(math.prod(x.shape[d] for d in dims) - correction, 0), mean


def variance(
    op: Any, x: Any, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, root: bool, both: bool
) -> Any:
    """Any of var, std, var_mean, std_mean; `op` is which."""
    dims = reduced_dims(dim, x.dim())
    x = settled(x, dims)
    if not split_axes(x, dims):
        return op(x, dim, correction=correction, keepdim=keepdim)
    var, mean = moments(x, dims, 1 if correction is None else correction)
    spread = reduced(var).sqrt() if root else var
    results = [spread.to(x.dtype.to_real()), mean.to(x.dtype)] if both else [spread.to(x.dtype.to_real())]
    if not keepdim:
        results = [result.squeeze(dims) for result in results]
    return tuple(results) if both else results[0]


def _declare_variance(op: Any, root: bool, both: bool) -> None:
    def quietly(
        local: torch.Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        if local.numel():
            return op(local, dim, correction=correction, keepdim=keepdim)
        # the operator would warn of too few elements where a rank just has none of the results
        spread = local.real.mean(dim, keepdim) if local.is_complex() else local.mean(dim, keepdim)
        return (spread, local.mean(dim, keepdim)) if both else spread

    rule(op, local_op=quietly)(reducing_whole)
    decomposition(op)(lambda *args, **kwargs: variance(op, *args, **kwargs, root=root, both=both))


_declare_variance(aten.var.correction, root=False, both=False)
_declare_variance(aten.std.correction, root=True, both=False)
_declare_variance(aten.var_mean.correction, root=False, both=True)
_declare_variance(aten.std_mean.correction, root=True, both=True)


# ---------------------------------------------------------------- where the extremes are


def first_index(match: Any, dims: Sizes, keepdim: bool) -> Any:
    """The first position, counted over `dims`, at which `match` is true: a sharded count and a small minimum."""
    position: Any = torch.zeros_like(match, dtype=torch.int64)
    step = 1
    for dim in reversed(dims):
        size = match.shape[dim]
        shape = [size if d == dim else 1 for d in range(match.dim())]
        position = position + (torch.arange(size, device=match.device) * step).view(shape)
        step *= size
    return torch.amin(position.masked_fill(~match, step), dims, keepdim)


def at_extreme(x: Any, extreme: Any) -> Any:
    """Where `x` is its extreme; a NaN is more extreme than any number."""
    match = x == extreme
    return match | (x != x) if x.is_floating_point() else match


def extreme_and_index(op: Any, reduce: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    """The extremes along a dim and where they first are."""
    dims = reduced_dims(dim, x.dim())
    x = settled(x, dims)
    if not split_axes(x, dims):
        return op(x, dim, keepdim)
    extreme = reduced(reduce(x, dims, True))
    index = first_index(at_extreme(x, extreme), dims, keepdim)
    return (extreme if keepdim else extreme.squeeze(dims)), index


def index_of_extreme(op: Any, reduce: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Where the extremes along a dim, or of the whole tensor, first are."""
    dims = reduced_dims(dim, x.dim())
    x = settled(x, dims)
    if not split_axes(x, dims):
        return op(x, dim, keepdim)
    return first_index(at_extreme(x, reduced(reduce(x, dims, True))), dims, keepdim)


def _declare_extreme(compute: Any, op: Any, reduce: Any) -> None:
    decomposition(op)(lambda *args, **kwargs: compute(op, reduce, *args, **kwargs))


_declare_extreme(extreme_and_index, aten.max.dim, torch.amax)
_declare_extreme(extreme_and_index, aten.min.dim, torch.amin)
_declare_extreme(index_of_extreme, aten.argmax.default, torch.amax)
_declare_extreme(index_of_extreme, aten.argmin.default, torch.amin)


@decomposition(aten.logsumexp.default)
def logsumexp(x: Any, dim: Dims, keepdim: bool = False) -> Any:
    """The logarithm of a sum, with the largest summand taken out: two small reductions."""
    dims = reduced_dims(dim, x.dim())
    x = settled(x, dims)
    if not split_axes(x, dims):
        return aten.logsumexp.default(x, dim, keepdim)
    wide = widened(x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype()))
    top = reduced(torch.amax(torch.real(wide) if wide.is_complex() else wide, dims, True))
    top = top.masked_fill(top.abs() == math.inf, 0)
    result = reduced((wide - top).exp().sum(dims, keepdim=True)).log() + top
    result = result.to(x.dtype) if x.dtype in HALVES else result
    return result if keepdim else result.squeeze(dims)
