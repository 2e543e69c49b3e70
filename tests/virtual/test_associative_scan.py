"""`associative_scan` along a sharded dim: against one device, and what ranks exchange."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan_op

import shardwise as sw
from shardwise import Replicate, Shard, Zigzag
from shardwise.recurrences import chunk_gated_delta_rule
from tests import sequence_attention as sequences

R, S0, S1, Z0 = Replicate(), Shard(0), Shard(1), Zigzag(0)
LAYOUTS: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    ((4,), (S0,)), ((3,), (S0,)), ((3,), (Z0,)), ((2, 2), (S0, S0)), ((2, 2), (S1, S0)), ((2, 2, 2), (S0, R, S1)),
    ((4,), (S1,)), ((2,), (Zigzag(0, blocks=(2, 0, 3, 1)),)),
)  # fmt: skip
ROOT = Path(__file__).parents[2]
LENGTHS = (12, 7, 2)


def associative_scan(*args: Any, **kwargs: Any) -> Any:
    """Torch's function, as code that imports it now gets it."""
    from torch._higher_order_ops.associative_scan import associative_scan as now

    return now(*args, combine_mode="generic", **kwargs)


def add(left: Any, right: Any) -> Any:
    return left + right


def linear(left: Any, right: Any) -> Any:
    """The recurrence `h = a * h + b`, as selective scans have it."""
    return {"a": left["a"] * right["a"], "b": right["a"] * left["b"] + right["b"]}


def product(left: Any, right: Any) -> Any:
    """Matrices, whose product does not commute."""
    return left @ right


def leaves(length: int, count: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.rand(length, *shape, dtype=torch.float64, generator=generator) - 0.2 for _ in range(count)]


CASES: dict[str, Any] = {
    "add": (add, 1, (6,), lambda xs: xs[0], lambda out: [out]),
    "linear": (linear, 2, (6,), lambda xs: {"a": xs[0], "b": xs[1]}, lambda out: [out["a"], out["b"]]),
    "product": (product, 1, (2, 2), lambda xs: xs[0], lambda out: [out]),
}


def run(name: str, given: list[Any], weights: list[Any], reverse: bool) -> list[Any]:
    """The scan, its gradients, and of matrices the gradients of their squares."""
    combine, _, _, packed, unpacked = CASES[name]
    xs = [x.detach().requires_grad_() for x in given]
    out = unpacked(associative_scan(combine, packed(xs), 0, reverse=reverse))
    total = sum((x * w).sum() for x, w in zip(out, weights, strict=True))
    grads = torch.autograd.grad(total, xs, create_graph=name == "product")
    if name != "product":
        return [*out, *grads]
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), xs)
    return [*out, *grads, *second]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name: str, reverse: bool) -> None:
    _, count, shape, _, _ = CASES[name]
    for i, length in enumerate(LENGTHS):
        plain, weights = leaves(length, count, shape), leaves(length, 2, shape)[-count:]
        wanted = run(name, plain, weights, reverse)
        at = i + 3 * reverse
        for mesh_shape, placements in (LAYOUTS[at % len(LAYOUTS)], LAYOUTS[i % 3]):
            mesh = sw.init_device_mesh("cpu", mesh_shape)
            laid = [[sw.distribute_tensor(x, mesh, placements) for x in xs] for xs in (plain, weights)]
            got = run(name, *laid, reverse)
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
            assert all(x.placements == placements for x in got[:count])


@pytest.mark.parametrize(("placement", "reverse"), [(S0, True), (Z0, False)])
def test_one_state_of_each_block_is_exchanged(placement: Any, reverse: bool) -> None:
    """However long the sequence is; gradients alike."""
    mesh = sw.init_device_mesh("cpu", (4,))
    found = set()
    for length in (16, 32):
        xs = [sw.distribute_tensor(x, mesh, [placement]).requires_grad_() for x in leaves(length, 2, (6,))]
        out, _, forward = sequences.counted(
            lambda xs=xs: associative_scan(linear, {"a": xs[0], "b": xs[1]}, 0, reverse=reverse)["b"]
        )
        _, _, backward = sequences.counted(lambda out=out, xs=xs: torch.autograd.grad(out.sum(), xs))
        found.add((forward, backward))
    blocks = 4 if placement is S0 else 8
    state = 6 * 8
    assert found == {(3 * blocks // 4 * 2 * state, 3 * blocks // 4 * state)}  # no gradient of products is wanted


def test_a_short_last_block_is_not_moved() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    received = set()
    for length in (15, 31):
        x = sw.distribute_tensor(*leaves(length, 1, (6,)), mesh, [S0])
        received.add(sequences.counted(lambda x=x: associative_scan(add, x, 0))[2])
    assert len(received) == 1
    assert received.pop() <= (3 + 2) * 6 * 8  # states, and the last one, which fills the block


def test_what_fills_a_short_block_stays_finite() -> None:
    """Values that grow if they are accumulated: their gradients would be 0 times infinity."""
    plain = torch.tensor(
        [1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1e-150, 1e200], dtype=torch.float64
    )  # the last block has one
    mesh = sw.init_device_mesh("cpu", (4,))
    for reverse in (False, True):
        x = sw.distribute_tensor(plain, mesh, [S0])
        laid = x.detach().requires_grad_()
        got = associative_scan(lambda a, b: a * b, laid, 0, reverse=reverse)
        (grad,) = torch.autograd.grad(got.sum(), laid)
        alone = plain.clone().requires_grad_()
        out = associative_scan(lambda a, b: a * b, alone, 0, reverse=reverse)
        (wanted,) = torch.autograd.grad(out.sum(), alone)
        torch.testing.assert_close(grad.full_tensor(), wanted, rtol=1e-12, atol=0)


def test_leaves_laid_out_differently_and_plain_ones() -> None:
    a, b = leaves(13, 2, (6,))
    wanted = associative_scan(linear, {"a": a, "b": b}, 0)["b"]
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(b, mesh, [S1, S0])
    for other in (a, sw.distribute_tensor(a, mesh, [S0, S1]), sw.distribute_tensor(a, mesh, [R, R])):
        got = associative_scan(linear, {"a": other, "b": x}, 0)["b"]
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def test_another_dim_and_captured_tensors() -> None:
    """The function captures a parameter, which gets its gradient."""
    x, weight = torch.randn(2, 13, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)

    def gradients(x: Any, weight: Any) -> list[Any]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        # associative: x * y * w
        out = associative_scan(lambda left, right: left * right * weight, x, 1)
        return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]

    wanted = gradients(x, weight)
    mesh = sw.init_device_mesh("cpu", (3,))
    got = gradients(sw.distribute_tensor(x, mesh, [S1]), sw.distribute_tensor(weight, mesh, [R]))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


def test_the_operator_itself() -> None:
    """Which torch calls for pointwise functions on a GPU. Its gradient on one device is right for one tensor alone."""
    a, b = leaves(13, 2, (6,))

    def combine(a: Any, b: Any, c: Any, d: Any) -> Any:
        return a * c, c * b + d

    mesh = sw.init_device_mesh("cpu", (4,))
    xs = [sw.distribute_tensor(x, mesh, [S0]) for x in (a, b)]
    for mine, theirs in zip(
        associative_scan_op(combine, xs, ()), associative_scan_op(combine, [a, b], ()), strict=True
    ):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
    plain, laid = ([x.requires_grad_() for x in given] for given in ([a, b], xs))
    wanted = torch.autograd.grad(associative_scan(linear, {"a": plain[0], "b": plain[1]}, 0)["b"].sum(), plain)
    got = torch.autograd.grad(associative_scan_op(combine, laid, ())[1].sum(), laid)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


def test_compiled() -> None:
    command = [sys.executable, "-m", "tests.virtual.compiled_scan"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_dry_run() -> None:
    """Memory and traffic of a selective scan do not grow with the ranks, but for one state of each."""
    found = {}
    for ranks in (8, 64):
        with sw.dry_run() as dry:
            mesh = sw.init_device_mesh("cuda", (ranks,))
            xs = [sw.zeros(8 * ranks, 16, device_mesh=mesh, placements=[S0]) for _ in "ab"]
            associative_scan(linear, {"a": xs[0], "b": xs[1]}, 0)
        found[ranks] = dry.bytes
    assert found == {ranks: (ranks - 1) * 2 * 16 * 4 for ranks in (8, 64)}


# ---------------------------------------------------------------- the gated delta rule


def token_by_token(query: Any, key: Any, value: Any, g: Any, beta: Any) -> Any:
    """The rule as it is defined."""
    state = query.new_zeros(query.shape[0], query.shape[2], key.shape[-1], value.shape[-1])
    found = []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = value[:, t] - (key[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + key[:, t].unsqueeze(-1) @ (error * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
        found.append((query[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(found, 1)


def _without_scale(query: Any, *rest: Any) -> Any:
    """As `token_by_token`; the function of models divides queries by the root of their width."""
    return chunk_gated_delta_rule(query * query.shape[-1] ** 0.5, *rest, chunk_size=8)[0]


@pytest.mark.parametrize("placement", [sw.Shard(1), sw.Zigzag(1)])
def test_the_gated_delta_rule_exchanges_states(placement: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    mesh, received = sw.init_device_mesh("cpu", (4,)), []

    def results(function: Any, given: list[Any], weights: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in given]
        out = function(*leaves)
        return [out, *torch.autograd.grad((out * weights).sum(), leaves)]

    for length in (128, 256):
        sizes = [(1, length, 2, 8)] * 4 + [(1, length, 2)] * 2
        q, k, v, weights, g, beta = (torch.randn(s, dtype=torch.float64, generator=generator) for s in sizes)
        given = [q, torch.nn.functional.normalize(k, dim=-1), v, -g.abs() / 4, beta.sigmoid()]
        wanted = results(token_by_token, given, weights)
        laid = [sw.distribute_tensor(x, mesh, [placement]) for x in (*given, weights)]
        with sw.debug.CommDebugMode() as comm:
            got = results(_without_scale, laid[:5], laid[5])
        received.append(comm.received_bytes)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-10, atol=1e-12)
    if placement == sw.Shard(1):
        assert received[0] == received[1]
