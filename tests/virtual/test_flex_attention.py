"""`flex_attention` on DTensors: masks and modified scores on every layout, against one device."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
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


# ---------------------------------------------------------------- algorithms

BY_SEQUENCE = (LAYOUTS[0], LAYOUTS[1], LAYOUTS[2], LAYOUTS[6])


def all_results(tensors: list[Any], weights: Any, score: Mod | None, blocks: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse, largest = operator(*leaves, score or identity, blocks, 0.3, {})
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    return [out, lse, largest, *torch.autograd.grad((out * weights).sum() + finite.square().sum(), leaves)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["ring", "gather", "heads", "halo"])
def test_every_way(name: str, way: str) -> None:
    """Values, statistics and gradients, also where another way has to be taken."""
    score, mask = CASES[name]
    at = list(CASES).index(name) + len(way)
    plain, blocks = operands(heads=4 if at % 2 else 2), create(mask or everything).as_tuple()
    weights = torch.randn(plain[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = all_results(plain, weights, score, blocks)
    layout = BY_SEQUENCE[at % len(BY_SEQUENCE)]
    tensors = laid_out(plain, layout)
    laid_out_weights = sw.distribute_tensor(weights, tensors[0].device_mesh, layout[1])
    with sw.attention(prefer=way):
        got = all_results(tensors, laid_out_weights, score, blocks)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


def taken(mask: Mod, *, prefer: str | None = None, placement: Any = S2) -> tuple[str, float]:
    """The algorithm of a call on four ranks, and the bytes that a rank receives."""
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.randn(1, 1, 64, 8), mesh, [placement])
    blocks = create_block_mask(mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16).as_tuple()
    with sw.attention(prefer=prefer), sw.explain() as report:
        operator(x, x, x, identity, blocks, 0.3, {})
    record = next(r for r in report.records if "flex_attention" in r.name)
    return record.way, record.received


def in_quarters(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q // 16 == k // 16


def test_what_travels_is_what_the_mask_lets_queries_see() -> None:
    rows = 2 * 8 * 4  # bytes of a key and its value
    assert taken(in_quarters) == ("local", 0)
    assert taken(window) == ("halo", 6 * rows)  # three on each side
    way, received = taken(causal, prefer="ring")
    assert (way, received) == ("ring", 3 * 16 * rows)
    assert taken(everything, prefer="gather") == ("gather", 3 * 16 * rows)
    assert taken(window, placement=Z2)[0] == "ring"  # halos need contiguous shards


def test_a_window_in_a_long_sequence_receives_little() -> None:
    """Under a hundredth of a gather: 128 keys before each query, 16,384 tokens, 8 ranks."""
    x = sw.distribute_tensor(torch.randn(1, 1, 16_384, 4), sw.init_device_mesh("cpu", (8,)), [S2])

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 128)

    with sw.explain() as report:
        operator(x, x, x, identity, (near,), 0.5, {})
    record = next(r for r in report.records if "flex_attention" in r.name)
    gathered = 2 * (16_384 - 2_048) * 4 * 4
    assert record.way == "halo"
    assert record.received <= 0.01 * gathered


def test_sinks_beside_a_window_receive_little() -> None:
    """The window and the first tokens, forward and backward."""

    def streaming(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & ((q - k < 20) | (k < 3))

    plain = [torch.randn(1, 2, 700, 8, dtype=torch.float64) for _ in range(3)]
    blocks = create_block_mask(streaming, None, None, 700, 700, device="cpu").as_tuple()
    wanted = all_results(plain, torch.ones_like(plain[0]), soft_cap, blocks)
    mesh = sw.init_device_mesh("cpu", (4,))
    with sw.explain() as report:
        laid = [sw.distribute_tensor(x, mesh, [S2]) for x in (*plain, torch.ones_like(plain[0]))]
        got = all_results(laid[:3], laid[3], soft_cap, blocks)
    records = [r for r in report.records if "flex_attention" in r.name]
    assert {record.way for record in records} == {"halo"}
    assert records[0].received == (19 + 3) * 2 * 2 * 8 * 8
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


def test_the_latest_values_of_captured_tensors_count() -> None:
    """A mask that torch has traced is read once, and again when its tensors are written to."""
    plain, numbers = operands(), DOCUMENTS.clone()

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return numbers[q] == numbers[k]

    q, k, v = laid_out(plain, LAYOUTS[0])
    for change in (lambda: None, lambda: numbers.copy_(numbers.flip(0)), lambda: numbers.zero_()):
        change()
        blocks = create(same)
        wanted = flex_attention(*plain, block_mask=blocks)
        for _ in range(2):
            got: Any = flex_attention(q, k, v, block_mask=blocks)
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def test_in_inference_mode() -> None:
    """Tensors of inference mode have no version: a mask that reads them is evaluated at each call."""
    plain = operands()
    with torch.inference_mode():
        numbers = DOCUMENTS.clone()

        def same(b: Any, h: Any, q: Any, k: Any) -> Any:
            return numbers[q] == numbers[k]

        q, k, v = laid_out(plain, LAYOUTS[0])
        for _ in range(2):
            blocks = create(same)
            wanted = flex_attention(*plain, block_mask=blocks)
            got: Any = flex_attention(q, k, v, block_mask=blocks)
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
            numbers.zero_()


def test_blocks_that_a_mask_lists_do_not_hide_keys() -> None:
    """Uncompiled, one device goes by the function alone."""
    plain = operands()
    full = create(everything)
    few = BlockMask.from_kv_blocks(
        torch.ones_like(full.kv_num_blocks), torch.zeros_like(full.kv_indices), None, None, 16, everything,
        seq_lengths=(LENGTH, LENGTH),
    )  # fmt: skip
    wanted = flex_attention(*plain, block_mask=few)
    got: Any = flex_attention(*laid_out(plain, LAYOUTS[0]), block_mask=few)
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def test_keys_that_all_samples_share() -> None:
    q, k, v = operands()
    plain, blocks = [q, k[:1], v[:1]], create(documents).as_tuple()
    wanted = all_results(plain, torch.ones_like(q), None, blocks)
    for layout in (((4,), (S2,), (S2,)), ((2, 2), (S0, S2), (R, S2))):
        tensors = laid_out(plain, layout)
        weights = sw.distribute_tensor(torch.ones_like(q), tensors[0].device_mesh, layout[1])
        for mine, theirs in zip(all_results(tensors, weights, None, blocks), wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("placement", [R, Shard(0)])
def test_captured_dtensors(placement: Any) -> None:
    plain = operands()
    wanted, _, _ = operator(*plain, identity, create(documents).as_tuple(), 0.3, {})
    q, k, v = laid_out(plain, LAYOUTS[0])
    numbers = sw.distribute_tensor(DOCUMENTS, q.device_mesh, [placement])

    def same(b: Any, h: Any, q: Any, k: Any, numbers: Any) -> Any:
        return (numbers[q] == numbers[k]) & (q >= k)

    got, _, _ = operator(q, k, v, identity, (same,), 0.3, {}, (), (numbers,))
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def test_a_bound_on_memory() -> None:
    q, k, v = laid_out(operands(), LAYOUTS[0])
    with sw.attention(max_bytes=1), pytest.raises(sw.MemoryBoundError, match="max_bytes=1"):
        operator(q, k, v, identity, (everything,), 0.3, {})


def test_bfloat16_and_more_ranks_than_tokens() -> None:
    plain = [x[:, :, :5].bfloat16() for x in operands()]
    wanted = [x.float() for x in operator(*plain, soft_cap, (causal,), 0.3, {})]
    mesh = sw.init_device_mesh("cpu", (7,))
    for prefer in ("ring", "gather"):
        with sw.attention(prefer=prefer):
            got = operator(*[sw.distribute_tensor(x, mesh, [S2]) for x in plain], soft_cap, (causal,), 0.3, {})
        for mine, theirs, tolerance in zip(got, wanted, (2e-2, 1e-5, 1e-5), strict=True):
            torch.testing.assert_close(mine.full_tensor().float(), theirs, rtol=tolerance, atol=tolerance)


def test_a_dry_run_gives_memory_and_bytes() -> None:
    peaks = []
    for ranks in (8, 64):
        with sw.dry_run() as run, sw.attention(prefer="ring"):
            mesh = sw.init_device_mesh("cpu", (ranks,))
            x = sw.zeros(1, 2, 64 * ranks, 16, device_mesh=mesh, placements=[S2])
            operator(x, x, x, identity, (causal,), 0.25, {})
        peaks.append(run.peak_bytes)
        assert run.bytes == (ranks - 1) * 2 * 64 * 2 * 16 * 4
    assert peaks[1] <= 1.02 * peaks[0]


def slopes_and_table(score: Any, b: Any, h: Any, q: Any, k: Any, table: Any, slopes: Any, fixed: Any) -> Any:
    """Of a learned table of relative positions, learned slopes and a constant."""
    return score * (1 + table[h, q - k + LENGTH] ** 2) + slopes[h] * (k - q) + fixed[k] * table[h, 0]


def learned_gradients(tensors: list[Any], blocks: Any, captured: Any, weights: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in (*tensors, *captured[:2])]
    out, lse, _ = operator(*leaves[:3], slopes_and_table, blocks, 0.3, {}, (*leaves[3:], captured[2]))
    return [out, *torch.autograd.grad((out * weights).sum() + lse.square().sum(), leaves)]


@pytest.mark.parametrize("way", ["ring", "gather", "heads", "halo", None])
@pytest.mark.parametrize("heads", [4, 2])
def test_gradients_of_captured_tensors(way: str | None, heads: int) -> None:
    """A learned bias and slopes: sums over ranks. Plain tensors, replicated and sharded DTensors."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((4, 2 * LENGTH), (4,), (LENGTH,))
    captured = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    plain, blocks = operands(heads), create(window if way == "halo" else causal).as_tuple()
    weights = torch.randn(plain[0].shape, dtype=torch.float64, generator=generator)
    wanted = learned_gradients(plain, blocks, captured, weights)
    at = heads + len(way or "")
    for layout in (LAYOUTS[at % len(LAYOUTS)], BY_SEQUENCE[at % len(BY_SEQUENCE)], LAYOUTS[0]):
        tensors = laid_out(plain, layout)
        mesh = tensors[0].device_mesh
        last = [R] * (mesh.ndim - 1)
        for given in (
            captured,
            [sw.distribute_tensor(x, mesh, [R] * mesh.ndim) for x in captured],
            [sw.distribute_tensor(x, mesh, [S0, *last]) for x in captured],
        ):
            with sw.attention(prefer=way):
                got = learned_gradients(tensors, blocks, given, sw.distribute_tensor(weights, mesh, layout[1]))
            for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
                if i > 3:
                    assert type(mine) is type(given[0])
                    assert type(mine) is torch.Tensor or mine.placements == given[0].placements
                whole = mine.full_tensor() if isinstance(mine, sw.DTensor) else mine
                torch.testing.assert_close(whole, theirs, rtol=1e-12, atol=1e-11)


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

    for layout in (LAYOUTS[4], LAYOUTS[0], LAYOUTS[1]):
        torch._dynamo.reset()
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(*laid_out(plain, layout))
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def test_checkpointed() -> None:
    """The forward that runs again takes the same way; the operator itself has gradients on a CPU."""
    plain, blocks = operands(), create(window).as_tuple()

    def attend(q: Any, k: Any, v: Any) -> Any:
        return operator(q * 2, k, v, identity, blocks, 0.3, {})[0]

    def gradients(tensors: list[Any], run: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        return list(torch.autograd.grad(run(*leaves).square().sum(), leaves))

    wanted = gradients(plain, attend)
    for layout in (LAYOUTS[0], LAYOUTS[1]):
        run: Any = functools.partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False)
        for mine, theirs in zip(gradients(laid_out(plain, layout), run), wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
