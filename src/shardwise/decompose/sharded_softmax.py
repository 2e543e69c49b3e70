"""Softmax along a sharded dim: a maximum and a sum are reduced."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.decompose.layout_helpers import as_laid_out, as_result, reduced, split_axes, widened, without_partial
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


def shifted(x: Any, dim: int) -> Any:
    """`x` minus the largest element of each row, which is reduced."""
    wide = widened(x)
    return wide - reduced(torch.amax(wide, dim, keepdim=True))


@decomposition(aten._softmax.default, reductions=2)
def softmax_of_shards(x: Any, dim: int, half_to_float: bool) -> Any:
    """Softmax along a sharded dim: the maximum and the sum are reduced."""
    dim %= max(x.dim(), 1)
    x = without_partial(x, (dim,))
    if not split_axes(x, (dim,)):
        return aten._softmax.default(x, dim, half_to_float)
    exps = shifted(x, dim).exp_()
    return as_result(exps.div_(reduced(exps.sum(dim, keepdim=True))), torch.float32 if half_to_float else x.dtype)


# zero reductions: always used, so that a loss over sharded classes gathers no scores
@decomposition(aten._log_softmax.default, reductions=0)
def log_softmax_of_shards(x: Any, dim: int, half_to_float: bool) -> Any:
    """The logarithm of a softmax along a sharded dim: the maximum and the sum are reduced."""
    dim %= max(x.dim(), 1)
    x = without_partial(x, (dim,))
    if not split_axes(x, (dim,)):
        return aten._log_softmax.default(x, dim, half_to_float)
    below = shifted(x, dim)
    return as_result(
        below - reduced(below.exp().sum(dim, keepdim=True)).log(), torch.float32 if half_to_float else x.dtype
    )


@decomposition(aten._safe_softmax.default, reductions=2)
def safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Softmax with zeros for rows that are masked completely: their maximum is minus infinity."""
    dim %= max(x.dim(), 1)
    x = without_partial(x if dtype is None else x.to(dtype), (dim,))
    if not split_axes(x, (dim,)):
        return aten._safe_softmax.default(x, dim)
    wide = widened(x)
    top = reduced(torch.amax(wide, dim, keepdim=True))
    nothing = top == -math.inf
    exps = (wide - top.masked_fill(nothing, 0)).exp()
    return as_result(exps / reduced(exps.sum(dim, keepdim=True)).masked_fill(nothing, 1), x.dtype)


@decomposition(aten._softmax_backward_data.default, reductions=1)
def softmax_backward_of_shards(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    """The gradient of a softmax along a sharded dim: one sum is reduced."""
    dim %= max(output.dim(), 1)
    output = without_partial(output, (dim,))
    grad = as_laid_out(grad, output)
    if not split_axes(output, (dim,)):
        return aten._softmax_backward_data.default(grad, output, dim, input_dtype)
    output = widened(output)
    weighted = widened(grad) * output
    total = reduced(weighted.sum(dim, keepdim=True))
    return as_result(weighted.addcmul_(output, total, value=-1), input_dtype)


@decomposition(aten._log_softmax_backward_data.default, reductions=0)
def log_softmax_backward_of_shards(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    """The gradient of a log-softmax along a sharded dim: one sum is reduced."""
    dim %= max(output.dim(), 1)
    output = without_partial(output, (dim,))
    grad = as_laid_out(grad, output)
    if not split_axes(output, (dim,)):
        return aten._log_softmax_backward_data.default(grad, output, dim, input_dtype)
    grad = widened(grad)
    return as_result(grad - widened(output).exp() * reduced(grad.sum(dim, keepdim=True)), input_dtype)
