"""Recurrences of state-space models and linear attention along a sharded sequence: ranks exchange only states.

The received bytes do not depend on the length: one state for each rank, by `associative_scan` over chunks. The
functions have the signatures of the functions in models, and replace them. On plain tensors they compute the same.
Models themselves multiply a matrix of all pairs of chunks with all states, or loop over chunks in Python. Then a rank
receives the states of all chunks, which no rule of an operator can avoid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import UnsupportedError
from shardwise.tensor import DTensor
from shardwise.torch_private import higher_order_ops

__all__ = ["chunk_gated_delta_rule", "linear_attention", "mamba2_chunk_scan"]

TOKENS = 1  # the dim of the sequence in the arguments
SMALLEST = 4  # the largest factor by which chunks are made smaller, so that shards consist of full chunks
FinalState = torch.Tensor | None
# Arguments of fused kernels under these names that change the result: gates, scales, bounds of packed sequences.
CHANGING = ("z", "scale", "seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "chunk_indices", "head_first")


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """The selective scan of Mamba 2; replaces the function of this name in models of transformers.

    Those are Mamba 2, Zamba 2, Bamba, Falcon H1, Granite hybrids and Nemotron H. The state of a head changes by
    `exp(A * dt) * state + dt * outer(x, B)`, and is read by `C`.

    Args:
        hidden_states: (batch, tokens, heads, width).
        dt: time steps, (batch, tokens, heads).
        A: decays of the heads, negative.
        B: the factors by which tokens are written to states, (batch, tokens, groups, state).
        C: the factors by which tokens read states, of the same shape.
        chunk_size: tokens that are computed together; smaller if shards do not consist of full chunks.
        D: the factor by which each head adds its input to the output.
        dt_bias: added to time steps.
        initial_states: (batch, heads, width, state).
        dt_softplus: whether to apply a softplus to time steps.
        dt_limit: the smallest and the largest time step.
        return_final_states: whether to return the last state too.
        kwargs: other arguments of models, not used. Those that would change the result are refused, unless None.

    Returns:
        (batch, tokens, heads, width) in float32, or float64 for float64; with the last state if requested.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> x, dt, B, C = (torch.rand(1, 64, *size) for size in ((2, 4), (2,), (1, 3), (1, 3)))
        >>> laid_out = [sw.distribute_tensor(t, mesh, [sw.Shard(1)]) for t in (x, dt, B, C)]
        >>> y = mamba2_chunk_scan(laid_out[0], laid_out[1], -torch.ones(2), *laid_out[2:], chunk_size=8)
        >>> y.spec
        f32[1,64,2,4] S1
    """
    _refuse_changing("mamba2_chunk_scan", kwargs)
    heads = hidden_states.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    values = _wide(hidden_states)
    steps = _wide(dt)
    read, written = (_wide(x).repeat_interleave(heads // x.shape[2], 2, output_size=heads) for x in (C, B))
    start = None if initial_states is None else initial_states.to(values.dtype).mT
    decay = A.to(values.dtype) * steps
    out, state = _scan(read, written, values * steps.unsqueeze(-1), decay, chunk_size, start)
    if D is not None:
        out = out + D.unsqueeze(-1) * values
    return (out, state.mT) if return_final_states else out


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor | None = None,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, FinalState]:
    """Causal linear attention, gated or not: a state of each head, `exp(g) * state + outer(key, value)`.

    Args:
        query: (batch, tokens, heads, width).
        key: the same shape.
        value: (batch, tokens, heads, width of values).
        g: logarithms of decays, (batch, tokens, heads); None: no decay.
        chunk_size: tokens that are computed together; smaller if shards do not consist of full chunks.
        initial_state: (batch, heads, width, width of values).
        output_final_state: whether to return the last state too.
        scale: of queries.

    Returns:
        The output, (batch, tokens, heads, width of values), in the dtype of the queries, and the last state or None.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> q, k, v = (sw.distribute_tensor(torch.rand(1, 64, 2, 4), mesh, [sw.Shard(1)]) for _ in "qkv")
        >>> linear_attention(q, k, v, chunk_size=8)[0].spec
        f32[1,64,2,4] S1
    """
    read, written, values = (_wide(x) for x in (query * scale, key, value))
    decay = torch.zeros_like(read[..., 0]) if g is None else _wide(g)
    start = None if initial_state is None else initial_state.to(read.dtype)
    out, state = _scan(read, written, values, decay, chunk_size, start)
    return out.to(query.dtype), state if output_final_state else None


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, FinalState]:
    """The gated delta rule; replaces `torch_chunk_gated_delta_rule` in Qwen3-Next, Qwen3.5 and OLMo hybrids.

    Args:
        query: (batch, tokens, heads, width).
        key: the same shape.
        value: (batch, tokens, heads, width of values).
        g: logarithms of decays, (batch, tokens, heads).
        beta: the weight by which a token is written, (batch, tokens, heads).
        chunk_size: tokens that are computed together; smaller if shards do not consist of full chunks.
        initial_state: (batch, heads, width, width of values).
        output_final_state: whether to return the last state too.
        use_qk_l2norm_in_kernel: whether queries and keys are normalized first.
        kwargs: other arguments of models, not used. Those that would change the result are refused, unless None.

    Returns:
        The output, (batch, tokens, heads, width of values), in the dtype of the queries, and the last state or None.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> q, k, v = (sw.distribute_tensor(torch.rand(1, 64, 2, 4), mesh, [sw.Shard(1)]) for _ in "qkv")
        >>> g, beta = (sw.distribute_tensor(torch.rand(1, 64, 2), mesh, [sw.Shard(1)]) for _ in "gb")
        >>> chunk_gated_delta_rule(q, k, v, -g, beta, chunk_size=8)[0].spec
        f32[1,64,2,4] S1
    """
    _refuse_changing("chunk_gated_delta_rule", kwargs)
    length = query.shape[TOKENS]
    wide = [_wide(x) for x in (query, key, value, beta, g)]
    if use_qk_l2norm_in_kernel:
        wide[:2] = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in wide[:2]]
    q, k, v, beta, g = _in_chunks(wide, chunk_size)
    q = q * q.shape[-1] ** -0.5
    decay = g.cumsum(-1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(_later(g), -math.inf).exp()
    system = (k * beta.unsqueeze(-1)) @ k.mT * between
    right_sides = v * beta.unsqueeze(-1), k * (beta * decay.exp()).unsqueeze(-1)
    new, read = (torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in right_sides)
    write = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).mT
    kept = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) * decay[..., -1].exp()[..., None, None]
    start = None if initial_state is None else initial_state.to(q.dtype)
    before, state = _states((kept - write @ read, write @ new), start, _then_matrix, torch.matmul)
    out = (q * decay.exp().unsqueeze(-1)) @ before + (q @ k.mT * between) @ (new - read @ before)
    return _tokens(out, length).to(query.dtype), state if output_final_state else None


def _refuse_changing(function: str, given: dict[str, Any]) -> None:
    name = next((name for name in CHANGING if given.get(name) is not None and given[name] is not False), None)
    if name is not None:
        raise UnsupportedError(
            f"{function}: the argument {name} is not supported, and without it the result would be another",
            hint="packed sequences: one sequence in each row of the batch; gates and scales: apply them to the result",
        )


# ---------------------------------------------------------------- chunks


def _wide(x: Any) -> Any:
    """`x` in at least float32."""
    return x if x.dtype is torch.float64 else x.float()


def _scan(
    read: Any, written: Any, values: Any, decay: Any, chunk_size: int, start: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `read @ state` and the last state of `state = exp(decay) * state + outer(written, value)`."""
    length = values.shape[TOKENS]
    q, k, v, g = _in_chunks([read, written, values, decay], chunk_size)
    within = _sums_between(g).exp()
    decay = g.cumsum(-1)
    new = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).mT @ v
    kept = decay[..., -1].exp()[..., None, None]
    before, state = _states((kept, new), start, _then_factor, torch.mul)
    out = (q @ k.mT * within) @ v + (q * decay.exp().unsqueeze(-1)) @ before
    return _tokens(out, length), state


def _in_chunks(tensors: list[Any], chunk_size: int) -> list[Any]:
    """Each tensor as (batch, chunks, heads, tokens of a chunk, ...), padded with zeros at the end."""
    length, size = _chunks(tensors, chunk_size)
    found = []
    for x in tensors:
        missing = length - x.shape[TOKENS]
        padded = F.pad(x, (*(0,) * (2 * (x.dim() - TOKENS - 1)), 0, missing)) if missing else x
        found.append(padded.unflatten(TOKENS, (length // size, size)).movedim(3, 2))
    return found


def _chunks(tensors: list[Any], chunk_size: int) -> tuple[int, int]:
    """The padded number of tokens, and the size of chunks: shards consist of full chunks, if possible."""
    length = tensors[0].shape[TOKENS]
    sharded = next((x for x in tensors if isinstance(x, DTensor) and x.spec.dim_axes[TOKENS]), None)
    parts = 1 if sharded is None else math.prod(sharded.device_mesh.shape[a] for a in sharded.spec.dim_axes[TOKENS])
    part = -(-length // parts)
    size = next((n for n in range(min(chunk_size, part), 0, -1) if part % n == 0), 1)
    if parts == 1 or (size < chunk_size and SMALLEST * size < min(chunk_size, part)):
        return -(-length // chunk_size) * chunk_size, chunk_size
    return part * parts, size


def _tokens(out: Any, length: int) -> Any:
    """Chunks as tokens, without padding."""
    flat = out.movedim(2, 3).flatten(1, 2)
    return flat if flat.shape[TOKENS] == length else flat[:, :length]


def _later(g: Any) -> torch.Tensor:
    """For two tokens of a chunk, whether the second is later than the first."""
    return torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)


def _sums_between(g: Any) -> Any:
    """For two tokens of a chunk, the sum of `g` after the second up to the first; minus infinity for a later second.

    Differences of sums from the beginning would be less accurate.
    """
    size = g.shape[-1]
    earlier = _later(g).T
    sums = g.unsqueeze(-1).expand(*g.shape, size).masked_fill(~earlier, 0.0).cumsum(-2)
    return sums.masked_fill(_later(g), -math.inf)


# ---------------------------------------------------------------- states


def _then_factor(left: Any, right: Any) -> Any:
    """The composition of two changes of a state, each a factor and an addend."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def _then_matrix(left: Any, right: Any) -> Any:
    """The composition of two changes of a state, each a matrix and an addend."""
    return right[0] @ left[0], right[0] @ left[1] + right[1]


def _states(changes: tuple[Any, Any], start: Any, then: Any, apply: Any) -> tuple[Any, Any]:
    """The state before each chunk, and the last state, from the changes of the chunks."""
    total, after = higher_order_ops.associative_scan(then, changes, dim=1, combine_mode="generic")
    if start is not None:
        after = after + apply(total, start.unsqueeze(1))
    before = F.pad(after, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    if start is not None:
        first = torch.arange(after.shape[1], device=after.device).view(1, -1, 1, 1, 1) == 0
        before = torch.where(first, start.unsqueeze(1), before)
    return before, after[:, -1]
