"""Names and arguments of torch.distributed.tensor and FSDP2, in the places where programs use them."""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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
from tests.plans import Adapted

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


# ---------------------------------------------------------------- copies: averages of weights


class Tower(nn.Module):
    """Blocks, a norm with running statistics, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return F.linear(h, self.head.weight.t())


def wrapped(kind: str, model: Any, square: sw.DeviceMesh) -> Any:
    """The model over the mesh, one batch for all."""
    if "tp" in kind:
        styles = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}
        parallelize_module(model, square["tp"], styles)
    if "fsdp" in kind:
        for block in model.blocks:
            fully_shard(block, square["dp"])
        fully_shard(model, square["dp"])
    if "ddp" in kind:
        replicate(model, square["dp"])
    return model


@pytest.mark.parametrize("kind", ["tp", "fsdp", "ddp", "fsdp tp"])
@pytest.mark.parametrize("multi", [True, False])
def test_averaged_models(kind: str, multi: bool, square: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(4, 4), Tower()
    ours = wrapped(kind, copy.deepcopy(plain), square)

    def average(model: nn.Module) -> Any:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if multi else None)

    averages = [average(model) for model in (ours, plain)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, plain)]
    for _ in range(3):
        for model, optimizer, averaged in zip((ours, plain), optimizers, averages, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
    for found, expected in zip(averages[0].module.parameters(), averages[1].module.parameters(), strict=True):
        found = found.full_tensor() if isinstance(found, sw.DTensor) else found
        torch.testing.assert_close(found.detach(), expected.detach())
    for model, expected in ((averages[0], averages[1](x)), (ours, plain(x))):
        out: Any = model(x)
        torch.testing.assert_close(out.tensors[1] if isinstance(out, sw.RankTensor) else out, expected)


def test_a_copy_trains_on_its_own(line: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 4), Tower()
    first = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, line)
    fully_shard(model, line)
    model.set_gradient_divide_factor(4.0)  # pyright: ignore[reportCallIssue]
    pending: Any = model(x).sum()  # a copy between forward and backward
    other: Any = copy.deepcopy(model)
    pending.backward()
    assert all(parameter.grad is None for parameter in other.parameters())
    assert other.head.weight is other.embedding.weight
    for parameter in other.parameters():
        with torch.no_grad():
            parameter.add_(1.0)
    for copied, kept, start in zip(other.parameters(), model.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(kept.full_tensor(), start.detach())
        torch.testing.assert_close(copied.full_tensor(), start.detach() + 1)
        assert copied is not kept
    other(x).sum().backward()
    for parameter in first.parameters():
        with torch.no_grad():
            parameter.add_(1.0)
    first(x).sum().backward()
    for copied, expected in zip(other.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(copied.grad.full_tensor(), expected.grad)
    single = copy.deepcopy(fully_shard(nn.Linear(4, 4), line))
    single(x).sum().backward()
    assert str(single.weight.grad.spec) == "f32[4,4] dp:S0"
    single.unshard()
    with pytest.raises(sw.UnsupportedError, match="call reshard"):
        copy.deepcopy(single)


# ---------------------------------------------------------------- parametrizations and adapters


def orthogonal(module: nn.Module) -> nn.Module:
    return parametrizations.orthogonal(module)


@pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")  # an orthogonal matrix is computed by QR
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("first", ["plan", "parametrization"])
@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm, orthogonal])
def test_parametrizations_before_and_after_a_plan(make: Any, first: str, ranks: int) -> None:
    mesh = sw.init_device_mesh("cpu", (ranks,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel(output_layouts=R)}
    models = []
    for is_parallel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2))
        if is_parallel and first == "plan":
            parallelize_module(model, mesh, plan)
        torch.manual_seed(1)
        make(model[0])
        make(model[2])
        if is_parallel and first == "parametrization":
            parallelize_module(model, mesh, plan)
        models.append(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    x = torch.randn(5, 4)
    for _ in range(2):
        outs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            out: Any = model(x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out.tensors[0] if isinstance(out, sw.RankTensor) else out)
        torch.testing.assert_close(*outs)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


FIRST_OPERATOR_THAT_IMPORTS_DYNAMO = """
import gc, sys, warnings
import torch
import shardwise as sw
from torch import nn
from shardwise.parallel import RowwiseParallel, parallelize_module

gc.disable()
warnings.simplefilter("ignore")
layer = nn.Linear(8, 4)
parallelize_module(layer, sw.init_device_mesh("cpu", (4,)), RowwiseParallel())
assert "torch._dynamo" not in sys.modules
nn.utils.parametrizations.orthogonal(layer)
print("torch._dynamo" in sys.modules, layer.weight.shape)
"""


def test_frames_that_an_import_of_dynamo_kept_are_released() -> None:
    command = [sys.executable, "-c", FIRST_OPERATOR_THAT_IMPORTS_DYNAMO]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "True torch.Size([4, 8])\n"


def test_weights_that_a_hook_computes(line: sw.DeviceMesh) -> None:
    with pytest.warns(FutureWarning):
        normed = nn.utils.weight_norm(nn.Linear(4, 4))
    with pytest.raises(sw.LayoutError, match="a hook computes its weight"):
        parallelize_module(normed, line, ColwiseParallel())


class Doubled(nn.Module):
    """An adapter of an adapter."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) * (1 + self.scale)


def two_layers(adapt: bool = False) -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    return with_adapters(model) if adapt else model


def with_adapters(model: nn.Sequential) -> nn.Sequential:
    """Adapters around both layers; nothing else is trained."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    model[0], model[2] = Doubled(Adapted(model[0])), Adapted(model[2])
    return model


STYLES = {
    "local": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "global": {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)},
}
INSIDE = {"0.base_layer.base_layer": ColwiseParallel(), "2.base_layer": RowwiseParallel()}
EVERY_PART = {
    "0.base_layer.base_layer": ColwiseParallel(output_layouts=R),
    "0.base_layer.lora_B": ColwiseParallel(output_layouts=R),
    "2.base_layer": RowwiseParallel(input_layouts=R),
    "2.lora_A": RowwiseParallel(input_layouts=R),
}
ADAPTED = {
    "before": lambda mesh, styles: with_adapters(parallelize_module(two_layers(), mesh, styles)),  # pyright: ignore[reportArgumentType]
    "after": lambda mesh, styles: parallelize_module(two_layers(adapt=True), mesh, styles),
    "inside": lambda mesh, styles: parallelize_module(two_layers(adapt=True), mesh, INSIDE),
    "twice": lambda mesh, styles: parallelize_module(
        parallelize_module(two_layers(adapt=True), mesh, styles), mesh, styles
    ),
}


def assert_same_training(ours: nn.Module, theirs: nn.Module, x: torch.Tensor, given: Any = None) -> None:
    """Results, gradients of the input and parameters after two steps."""
    entered = x if given is None else given
    for _ in range(2):
        found = []
        for model, value in ((ours, entered), (theirs, x)):
            value = value.detach().clone().requires_grad_()
            wanted = [p for p in model.parameters() if p.requires_grad]
            assert wanted
            optimizer = torch.optim.SGD(wanted, lr=0.1)
            out = model(value)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((whole(out), whole(value.grad)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a.requires_grad == b.requires_grad
        torch.testing.assert_close(whole(a.detach()), b.detach(), msg=lambda text, name=name: f"{name}: {text}")


def whole(value: Any) -> torch.Tensor:
    """What all ranks agree on."""
    if isinstance(value, sw.RankTensor):
        for part in value.tensors[1:]:
            assert torch.equal(part, value.tensors[0])
        return value.tensors[0]
    return value.full_tensor() if isinstance(value, sw.DTensor) else value


@pytest.mark.parametrize(
    ("order", "output", "shape"),
    [("before", "local", (4,)), ("before", "local", (3,)), ("before", "global", (2,)), ("after", "local", (3,)),
     ("after", "global", (4,)), ("inside", "local", (3,)), ("twice", "local", (4,))],
)  # fmt: skip
def test_adapters_around_layers_of_a_plan(order: str, output: str, shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    model = ADAPTED[order](mesh, STYLES[output])
    assert_same_training(model, two_layers(adapt=True), torch.randn(7, 6))
    assert_same_training(copy.deepcopy(model), two_layers_after(model), torch.randn(7, 6))


def two_layers_after(model: nn.Module) -> nn.Sequential:
    """A plain model with the values that a parallel one has."""
    plain = two_layers(adapt=True)
    plain.load_state_dict({name: whole(value.detach()) for name, value in model.state_dict().items()})
    return plain


def test_adapters_with_sequences_in_shards(line: sw.DeviceMesh) -> None:
    styles = {"0": ColwiseParallel(input_layouts=S1), "2": RowwiseParallel(output_layouts=S1, use_local_output=False)}
    x = torch.randn(2, 8, 6)
    model = with_adapters(parallelize_module(two_layers(), line, styles))  # pyright: ignore[reportArgumentType]
    assert_same_training(model, two_layers(adapt=True), x, sw.distribute_tensor(x, line, [S1]))


@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_with_batches_on_a_larger_mesh(square: sw.DeviceMesh, sharded: bool) -> None:
    x = torch.randn(5, 6)
    model = ADAPTED["before"](square["tp"], STYLES["local"])
    if sharded:
        fully_shard(model, square["dp"])
    assert_same_training(model, two_layers(adapt=True), x, sw.distribute_tensor(x, square, [S0, R]))


def test_adapter_whose_parts_have_styles(line: sw.DeviceMesh) -> None:
    x = torch.randn(7, 6)
    at_once = parallelize_module(two_layers(adapt=True), line, EVERY_PART)
    first = {"0": EVERY_PART["0.base_layer.base_layer"], "2": EVERY_PART["2.base_layer"]}
    later = parallelize_module(ADAPTED["before"](line, first), line, EVERY_PART)
    for model in (at_once, later):
        assert isinstance(model.get_submodule("0.base_layer.lora_B").weight, sw.DTensor)
        assert isinstance(model.get_submodule("2.lora_A").weight, sw.DTensor)
        assert_same_training(model, two_layers(adapt=True), x)


def test_layer_that_loses_its_adapter(line: sw.DeviceMesh) -> None:
    model: Any = ADAPTED["before"](line, STYLES["local"])
    assert isinstance(model[0].base_layer.base_layer(torch.ones(3, 6)), sw.DTensor)  # inside the adapter
    model[0] = model[0].base_layer
    model[0] = model[0].base_layer
    model[2] = model[2].base_layer
    assert isinstance(model[0](torch.ones(3, 6)), sw.RankTensor)
    x = torch.randn(7, 6)
    torch.testing.assert_close(whole(model(x)), two_layers()(x))


def test_adapters_of_peft_after_a_plan(line: sw.DeviceMesh) -> None:
    peft = pytest.importorskip("peft")
    x, models = torch.randn(5, 6), []
    for mesh in (line, None):
        model = two_layers() if mesh is None else parallelize_module(two_layers(), mesh, STYLES["local"])
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
        models.append(peft.get_peft_model(model, config))
    assert_same_training(*models, x)
    merged, plain = (model.merge_and_unload() for model in models)
    torch.testing.assert_close(whole(merged(x)), plain(x))


# ---------------------------------------------------------------- functions of locals


def test_uneven_results_of_local_map(line: sw.DeviceMesh) -> None:
    x: Any = sw.distribute_tensor(torch.arange(12.0).reshape(6, 2), line, [S0]).requires_grad_()
    double: Any = sw.local_map(lambda t: t * 2, out_placements=[S0], in_placements=([S0],))
    with pytest.raises(sw.LayoutError, match="out_shapes="):
        double(x)
    for shapes in ((6, 2), lambda t: t.shape, [(6, 2)]):
        double = sw.local_map(lambda t: t * 2, out_placements=[S0], in_placements=([S0],), out_shapes=shapes)
        found: Any = double(x)
        torch.testing.assert_close(found.full_tensor(), x.full_tensor() * 2)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(gradient.full_tensor(), torch.full((6, 2), 2.0))
    both: Any = sw.local_map(
        lambda t: (t + 1, t.sum()), ([S0], [sw.Partial()]), ([S0],), out_shapes=lambda t: (t.shape, None)
    )
    shifted, total = both(x)
    torch.testing.assert_close(shifted.full_tensor(), x.full_tensor() + 1)
    assert total.item() == 66.0
    with pytest.raises(sw.LayoutError, match="1 out_shapes for 2 results"):
        sw.local_map(lambda t: (t, t), ([S0], [S0]), ([S0],), out_shapes=[(6, 2)])(x)


# ---------------------------------------------------------------- parts of replicated modules


@pytest.mark.parametrize("inputs", ["plain", "dtensor"])
def test_parts_of_a_replicated_module_are_called_with_a_batch_of_each_rank(inputs: str, line: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"body": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 2)})
    model, batches = replicate(copy.deepcopy(plain), line), rank_batches()
    batch: Any = batches if inputs == "plain" else sw.DTensor.from_local(batches, line, [S0])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(2):
        for each, x, optimizer in zip(
            (model, plain), (batch, torch.cat(list(batches.tensors))), optimizers, strict=True
        ):
            layers: Any = each["body"]
            for layer in layers:
                x = layer(x).tanh()
            each["head"](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, sw.DTensor)
            torch.testing.assert_close(ours.full_tensor(), theirs.detach())
    with torch.no_grad():
        assert type(model["head"](batches)) is sw.RankTensor


# ---------------------------------------------------------------- shapes changed in place


STEPS: dict[str, Any] = {
    "squeeze_": lambda y: y.squeeze_(),
    "squeeze_ 0": lambda y: y.squeeze_(0),
    "unsqueeze_ 0": lambda y: y.unsqueeze_(0),
    "unsqueeze_ -1": lambda y: y.unsqueeze_(-1),
    "transpose_": lambda y: y.transpose_(0, -1),
    "squeeze": lambda y: y.squeeze(),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "flat": lambda y: y.reshape(-1),
    "column": lambda y: y[..., 0] if y.dim() > 1 else y,
    "mul_": lambda y: y.mul_(3),
    "clamp_": lambda y: y.clamp_(min=-1),
}


@pytest.mark.parametrize("placement", [R, S0, S1, sw.Partial()])
def test_shapes_changed_in_place_under_autograd(placement: Any) -> None:
    mesh, random_ = sw.init_device_mesh("cpu", (2,)), random.Random(0)
    for shape in ((2, 2), (4, 1), (1, 3), (2, 1, 2)) * 12:
        chain = [*random_.choices(list(STEPS), k=random_.randint(2, 5)), "mul_"]
        start, found = torch.randn(shape), []
        for leaf in (sw.distribute_tensor(start, mesh, [placement]), start.clone()):
            base = y = leaf.requires_grad_() * 2
            for step in chain:
                y = STEPS[step](y)
            y.square().sum().backward()
            found.append([y, base, leaf.grad])
        for ours, theirs in zip(*found, strict=True):
            assert ours.shape == theirs.shape, chain
            torch.testing.assert_close(ours.full_tensor().detach(), theirs.detach(), msg=str(chain))


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_plain_parameters_beside_dtensors(options: Any, line: sw.DeviceMesh) -> None:
    models = []
    for is_parallel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if is_parallel:
            parallelize_module(model, line, {"0": ColwiseParallel(output_layouts=R)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            model(torch.arange(8.0).reshape(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert type(models[0][1].weight) is nn.Parameter
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        ours = ours.full_tensor() if isinstance(ours, sw.DTensor) else ours
        torch.testing.assert_close(ours.detach(), theirs.detach())


# ---------------------------------------------------------------- what is shown


def test_ranks_are_abbreviated() -> None:
    mesh = sw.init_device_mesh("cpu", (16,))
    whole: Any = sw.ones(2, device_mesh=mesh)
    assert "ranks 0 to 15: tensor([1., 1.])" in repr(whole)
    rows: Any = sw.distribute_tensor(torch.arange(16.0), mesh, [S0]).requires_grad_()
    assert "rank 2: tensor([2.])" in repr(rows)
    assert "... 10 more" in repr(rows)
    assert "rank 15: tensor([15.])" in repr(rows)
    assert "rank 8:" not in repr(rows)
    assert repr(rows).endswith("requires_grad=True)")
    uneven: Any = sw.RankTensor([torch.ones(2), torch.ones(1)])
    assert "rank 1: tensor([1.])" in repr(uneven)


def test_one_process_speaks_for_all_virtual_ranks(line: sw.DeviceMesh) -> None:
    assert sw.is_main()
    with pytest.raises(sw.UnsupportedError, match=r"is_main\(\)"):
        line.get_rank()


def test_how_a_tensor_came_about_is_not_in_its_type(line: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.arange(16.0).reshape(4, 4), line, [S0])
    for tensor in (x, x[1], x.redistribute(placements=[R], async_op=True)):
        assert type(tensor).__name__ == type(tensor).__qualname__ == "DTensor"


def test_a_plain_parameter_beside_a_plan_is_named(line: sw.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(1, 1))
    parallelize_module(model, line, {"0": ColwiseParallel()})
    with pytest.raises(sw.AgreementError, match=r"^1\.(weight|bias): a plain parameter beside a plan"):
        model(torch.randn(2, 4)).square().sum().backward()


@pytest.mark.parametrize("layout", [S0, S1, R], ids=str)
@pytest.mark.parametrize("lengths", [[7, 5, 3, 2], [3, 7, 2, 5]], ids=["sorted", "unsorted"])
def test_packed_sequences(line: sw.DeviceMesh, layout: sw.Placement, lengths: list[int]) -> None:
    torch.manual_seed(0)
    plain_model, plain = nn.LSTM(5, 4, batch_first=True), torch.randn(4, 7, 5, requires_grad=True)
    model = sw.distribute_module(copy.deepcopy(plain_model), line)
    x: Any = sw.distribute_tensor(plain.detach(), line, [layout]).requires_grad_()
    results: list[Any] = []
    for module, value in ((plain_model, plain), (model, x)):
        packed = nn.utils.rnn.pack_padded_sequence(value, lengths, batch_first=True, enforce_sorted=lengths[0] == 7)
        padded, sizes = nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)
        padded.square().sum().backward()
        results.append((padded, sizes, value.grad, [p.grad for p in module.parameters()]))
    (padded, sizes, grad, grads), (ours, our_sizes, our_grad, our_grads) = results
    torch.testing.assert_close(ours.full_tensor(), padded)
    assert torch.equal(our_sizes, sizes)
    torch.testing.assert_close(our_grad.full_tensor(), grad)
    torch.testing.assert_close([g.full_tensor() for g in our_grads], grads)
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        nn.utils.rnn.pack_padded_sequence(x, [2, 7, 5, 3], batch_first=True)


@pytest.mark.parametrize("network", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True, "num_layers": 2}], ids=str)
def test_recurrent_networks_keep_a_sharded_batch(line: sw.DeviceMesh, network: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain_model = network(8, 6, **options)
    model = sw.distribute_module(copy.deepcopy(plain_model), line)
    batch = 0 if options else 1
    plain = torch.randn((7, 5, 8) if options else (5, 7, 8), requires_grad=True)
    x: Any = sw.distribute_tensor(plain.detach(), line, [sw.Shard(batch)]).requires_grad_()
    with sw.debug.CommDebugMode() as communication:
        result, _ = model(x)
    assert communication.get_total_counts() == 0
    assert result.placements == (sw.Shard(batch),)
    expected, _ = plain_model(plain)
    torch.testing.assert_close(result.full_tensor(), expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    for ours, one in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), one.grad)


def test_opt_einsum_contracts_dtensors_by_torch(tmp_path: Path) -> None:
    """It chooses functions by the package of a tensor's class. One that it does not know is converted to numpy."""
    package = tmp_path / "opt_einsum" / "backends"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "dispatch.py").write_text("_aliases = {'torch': 'opt_einsum.backends.torch'}\n")
    program = """
import sys, shardwise as sw
x = sw.ones(2, device_mesh=sw.init_device_mesh("cpu", (2,)))
sys.path.append(sys.argv[1])  # last: an installed one comes first, and holds the same
from opt_einsum.backends.dispatch import _aliases
print(_aliases[type(x).__module__.split(".")[0]])
"""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
    assert done.stdout.strip() == "opt_einsum.backends.torch"
