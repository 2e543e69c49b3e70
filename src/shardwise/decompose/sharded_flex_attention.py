"""`flex_attention` on DTensors: block by block (`rules/flex_blocks.py`), by a ring, halos, heads or gathered keys.

If sizes are symbolic, or a function captures a DTensor larger than keys and values, scores and masks are computed by
operators on DTensors, sharded like the queries, and keys and values are gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, Partial, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.decompose.layout_helpers import indices_of, moved_to, widened, without_partial
from shardwise.dispatch.plain_operands import replicated_operand
from shardwise.errors import UnsupportedError
from shardwise.fabric.dry import Following
from shardwise.rules.flex_blocks import FlexFunctions, functions, repeat_heads, sum_heads
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import CopiedDTensor, PendingDTensor
from shardwise.torch_private import flex_attention, flex_attention_backward

__all__ = ["on_every_rank", "register"]

SEQUENCE = 2  # the dim of queries, keys and values
LOG2 = math.log(2)  # torch's operator gives logarithms to base 2
Buffers = tuple[Any, ...]


class Scores(NamedTuple):
    """The scores of a call: products of queries and keys, arguments of softmax, the mask, indices."""

    products: Any
    final: Any
    allowed: Any
    indices: Sequence[Any]


def attend(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: Any,  # a number, of a compiler perhaps a symbolic one
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Buffers = (),
    mask_mod_other_buffers: Buffers = (),
) -> tuple[Any, Any, Any]:
    """The output, the logarithm of the sum of exponentials, and the largest score of each query."""
    buffers = score_mod_other_buffers, mask_mod_other_buffers
    keys, values = (_for_each_sample(x, query) for x in (key, value))
    if not _runs_by_blocks(query, keys, values, *buffers):
        found = _attend_by_operators(query, keys, values, score_mod, block_mask[-1], scale, *buffers)
    else:
        used = _functions(query, key, score_mod, None, block_mask[-1], *buffers)
        with functions.holding(used):
            found = torch.ops.shardwise.flex_attention.default(query, keys, values, scale)
    results = [_laid_out_like(x, query) for x in found]
    return _in_memory_like(results[0], query), results[1], results[2]


def attend_backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    grad_out: Any,
    grad_logsumexp: Any,
    fw_graph: Callable[..., Any],
    joint_graph: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: Any,  # a number, of a compiler perhaps a symbolic one
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Buffers = (),
    mask_mod_other_buffers: Buffers = (),
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """The gradients of queries, keys and values, and of tensors that `score_mod` captures."""
    buffers = score_mod_other_buffers, mask_mod_other_buffers
    upstream = torch.zeros_like(out) if grad_out is None else grad_out
    keys, values = (_for_each_sample(x, query) for x in (key, value))
    given = (query, keys, values, out, logsumexp, upstream, grad_logsumexp)
    learned = [isinstance(x, torch.Tensor) and x.requires_grad for x in score_mod_other_buffers]
    of_learned: list[Any] = []
    if not _runs_by_blocks(query, keys, values, *buffers):
        if any(learned):
            raise UnsupportedError(
                "flex_attention on DTensors of symbolic sizes, or with captured DTensors that are larger than keys and "
                "values, gives no gradients of the tensors that score_mod captures",
                hint="detach them, or compile with dynamic=False",
            )
        grads = _backward_by_operators(*given, fw_graph, joint_graph, block_mask[-1], scale, *buffers)
    else:
        used = replace(_functions(query, key, fw_graph, joint_graph, block_mask[-1], *buffers), learned=tuple(learned))
        with functions.holding(used):
            grads = torch.ops.shardwise.flex_attention_backward.default(*given, scale)
        of_learned = [_summed(local, spec) for local, spec in used.gradients]
    grads = [_sum_of_samples(grad, like) for grad, like in zip(grads, (query, key, value), strict=True)]
    laid_out = [_laid_out_like(grad, like) for grad, like in zip(grads, (query, key, value), strict=True)]
    left = iter(of_learned)
    of_captured = [
        _gradient_like(next(left, None), x) if wanted else None
        for x, wanted in zip(score_mod_other_buffers, learned, strict=True)
    ]
    return laid_out[0], laid_out[1], laid_out[2], tuple(of_captured)


def _summed(local: torch.Tensor, query: DTensorSpec) -> DTensor:
    """The gradient of a captured tensor: Partial, an addend for the queries of each rank."""
    placements = [Partial() if isinstance(p, AnyShard) else Replicate() for p in query.placements]
    return DTensor.from_local(local, query.mesh, placements, run_check=False)


def _gradient_like(grad: Any, like: Any) -> Any:
    """A gradient in the layout of its tensor, plain for a plain one."""
    if grad is None:  # on a rank outside of the mesh
        return None
    if not isinstance(like, DTensor):
        return grad.full_tensor().to(like.dtype)
    placements = [Replicate() if isinstance(p, Partial) else p for p in like.placements]
    return grad.redistribute(placements=placements, shard_order=like.spec.shard_order).to(like.dtype)


# ---------------------------------------------------------------- block by block


def _runs_by_blocks(query: Any, keys: Any, values: Any, *buffers: Buffers) -> bool:
    """Whether sizes are known, and captured DTensors, which are gathered, are no larger than keys and values."""
    tensors = (query, keys, values)
    if any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape) or any(not x.numel() for x in tensors):
        return False
    if keys.shape[SEQUENCE] != values.shape[SEQUENCE]:  # the operators raise torch's error
        return False
    captured = [x for of in buffers for x in of if isinstance(x, DTensor)]
    return sum(x.nbytes for x in captured) <= keys.nbytes + values.nbytes


def _functions(
    query: Any,
    key: Any,
    score: Callable[..., Any],
    gradient: Callable[..., Any] | None,
    mask: Callable[..., Any],
    captured: Buffers,
    mask_captured: Buffers,
) -> FlexFunctions:
    """The functions of a call, with their captured tensors replicated."""
    mesh = next(x for x in (query, key) if isinstance(x, DTensor)).device_mesh
    each = [tuple([on_every_rank(x, mesh) for x in of]) for of in (captured, mask_captured)]
    return FlexFunctions(score, gradient, mask, each[0], each[1])


def on_every_rank(x: Any, mesh: DeviceMesh) -> Any:
    """A captured tensor as a plain tensor; plain tensors are compared between processes."""
    if isinstance(x, DTensor):
        captured: Any = x.detach()
        return captured.full_tensor()
    if isinstance(x, torch.Tensor) and not is_tracing():
        replicated_operand(DTensor, x, mesh, "flex_attention", "captured")
    return x


def _for_each_sample(x: Any, query: Any) -> Any:
    """Keys or values expanded to the batch of the queries."""
    return x.expand(query.shape[0], *x.shape[1:]) if x.shape[0] != query.shape[0] else x


def _sum_of_samples(grad: Any, like: Any) -> Any:
    return grad.sum(0, keepdim=True) if grad.shape[0] != like.shape[0] else grad


# ---------------------------------------------------------------- by operators


def _attend_by_operators(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any],
    mask_mod: Callable[..., Any],
    scale: Any,
    score_buffers: Buffers,
    mask_buffers: Buffers,
) -> tuple[Any, Any, Any]:
    """The results of `attend`, with keys and values expanded to the batch of the queries."""
    keys, values = _beside(query, key, value)
    final = _scores(query, repeat_heads(keys, query), score_mod, mask_mod, scale, score_buffers, mask_buffers).final
    largest = final.amax(-1)
    dead = largest == -math.inf  # queries without keys
    sums = final.logsumexp(-1).masked_fill(dead, -math.inf)
    weights = final.softmax(-1).masked_fill(dead.unsqueeze(-1), 0.0)
    return weights.to(query.dtype) @ repeat_heads(values, query).to(query.dtype), sums / LOG2, largest / LOG2


def _backward_by_operators(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    upstream: Any,
    grad_logsumexp: Any,
    score_mod: Callable[..., Any],
    joint: Callable[..., Any],
    mask_mod: Callable[..., Any],
    scale: Any,
    score_buffers: Buffers,
    mask_buffers: Buffers,
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values."""
    keys, values = (repeat_heads(x, query) for x in _beside(query, key, value))
    scores = _scores(query, keys, score_mod, mask_mod, scale, score_buffers, mask_buffers)
    dead = (logsumexp == -math.inf).unsqueeze(-1)
    weights = (scores.final - logsumexp.unsqueeze(-1) * LOG2).exp().masked_fill(dead, 0.0)
    wide = weights.dtype
    given = (out.to(wide) * upstream.to(wide)).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        given = given - grad_logsumexp.unsqueeze(-1) / LOG2
    of_final = weights * (upstream.to(wide) @ values.to(wide).mT - given)
    used = FlexFunctions(score_mod, joint, mask_mod, score_buffers, mask_buffers)
    of_products, _ = used.of_products(scores.products, scores.indices, of_final)
    of_products = torch.where(scores.allowed, of_products * scale, 0.0).to(query.dtype)
    return (
        of_products @ keys.to(query.dtype),
        sum_heads(of_products.mT @ query, key),
        sum_heads(weights.to(query.dtype).mT @ upstream, value),
    )


# ---------------------------------------------------------------- scores


def _scores(
    query: Any,
    keys: Any,
    score_mod: Callable[..., Any],
    mask_mod: Callable[..., Any],
    scale: Any,  # a number, of a compiler perhaps a symbolic one
    score_buffers: Buffers,
    mask_buffers: Buffers,
) -> Scores:
    products = without_partial(widened(query) @ widened(keys).mT) * scale
    indices = [indices_of(products, dim) for dim in range(4)]
    used = FlexFunctions(score_mod, None, mask_mod, score_buffers, mask_buffers)
    modified, allowed = used.modified(products, indices), used.visible(*indices)
    return Scores(products, torch.where(allowed, modified, -math.inf), allowed, indices)


# ---------------------------------------------------------------- layouts, heads


def _beside(query: Any, key: Any, value: Any) -> list[Any]:
    """Keys and values with their sequence gathered on the axes that shard that of the queries."""
    axes = query.spec.dim_axes[SEQUENCE] if isinstance(query, DTensor) else ()
    found = []
    for x in (key, value):
        placements = list(x.placements) if isinstance(x, DTensor) else []
        for axis, placement in enumerate(placements):
            if axis in axes and isinstance(placement, AnyShard) and placement.dim == SEQUENCE:
                placements[axis] = Replicate()
        found.append(moved_to(x, placements))
    return found


def _laid_out_like(x: Any, like: Any) -> Any:
    """A result with the dims of `like`, but perhaps the last, in its layout."""
    if not isinstance(x, DTensor) or not isinstance(like, DTensor) or x.device_mesh is not like.device_mesh:
        return x
    kept = [
        Replicate() if isinstance(p, Partial) or (isinstance(p, AnyShard) and p.dim >= min(x.dim(), 3)) else p
        for p in like.placements
    ]
    order = [entry for entry in like.spec.shard_order if entry.dim < min(x.dim(), 3)]
    with torch.no_grad():
        return x.redistribute(placements=kept, shard_order=order)


def _in_memory_like(x: Any, like: Any) -> Any:
    """The same values with the memory order of `like`, like the results of torch's operator."""
    order = sorted(range(like.dim()), key=lambda dim: (-like.stride(dim), dim))
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(like.dim())])


def register() -> None:
    """Register implementations of torch's operators for DTensors, tensors in flight and copied views.

    The mode of a dry run stays active for the operators on locals.
    """
    for op, implementation in ((flex_attention, attend), (flex_attention_backward, attend_backward)):
        attention: Callable[..., Any] = implementation
        for kind in (DTensor, PendingDTensor, CopiedDTensor):
            op.py_impl(kind)(attention)
        op.py_impl(Following)(functools.partial(_followed, op, attention))


def _followed(op: Any, attention: Callable[..., Any], mode: Following, *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(x, DTensor) for x in args):
        return op(*args, **kwargs)
    with mode:
        return attention(*args, **kwargs)
