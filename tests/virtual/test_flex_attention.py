"""`flex_attention` on DTensors: masks and modified scores on every layout, against one device."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import shardwise as sw
from shardwise import Replicate, Shard, Zigzag
from shardwise.torch_private import flex_attention as operator

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

R, S0, S1, S2, Z2 = Replicate(), Shard(0), Shard(1), Shard(2), Zigzag(2)
LENGTH = 21
DOCUMENTS = torch.tensor([0] * 6 + [1] * 10 + [2] * 5)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
BIAS = torch.linspace(-1, 1, 2 * LENGTH, dtype=torch.float64)
Mod = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs() <= 3


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)


def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < 4 + b) | (q >= k)


def sinks(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q >= k) & (q - k < 4)) | (k < 2)


def first_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & ((h < 2) | (q != 7))  # of the others one query attends to nothing


def linear_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * (k - q)


def relative_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + BIAS[q - k + LENGTH]


def soft_cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2 * (score / 2).tanh()


CASES: dict[str, tuple[Mod | None, Mod | None]] = {
    "nothing": (None, None),
    "causal": (None, causal),
    "window": (None, window),
    "documents": (None, documents),
    "prefix": (None, prefix),
    "sinks": (soft_cap, sinks),
    "heads": (linear_bias, first_heads),
    "bias": (relative_bias, causal),
}
LAYOUTS: tuple[tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]], ...] = (
    ((4,), (S2,), (S2,)), ((3,), (Z2,), (Z2,)), ((2, 2), (S0, Z2), (S0, S2)), ((2, 2), (S1, S2), (S1, S2)),
    ((2, 2), (S0, S1), (S0, S1)), ((4,), (R,), (S2,)), ((4,), (S2,), (R,)), ((2, 2, 2), (S0, S1, Z2), (S0, S1, Z2)),
)  # fmt: skip


def create(mask: Mod) -> BlockMask:
    return create_block_mask(mask, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def operands(heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = (2, 4, LENGTH, 8), (2, heads, LENGTH, 8), (2, heads, LENGTH, 8)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def laid_out(plain: list[torch.Tensor], layout: Any) -> list[Any]:
    shape, of_query, of_keys = layout
    mesh = sw.init_device_mesh("cpu", shape)
    return [sw.distribute_tensor(x, mesh, of_keys if i else of_query) for i, x in enumerate(plain)]


def identity(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score


def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k >= 0


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name: str) -> None:
    score, mask = CASES[name]
    plain, blocks = operands(), create(mask or everything).as_tuple()
    wanted = operator(*plain, score or identity, blocks, 0.3, {})
    for layout in LAYOUTS:
        got = operator(*laid_out(plain, layout), score or identity, blocks, 0.3, {})
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
        assert got[0].placements == layout[1]


def test_the_function_that_models_call() -> None:
    plain = operands()
    for name, layout in (("causal", LAYOUTS[0]), ("bias", LAYOUTS[2]), ("documents", LAYOUTS[2])):
        score, mask = CASES[name]
        blocks = create(mask or everything)
        wanted = flex_attention(*plain, score_mod=score, block_mask=blocks)
        got: Any = flex_attention(*laid_out(plain, layout), score_mod=score, block_mask=blocks)
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
        assert got.placements == layout[1]


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_grouped_heads_and_sums() -> None:
    plain, blocks = operands(heads=2), create(causal)
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": True, "scale": 0.3, "return_lse": True}
    wanted, sums = flex_attention(*plain, **options)
    out, lse = flex_attention(*laid_out(plain, LAYOUTS[2]), **options)
    torch.testing.assert_close(out.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.full_tensor(), sums, rtol=1e-12, atol=1e-12)


def test_a_sink_is_one_more_logit() -> None:
    """As models have it: the sum of exponentials grows by that of a learned logit for each head."""
    plain, sink = operands(), torch.tensor([0.1, -0.3, 0.7, 1.5], dtype=torch.float64)
    hidden = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def written_out(q: Any, k: Any, v: Any) -> Any:
        """Without this operator."""
        scores = (q @ k.mT * 0.3).masked_fill(hidden, -math.inf)
        logits = torch.cat([scores, sink.view(1, -1, 1, 1).expand(2, 4, LENGTH, 1)], -1)
        return logits.softmax(-1)[..., :-1] @ v

    wanted = written_out(*plain)
    for layout in (LAYOUTS[1], LAYOUTS[3], LAYOUTS[7]):
        q, k, v = laid_out(plain, layout)
        out, sums, _ = operator(q, k, v, identity, create(causal).as_tuple(), 0.3, {})
        lse = sums * math.log(2)
        renormalized = out * (lse.exp() / (lse.exp() + sink.view(1, -1, 1).exp())).unsqueeze(-1)
        for got in (renormalized, written_out(q, k, v)):
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["nothing", "window", "documents", "sinks", "heads", "bias"])
@pytest.mark.parametrize("heads", [4, 2])
def test_gradients(name: str, heads: int) -> None:
    """Of the operator itself: torch's function takes no tensors with gradients on a CPU."""
    score, mask = CASES[name]
    plain, blocks = operands(heads), create(mask or everything).as_tuple()
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(plain[0].shape, dtype=torch.float64, generator=generator)

    def run(tensors: list[Any], weights: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse, _ = operator(*leaves, score or identity, blocks, 0.3, {})
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        return [out, *torch.autograd.grad((out * weights).sum() + finite.square().sum(), leaves)]

    wanted = run(plain, weights)
    at = list(CASES).index(name)
    for layout in (LAYOUTS[(at + heads) % len(LAYOUTS)], LAYOUTS[1]):
        tensors = laid_out(plain, layout)
        got = run(tensors, sw.distribute_tensor(weights, tensors[0].device_mesh, layout[1]))
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-10, atol=1e-12)


def test_gradients_of_captured_tensors_are_refused() -> None:
    bias = torch.randn(2 * LENGTH, dtype=torch.float64, requires_grad=True)
    blocks = create(causal)

    def learned(score: Any, b: Any, h: Any, q: Any, k: Any, bias: Any) -> Any:
        return score + bias[q - k + LENGTH]

    q, k, v = (x.requires_grad_() for x in laid_out(operands(), LAYOUTS[0]))
    out, _, _ = operator(q, k, v, learned, blocks.as_tuple(), 0.3, {}, (bias,))
    with pytest.raises(sw.UnsupportedError, match="score_mod captures"):
        out.sum().backward()


def test_a_window_agrees_with_a_masked_attention() -> None:
    plain = operands()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(3).triu(-3)
    wanted = scaled_dot_product_attention(*plain, attn_mask=mask)
    got, _, _ = operator(*laid_out(plain, LAYOUTS[1]), identity, create(window).as_tuple(), 8**-0.5, {})
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def test_compiled() -> None:
    plain, blocks = operands(), create(window)
    wanted = flex_attention(*plain, block_mask=blocks) + 1

    def step(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, block_mask=blocks) + 1

    torch._dynamo.reset()
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(*laid_out(plain, LAYOUTS[4]))
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
