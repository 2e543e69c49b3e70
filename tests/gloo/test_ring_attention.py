"""Attention over a sharded sequence on processes: every way against one device, compiled, under a check of ranks."""

import itertools
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

import shardwise as sw
from shardwise.torch_private import flex_attention
from tests.gloo.processes import ProcessPool
from tests.sequence_attention import LENGTHS, S0, S2, Z2, R, assert_close, attend, case, on_mesh, on_one_device

MESHES: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (((4,), (S2,)), ((2, 2), (S0, S2)), ((2, 2), (S2, S2)))
ZIGZAGS: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (((4,), (Z2,)), ((2, 2), (S0, Z2)), ((2, 2), (Z2, S2)))


def _table(way: str, meshes: Any) -> None:
    table = ("none", "plain"), ("causal", "plain"), ("boolean", "plain"), ("causal", "groups"), ("window", "scale")
    for mask, option in table:
        for i, lengths in enumerate(LENGTHS):
            given = case(mask, lengths, option=option)
            shape, placements = meshes[i % len(meshes)]
            assert_close(on_mesh(given, sw.init_device_mesh("cpu", shape), placements, way), on_one_device(given))
    half = case("causal", (13, 13), torch.bfloat16)
    got = on_mesh(half, sw.init_device_mesh("cpu", (4,)), [S2], way)
    for mine, plain in zip(got, on_one_device(half), strict=True):
        torch.testing.assert_close(mine.full_tensor(), plain, atol=2e-2, rtol=2e-2)


def test_every_way(gloo4: ProcessPool) -> None:
    for way in ("ring", "gather", "heads"):
        gloo4.run(_table, way, MESHES, timeout=120)
    gloo4.run(_table, "ring", ZIGZAGS, timeout=120)


def _checked() -> None:
    with sw.debug.check_ranks():
        given = case("causal", (13, 13))
        assert_close(on_mesh(given, sw.init_device_mesh("cpu", (4,)), [S2], "ring"), on_one_device(given))


def test_under_a_check_of_ranks(gloo4: ProcessPool) -> None:
    gloo4.run(_checked, timeout=60)


def _compiled() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for mask, placement in (("causal", S2), ("none", S2), ("causal", Z2)):
        given = case(mask, (13, 13))

        def step(q: Any, k: Any, v: Any, causal: bool = given.options["is_causal"]) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).square().sum()

        plain = [x.clone().requires_grad_() for x in given.tensors[:3]]
        wanted = torch.autograd.grad(step(*plain), plain)
        laid = [sw.distribute_tensor(x, mesh, [placement]).requires_grad_() for x in given.tensors[:3]]
        torch._dynamo.reset()
        with sw.attention(prefer="ring"):
            total = torch.compile(step, backend="aot_eager", fullgraph=True)(*laid)
            assert_close(list(torch.autograd.grad(total, laid)), list(wanted))


def test_compiled(gloo4: ProcessPool) -> None:
    gloo4.run(_compiled, timeout=120)


def _flex() -> None:
    def sloped(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
        return score + slopes[h] * (k - q)

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() < 4

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def run(tensors: list[Any], blocks: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse, _ = flex_attention(*leaves[:3], sloped, blocks, 0.3, {}, (leaves[3],))
        return [out, lse.detach(), *torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)]

    given, slopes = case("none", (13, 13)), torch.linspace(0.1, 0.5, 4, dtype=torch.float64)
    mesh = sw.init_device_mesh("cpu", (4,))
    for mask, ways in ((window, ("halo", "ring", "gather")), (causal, ("ring", "heads"))):
        blocks = create_block_mask(mask, None, None, 13, 13, device="cpu").as_tuple()
        wanted = run([*given.tensors[:3], slopes], blocks)
        for way, placement in itertools.product(ways, (S2, Z2, sw.Shard(1))):
            laid = [sw.distribute_tensor(x, mesh, [placement]) for x in given.tensors[:3]]
            laid.append(sw.distribute_tensor(slopes, mesh, [S0]))
            with sw.attention(prefer=way):
                assert_close(run(laid, blocks), wanted)


def test_flex_attention(gloo4: ProcessPool) -> None:
    gloo4.run(_flex, timeout=120)


def _dropout() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("causal", (13, 13), option="dropout")
    for way, placement in itertools.product(("ring", "gather", "heads"), (S2, Z2)):
        assert_close(on_mesh(given, mesh, [placement], way), on_one_device(given))


def test_dropout(gloo4: ProcessPool) -> None:
    gloo4.run(_dropout, timeout=120)


def _masks() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("float", (9, 11))
    laid = [sw.distribute_tensor(x, mesh, [S2]) for x in given.tensors]
    for placement in (R, S0, sw.Shard(1)):
        mask = sw.distribute_tensor(given.mask, mesh, [placement])
        with sw.attention(prefer="ring"):
            assert_close(attend(given, laid[:3], mask, laid[3]), on_one_device(given))


def _windows() -> None:
    for length, shape, placements in ((13, (4,), [S2]), (16, (2, 2), [S0, S2]), (5, (4,), [S2]), (3, (4,), [S2])):
        near = torch.ones(length, length, dtype=torch.bool).tril(1).triu(-2 if length > 3 else 0)
        given = case("none", (length, length))._replace(mask=near)
        with sw.explain() as report:
            got = on_mesh(given, sw.init_device_mesh("cpu", shape), placements, "halo")
        assert "halo" in {record.way for record in report.records}
        assert_close(got, on_one_device(given))
    at = torch.arange(500)
    sinks = (at[:, None] >= at) & ((at[:, None] - at < 9) | (at < 3))
    given = case("none", (500, 500))._replace(mask=sinks)
    with sw.explain() as report:
        got = on_mesh(given, sw.init_device_mesh("cpu", (4,)), [S2], "halo")
    assert "halo" in {record.way for record in report.records}
    assert_close(got, on_one_device(given))


def test_windows(gloo4: ProcessPool) -> None:
    gloo4.run(_windows, timeout=120)


def test_masks(gloo4: ProcessPool) -> None:
    gloo4.run(_masks, timeout=60)
