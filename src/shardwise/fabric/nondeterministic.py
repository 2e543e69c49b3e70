"""Nondeterministic operators: virtual ranks with equal operands share one result.

Replicas must be equal. If a kernel adds in no fixed order, or reads uninitialized memory, ranks with equal operands
would get different results. Ranks whose operands differ compute their own results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.fabric.shared_writes import agree, is_traced
from shardwise.torch_private import OpOverload, tree_map

__all__ = ["is_nondeterministic", "own_results", "shape_only", "share_results"]

_shares = True


@contextlib.contextmanager
def own_results() -> Iterator[None]:
    """Inside, every rank computes its own result, and operands are not compared."""
    global _shares
    previous, _shares = _shares, False
    try:
        yield
    finally:
        _shares = previous


# Operators of torch.use_deterministic_algorithms, and least squares, whose driver gelsy gets pivots from
# uninitialized memory.
_NAMES = frozenset({
    "linalg_lstsq", "index_put", "_index_put_impl", "_unsafe_index_put", "put", "index_add", "index_copy",
    "scatter_add", "scatter", "scatter_reduce", "cumsum", "bincount", "histc", "median", "nanmedian",
    "embedding_dense_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward", "index_select_backward",
    "convolution", "convolution_backward", "cudnn_convolution", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward",
    "upsample_bilinear2d_backward", "_upsample_bilinear2d_aa_backward", "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "max_pool2d_with_indices_backward",
    "adaptive_max_pool3d_backward", "index_reduce", "kthvalue", "_flash_attention_backward",
    "_efficient_attention_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
})  # fmt: skip


# Of these the second operand, the input of forward, is read for its shape alone.
_BY_SHAPE = frozenset(name for name in _NAMES if name.endswith("_backward") and ("pool" in name or "_pad" in name))


def shape_only(op: Any) -> int | None:
    """The position among the tensors of an operand whose values are not read.

    Example:
        >>> shape_only(torch.ops.aten.avg_pool3d_backward.default), shape_only(torch.ops.aten.index_add.default)
        (1, None)
    """
    return 1 if isinstance(op, OpOverload) and op._opname in _BY_SHAPE else None


def is_nondeterministic(op: Any) -> bool:
    """Whether an operator may return different bits for equal operands.

    Example:
        >>> is_nondeterministic(torch.ops.aten.index_add_.default), is_nondeterministic(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return isinstance(op, OpOverload) and op._opname.rstrip("_") in _NAMES


def share_results(
    rows: Sequence[Sequence[Any]],
    call: Callable[[Sequence[Any]], Any],
    written: Sequence[tuple[int, str]],
    unread: int | None = None,
) -> list[Any]:
    """`call` on the row of each rank, once for all ranks whose rows are equal.

    Args:
        rows: each rank's tensors and other values.
        call: runs the operator on a row.
        written: the positions in a row of the tensors that it writes to, and the names of their arguments.
        unread: the position in a row of a tensor of which only the shape is read.
    """
    if not _shares or any(is_traced(value) for value in rows[0] if isinstance(value, torch.Tensor)):
        return [call(row) for row in rows]
    found: list[int] = []  # for each rank the first one with the same row
    for rank, row in enumerate(rows):
        found.append(next((i for i in dict.fromkeys(found) if _equal(rows[i], row, unread)), rank))
    results: list[Any] = []
    for rank, (row, first) in enumerate(zip(rows, found, strict=True)):
        results.append(call(row) if first == rank else _repeat(row, rows[first], results[first], written))
    return results


def _equal(a: Sequence[Any], b: Sequence[Any], unread: int | None) -> bool:
    return all(x.shape == y.shape if i == unread else _same(x, y) for i, (x, y) in enumerate(zip(a, b, strict=True)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return agree(a, b)
    if isinstance(a, dict):
        return a is b or (a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items()))
    return a is b or a == b


def _repeat(row: Sequence[Any], first: Sequence[Any], result: Any, written: Sequence[tuple[int, str]]) -> Any:
    """The results of another rank with an equal row, for this row."""
    for position, _ in written:
        if row[position] is not first[position]:
            row[position].copy_(first[position])

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        at = next((position for position, _ in written if value is first[position]), None)
        return value.clone() if at is None else row[at]

    return tree_map(own, result)
