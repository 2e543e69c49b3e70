"""Sizes of `Ragged` that are new at each step: caches and memory stay flat, and results are those of one device."""

import functools
import gc
import itertools
import random
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise import Ragged, Replicate, Shard
from shardwise.core.cache import BoundedCache
from shardwise.core.intern import pool_size
from shardwise.fabric.routes import bound_route

TOKENS, WIDTH = 4096, 8


def random_sizes(rng: random.Random, size: int, parts: int) -> list[int]:
    bounds = [0, *sorted(rng.choices(range(size + 1), k=parts - 1)), size]
    return [high - low for low, high in itertools.pairwise(bounds)]


def entries_of_caches() -> int:
    """What all caches of the library hold together."""
    bounded = sum(len(found) for found in gc.get_objects() if type(found) is BoundedCache)
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("shardwise")]
    named = {id(value): value for module in modules for value in list(module.values())}
    return bounded + sum(f.cache_info().currsize for f in named.values() if isinstance(f, functools._lru_cache_wrapper))


def step(mesh: sw.DeviceMesh, x: Any, weight: Any, sizes: Any, others: Any) -> torch.Tensor:
    """What experts do to tokens, forward and backward, and moves from and to other layouts."""
    tokens = x.redistribute(placements=[Ragged(0, sizes)])
    hidden = F.silu(tokens @ weight) * tokens + 1
    back = hidden.redistribute(placements=[Ragged(0, others)]).redistribute(placements=[Shard(0)])
    (back * back).sum().backward()
    part = tokens.detach().to_local()
    again = sw.DTensor.from_local(part, mesh, [Ragged(0, sizes)], shape=tokens.shape, stride=tokens.stride())
    return again.sum(1).full_tensor()


def test_a_thousand_steps_leave_caches_and_memory_flat() -> None:
    rng = random.Random(0)
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.randn(TOKENS, WIDTH), mesh, [Shard(0)]).requires_grad_()
    weight = sw.distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Replicate()]).requires_grad_()

    def run(steps: int) -> tuple[int, int, int]:
        for _ in range(steps):
            sizes, others = (random_sizes(rng, TOKENS, 4) for _ in range(2))
            step(mesh, x, weight, sizes, others)
            x.grad = weight.grad = None
        gc.collect()
        return entries_of_caches(), pool_size(), len(gc.get_objects())

    entries, pool, objects = run(400)  # until caches have as many entries of given sizes as they keep
    later = run(600)
    assert later[0] == entries
    if "beartype" not in sys.modules:  # it keeps the closures that it has checked
        assert later[1] <= pool + 64  # specs that are kept differ in how many others they need
        assert later[2] <= objects + 2000  # a step makes about as many


def test_new_sizes_give_the_values_of_one_device() -> None:
    """Also where an operator was decided for other sizes before."""
    rng = random.Random(1)
    mesh = sw.init_device_mesh("cpu", (2, 3))
    x = torch.randn(12, 10, dtype=torch.float64)
    weight = torch.randn(10, 10, dtype=torch.float64)
    for _ in range(20):
        placed = [Ragged(1, random_sizes(rng, 10, 2)), Ragged(0, random_sizes(rng, 12, 3))]
        laid = sw.distribute_tensor(x, mesh, placed).requires_grad_()
        plain = x.clone().requires_grad_()
        for given in (laid, plain):
            ((given @ weight).relu() * given + given.mean(1, keepdim=True)).square().sum().backward()
        assert laid.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(laid.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)


def test_two_lists_of_sizes_are_told_from_one() -> None:
    """Operands of equal sizes need nothing moved, those of different ones do, whatever was met before."""
    mesh = sw.init_device_mesh("cpu", (4,))
    x = torch.arange(32.0).reshape(8, 4)
    for first, second in (((3, 5, 0, 0), (3, 5, 0, 0)), ((3, 5, 0, 0), (0, 1, 1, 6)), ((1, 1, 6, 0), (1, 1, 6, 0))):
        a, b = (sw.distribute_tensor(x, mesh, [Ragged(0, sizes)]) for sizes in (first, second))
        with sw.debug.CommDebugMode() as comm:
            total = a + b
        assert comm.get_total_counts() == (first != second)
        assert torch.equal(total.full_tensor(), x + x)


def test_sizes_may_be_a_tensor() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    counts = torch.tensor([5, 0, 3])
    assert Ragged(0, counts) is Ragged(0, (5, 0, 3))
    assert Ragged(0, sw.distribute_tensor(counts, mesh, [Replicate()])) is Ragged(0, (5, 0, 3))
    with pytest.raises(sw.LayoutError, match="integer size"):
        Ragged(0, torch.tensor([1.5, 2.0]))


def test_layouts_that_coincide_need_no_collective() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Ragged(0, (2, 2, 2, 2))])
    assert bound_route(x.spec, x.spec.with_placements([Shard(0)])).route.collectives == 0
    assert torch.equal(x.redistribute(placements=[Shard(0)]).full_tensor(), torch.arange(8.0))
