"""Norms and variances: over sharded dims by norms of the parts and sums of powers, which are small. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.placement import norm_of
from shardwise.rules.engine import Factors
from shardwise.rules.layout_helpers import reduced, settled, split_axes, widened
from shardwise.rules.reduction import Dims, Sizes, by, counting, passing, reduced_dims, reducing, reducing_whole
from shardwise.rules.registry import Call, decomposition, rule

aten = torch.ops.aten


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
    if local.numel() or all(local.shape[d] for d in dims):
        return aten.linalg_vector_norm.default(local, ord, dims, keepdim, dtype=dtype)
    nothing = aten.linalg_vector_norm.default(local, 0, dims, keepdim, dtype=dtype)
    return nothing if ord >= 0 else nothing.fill_(math.inf)


NORM_REDUCTIONS = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}


@rule(aten.linalg_vector_norm.default, reads=("ord",), local_op=local_vector_norm)
def vector_norm(call: Call) -> Factors | None:
    """Norms of parts are a sum, an extreme, or again a norm."""
    reduction = NORM_REDUCTIONS.get(call["ord"])
    if reduction is not None:
        return reducing(call, reduce=by(call, reduction))
    norm = norm_of(call["ord"])
    return reducing(call, reduce=by(call, norm), rows=passing(norm))


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
    decomposition(op, reductions=2)(lambda *args, **kwargs: variance(op, *args, **kwargs, root=root, both=both))


_declare_variance(aten.var.correction, root=False, both=False)
_declare_variance(aten.std.correction, root=True, both=False)
_declare_variance(aten.var_mean.correction, root=False, both=True)
_declare_variance(aten.std_mean.correction, root=True, both=True)
