"""Recurrences of models along a sharded sequence against a loop over tokens: values, gradients, received bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise import Replicate, Shard, Zigzag
from shardwise.recurrences import chunk_gated_delta_rule, linear_attention, mamba2_chunk_scan

R, S0, S1, S2, Z1 = Replicate(), Shard(0), Shard(1), Shard(2), Zigzag(1)
LAYOUTS: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    ((4,), (S1,)), ((3,), (S1,)), ((2, 2), (S1, S1)), ((2, 2), (S0, S1)), ((2, 2, 2), (S0, S2, S1)), ((3,), (Z1,)),
)  # fmt: skip
HEADS, WIDTH, STATE, GROUPS = 4, 5, 3, 2


def mamba2_loop(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, bias: Any, state: Any) -> list[Any]:
    """Token by token."""
    dt = F.softplus(dt + bias).clamp(0.01, 3.0)
    b, c = (y.repeat_interleave(HEADS // GROUPS, 2) for y in (b, c))
    found = []
    for t in range(x.shape[1]):
        change = (dt[:, t] * a).exp()[..., None, None]
        state = state * change + (dt[:, t].unsqueeze(-1) * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(-2)
        found.append((state @ c[:, t].unsqueeze(-1)).squeeze(-1) + d.unsqueeze(-1) * x[:, t])
    return [torch.stack(found, 1), state]


def mamba2_chunks(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, bias: Any, state: Any) -> list[Any]:
    options = {"D": d, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "dt_limit": (0.01, 3.0)}
    return list(mamba2_chunk_scan(x, dt, a, b, c, 8, return_final_states=True, **options))


def delta_loop(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> list[Any]:
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    found = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = (state * k[:, t].unsqueeze(-1)).sum(-2)
        new = (v[:, t] - old) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        found.append((state * q[:, t].unsqueeze(-1)).sum(-2) * q.shape[-1] ** -0.5)
    return [torch.stack(found, 1), state]


def delta_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> list[Any]:
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return list(chunk_gated_delta_rule(q, k, v, g, beta, 8, **options))


def linear_loop(q: Any, k: Any, v: Any, g: Any, state: Any) -> list[Any]:
    found = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None] + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        found.append((state * q[:, t].unsqueeze(-1)).sum(-2) * 0.5)
    return [torch.stack(found, 1), state]


def linear_chunks(q: Any, k: Any, v: Any, g: Any, state: Any) -> list[Any]:
    return list(linear_attention(q, k, v, g, 8, state, True, 0.5))


def drawn(name: str, length: int) -> list[tuple[torch.Tensor, bool]]:
    """The arguments of a call in float64, and whether each has tokens."""
    generator = torch.Generator().manual_seed(length)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    tokens = (2, length, HEADS)
    if name == "mamba2":
        of_tokens = rand(*tokens, WIDTH), rand(*tokens), rand(2, length, GROUPS, STATE), rand(2, length, GROUPS, STATE)
        x, dt, b, c = ((t, True) for t in of_tokens)
        rest = [(t, False) for t in (rand(HEADS), rand(HEADS), rand(2, HEADS, WIDTH, STATE))]
        return [x, dt, (-rand(HEADS).exp(), False), b, c, *rest]
    decays = -rand(*tokens).square()
    found = [rand(*tokens, STATE), rand(*tokens, STATE), rand(*tokens, WIDTH), decays]
    found += [rand(*tokens).sigmoid()] if name == "delta" else []
    return [*((t, True) for t in found), (rand(2, HEADS, STATE, WIDTH), False)]


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mamba2": (mamba2_loop, mamba2_chunks),
    "delta": (delta_loop, delta_chunks),
    "linear": (linear_loop, linear_chunks),
}


def results(run: Callable[..., Any], given: list[Any]) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in given]
    out, state = run(*leaves)
    return [out.detach(), state.detach(), *torch.autograd.grad(out.square().sum() + state.sum(), leaves)]


def laid_out(given: list[tuple[torch.Tensor, bool]], shape: Any, placements: Any) -> list[Any]:
    mesh = sw.init_device_mesh("cpu", shape)
    without = [R if not isinstance(p, Shard | Zigzag) or p.dim else p for p in placements]
    found = []
    for x, has_tokens in given:
        chosen = placements if has_tokens else [R if x.dim() < 3 else p for p in without]
        found.append(sw.distribute_tensor(x, mesh, chosen))
    return found


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("length", [48, 40, 37])
def test_as_token_by_token(name: str, length: int) -> None:
    """On plain tensors and on every layout, also of lengths that do not divide."""
    loop, chunks = FORMS[name]
    given = drawn(name, length)
    wanted = results(loop, [x for x, _ in given])
    runs = [[x for x, _ in given], *(laid_out(given, *layout) for layout in LAYOUTS)]
    for tensors in runs:
        for mine, plain in zip(results(chunks, tensors), wanted, strict=True):
            whole = mine.full_tensor() if isinstance(mine, sw.DTensor) else mine
            assert float((whole - plain).norm() / plain.norm()) < 1e-12


@pytest.mark.parametrize("name", FORMS)
def test_what_is_received_does_not_depend_on_the_length(name: str) -> None:
    """Forward and backward; also where shards do not consist of chunks of this size."""
    received = []
    for length in (128, 256, 512, 100, 250):
        tensors = laid_out(drawn(name, length), (4,), (S1,))
        with sw.debug.CommDebugMode() as comm:
            out = results(FORMS[name][1], tensors)[0]
        assert out.placements == (S1,)
        received.append(comm.received_bytes)
    assert len(set(received)) == 1
    state = 2 * HEADS * max(STATE * WIDTH, STATE * STATE) * 8
    assert received[0] < 40 * state


def test_half_precision() -> None:
    given = [(x.bfloat16(), tokens) for x, tokens in drawn("delta", 48)]
    exact = delta_chunks(*(x.double() for x, _ in given))
    plain = delta_chunks(*(x for x, _ in given))
    mine = delta_chunks(*laid_out(given, (4,), (S1,)))
    assert (mine[0].dtype, mine[1].dtype) == (plain[0].dtype, plain[1].dtype) == (torch.bfloat16, torch.float32)
    for got, other, truth in zip(mine, plain, exact, strict=True):
        error, allowed = ((x.double() - truth).abs().max() for x in (got.full_tensor(), other))
        assert error <= 2 * allowed


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx", "z"])
def test_arguments_that_change_the_result_are_refused(name: str) -> None:
    x, dt = torch.randn(1, 8, 2, 4), torch.rand(1, 8, 2)
    given: dict[str, Any] = {name: torch.tensor([0, 3, 8])}
    with pytest.raises(sw.UnsupportedError, match=name):
        mamba2_chunk_scan(x, dt, -torch.ones(2), x, x, 4, **given)
    with pytest.raises(sw.UnsupportedError, match=name):
        chunk_gated_delta_rule(x, x, x, -dt, dt, 4, **given)
    unused: dict[str, Any] = {name: None, "use_cache": True}
    assert torch.equal(
        chunk_gated_delta_rule(x, x, x, -dt, dt, 4, **unused)[0], chunk_gated_delta_rule(x, x, x, -dt, dt, 4)[0]
    )
