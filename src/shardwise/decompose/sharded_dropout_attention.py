"""Attention with dropout over a sharded sequence on CPUs, with one device's random numbers: block by block.

torch computes it from matrix products, which would gather keys and values. Here every rank can draw the box of the
global dropout mask for a block of scores (`rng/dropout_tiles.py`), so keys and values can rotate in a ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwise import modes
from shardwise.core.tracing import is_tracing
from shardwise.decompose.sharded_flex_attention import on_every_rank
from shardwise.dispatch.random_ops import agree_once
from shardwise.fabric.base import fabric_of
from shardwise.rng.draw_blocks import default_generator
from shardwise.rng.dropout_tiles import DropoutMask, can_repeat
from shardwise.rules.dropout_blocks import DropoutFunctions
from shardwise.rules.flex_blocks import functions
from shardwise.tensor import DTensor
from shardwise.tensor.composites import attention_by_products, attention_with_dropout
from shardwise.tensor.ranks import is_forward_or_transformed

SEQUENCE = 2  # the dim of queries, keys and values


class _Call(NamedTuple):
    """The arguments of a call beside queries, keys and values, and the random state before it."""

    mask: Any
    dropout_p: float
    causal: bool
    scale: float
    groups: bool
    state: torch.Tensor
    used: DropoutFunctions


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Any = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The output and an unused second result; NotImplemented if matrix products compute it."""
    tensors = (query, key, value)
    if dropout_mask is not None or not 0 < dropout_p < 1 or not _is_sharded_alike(tensors, enable_gqa):
        return NotImplemented
    if is_tracing() or not modes.may_read_values() or modes.draws_by_index() or is_forward_or_transformed():
        return NotImplemented
    if attn_mask is not None and not _is_on_every_rank(attn_mask, query):
        return NotImplemented
    mesh, keep = query.device_mesh, 1 - dropout_p
    if mesh.device_type != "cpu" or not can_repeat(keep):
        return NotImplemented
    has_values = fabric_of(mesh).has_values
    agree_once(mesh)
    generator = default_generator(torch.device("cpu"))
    state = generator.get_state()
    shape = (*query.shape[:3], key.shape[SEQUENCE])
    used = DropoutFunctions(
        _unused, None, _unused,
        bias=None if attn_mask is None or not has_values else on_every_rank(attn_mask, mesh),
        causal=is_causal,
        dropout=DropoutMask(shape, keep, generator) if has_values else None,
        keep=keep,
    )  # fmt: skip
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    call = _Call(attn_mask, dropout_p, is_causal, factor, enable_gqa, state, used)
    out = _Attention.apply(query, key, value, call)
    return out, out.detach()


def _unused(*args: Any) -> Any:
    raise AssertionError("scores and masks are functions of `DropoutFunctions`")


def _is_sharded_alike(tensors: tuple[Any, Any, Any], groups: bool) -> bool:
    """Whether a sequence is sharded, and blocks support the shapes and the dtype."""
    if not all(isinstance(x, DTensor) and x.dim() == 4 and x.numel() for x in tensors):
        return False
    query, key, value = tensors
    if any(x.device_mesh is not query.device_mesh or x.dtype is not query.dtype for x in tensors):
        return False
    heads = query.shape[1] % key.shape[1] == 0 if groups else query.shape[1] == key.shape[1]
    same = key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3]
    return heads and same and any(x.spec.dim_axes[SEQUENCE] for x in tensors)


def _is_on_every_rank(mask: Any, query: Any) -> bool:
    """Whether the mask is replicated and needs no gradient."""
    if mask.requires_grad or mask.dim() < 2:
        return False
    return not isinstance(mask, DTensor) or (mask.device_mesh is query.device_mesh and mask.spec.is_replicated)


class _Attention(torch.autograd.Function):
    """Attention by blocks, forward and backward. With `create_graph`, backward uses matrix products instead."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, call: _Call) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with functions.holding(call.used):
            out, sums, _ = torch.ops.shardwise.flex_attention.default(query, key, value, call.scale)
        call.used.current.clear()
        # a clone: users may write to the output; the mask is saved so that torch checks writes to it
        ctx.save_for_backward(query, key, value, out.clone(), sums, call.mask)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, sums, _ = ctx.saved_tensors
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            return *_by_products((query, key, value), call, grad), None
        with functions.holding(call.used):
            grads = torch.ops.shardwise.flex_attention_backward.default(
                query, key, value, out, sums, grad, None, call.scale
            )
        return *grads, None


def _by_products(tensors: tuple[Any, ...], call: _Call, grad: Any) -> list[Any]:
    """The gradients as functions of the operands, with the random numbers of the forward."""
    # operands may be one tensor, or depend on each other: views give each its own gradient
    tensors = tuple([x.view_as(x) for x in tensors])
    generator = default_generator(torch.device("cpu"))
    after = generator.get_state()
    generator.set_state(call.state)
    try:
        options = {"scale": call.scale, "enable_gqa": call.groups}
        out, _ = attention_by_products(*tensors, call.mask, call.dropout_p, call.causal, None, **options)
    finally:
        generator.set_state(after)
    asked = [x for x in tensors if x.requires_grad]
    found = iter(torch.autograd.grad(out, asked, grad, create_graph=True))
    return [next(found) if x.requires_grad else None for x in tensors]


attention_with_dropout.append(attend)
