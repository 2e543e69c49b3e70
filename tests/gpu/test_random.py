"""Random operators on a CUDA device: virtual ranks that share it draw what the device draws for the global tensor."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DeviceMesh, Replicate, Shard, StridedShard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SIZES = (1, 255, 256, 270_335, 270_336, 270_337, 3_000_001)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FILLS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(1.5),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.25),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(),
    "random_ from to": lambda x: x.random_(-5, 100),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
}
VALUES: dict[str, Callable[[Any], Any]] = {
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs() + 1),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 3),
    "multinomial 1": lambda x: torch.multinomial(x.abs() + 0.1, 1),
    "multinomial with replacement": lambda x: torch.multinomial(x.abs() + 0.1, 3, replacement=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None, None].expand(-1, -1, 2, 3), 0.4),
    "dropout all": lambda x: F.dropout(x, 1.0),
    "xavier_normal_": lambda x: torch.nn.init.xavier_normal_(x),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x),
    "transposed": lambda x: x.t().normal_(),
    "transposed dropout": lambda x: F.dropout(x.t(), 0.4),
    "generator": lambda x: x.normal_(generator=torch.Generator("cuda").manual_seed(5)),
}


def mesh_of(*shape: int) -> DeviceMesh:
    with sw.virtual():
        return sw.init_device_mesh("cuda", shape)


def _flat(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(fn: Callable[[Any], Any], x: torch.Tensor, mesh: DeviceMesh, placements: Any, told: str) -> None:
    """Three times in a row, with other draws in between; the same numbers and the same state at the end."""

    def run(given: Any) -> list[torch.Tensor]:
        torch.manual_seed(1234)
        results = []
        for _ in range(3):
            made = _flat(fn(given.clone()))
            results += [t.full_tensor() if isinstance(t, sw.DTensor) else t for t in made]
            results.append(torch.rand(3, device="cuda"))
        return [*results, torch.cuda.get_rng_state()]

    want = run(x)
    have = run(sw.distribute_tensor(x, mesh, placements))
    for a, b in zip(want, have, strict=True):
        assert a.dtype == b.dtype, told
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), f"{told}: {(a != b).sum()} of {a.numel()} differ"


def test_every_size_on_meshes_of_2_to_8() -> None:
    for size, ranks in itertools.product(SIZES, (2, 3, 8)):
        mesh = mesh_of(ranks)
        for name, fn in FILLS.items():
            same(fn, torch.ones(size, device="cuda"), mesh, [S0], f"{name} of {size} on {ranks}")


def test_every_float_and_layout() -> None:
    for shape in ((4,), (2, 3), (2, 2, 2)):
        mesh = mesh_of(*shape)
        layouts = list(itertools.product((R, S0, S1), repeat=len(shape)))
        layouts.append((StridedShard(0, 2), *[R] * (len(shape) - 1)))
        for dtype, (name, fn) in itertools.product(FLOATS, FILLS.items()):
            for size in ((64, 36), (37, 11)):
                for placements in layouts[:: 1 if len(shape) < 3 else 5]:
                    x = torch.randn(size, device="cuda").to(dtype)
                    same(fn, x, mesh, placements, f"{name} {dtype} {size} {placements}")


def test_integers() -> None:
    mesh = mesh_of(2, 2)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        x = torch.zeros(37, 300, dtype=dtype, device="cuda")
        for placements in ([S0, S1], [S1, R], [S0, S0]):
            same(lambda x: x.random_(), x, mesh, placements, f"random_ {dtype}")
            same(lambda x: x.bernoulli_(0.3), x, mesh, placements, f"bernoulli_ {dtype}")
    x = torch.zeros(37, 300, dtype=torch.int64, device="cuda")
    same(lambda x: x.random_(0, 2**40), x, mesh, [S0, S1], "random_ of a large range")


def test_operators_that_look_at_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in ((4,), (2, 3)):
            mesh = mesh_of(*shape)
            for name, fn in VALUES.items():
                for size in ((16, 12), (7, 9)):
                    for placements in itertools.product((R, S0, S1), repeat=len(shape)):
                        same(fn, torch.randn(size, device="cuda"), mesh, placements, f"{name} {size} {placements}")


def test_factories() -> None:
    mesh = mesh_of(2, 2)
    for ours, theirs in (
        (lambda **k: sw.rand(333, 70, **k), lambda: torch.rand(333, 70, device="cuda")),
        (lambda **k: sw.randn(333, 70, **k), lambda: torch.randn(333, 70, device="cuda")),
        (
            lambda **k: sw.randn(33, 7, dtype=torch.complex64, **k),
            lambda: torch.randn(33, 7, dtype=torch.complex64, device="cuda"),
        ),
        (lambda **k: sw.randint(-3, 9, (333, 70), **k), lambda: torch.randint(-3, 9, (333, 70), device="cuda")),
        (lambda **k: sw.randperm(70, **k), lambda: torch.randperm(70, device="cuda")),
    ):
        torch.manual_seed(3)
        have = [ours(device_mesh=mesh, placements=[S0, R]).full_tensor() for _ in range(2)]
        torch.manual_seed(3)
        for a in have:
            assert torch.equal(a, theirs())


def test_recomputation_draws_the_same_numbers() -> None:
    mesh = mesh_of(2, 2)
    plain = torch.randn(64, 48, device="cuda")

    def block(h: Any) -> Any:
        return F.dropout(F.gelu(F.dropout(h, 0.3)), 0.3) ** 2

    for reentrant in (True, False):
        grads = []
        for given in (plain.clone(), sw.distribute_tensor(plain, mesh, [S0, S1])):
            x = given.requires_grad_()
            torch.manual_seed(5)
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
            assert x.grad is not None
            grads.append(x.grad.full_tensor() if isinstance(x.grad, sw.DTensor) else x.grad)
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


def test_trackers() -> None:
    mesh = mesh_of(4)
    tracker = sw.OffsetBasedRNGTracker(mesh)
    tracker.manual_seed(11)
    assert tracker.get_offset() == 0
    a = sw.rand(100, device_mesh=mesh, placements=[S0]).full_tensor()
    assert tracker.get_offset() == 4
    tracker.set_offset(0)
    assert torch.equal(a, sw.rand(100, device_mesh=mesh).full_tensor())


def test_indexed_numbers_are_the_same_on_every_mesh() -> None:
    seen = []
    for shape, placements in (((1,), [R]), ((4,), [S0]), ((2, 3), [S1, S0])):
        torch.manual_seed(3)
        with sw.use_rng("indexed"):
            x = sw.zeros(37, 30, device_mesh=mesh_of(*shape), placements=placements)
            seen.append([fn(x) for name, fn in FILLS.items() if name != "native_dropout"])
    for row in seen[1:]:
        for a, b in zip(row, seen[0], strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())


def test_attention_with_dropout() -> None:
    """The fused kernels draw by batch and head in a way of their own: they are run on global tensors, and right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(4, 4, 64, 32, device="cuda", dtype=dtype)
            for placements in ([R, R], [S0, R], [S0, S1], [R, S1]):
                for causal in (True, False):

                    def attend(x: Any, causal: bool = causal) -> Any:
                        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=causal)

                    told = f"attention {dtype} {placements} causal={causal}"
                    same(attend, q, mesh_of(2, 2), placements, told)
