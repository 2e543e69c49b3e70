"""replicate on virtual ranks: losses and gradients of one device, buckets, and avoided communication."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode
from tests.transformer import Transformer, assert_same, assert_trains_as_one_device, batch, loss_of, tensor_parallel

R, S0 = Replicate(), Shard(0)


def line(ranks: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def counts(comm: CommDebugMode) -> Counter[str]:
    return Counter({str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items()})


def rows(tensor: torch.Tensor, ranks: int) -> sw.RankTensor:
    return sw.RankTensor(tensor.chunk(ranks))


@pytest.mark.parametrize("tied", [False, True])
def test_batches_of_ranks_train_on_the_mean_of_their_losses(tied: bool) -> None:
    mesh = line(4)
    assert_trains_as_one_device(
        lambda model: sw.replicate(model, mesh, bucket_cap_mb=0.002),
        lambda tensor: rows(tensor, 4),
        dropout=0.0,
        tied=tied,
        steps=3,
    )


def test_with_tensor_parallelism_and_a_global_batch_dropout_included() -> None:
    world = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert_trains_as_one_device(
        lambda model: sw.replicate(model, world["dp"]),
        lambda tensor: sw.distribute_tensor(tensor, world, [S0, R]),
        dropout=0.2,
        steps=3,
        prepare=lambda model: tensor_parallel(model, world["tp"]),
    )


@pytest.mark.parametrize(("cap", "buckets"), [(25.0, 1), (0.0004, 2), (0.0, 4)])
def test_gradients_travel_in_buckets(cap: float, buckets: int) -> None:
    model = sw.replicate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), line(2), bucket_cap_mb=cap)
    x = sw.RankTensor([torch.ones(1, 8)] * 2)
    with CommDebugMode() as comm:
        loss = model(x).sum()
        assert not counts(comm)
        loss.backward()
    assert counts(comm) == {"all_reduce": buckets}
    with CommDebugMode() as comm, model.no_sync():
        model(x).sum().backward()
    assert not counts(comm)
    model(x).sum().backward()
    once = model[1].bias.grad.full_tensor()
    assert torch.equal(once, torch.full((8,), 3.0))


def test_buckets_are_reduced_while_backward_runs() -> None:
    model = sw.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), line(2), bucket_cap_mb=0.0)
    said: list[int] = []
    with CommDebugMode() as comm:
        out = model(sw.RankTensor([torch.ones(1, 4)] * 2))
        leaf: Any = model._shardwise_data_parallel.groups[0].current.leaves(None)[0]
        leaf.register_hook(lambda _: said.append(comm.get_total_counts()))
        out.sum().backward()
    assert 2 <= said[0] < 4  # the gradients of the second layer were on their way before the first layer's were there
    assert comm.get_total_counts() == 4


def test_unused_and_frozen_parameters() -> None:
    mesh = line(2)
    torch.manual_seed(0)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
            self.used.bias.requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    reference = Half().double()
    model = copy.deepcopy(reference)
    sw.replicate(model, mesh)
    x = torch.randn(4, 4, dtype=torch.float64)
    for _ in range(2):
        reference(x).pow(2).sum().backward()
        model(sw.distribute_tensor(x, mesh, [S0])).pow(2).sum().backward()
    assert_same(model, reference, lambda parameter: parameter.grad)


def test_parameters_stay_where_they_are_and_follow_the_optimizer() -> None:
    mesh = line(2)
    reference = Transformer()
    model = copy.deepcopy(reference)
    sw.replicate(model, mesh)
    tokens, targets = batch(0)
    with torch.no_grad():
        for one in (reference, model):
            for parameter in one.parameters():
                parameter.mul_(0.5)
    loss = loss_of(model(sw.distribute_tensor(tokens, mesh, [S0])), sw.distribute_tensor(targets, mesh, [S0]))
    torch.testing.assert_close(loss.full_tensor(), loss_of(reference(tokens), targets))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    loss = loss_of(model(rows(tokens, 2)), rows(targets, 2))
    torch.testing.assert_close(torch.stack(loss.tensors).mean(), loss_of(reference(tokens), targets))
    with pytest.raises(sw.UnsupportedError, match="already"):
        sw.replicate(model, mesh)
