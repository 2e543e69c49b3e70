"""Derivatives of any order through moves, locals and layers on real processes, and through torch's DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import shardwise as sw
from shardwise import DTensor, Partial, Shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.gloo.processes import ProcessPool
from tests.virtual.programs import Program, check, make


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def penalty(function: Callable[[Any], Any], x: Any) -> torch.Tensor:
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return second.full_tensor() if isinstance(second, DTensor) else second


def moves() -> None:
    value = numbers(6, 5)
    want = penalty(lambda x: (x**3).tanh(), value.clone().requires_grad_())
    tangent = jvp(lambda x: (x**3).tanh(), (value,), (value.sin(),))[1]
    for shape, before, after in (
        ((4,), [Shard(0)], [Shard(1)]),
        ((2, 2), [Shard(0), Partial()], [Shard(1), Shard(0)]),
        ((2, 2), [Partial("avg"), Shard(1)], [sw.Replicate(), sw.Replicate()]),
    ):
        mesh = sw.init_device_mesh("cpu", shape)
        x = sw.distribute_tensor(value, mesh, before).requires_grad_()

        def through(x: Any, mesh: Any = mesh, after: Any = after) -> Any:
            y = (x**3).redistribute(placements=after)
            y = DTensor.from_local(y.to_local(), mesh, after, shape=y.shape)
            return DTensor.from_local(y.full_tensor(), mesh).tanh()

        torch.testing.assert_close(penalty(through, x), want)
        plain = x.detach()
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(through(forward_ad.make_dual(plain, plain.sin()))).tangent
        torch.testing.assert_close(out.full_tensor(), tangent)
        torch.testing.assert_close(jvp(through, (plain,), (plain.sin(),))[1].full_tensor(), tangent)
        rows = vmap(grad(lambda r: (r * 2).redistribute().tanh().sum()))(plain)
        torch.testing.assert_close(rows.full_tensor(), 2 * (1 - (2 * value).tanh() ** 2))


def test_moves(gloo4: ProcessPool) -> None:
    gloo4.run(moves)


def writes() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(numbers(8), mesh, [Shard(0)]).requires_grad_()
    saved = x.tanh()
    made = DTensor.from_local(saved.to_local().mul_(3), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()
    made = DTensor.from_local(x.to_local().tanh(), mesh, [Shard(0)]).mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()
    transposed = sw.distribute_tensor(numbers(8, 5), mesh, [Shard(0)]).t()
    for moved in (transposed, transposed.redistribute(placements=[sw.Replicate()], async_op=True), transposed * 1):
        assert moved.full_tensor().stride() == (1, 5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), sw.distribute_tensor(numbers(8), mesh, [sw.Replicate()]))
        dual.redistribute(placements=[sw.Replicate()]).fill_(1)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent.full_tensor(), numbers(8))


def test_writes(gloo4: ProcessPool) -> None:
    gloo4.run(writes)


def layers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()
    mine = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()
    mine.load_state_dict(plain.state_dict())
    mesh = sw.init_device_mesh("cpu", (4,))
    parallelize_module(mine, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)})
    value = numbers(5, 8)
    y, x = value.clone().requires_grad_(), sw.distribute_tensor(value, mesh).requires_grad_()
    for model, given in ((plain, y), (mine, x)):
        grads = torch.autograd.grad(model(given).tanh().sum(), [given, *model.parameters()], create_graph=True)
        sum((g**2).sum() for g in grads).backward()  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    for p, q in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_layers(gloo4: ProcessPool) -> None:
    gloo4.run(layers)


def torchs() -> None:
    value = numbers(6, 5)
    want = penalty(lambda x: (x**3).tanh(), value.clone().requires_grad_())
    x = sw.distribute_tensor(value, sw.init_device_mesh("cpu", (4,)), [Shard(0)]).requires_grad_()
    there_and_back = penalty(lambda x: sw.from_torch(sw.to_torch(x**3)).tanh(), x)
    torch.testing.assert_close(there_and_back, want)


def test_through_the_dtensor_of_torch(gloo4: ProcessPool) -> None:
    gloo4.run(torchs)


def programs(some: list[Program]) -> list[str]:
    return [f"{program.seed}: {told}" for program in some if (told := check(program)) is not None]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch does so for forward mode
def test_random_programs(gloo4: ProcessPool) -> None:
    """The programs that fit on four processes."""
    some = [program for program in map(make, range(3000, 3060)) if torch.Size(program.mesh).numel() == 4]
    assert len(some) > 10
    assert gloo4.run(programs, some, timeout=200) == [[]] * 4
