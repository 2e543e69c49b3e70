"""Which way an operator goes where it must communicate: by what that costs, and what its result then owes."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from tests.virtual.free import S0, S1, R
from tests.virtual.parity import bytes_moved, distribute, whole


def layer(mesh: sw.DeviceMesh, features: tuple[int, int], split: int, bias: Any = None) -> list[Any]:
    """A weight of a linear layer, split along the last axis of the mesh, and a bias if it has one."""
    replicas = [R] * (mesh.ndim - 1)
    weight = sw.ones(features, device_mesh=mesh, placements=[*replicas, sw.Shard(split)], requires_grad=True)
    if bias is None:
        return [weight]
    return [weight, sw.ones(features[0], device_mesh=mesh, placements=[*replicas, bias], requires_grad=True)]


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (8,)])
@pytest.mark.parametrize("width", [32, 1024])
def test_layers_split_by_hand_reduce_twice_forward_and_twice_backward(shape: tuple[int, ...], width: int) -> None:
    """A block of a transformer, weights by columns and rows: no weight is gathered, and no activation."""
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", shape)
        x = sw.ones(8, 64, width, device_mesh=mesh, placements=[*[S0] * (mesh.ndim - 1), R])
        scale = sw.ones(width, device_mesh=mesh, placements=[R] * mesh.ndim, requires_grad=True)
        square = (width, width)
        queries, keys, values = (layer(mesh, square, 0) for _ in range(3))
        out = layer(mesh, square, 1)
        up, down = layer(mesh, (4 * width, width), 0, S0), layer(mesh, (width, 4 * width), 1, R)
        normed = F.layer_norm(x, (width,), scale)
        q, k, v = (F.linear(normed, *w).view(8, 64, 8, -1).transpose(1, 2) for w in (queries, keys, values))
        attended = (torch.softmax(q @ k.transpose(2, 3), -1) @ v).transpose(1, 2).reshape(8, 64, width)
        x = x + F.linear(attended, *out)
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,), scale), *up)), *down)
        loss = x.pow(2).mean()
        assert run.collectives == Counter({"all_reduce": 2})
        loss.backward()
    assert run.collectives == Counter({"all_reduce": 4})
    n, local = shape[-1], 8 * 64 * width * 4 // math.prod(shape[:-1])
    assert run.bytes == 4 * 2 * (n - 1) * local // n
    for (weight, *_), split in ((queries, S0), (out, S1), (up, S0), (down, S1)):
        assert weight.grad is not None
        assert weight.grad.placements[-1] is split


def place_of_maximum(x: Any, dim: int) -> Any:
    """Where the largest so far was."""
    return torch.cummax(x, dim).indices


@pytest.mark.parametrize(
    ("op", "reductions"),
    [(torch.softmax, 2), (torch.std, 2), (torch.logsumexp, 2), (torch.cumsum, 1), (place_of_maximum, 2)],
)
def test_short_rows_are_moved_and_long_ones_are_not(op: Callable[..., Any], reductions: int) -> None:
    """Starting a collective costs as much as some ten thousand elements do."""
    mesh = sw.init_device_mesh("cpu", (4,))
    for size, collectives in ((64, 1), (2**16, reductions)):
        x = torch.randn(4, size)
        got, count, received = bytes_moved(lambda x=x: op(distribute(x, mesh, [S1]), 1))
        torch.testing.assert_close(whole(got), op(x, 1), rtol=1e-3, atol=1e-3)
        assert count == collectives
        assert received <= 1024


def test_a_model_of_costs_counts_from_when_it_is_set() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = distribute(torch.randn(4, 4096), mesh, [S1])
    counts = [bytes_moved(lambda: torch.softmax(x, 1))[1]]
    before = sw.set_cost_model(sw.CostModel(devices={"cpu": sw.Link(alpha=1e-9, beta=1e-9)}))
    try:
        counts.append(bytes_moved(lambda: torch.softmax(x, 1))[1])
    finally:
        sw.set_cost_model(before)
    assert counts == [1, 2]
