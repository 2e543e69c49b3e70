"""Routes that go inside hosts first give the values of any other route; training with them is that of one device."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.debug import CommDebugMode

FAST, SLOW = sw.Link(1e-9, 1e-9), sw.Link(1e-9, 1e-8)


@pytest.fixture(autouse=True)
def hosts_of_four() -> Iterator[None]:
    before = sw.set_cost_model(sw.CostModel(hosts={"cpu": sw.HostLinks(4, FAST, SLOW, SLOW)}))
    yield
    sw.set_cost_model(before)


PLACEMENTS = [sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Partial(), sw.Partial("max"), sw.Partial("avg")]


@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 4), (12,)])
@pytest.mark.parametrize("sizes", [(24, 48), (20, 9), (24,), (48, 8, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_values_are_those_of_equal_links(shape: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    value = torch.arange(torch.Size(sizes).numel()).reshape(sizes).to(dtype)
    known = [p for p in PLACEMENTS if not (isinstance(p, sw.Shard) and p.dim >= len(sizes))]
    targets = [p for p in known if not isinstance(p, sw.Partial)]
    for old, new in itertools.product(known, targets):
        if old == sw.Partial("avg") and dtype is torch.int64:
            continue
        for others in itertools.product([sw.Replicate(), sw.Shard(0)], repeat=len(shape) - 1):
            if isinstance(old, sw.Partial):  # ranks that differ only along replicated axes hold the same
                axis = mesh.coordinates[:, 0].tolist()
                parts = sw.RankTensor([value * (at % 3 - 1) for at in axis])
                made = sw.DTensor.from_local(parts, mesh, [old, *[sw.Replicate()] * len(others)], run_check=False)
            else:
                made = sw.distribute_tensor(value, mesh, [old, *others])
            found = made.redistribute(placements=[new, *others])
            before = sw.set_cost_model(sw.CostModel())
            plain = made.redistribute(placements=[new, *others])
            sw.set_cost_model(before)
            for mine, theirs in zip(found.to_local().tensors, plain.to_local().tensors, strict=True):
                torch.testing.assert_close(mine, theirs)


def test_the_route_is_taken_and_explained() -> None:
    mesh = sw.init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    x = sw.DTensor.from_local(sw.RankTensor([torch.full((16, 16), float(r)) for r in range(8)]), mesh, [sw.Partial()])
    with CommDebugMode() as mode:
        found = x.redistribute(placements=[sw.Replicate()])
    assert torch.equal(found.full_tensor(), torch.full((16, 16), 28.0))
    assert mode.get_total_counts() == 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def train(model: nn.Module, place: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
        loss = model(place(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", [sw.fully_shard, sw.replicate])
def test_training_is_that_of_one_device(wrap: Any) -> None:
    plain = network()
    mesh = sw.init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    model = wrap(copy.deepcopy(plain), mesh)
    found = train(model, lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0)]))
    assert found == pytest.approx(train(plain, lambda x: x), rel=1e-5)


def test_dry_runs_count_the_route() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (4096,), mesh_dim_names=("dp",))
        x = sw.zeros(4096, 4096, device_mesh=mesh, placements=[sw.Shard(0)])
        x.redistribute(placements=[sw.Replicate()])
    assert sum(run.collectives.values()) == 3
