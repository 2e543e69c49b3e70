"""`flex_attention` on DTensors: scores, masks and modifications of scores as operators on DTensors.

Batch, heads and queries may be sharded: so are scores and the indices from which masks are computed. Keys and values
are gathered along their sequence on the axes that shard the queries. As on one device without a compiled
kernel, a rank holds all scores of its queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.placement import AnyShard, Partial, Replicate
from shardwise.decompose.layout_helpers import indices_of, moved_to, widened, without_partial
from shardwise.errors import UnsupportedError
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import CopiedDTensor, PendingDTensor
from shardwise.torch_private import flex_attention, flex_attention_backward, scalar_lookups

__all__ = ["register"]

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
    keys, values = _beside(query, key, value)
    buffers = score_mod_other_buffers, mask_mod_other_buffers
    final = _scores(query, _each_head(keys, query), score_mod, block_mask[-1], scale, *buffers).final
    largest = final.amax(-1)
    dead = largest == -math.inf  # queries without keys
    sums = final.logsumexp(-1).masked_fill(dead, -math.inf)
    weights = final.softmax(-1).masked_fill(dead.unsqueeze(-1), 0.0)
    out = weights.to(query.dtype) @ _each_head(values, query).to(query.dtype)
    results = [_laid_out_like(x, query) for x in (out, sums / LOG2, largest / LOG2)]
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
    """The gradients of queries, keys and values."""
    if any(isinstance(buffer, torch.Tensor) and buffer.requires_grad for buffer in score_mod_other_buffers):
        raise UnsupportedError(
            "flex_attention on DTensors gives no gradients of the tensors that score_mod captures",
            hint="detach them, or add a bias as the attn_mask of F.scaled_dot_product_attention",
        )
    keys, values = (_each_head(x, query) for x in _beside(query, key, value))
    buffers = score_mod_other_buffers, mask_mod_other_buffers
    scores = _scores(query, keys, fw_graph, block_mask[-1], scale, *buffers)
    dead = (logsumexp == -math.inf).unsqueeze(-1)
    weights = (scores.final - logsumexp.unsqueeze(-1) * LOG2).exp().masked_fill(dead, 0.0)
    wide = weights.dtype
    upstream = torch.zeros_like(out) if grad_out is None else grad_out
    given = (out.to(wide) * upstream.to(wide)).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        given = given - grad_logsumexp.unsqueeze(-1) / LOG2
    of_final = weights * (upstream.to(wide) @ values.to(wide).mT - given)
    with scalar_lookups():
        first = _for_each_score(lambda *args: joint_graph(*args)[0], 1, 1 + len(score_mod_other_buffers), (0,))
        of_products = first(scores.products, *scores.indices, of_final, *score_mod_other_buffers)
    of_products = torch.where(scores.allowed, of_products * scale, 0.0).to(query.dtype)
    grads = (
        of_products @ keys.to(query.dtype),
        _sum_of_heads(of_products.mT @ query, key),
        _sum_of_heads(weights.to(query.dtype).mT @ upstream, value),
    )
    laid_out = [_laid_out_like(grad, like) for grad, like in zip(grads, (query, key, value), strict=True)]
    return laid_out[0], laid_out[1], laid_out[2], (None,) * len(score_mod_other_buffers)


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
    with scalar_lookups():
        modified = _for_each_score(score_mod, 1, len(score_buffers))(products, *indices, *score_buffers)
        allowed = _for_each_score(mask_mod, 0, len(mask_buffers))(*indices, *mask_buffers)
    return Scores(products, torch.where(allowed, modified, -math.inf), allowed, indices)


def _for_each_score(
    function: Callable[..., Any], before: int, after: int, mapped: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """A function of `before` scores, four indices and `after` more, on all of them.

    Args:
        function: called with scalars.
        before: the number of scores before the indices.
        after: the number of arguments after the indices.
        mapped: those of them that are scores as well; the others are passed unchanged.
    """
    following = tuple(0 if i in mapped else None for i in range(after))
    for index in reversed(range(4)):
        of_indices = tuple(0 if i == index else None for i in range(4))
        function = torch.vmap(function, in_dims=((0,) * before) + of_indices + following)
    return function


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


def _each_head(x: Any, query: Any) -> Any:
    """Keys or values for each head and sample of the queries, which several may share."""
    groups = query.shape[1] // x.shape[1]
    each = x.repeat_interleave(groups, 1) if groups > 1 else x
    return each.expand(query.shape[0], *each.shape[1:]) if each.shape[0] != query.shape[0] else each


def _sum_of_heads(grad: Any, like: Any) -> Any:
    """The gradient of keys or values from that of each head."""
    groups = grad.shape[1] // like.shape[1]
    return grad.unflatten(1, (-1, groups)).sum(2) if groups > 1 else grad


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
    """The same values with dims in memory in the order of `like`, as torch's operator gives them."""
    order = sorted(range(like.dim()), key=lambda dim: (-like.stride(dim), dim))
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(like.dim())])


def register() -> None:
    """Register implementations of torch's operator for these classes: DTensor, in flight, copied views."""
    for kind in (DTensor, PendingDTensor, CopiedDTensor):
        flex_attention.py_impl(kind)(attend)
        flex_attention_backward.py_impl(kind)(attend_backward)
