"""Names and arguments of torch.distributed.tensor and FSDP2, in the places where programs use them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.parallel import (
    ColwiseParallel,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
    replicate,
    share_comm_ctx,
)

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def line() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


@pytest.fixture
def square() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def rank_batches(size: int = 4) -> sw.RankTensor:
    return sw.RankTensor([torch.arange(8.0).reshape(2, 4) + rank for rank in range(size)])


# ---------------------------------------------------------------- meshes


def test_functions_without_a_mesh_take_that_of_the_with_statement(line: sw.DeviceMesh) -> None:
    with line:
        made = (
            sw.distribute_tensor(torch.arange(4.0), placements=[S0]),
            sw.zeros(4, placements=[S0]),
            sw.DTensor.from_local(torch.ones(1), placements=[S0]),
            fully_shard(nn.Linear(4, 4)).weight,
            replicate(nn.Linear(4, 4)).weight,
            parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel()).weight,
            sw.distribute_module(nn.Linear(4, 4)).weight,
        )
    assert all(tensor.device_mesh is line for tensor in made)
    with pytest.raises(sw.MeshError, match="no mesh was given"):
        sw.zeros(4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_axes_of_two_splits_of_a_world_compose(replicas: int) -> None:
    world = sw.init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    loading = world._unflatten(0, (1, 4, 1, 2), ("pp", "batch", "cp", "tp"))
    dense = world._unflatten(0, (1, replicas, 4 // replicas, 2), ("pp", "replicas", "fsdp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    plain, x = copy.deepcopy(model), torch.randn(8, 4)
    parallelize_module(model, loading["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, dense["replicas", "fsdp"] if replicas > 1 else dense["fsdp"])
    optimizer, expected = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    for _ in range(2):
        batches = sw.RankTensor([x.chunk(4)[rank // 2] for rank in range(8)])
        model(batches).square().mean().backward()
        plain(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()


def test_a_batch_on_another_mesh_than_the_models(line: sw.DeviceMesh, square: sw.DeviceMesh) -> None:
    other = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    batch = sw.distribute_tensor(torch.ones(4, 4), other, [S0])
    models = (
        fully_shard(nn.Linear(4, 4), line),
        replicate(nn.Linear(4, 4), line),
        parallelize_module(nn.Linear(4, 4), square["tp"], ColwiseParallel()),
    )
    for model in models:
        with pytest.raises(sw.MeshError, match=r"the batch is on DeviceMesh\(cpu other=4.*the model's"):
            model(batch)


# ---------------------------------------------------------------- modules


def test_functions_of_values_and_a_mesh_alone(line: sw.DeviceMesh) -> None:
    linear = nn.Linear(4, 3)
    expected = linear(torch.arange(32.0).reshape(8, 4))
    sw.distribute_module(
        linear,
        line,
        input_fn=lambda inputs, mesh: sw.distribute_tensor(inputs[0], mesh, [S0]),
        output_fn=lambda output, mesh: output.redistribute(mesh, [R]).to_local(),
    )
    found: Any = linear(torch.arange(32.0).reshape(8, 4))
    torch.testing.assert_close(found.tensors[3], expected)
    with pytest.raises(sw.LayoutError, match="input_fn takes 1 arguments"):
        sw.distribute_module(nn.Linear(4, 3), line, input_fn=lambda inputs: inputs)


def test_parameters_of_each_rank(line: sw.DeviceMesh) -> None:
    linear = nn.Linear(4, 4)
    expected = linear.weight.detach().clone()
    made: Any = parallelize_module(linear, line, ColwiseParallel(), src_data_rank=None)
    torch.testing.assert_close(made.weight.full_tensor(), expected)


@pytest.mark.parametrize("inputs", ["plain", "dtensor"])
@pytest.mark.parametrize("make", [fully_shard, replicate])
def test_a_divide_factor_divides_the_sum(make: Any, inputs: str, line: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    plain, batches = copy.deepcopy(model), rank_batches()
    make(model, line)
    model.set_gradient_divide_factor(2.0)  # pyright: ignore[reportCallIssue]
    batch: Any = batches if inputs == "plain" else sw.DTensor.from_local(batches, line, [S0])
    model(batch).square().sum().backward()
    plain(torch.cat(list(batches.tensors))).square().sum().backward()
    weight: Any = model.weight
    assert plain.weight.grad is not None
    torch.testing.assert_close(weight.grad.full_tensor(), plain.weight.grad / 2)


class Scaled(nn.Module):
    """A linear layer with a learnable temperature, which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature.exp()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_scalar_parameters(shape: tuple[int, ...], policy: Any) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    model = Scaled()
    plain, batches = copy.deepcopy(model), rank_batches()
    fully_shard(model, mesh, mp_policy=policy)
    temperature: Any = model.temperature
    assert temperature.spec.is_replicated
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    tolerance: Any = {"rtol": 3e-2, "atol": 3e-2} if policy else {}
    for _ in range(3):
        out: Any = model(batches)
        assert policy is None or out.dtype is torch.bfloat16
        out.sigmoid().mean().backward()
        plain(torch.cat(list(batches.tensors))).sigmoid().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.temperature.full_tensor(), plain.temperature.detach(), **tolerance)


def test_data_axes_by_name() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "tp"))
    both = fully_shard(nn.Linear(8, 8), mesh, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
    assert str(both.weight.spec) == "f32[8,8] a_b:S0"
    hybrid = fully_shard(nn.Linear(8, 8), mesh, dp_mesh_dims=DataParallelMeshDims(shard="b", replicate="a"))
    assert str(hybrid.weight.spec) == "f32[8,8] a:R b:S0"
    alone = fully_shard(nn.Linear(8, 8), mesh, dp_mesh_dims=DataParallelMeshDims(replicate=("a", "b")))
    assert str(alone.weight.spec) == "f32[8,8] a_b:R"
    for model in (both, hybrid, alone):
        model(torch.ones(2, 8)).sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((8, 8), 2.0))
    with pytest.raises(sw.MeshError, match="twice"):
        fully_shard(nn.Linear(8, 8), mesh, dp_mesh_dims=DataParallelMeshDims(shard="a", replicate=("a", "b")))
    with pytest.raises(ValueError, match="name an axis"):
        DataParallelMeshDims()


def test_names_that_are_accepted(line: sw.DeviceMesh) -> None:
    model = fully_shard(nn.Linear(4, 4), line)
    share_comm_ctx([model])
    with pytest.raises(sw.UnsupportedError, match="not fully sharded"):
        share_comm_ctx([nn.Linear(4, 4)])
    assert replicate(nn.Linear(4, 4), device_mesh=line).weight.device_mesh is line
    with pytest.raises(sw.MeshError, match="both"):
        replicate(nn.Linear(4, 4), line, device_mesh=line)


def test_replicated_modules_in_another_dtype(line: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    plain, batches = copy.deepcopy(model), rank_batches()
    replicate(model, line, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        out = model(batches)
        assert out.dtype is torch.bfloat16
        out.float().square().mean().backward()
        plain(torch.cat(list(batches.tensors))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=3e-2, atol=3e-2)


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_parallel_with_plain_targets(reduction: str, square: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 8), torch.arange(6)
    targets[2] = -100
    expected = logits.clone().requires_grad_()
    F.cross_entropy(expected, targets, reduction=reduction).sum().backward()
    for placements in ([R, S1], [S0, S1]):
        ours: Any = sw.distribute_tensor(logits, square, placements).requires_grad_()
        with loss_parallel():
            loss: Any = F.cross_entropy(ours, targets, reduction=reduction)
            loss.sum().backward()
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)
