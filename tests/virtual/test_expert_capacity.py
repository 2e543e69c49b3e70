"""Experts with a capacity: in compiled and captured programs, derivatives, and at the limits of sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise import Replicate, Shard
from tests.expert_slots import CASES, compiled_beside_eager

S0, R = Shard(0), Replicate()


@pytest.mark.parametrize(("shape", "names"), CASES[:2], ids=str)
def test_one_graph_on_virtual_ranks(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    assert all(compiled_beside_eager(shape, names, uneven=len(names) == 1))


@pytest.mark.parametrize(("shape", "names"), CASES, ids=str)
def test_captured_steps(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Training steps, replayed: losses and parameters are those of eager steps, bit by bit."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    split = [S0 if name == "ep" else R for name in names]
    rows = [R if name == "tp" else S0 for name in names]
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        sizes = (((6, 8), [R] * mesh.ndim), ((6, 8, 16), split), ((6, 16, 8), split))
        parameters = [sw.distribute_tensor(torch.randn(n), mesh, p).requires_grad_() for n, p in sizes]
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step(x: Any, parameters: Any = parameters, optimizer: Any = optimizer) -> Any:
            router, up, down = parameters
            weights, ids = F.linear(x, router).softmax(-1).topk(2)
            tokens, back = sw.moe.dispatch(x, ids, 6, weights=weights, capacity=3)
            hidden = F.silu(F.grouped_mm(tokens, up, offs=back.offs))
            loss = back(F.grouped_mm(hidden, down, offs=back.offs)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = sw.captured(step) if captured else step
        losses = [run(sw.distribute_tensor(torch.randn(16, 8), mesh, rows)).full_tensor() for _ in range(4)]
        found.append([*losses, *[p.detach().full_tensor() for p in parameters]])
    for eager, replayed in zip(*found, strict=True):
        assert torch.equal(eager, replayed)


def test_what_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.randn(4, 2), mesh, [S0])
    ids = sw.distribute_tensor(torch.zeros(4, 1, dtype=torch.int64), mesh, [S0])
    with pytest.raises(sw.UnsupportedError, match="by torch"):
        torch.func.grad(lambda x: sw.moe.dispatch(x, ids, 2, capacity=1)[0].sum())(x)
    with pytest.raises(sw.UnsupportedError, match="give it a capacity"):
        sw.debug.make_fx(lambda x, ids: sw.moe.dispatch(x, ids, 2)[0])(x, ids)
    with pytest.raises(sw.UnsupportedError, match="of a tensor"):
        sw.captured(lambda x, ids: sw.moe.dispatch(x, ids, 2)[0])(x, ids)
    with pytest.raises(sw.LayoutError, match="capacity=0"):
        sw.moe.dispatch(x, ids, 2, capacity=0)


def test_derivatives_of_higher_order() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    x, weights = (torch.randn(7, n, dtype=torch.float64) for n in (4, 2))
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(7)])

    def penalty(x: Any, weights: Any, ids: Any, groups: int | None) -> Any:
        rows, back = sw.moe.dispatch(x, ids, 5, capacity=1, groups=groups)
        return back(rows.sin() * rows, weights).square().sum()

    laid = [sw.distribute_tensor(tensor, mesh, [S0]) for tensor in (x, weights, ids)]
    given: list[Any] = [tensor.requires_grad_() for tensor in (x, weights, laid[0], laid[1])]
    second = []
    for one, other, where, groups in ((given[0], given[1], ids, 3), (given[2], given[3], laid[2], None)):
        first = torch.autograd.grad(penalty(one, other, where, groups), (one, other), create_graph=True)
        second.append(torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (one, other)))
    for plain, mine in zip(*second, strict=True):
        torch.testing.assert_close(mine.full_tensor(), plain)


@pytest.mark.parametrize("tokens", [0, 1, 3, 9])
@pytest.mark.parametrize("capacity", [None, 1, 4])
def test_few_tokens_and_doubled_experts(tokens: int, capacity: int | None) -> None:
    """Fewer tokens than ranks, none at all; a token that goes to one expert twice; one expert for all."""
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x = torch.randn(tokens, 3, dtype=torch.float64)
    weights = torch.rand(tokens, 3, dtype=torch.float64)
    ids = torch.randint(0, 5, (tokens, 3))
    ids[:, 1] = ids[:, 0]
    ids[tokens // 2 :] = 4
    found = []
    for on_mesh in (False, True):
        given: list[Any] = [x, weights, ids]
        if on_mesh:
            given = [sw.distribute_tensor(tensor, mesh, [S0]) for tensor in given]
        leaves: list[Any] = [tensor.detach().requires_grad_() for tensor in given[:2]]
        groups = 4 if capacity and not on_mesh else None
        rows, back = sw.moe.dispatch(leaves[0], given[2], 5, capacity=capacity, groups=groups)
        y = back(rows.sin(), leaves[1])
        grads = torch.autograd.grad(y.square().sum(), leaves)
        values = [rows, y, back.offs, back.counts, *grads]
        found.append([v.full_tensor() if isinstance(v, sw.DTensor) else v for v in values])
    for plain, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)
