"""Halos between real processes, eager and compiled."""

import torch

import shardwise as sw
from shardwise.plan import propagate
from tests.virtual.test_halo import CONVOLUTIONS, FLOAT, NETWORK, PADS, POOLS, RESIZED, TRANSPOSED, UNFOLDED, network


def always() -> None:
    """Halos however short shards are."""
    propagate.ShardingPropagator._seconds = lambda *args: 0.0
    propagate.halo_rows = lambda *args: 0.0


def check(fn, shapes, mesh, placements, compiled=False) -> None:
    torch.manual_seed(0)
    whole = [sw.Replicate()] * mesh.ndim
    plain = [torch.randn(size, dtype=FLOAT).requires_grad_() for size in shapes]
    given = [
        sw.distribute_tensor(t.detach().clone(), mesh, whole if i else placements).requires_grad_()
        for i, t in enumerate(plain)
    ]
    wanted = fn(*plain)
    got = (torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn)(*given)
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
    wanted.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(given, plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-11, atol=1e-11)


def compare_all() -> int:
    always()
    line, plane = sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (2, 2))
    chosen = [
        *(CONVOLUTIONS[name] for name in ("stride", "empty shards")),
        *(TRANSPOSED[name] for name in ("stride and output padding",)),
        *(POOLS[name] for name in ("avg, padding not counted", "max")),
        *(PADS[name] for name in ("reflect", "circular")),
        *(UNFOLDED[name] for name in ("both dims",)),
        *(RESIZED[name] for name in ("bilinear by 1.3",)),
    ]
    for fn, shapes in chosen:
        check(fn, shapes, line, [sw.Shard(2)])
        check(fn, shapes, plane, [sw.Shard(2), sw.Shard(len(shapes[0]) - 1)])
    check(network, NETWORK, plane, [sw.Shard(2), sw.Shard(3)], compiled=True)
    return len(chosen)


def test_halos_between_processes(gloo4):
    assert gloo4.run(compare_all, timeout=300) == [9] * 4
