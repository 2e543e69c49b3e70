"""Operators of nn.TransformerEncoderLayer and nn.MultiheadAttention in eval mode, computed from smaller ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import UnsupportedError
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten._nested_tensor_from_mask.default)
def nested(*args: Any, **kwargs: Any) -> Any:
    """Nested tensors, which nn.TransformerEncoder makes of padded batches in eval mode."""
    raise UnsupportedError(
        "a padded batch would become a nested tensor, and a DTensor is dense",
        hint="nn.TransformerEncoder(..., enable_nested_tensor=False)",
    )


OF_BATCH = 1  # the kind of a mask of keys, one for each sequence; others broadcast as they are


@decomposition(aten._native_multi_head_attention.default)
def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    """Attention with its projections; a mask is true for excluded keys."""
    projected = map(F.linear, (query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
    q, k, v = (x.unflatten(-1, (num_head, -1)).transpose(1, 2) for x in projected)
    scores = (q * (embed_dim // num_head) ** -0.5) @ k.mT
    if mask is not None:
        hidden = mask.bool()[:, None, None, :] if mask_type == OF_BATCH else mask.bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    mixed = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return mixed, None
    return mixed, weights.mean(1) if average_attn_weights else weights


@decomposition(aten._transformer_encoder_layer_fwd.default)
def encoder_layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
    norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None,
    mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Attention, then two linear layers, each with a norm before or after it."""

    def attend(x: Any) -> Any:
        around = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask)
        return multi_head_attention(x, x, x, *around, need_weights=False, mask_type=mask_type)[0]

    def forward(x: Any) -> Any:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else inner.relu(), ffn_weight_2, ffn_bias_2)

    x = src
    for part, weight, bias in ((attend, norm_weight_1, norm_bias_1), (forward, norm_weight_2, norm_bias_2)):
        if norm_first:
            x = x + part(F.layer_norm(x, (embed_dim,), weight, bias, eps))
        else:
            x = F.layer_norm(x + part(x), (embed_dim,), weight, bias, eps)
    return x
