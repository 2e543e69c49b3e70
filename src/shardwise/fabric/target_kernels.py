"""The kernels that the target device of a dry run would choose, in place of those that torch chooses for meta tensors.

For meta tensors torch takes the mathematical path of attention, which stores every score matrix, and computes norms by
several operators. Devices run fused kernels. Here their operators are called on the meta tensors, so that tensors saved
for backward are those of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shardwise.torch_private import below_autograd, current_graph_task

__all__ = ["ALLOCATION", "FUSED", "WORKSPACE", "workspace_of"]

aten = torch.ops.aten

ALLOCATION = 512  # bytes: CUDA's caching allocator rounds each allocation up to a multiple of it
WORKSPACE = 33 * 2**20  # bytes that cuBLAS allocates on Hopper for each of its handles, at their first product
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256  # the widest head that flash attention takes
_MATMULS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm.default}


def workspace_of(op: Any) -> tuple[str, bool] | None:
    """The key of the workspace of a matrix product: its library, and the thread of backward or of the program."""
    if op not in _MATMULS:
        return None
    in_backward = current_graph_task() != -1  # pyright: ignore[reportAttributeAccessIssue]
    return "cublasLt" if op is aten.addmm.default else "cublas", in_backward


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` by the operator that a GPU would run; NotImplemented for the mathematical path.

    The order is torch's: flash attention, memory-efficient attention, and then the mathematical path.
    """
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if query.dim() != 4 or 0 in query.shape or 0 in key.shape:
        return NotImplemented
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    cuda = torch.backends.cuda
    if attn_mask is None and query.dtype in _HALF and alike and query.shape[-1] <= _FLASH_HEAD:
        if cuda.flash_sdp_enabled():
            return _flash(query, key, value, dropout_p, is_causal, scale)
    elif grouped or query.dtype is torch.float64:
        return NotImplemented
    if cuda.mem_efficient_sdp_enabled() and not grouped:
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = _bias(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, saves, dropout_p, is_causal, scale=scale
        )[0]
    return NotImplemented


def attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` by the operator that a CPU runs; NotImplemented for the mathematical path."""
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if query.dim() != 4 or dropout_p or not alike or 0 in query.shape or 0 in key.shape:
        return NotImplemented
    if not torch.backends.cuda.flash_sdp_enabled() or (query.shape[1] != key.shape[1] and not enable_gqa):
        return NotImplemented
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4)):
        return NotImplemented
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, is_causal, attn_mask=_added(attn_mask, query), scale=scale
    )[0]


def _flash(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    """Flash attention, whose heads are padded to a multiple of eight."""
    width = query.shape[-1]
    short = -width % 8
    if short:
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (F.pad(tensor, (0, short)) for tensor in (query, key, value))
    out = aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :width] if short else out


def _bias(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """A mask as the memory-efficient kernel takes it: of the dtype of the queries, with every dim."""
    mask = _added(mask, query)
    return None if mask is None else mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _added(mask: Any, query: torch.Tensor) -> Any:
    """A mask as values to add to scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)


class FusedRMSNorm(torch.autograd.Function):
    """One kernel that saves its input and the reciprocal roots. For meta tensors torch would use several operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with below_autograd():
            out, roots = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, roots)
        ctx.shape = shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, roots = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_x, of_weight = aten._fused_rms_norm_backward.default(grad, x, ctx.shape, roots, weight, wanted)
        return of_x, None, of_weight, None


def rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """`F.rms_norm` as one kernel; NotImplemented if torch uses several operators on a GPU too."""
    if not hasattr(aten, "_fused_rms_norm") or (weight is not None and weight.dtype is not x.dtype):
        return NotImplemented
    return FusedRMSNorm.apply(x, list(normalized_shape), weight, eps)


# By device type: replacements of functions that programs call. NotImplemented means torch's own choice.
FUSED: dict[str, dict[Any, Callable[..., Any]]] = {
    "cpu": {F.scaled_dot_product_attention: attention_on_cpu},
    "cuda": {
        F.scaled_dot_product_attention: attention,
        F.rms_norm: rms_norm,  # which calls torch.rms_norm, where modes no longer see it
        torch.rms_norm: rms_norm,
    },
}
