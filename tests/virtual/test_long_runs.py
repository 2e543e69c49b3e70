"""What varies from step to step makes nothing grow: scalars, learning rates, lengths; many threads, two meshes."""

import gc
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from bench.long_run import Loop
from shardwise.fabric import routes
from shardwise.tensor import dispatcher

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


def ours() -> int:
    """How many tensors, and objects of the library, there are."""
    kinds = (type(thing) for thing in gc.get_objects())
    return sum(str(kind.__module__).startswith("shardwise") or issubclass(kind, torch.Tensor) for kind in kinds)


@pytest.mark.skipif("beartype" in sys.modules, reason="beartype keeps the closures that it has checked")
def test_changing_scalars_and_lengths_make_nothing_grow() -> None:
    loop = Loop()
    for step in range(300):  # every length and everything that is made once
        loop.step(step)
    gc.collect()
    entries, objects = sw.cache_info(), ours()
    for step in range(300, 1500):
        loop.step(step)
    gc.collect()
    after = sw.cache_info()
    assert after.entries == entries.entries
    assert after.routes == entries.routes
    assert after.misses == entries.misses
    assert ours() - objects < 10


def test_caches_stay_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new length on each step: the oldest entries are dropped, and dropped ones are made again."""
    before = sw.cache_info()
    most, most_routes = before.entries + 50, before.routes + 20
    monkeypatch.setattr(dispatcher.cache, "limit", most)
    monkeypatch.setattr(routes._bound, "limit", most_routes)
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.ones(8, 4, device_mesh=mesh, placements=[S0])
    seen = []
    for length in [*range(1, 200), 1]:
        product = sw.ones(length, 4, device_mesh=mesh, placements=[S0]) @ x.t()
        assert torch.equal(product.redistribute(placements=[S1]).full_tensor(), torch.full((length, 8), 4.0))
        seen.append(sw.cache_info())
    # a step makes a few entries: the bound is reached, or nearly, and never passed
    assert most - 8 < max(info.entries for info in seen) <= most
    assert most_routes - 4 < max(info.routes for info in seen) <= most_routes
    assert seen[-1].misses - before.misses > 150


def test_backward_on_several_threads_at_once() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    weight = torch.randn(12, 12, dtype=torch.float64)
    failures: list[Any] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for step in range(10):
                x = torch.randn(4 + (seed + step) % 5, 12, dtype=torch.float64, generator=generator)
                plain_w = weight.clone().requires_grad_()
                F.gelu(x @ plain_w).square().mean().backward()
                w = sw.distribute_tensor(weight, mesh, [S0, S1]).requires_grad_()
                F.gelu(sw.distribute_tensor(x, mesh, [S0, R]) @ w).square().mean().backward()
                assert w.grad is not None
                assert plain_w.grad is not None
                torch.testing.assert_close(w.grad.full_tensor(), plain_w.grad)  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_two_meshes_in_one_program() -> None:
    first = sw.init_device_mesh("cpu", (4,))
    second = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a = torch.randn(8, 6, dtype=torch.float64)
    plain = a.clone().requires_grad_()
    (plain.softmax(-1) @ a.t()).square().sum().backward()
    x = sw.distribute_tensor(a, first, [S0]).requires_grad_()
    moved = x.softmax(-1).redistribute(second, [S1, S0])
    (moved @ sw.distribute_tensor(a, second, [R, S0]).t()).square().sum().backward()
    assert x.grad is not None
    assert x.grad.device_mesh is first
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)  # pyright: ignore[reportAttributeAccessIssue]
