"""Norms and variances; over sharded dims variances are decomposed (`decompose/sharded_statistics.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.core.placement import norm_of
from shardwise.rules.engine import Factors
from shardwise.rules.reduction import Dims, Sizes, by, counting, passing, reduced_dims, reducing, reducing_unsharded
from shardwise.rules.registry import Call, rule

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
    if not all(local.shape[d] for d in dims):  # most norms of an empty tensor are undefined
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
    """Norms of shards are combined by a sum, an extremum or a norm."""
    reduction = NORM_REDUCTIONS.get(call["ord"])
    if reduction is not None:
        return reducing(call, reduce=by(call, reduction))
    norm = norm_of(call["ord"])
    return reducing(call, reduce=by(call, norm), rows=passing(norm))


def _declare_variance(op: Any, both: bool) -> None:
    def quietly(
        local: torch.Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        if local.numel():
            return op(local, dim, correction=correction, keepdim=keepdim)
        # on a rank without results the operator would warn of too few elements
        spread = local.real.mean(dim, keepdim) if local.is_complex() else local.mean(dim, keepdim)
        return (spread, local.mean(dim, keepdim)) if both else spread

    rule(op, local_op=quietly)(reducing_unsharded)


_declare_variance(aten.var.correction, both=False)
_declare_variance(aten.std.correction, both=False)
_declare_variance(aten.var_mean.correction, both=True)
_declare_variance(aten.std_mean.correction, both=True)
