"""Fused attention: batch and heads are parallel, queries too without a causal mask; keys must not be sharded.

`ALGORITHMS` attend to a sharded sequence; `plan/sequence_attention.py` chooses among them. Calls with dropout have no
rule here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.attention_blocks import MASKS, BlockKernel, Kernel
from shardwise.rules.dims import aligned
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten

QUERY, KEY, VALUE, OUT = ("b", "h", "s", "e"), ("b", "h", "t", "e"), ("b", "h", "t", "v"), ("b", "h", "s", "v")
SUMS = ("b", "h", "s", None)  # of the exponentials, one for each query; some kernels leave the last dim out
UNSHARDED = frozenset("etv")
# argument names of the operators
DIMS: dict[str, tuple[Dim, ...]] = {
    "query": QUERY, "key": KEY, "value": VALUE, "out": OUT, "grad_out": OUT, "grad_out_": OUT, "logsumexp": SUMS,
    "grad_logsumexp": SUMS,
}  # fmt: skip


def operand_dims(name: str, meta: TensorMeta, scores: Sequence[int]) -> tuple[Dim, ...]:
    """The factors of an argument, by its name."""
    if name in MASKS:
        return aligned(meta.shape, ("b", "h", "s", "t"), scores)
    return DIMS[name][: len(meta.shape)] if name in DIMS else (None,) * len(meta.shape)


def attention(
    *results: tuple[Dim, ...], unsharded: str = "", algorithm: str = "", empty: bool = False
) -> Callable[[Call], Factors | None]:
    """The rule of an attention operator.

    Args:
        results: the factors of its first results. Others are states of the random generator.
        unsharded: further factors that must not be sharded.
        algorithm: which dims of a sequence may be sharded. "ring": queries and keys, by one factor. "gather": queries,
            with any mask. "heads": neither. "": queries, unless the mask is causal.
        empty: whether local sequences may be empty.
    """

    def factors(call: Call) -> Factors | None:
        query, key = call["query"].shape, call["key"].shape
        of_bias = len(results) == 3 and len(call.results) == 4
        if algorithm in BY_BLOCKS and of_bias:  # blocks give no gradient of the mask
            return None
        if call.get("dropout_p") or call.get("return_debug_mask") or len(query) != 4 or query[0] != key[0]:
            return None
        scores = (*query[:3], key[2])
        operands = {name: operand_dims(name, meta, scores) for name, meta in call.tensors.items()}
        given = [dims[: len(meta.shape)] for dims, meta in zip(results, call.results, strict=False)]
        rest = range(len(given), len(call.results))
        if of_bias:
            given.append(operands["attn_bias"])
            rest = range(0)
        tensors = tuple(operands.values())
        if algorithm == "ring":
            tensors, given = tuple(map(_travelling, call.tensors, tensors)), [_one_sequence(dims) for dims in given]
        stays = algorithm == "heads" or (algorithm == "" and call.get("is_causal"))
        return Factors(
            tensors,
            (*given, *((None,) * len(call.results[i].shape) for i in rest)),
            unsharded=UNSHARDED | frozenset(unsharded) | frozenset("s" if stays else ""),
            summed=frozenset("bhs"),
            untouched=frozenset(itertools.product("bhs", rest)),
            nonempty=frozenset("bh" if empty else "bhs"),
            # a head of the keys serves several of the queries: both must be split at the same heads
            even=frozenset("h" if query[1] != key[1] else ""),
        )

    return factors


def _one_sequence(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """`dims` with one factor for queries and keys: each rank has a block of both."""
    return tuple("s" if name == "t" else name for name in dims)


def _travelling(name: str, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The factors of an argument if keys rotate; the columns of a mask are replicated."""
    return tuple(None if n == "t" else n for n in dims) if name in MASKS else _one_sequence(dims)


def local_length(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local number of queries."""
    return {"max_q": inputs[list(call.tensors).index("query")].local_shape(coordinate)[2]}


def padded(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias whose rows are aligned for the efficient kernels; copies and parts may not be."""
    if bias is None:
        return bias
    steps = (*bias.stride()[:-1], bias.storage_offset())
    if bias.stride(-1) == 1 and all(step % ALIGNMENT == 0 for step in steps):
        return bias
    size = bias.shape[-1]
    stored = bias
    for dim in range(bias.dim() - 2):
        if bias.stride(dim) == 0:  # one value for all samples or heads
            stored = stored.narrow(dim, 0, 1)
    return torch.nn.functional.pad(stored, (0, -size % ALIGNMENT))[..., :size].expand(bias.shape)


def in_rows(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` on locals with contiguous rows. Its kernel assumes that; redistributed locals may differ."""

    def attend_in_rows(*args: Any, **kwargs: Any) -> Any:
        return op(*map(_with_rows, args), **kwargs)

    return attend_in_rows


def _with_rows(arg: Any) -> Any:
    odd = isinstance(arg, torch.Tensor) and arg.ndim == 4 and arg.stride(-1) != 1
    return arg.contiguous() if odd else arg


def efficient(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Memory-efficient attention on locals. It always returns one sum for each query.

    The kernel returns sums for a number of queries that is rounded up; the padding is cut off.
    """
    op = aten._scaled_dot_product_efficient_attention.default
    out, sums, *state = op(query, key, value, padded(attn_bias), True, dropout_p, is_causal, scale=scale)
    return (out, sums.narrow(-1, 0, query.shape[2]), *state)


def efficient_backward(
    grad_out_: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_bias: torch.Tensor | None,
    out: Any,
    logsumexp: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """The gradients of memory-efficient attention on locals. Sums are padded with infinity: padding adds nothing.

    The kernel assumes the strides of its own output, with the heads of a query adjacent. It does not check them:
    another order gives wrong gradients.
    """
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    sums = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % SUMS_ALIGNMENT), value=math.inf)
    return backward(grad_out_, query, key, value, padded(attn_bias), out, sums, *rest, **named)


READS = ("dropout_p",)
ALIGNMENT = 16  # of the rows of a mask
SUMS_ALIGNMENT = 32  # of the number of queries that the efficient kernel has sums for
BY_BLOCKS = ("ring", "gather")
ALGORITHMS = ("ring", "heads", "gather")  # for a sharded sequence
# Fused operators that compute blocks, and whether each is a gradient.
KERNELS: dict[Any, tuple[Kernel, bool]] = {}


def algorithms_of(*results: tuple[Dim, ...], empty: bool) -> dict[str, Callable[[Call], Factors | None]]:
    """The algorithms of an attention operator, by the factors of its results."""
    return {name: attention(*results, algorithm=name, empty=empty and name != "heads") for name in ALGORITHMS}


for forward in (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
):
    rule(forward, reads=READS, local_op=in_rows(forward))(attention(OUT, SUMS))

for backward in (
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
):
    rule(backward, reads=READS, local_op=in_rows(backward), localize=local_length)(attention(QUERY, KEY, VALUE))

# ---------------------------------------------------------------- kernels on one block of a sequence

on_cpu = in_rows(aten._scaled_dot_product_flash_attention_for_cpu.default)
on_cpu_backward = in_rows(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
flash = in_rows(aten._scaled_dot_product_flash_attention.default)
flash_backward = in_rows(aten._scaled_dot_product_flash_attention_backward.default)


def cpu_block(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """A block on a CPU."""
    return on_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)


def cpu_block_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, given: Any
) -> Any:
    """The gradients of a block on a CPU."""
    options = {"attn_mask": mask, "scale": given["scale"]}
    return on_cpu_backward(grad_out, query, key, value, out, lse, 0.0, causal, **options)


def flash_block(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """A block on a GPU; this kernel takes no mask."""
    return flash(query, key, value, 0.0, causal, False, scale=scale)


def flash_block_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, given: Any
) -> Any:
    """The gradients of a block on a GPU."""
    lengths = (given["cum_seq_q"], given["cum_seq_k"], query.shape[2], key.shape[2])
    random = (given["philox_seed"], given["philox_offset"])
    sums = lse.contiguous()
    return flash_backward(grad_out, query, key, value, out, sums, *lengths, 0.0, causal, *random, scale=given["scale"])


def efficient_block(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """A block on a GPU, by the kernel that takes masks."""
    return in_rows(efficient)(query, key, value, mask, True, 0.0, causal, scale=scale)


def efficient_block_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, given: Any
) -> Any:
    """The gradients of a block on a GPU, by the kernel that takes masks."""
    random = (given["philox_seed"], given["philox_offset"])
    wanted = [True, True, True, False]
    options = (0.0, wanted, causal)
    return in_rows(efficient_backward)(
        grad_out, query, key, value, mask, out, lse, *random, *options, scale=given["scale"]
    )[:3]


CPU, GPU = BlockKernel(cpu_block, cpu_block_backward), BlockKernel(flash_block, flash_block_backward)
MASKED = BlockKernel(efficient_block, efficient_block_backward)
for op, local_op, kernel, meta in (
    (aten._scaled_dot_product_flash_attention_for_cpu.default, on_cpu, CPU, None),
    (aten._scaled_dot_product_flash_attention.default, flash, GPU, None),
    (aten._scaled_dot_product_efficient_attention.default, in_rows(efficient), MASKED, efficient),
):
    algorithms = algorithms_of(OUT, SUMS, empty=kernel is CPU)
    rule(op, reads=READS, local_op=local_op, meta_op=meta, algorithms=algorithms)(attention(OUT, SUMS))
    KERNELS[op] = kernel, False

efficient_gradient = in_rows(efficient_backward)
for op, local_op, kernel, localize in (
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, on_cpu_backward, CPU, None),
    (aten._scaled_dot_product_flash_attention_backward.default, flash_backward, GPU, local_length),
    (aten._scaled_dot_product_efficient_attention_backward.default, efficient_gradient, MASKED, None),
):
    of_each = (QUERY, KEY, VALUE)
    algorithms = algorithms_of(*of_each, empty=kernel is CPU)
    rule(op, reads=READS, local_op=local_op, localize=localize, algorithms=algorithms)(attention(*of_each))
    KERNELS[op] = kernel, True
