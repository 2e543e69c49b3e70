"""Memory-efficient attention over a sharded sequence: the operator of a GPU, here emulated on a CPU as its kernel is.

The emulation has what matters of the kernel: sums for a number of queries that is rounded up to 32, infinity where
there is no query, and masks whose rows begin at multiples of 16.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise import Replicate, Shard, Zigzag

aten = torch.ops.aten
R, S0, S1, S2, Z2 = Replicate(), Shard(0), Shard(1), Shard(2), Zigzag(2)


def check_bias(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> None:
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(-1) == 1
        assert bias.storage_offset() % 16 == 0
        assert all(stride % 16 == 0 for stride in bias.stride()[:-1])


def scores(query: Any, key: Any, bias: Any, causal: bool, scale: float | None) -> Any:
    check_bias(bias, query, key)
    found = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        found = found.masked_fill(~torch.ones(found.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return found if bias is None else found + bias


def forward(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    found = scores(query, key, bias, causal, scale)
    lse = found.logsumexp(-1).float()
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf) if sums else lse[..., :0]
    out = found.softmax(-1).nan_to_num(0.0) @ value
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, lse: Any, seed: Any, offset: Any, dropout: float,
    wanted: list[bool], causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    rows = query.shape[2]
    assert lse.shape[-1] == -(-rows // 32) * 32
    assert (lse[..., rows:] == math.inf).all()
    weights = (scores(query, key, bias, causal, scale) - lse[..., :rows, None]).exp().nan_to_num(0.0)
    of_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    of_bias = of_scores if wanted[3] else None
    return of_scores @ key * factor, of_scores.mT @ query * factor, weights.mT @ grad, of_bias


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL", "CPU") as library:
        library.impl("_scaled_dot_product_efficient_attention", forward)
        library.impl("_scaled_dot_product_efficient_attention_backward", backward)
        yield


def tensors(length: int, keys: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, 4, size, 8, generator=generator) for size in (length, keys or length, keys or length)]


def mask_of(kind: str, rows: int, columns: int) -> torch.Tensor | None:
    """A mask as torch's function gives it to the kernel: of every sample and head, rows padded to multiples of 16."""
    if kind in ("none", "causal"):
        return None
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.rand(1, 1, rows, columns, generator=generator) < 0.4
    if kind == "dead rows":
        hidden[..., 3:6, :] = True
    if kind == "window":
        hidden = ~torch.ones(rows, columns, dtype=torch.bool).tril().triu(-4)[None, None]
    stored = F.pad(torch.zeros(1, 1, rows, columns).masked_fill(hidden, -math.inf), (0, -columns % 16))
    return stored[..., :columns].expand(2, 4, rows, columns)


def attend(operands: list[Any], mask: Any, causal: bool) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in operands]
    out = aten._scaled_dot_product_efficient_attention.default(*leaves, mask, True, 0.0, causal, scale=0.3)[0]
    return [out, *torch.autograd.grad(out.square().sum() + out.sum(), leaves)]


def plainly(operands: list[Any], mask: Any, causal: bool) -> list[Any]:
    """By the mathematical path, with zeros for queries that see nothing."""
    leaves = [x.detach().requires_grad_() for x in operands]
    found = leaves[0] @ leaves[1].mT * 0.3
    hidden = torch.zeros(found.shape[-2:]) if mask is None else mask
    if causal:
        hidden = hidden.masked_fill(~torch.ones(found.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    dead = (hidden == -math.inf).all(-1, keepdim=True)
    weights = (found + hidden.masked_fill(dead, 0.0)).softmax(-1) * ~dead
    out = weights @ leaves[2]
    return [out, *torch.autograd.grad(out.square().sum() + out.sum(), leaves)]


LAYOUTS = (
    ((4,), (S2,), (S2,)),
    ((3,), (Z2,), (Z2,)),
    ((2, 2), (S0, Z2), (S0, S2)),
    ((4,), (S2,), (R,)),
    ((4,), (R,), (S2,)),
)


@pytest.mark.parametrize("kind", ["none", "causal", "mask", "dead rows", "window"])
@pytest.mark.parametrize("way", [None, "ring", "gather", "heads"])
def test_every_way(kind: str, way: str | None) -> None:
    for rows, columns in ((64, 64), (46, 46), (40, 70)):
        plain, mask = tensors(rows, columns), mask_of(kind, rows, columns)
        wanted = plainly(plain, mask, kind == "causal")
        for shape, of_query, of_keys in LAYOUTS:
            mesh = sw.init_device_mesh("cpu", shape)
            laid = [sw.distribute_tensor(x, mesh, of_keys if i else of_query) for i, x in enumerate(plain)]
            with sw.attention(prefer=way), sw.explain() as report:
                got = attend(laid, mask, kind == "causal")
            moves = of_keys != (R,)
            if moves and way is not None and (way != "heads" or shape != (3,)):
                assert {r.way for r in report.records if "efficient" in r.name} == {way}
            assert got[0].placements == of_query
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_mask_needs_whole_rows() -> None:
    plain = tensors(32)
    bias = torch.randn(2, 4, 32, 32)
    mesh = sw.init_device_mesh("cpu", (4,))

    def gradient(operands: list[Any], bias: Any) -> Any:
        bias = bias.detach().requires_grad_()
        out = aten._scaled_dot_product_efficient_attention.default(*operands, bias, True, scale=0.3)[0]
        return torch.autograd.grad(out.square().sum(), bias)[0]

    wanted = gradient([x.requires_grad_() for x in plain], bias)
    laid = [sw.distribute_tensor(x.detach(), mesh, [S2]).requires_grad_() for x in plain]
    with sw.attention(prefer="ring"):
        got = gradient(laid, sw.distribute_tensor(bias, mesh, [R]))
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-5, atol=1e-5)


def test_a_dry_run_of_a_gpu_with_a_mask() -> None:
    peaks = []
    for ranks in (8, 64):
        with sw.dry_run() as run, sw.attention(prefer="ring"):
            mesh = sw.init_device_mesh("cuda", (ranks,))
            x, mask = (
                sw.zeros(shape, dtype=dtype, device_mesh=mesh, placements=[placement])
                for shape, dtype, placement in (
                    ((1, 8, 64 * ranks, 64), torch.bfloat16, S2), ((64 * ranks, 1), torch.bool, S0)
                )
            )  # fmt: skip
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        peaks.append(run.peak_bytes)
        assert run.bytes == (ranks - 1) * 2 * 64 * 8 * 64 * 2
    assert peaks[1] <= 1.02 * peaks[0]
