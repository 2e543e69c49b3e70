"""Operators on real processes: small programs against one device, and what virtual ranks would hide."""

import math

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.events import route_started
from shardwise.plan.cost import current_cost_model, set_cost_model
from shardwise.plan.propagate import ShardingPropagator

FLOAT = torch.float64


def distributed(tensor: torch.Tensor, mesh: sw.DeviceMesh, *placements: sw.Placement) -> sw.DTensor:
    made = sw.distribute_tensor(tensor, mesh, placements)
    made.requires_grad_(tensor.is_floating_point())
    return made


PROGRAMS = {
    "pointwise": lambda x, w: (x * 2 + 1).tanh() - x,
    "linear": lambda x, w: F.linear(x, w).relu(),
    "softmax": lambda x, w: x.softmax(-1) + x.log_softmax(1),
    "norms": lambda x, w: F.layer_norm(x, x.shape[-1:]) + x.norm() + x.std(1, keepdim=True),
    "reductions": lambda x, w: x.sum(1) + x.mean(1) + x.amax(1) + x.logsumexp(1),
    "views": lambda x, w: x.reshape(-1, x.shape[-1]).t().flatten(),
    "indexing": lambda x, w: x[:, 1:3].cumsum(1) + x[:, :1] + x.roll(1, 1)[:, :2],
    "rows": lambda x, w: (
        torch.cat([x[1:] - x[:-1], x.flip(0)]).roll(2, 0)[:, 1:] + F.pad(x, (0, 0, 0, 0, 1, -1))[:1, 1:]
    ),
    "scans": lambda x, w: x.cumsum(0) + x.logcumsumexp(1),
    "writes": lambda x, w: _written(x),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "loss": lambda x, w: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1)),
    "losses": lambda x, w: F.mse_loss(x, x.flip(1)) + F.smooth_l1_loss(x, x * 2),
}


def _written(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[:, 1:3] = 0
    x[0].add_(1)
    return x


def compare_programs(shape: tuple[int, ...]) -> int:
    torch.manual_seed(0)
    meshes = [sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (2, 2))]
    x, w = torch.randn(*shape, dtype=FLOAT), torch.randn(3, shape[-1], dtype=FLOAT)
    compared = 0
    for mesh in meshes:
        for placements in _layouts(mesh.ndim):
            for name, program in PROGRAMS.items():
                plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
                wanted = program(*plain)
                wanted.sum().backward()
                given = [distributed(x, mesh, *placements), distributed(w, mesh, *[sw.Replicate()] * mesh.ndim)]
                got = program(*given)
                got.sum().backward()
                where = f"{name} {placements}"
                torch.testing.assert_close(got.full_tensor(), wanted, msg=lambda m, w=where: f"{w}: {m}")
                torch.testing.assert_close(
                    given[0].grad.full_tensor(), plain[0].grad, msg=lambda m, w=where: f"{w}: {m}"
                )
                compared += 1
    return compared


def _layouts(axes: int) -> list[list[sw.Placement]]:
    every = [sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Partial()]
    return [[one] for one in every] if axes == 1 else [[every[1], every[2]], [every[2], every[4]], [every[1], every[1]]]


def test_programs_even(gloo4):
    assert gloo4.run(compare_programs, (4, 8, 4), timeout=120) == [8 * len(PROGRAMS)] * 4


def test_programs_uneven(gloo4):
    assert gloo4.run(compare_programs, (3, 5, 7), timeout=120) == [8 * len(PROGRAMS)] * 4


def extremes_with_nan() -> list[bool]:
    mesh = sw.init_device_mesh("cpu", (4,))
    rank = mesh.get_rank()
    nan, inf = math.nan, math.inf
    table = torch.tensor([[nan, 1, -0.0, 2, -inf], [1, nan, 0.0, -3, inf], [2, 2, -1, 5, 3], [0, -nan, 0, -7, 1]])
    right = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        parts = table.to(dtype)
        for op, wanted in (("max", parts.amax(0)), ("min", parts.amin(0))):
            reduced = sw.DTensor.from_local(parts[rank], mesh, [sw.Partial(op)])
            scattered = reduced.redistribute(placements=[sw.Shard(0)])
            for got in (reduced.full_tensor(), scattered.full_tensor()):
                right.append(torch.equal(got.isnan(), wanted.isnan()))
                right.append(torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)))
    return right


def test_a_nan_survives_minimum_and_maximum(gloo4):
    for right in gloo4.run(extremes_with_nan):
        assert all(right), right


def draws() -> list[torch.Tensor]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    torch.manual_seed(3)
    x = distributed(torch.ones(5, 6), mesh, sw.Shard(0), sw.Shard(1))
    with torch.no_grad():
        drawn = [F.dropout(x, 0.4), torch.rand_like(x), torch.randn_like(x), x.clone().normal_()]
    return [tensor.full_tensor() for tensor in drawn]


def test_random_numbers_are_those_of_one_device(gloo4):
    torch.manual_seed(3)
    x = torch.ones(5, 6)
    wanted = [F.dropout(x, 0.4), torch.rand_like(x), torch.randn_like(x), x.clone().normal_()]
    for drawn in gloo4.run(draws):
        assert all(torch.equal(a, b) for a, b in zip(drawn, wanted, strict=True))


def rows_compiled(rows: int) -> bool:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[1:] - x[:-1], y.flip(0)]).roll(2, 0).square().sum()

    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (4,))
    x, y = torch.randn(2, rows, 3, dtype=FLOAT).unbind()
    plain = [t.clone().requires_grad_() for t in (x, y)]
    fn(*plain).backward()
    given = [distributed(t, mesh, sw.Shard(0)) for t in (x, y)]
    torch.compile(fn, backend="aot_eager")(*given).backward()
    pairs = zip(given, plain, strict=True)
    return all(torch.allclose(a.grad.full_tensor(), b.grad) for a, b in pairs)  # pyright: ignore[reportOptionalMemberAccess]


def test_rows_are_exchanged_in_compiled_programs(gloo4):
    for rows in (8, 9):
        assert gloo4.run(rows_compiled, rows, timeout=120) == [True] * 4


def exchange_by_owner() -> int:
    """Look-ups, writes and sorting along a sharded dim, with indices that are sharded, against one device."""
    torch.manual_seed(0)
    always, before = (lambda *_: -1.0), ShardingPropagator._by_owner
    ShardingPropagator._by_owner = always
    seen: list[str] = []
    route_started.append(lambda route: seen.extend(type(step).__name__ for step in route.steps))
    set_cost_model(current_cost_model())  # forget what was chosen
    try:
        meshes = [sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (2, 2))]
        meshes.append(sw.DeviceMesh("cpu", [2, 0, 3, 1]))
        for mesh in meshes:
            for length, count in ((11, 9), (3, 6)):
                x, index = torch.randn(length, 3, dtype=FLOAT), torch.randint(0, length, (count, 3))
                source, split = torch.randn(count, 3, dtype=FLOAT), [sw.Shard(0)] * mesh.ndim
                given = [distributed(t, mesh, *split) for t in (x, index, source)]
                for name, program in BY_OWNER.items():
                    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in (x, index, source)]
                    found, wanted = program(*given), program(*plain)
                    torch.testing.assert_close(found.full_tensor(), wanted, msg=name)
                    if wanted.requires_grad:
                        (got,) = torch.autograd.grad((found * found).sum(), given[0])
                        (want,) = torch.autograd.grad((wanted * wanted).sum(), plain[0])
                        torch.testing.assert_close(got.full_tensor(), want, msg=name)
        wrong = torch.zeros(8, 3, dtype=torch.int64)
        wrong[5, 1] = 99  # one rank has it, all raise
        given = [distributed(t, meshes[0], sw.Shard(0)) for t in (torch.randn(16, 3), wrong)]
        try:
            given[0].gather(0, given[1])
        except IndexError:
            seen.append("refused")
        assert given[0].sort(0).values.full_tensor()[0].shape == (3,)
    finally:
        ShardingPropagator._by_owner = before
        route_started.clear()
        set_cost_model(current_cost_model())
    assert "refused" in seen
    return seen.count("OwnerExchange")


BY_OWNER = {
    "gather": lambda x, i, s: x.gather(0, i),
    "index": lambda x, i, s: x[i[:, 0]],
    "embedding": lambda x, i, s: F.embedding(i, x),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
    "scatter": lambda x, i, s: x.detach().scatter(0, i, s.detach()),
    "index_put": lambda x, i, s: x.index_put((i[:, 0], i[:, 1] % 3), s[:, 0], accumulate=True),
    "of booleans": lambda x, i, s: (x > 0).gather(0, i),
    "sort": lambda x, i, s: x.sort(0).values,
    "argsort": lambda x, i, s: (x > 0).sort(dim=0, stable=True, descending=True).indices,
    "quantile": lambda x, i, s: x.quantile(0.3, 0),
    "searchsorted": lambda x, i, s: torch.searchsorted(x[:, 0].detach().sort().values, s[:, 0].detach()),
}


def test_items_are_exchanged_by_owner(gloo4):
    counts = gloo4.run(exchange_by_owner)
    assert min(counts) == max(counts) > 100
