"""Variances over sharded dims by reduced sums of powers; older names of norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.decompose.layout_helpers import reduced, split_axes, widened, without_partial
from shardwise.rules.reduction import Dims, reduced_dims
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


def any_norm(x: Any, p: float | None, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    """`torch.norm`, computed by `linalg.vector_norm`."""
    return aten.linalg_vector_norm.default(x, 2 if p is None else p, dim or None, keepdim, dtype=dtype)


decomposition(aten.norm.Scalar)(lambda x, p=2: any_norm(x, p))
decomposition(aten.norm.ScalarOpt_dtype)(lambda x, p, *, dtype: any_norm(x, p, dtype=dtype))
decomposition(aten.norm.ScalarOpt_dim)(lambda x, p, dim, keepdim=False: any_norm(x, p, dim, keepdim))
decomposition(aten.norm.ScalarOpt_dim_dtype)(lambda x, p, dim, keepdim, *, dtype: any_norm(x, p, dim, keepdim, dtype))
decomposition(aten.dist.default)(lambda x, other, p=2: any_norm(x - other, p))


# ---------------------------------------------------------------- variances


def moments(x: Any, dims: Sequence[int], correction: float) -> tuple[Any, Any]:
    """Variance and mean over `dims`, kept with size one: computed in a wide dtype, in two passes."""
    wide = widened(x)
    mean = reduced(wide.mean(dims, keepdim=True))
    squares = torch.ops.shardwise.power_sum.default(wide - mean, 2, dims, True)
    return squares / max(math.prod(x.shape[d] for d in dims) - correction, 0), mean


def variance(
    op: Any, x: Any, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, root: bool, both: bool
) -> Any:
    """`op` on a DTensor: var, std, var_mean or std_mean."""
    dims = reduced_dims(dim, x.dim())
    x = without_partial(x, dims)
    if not split_axes(x, dims):
        return op(x, dim, correction=correction, keepdim=keepdim)
    var, mean = moments(x, dims, 1 if correction is None else correction)
    spread = reduced(var).sqrt() if root else var
    results = [spread.to(x.dtype.to_real()), mean.to(x.dtype)] if both else [spread.to(x.dtype.to_real())]
    if not keepdim:
        results = [result.squeeze(dims) for result in results]
    return tuple(results) if both else results[0]


def _decompose_variance(op: Any, root: bool, both: bool) -> None:
    decomposition(op, reductions=2)(lambda *args, **kwargs: variance(op, *args, **kwargs, root=root, both=both))


_decompose_variance(aten.var.correction, root=False, both=False)
_decompose_variance(aten.std.correction, root=True, both=False)
_decompose_variance(aten.var_mean.correction, root=False, both=True)
_decompose_variance(aten.std_mean.correction, root=True, both=True)
