"""DTensors for Python and torch: metadata, repr, copies, pickle, and the factories."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, MaskPartial, Partial, RankTensor, Replicate, Shard, StridedShard

LAYOUTS: tuple[list[Any], ...] = (
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [StridedShard(0, 2), Replicate()],
    [Partial("avg"), MaskPartial()],
    [Replicate(), Partial("max")],
)


def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def made(placements: list[Any], **options: Any) -> DTensor:
    return sw.distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh(), placements, **options)


def assert_same(one: DTensor, other: DTensor) -> None:
    assert type(other) is DTensor
    assert other.spec is one.spec
    assert other.requires_grad == one.requires_grad
    for a, b in zip(one.to_local().tensors, other.to_local().tensors, strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr() or not a.numel()


# ---------------------------------------------------------------- the global tensor


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_it_has_the_metadata_of_the_global_tensor(placements: list[Any]) -> None:
    tensor = made(placements)
    assert tensor.shape == tensor.size() == (5, 3)
    assert tensor.stride() == (3, 1)
    assert (tensor.dim(), tensor.numel(), len(tensor)) == (2, 15, 5)
    assert (tensor.dtype, tensor.device, tensor.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert tensor.is_contiguous()
    assert tensor.is_leaf
    assert not tensor.requires_grad
    assert tensor.device_mesh is mesh()
    assert tensor.placements == tuple(placements)
    assert (tensor.spec.mesh, tensor.spec.placements) == (tensor.device_mesh, tensor.placements)


def test_strides_of_the_global_tensor_are_kept() -> None:
    tensor = sw.distribute_tensor(torch.arange(12.0).reshape(3, 4).t(), mesh(), [Shard(0), Replicate()])
    assert (tensor.shape, tensor.stride()) == ((4, 3), (1, 4))
    moved = tensor.redistribute(placements=[Replicate(), Shard(1)])
    assert moved.stride() == (1, 4)
    assert torch.equal(moved.full_tensor(), torch.arange(12.0).reshape(3, 4).t())


def test_requires_grad_is_that_of_what_is_distributed() -> None:
    leaf = torch.ones(4, requires_grad=True)
    assert sw.distribute_tensor(leaf, mesh()).requires_grad
    assert sw.distribute_tensor(leaf, mesh()).is_leaf
    tensor = made([Shard(0), Shard(1)]).requires_grad_()
    assert not tensor.detach().requires_grad
    assert tensor.redistribute().requires_grad
    with torch.no_grad():
        assert not tensor.redistribute().requires_grad


def test_from_local_works_the_global_shape_out() -> None:
    local = RankTensor([torch.full((2, 3), float(rank)) for rank in range(4)])
    tensor = DTensor.from_local(local, mesh(), [Shard(0), Shard(1)])
    assert (tensor.shape, tensor.stride()) == ((4, 6), (6, 1))
    assert DTensor.from_local(local, mesh()).placements == (Replicate(), Replicate())
    assert DTensor.from_local(local, mesh(), [Partial(), Shard(-1)]).shape == (2, 6)
    uneven = RankTensor([torch.zeros(n) for n in (2, 2, 1, 0)])
    line = sw.init_device_mesh("cpu", (4,))
    assert DTensor.from_local(uneven, line, [Shard(0)], shape=(5,)).shape == (5,)
    with pytest.raises(sw.LayoutError, match="shape="):
        DTensor.from_local(uneven, line, [Shard(0)])
    strided = DTensor.from_local(local, mesh(), [Shard(0), Shard(1)], shape=(4, 6), stride=(1, 4))
    assert strided.stride() == (1, 4)


def test_from_local_and_to_local_share_memory() -> None:
    local = RankTensor([torch.zeros(2) for _ in range(4)])
    tensor = DTensor.from_local(local, mesh(), [Shard(0), Replicate()])
    local.tensors[3].fill_(1)
    assert tensor.to_local().tensors[3].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [sw.distribute_tensor, DTensor.from_local])
def test_functionalize_makes_none(make: Callable[..., Any]) -> None:
    on = mesh()
    with pytest.raises(sw.UnsupportedError, match="inside a function that torch"):
        torch.func.functionalize(lambda x: make(x, on).sum())(torch.ones(4))


def test_repr_says_what_it_is() -> None:
    text = repr(made([Shard(0), Partial()]).requires_grad_())
    assert text.startswith("DTensor(f32[5,3] dp:S0 tp:P, local=RankTensor(")
    assert "rank 3: tensor(" in text
    assert "requires_grad=True" in text
    assert str(made([Shard(0), Replicate()])) == repr(made([Shard(0), Replicate()]))
    ordered = made([Shard(0), Shard(0)], shard_order=[(0, ("tp", "dp"))])
    assert "f32[5,3] dp:S0 tp:S0 order 0:tp>dp" in repr(ordered)


# ---------------------------------------------------------------- copies


def through_pickle(tensor: DTensor) -> DTensor:
    return pickle.loads(pickle.dumps(tensor))


def through_torch_save(tensor: DTensor) -> DTensor:
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["tensor"]


WAYS: dict[str, Callable[[DTensor], DTensor]] = {
    "pickle": through_pickle,
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_a_copy_is_the_same_tensor(way: str, placements: list[Any]) -> None:
    for needs in (False, True):
        tensor = made(placements).requires_grad_(needs)
        assert_same(tensor, WAYS[way](tensor))


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_keeps_order_dtype_and_the_part_of_a_mesh(way: str) -> None:
    assert_same(ordered := made([Shard(0), Shard(0)], shard_order=[(0, ("tp", "dp"))]), WAYS[way](ordered))
    assert_same(half := sw.zeros(5, dtype=torch.bfloat16, device_mesh=mesh()), WAYS[way](half))
    part = DTensor.from_local(RankTensor([torch.full((2,), float(i)) for i in range(4)]), mesh()["tp"], [Shard(0)])
    assert_same(part, WAYS[way](part))


def test_a_deep_copy_keeps_the_gradient_and_refuses_what_was_computed() -> None:
    tensor = made([Shard(0), Replicate()]).requires_grad_()
    tensor.full_tensor().sum().backward()
    copied = copy.deepcopy(tensor)
    assert_same(tensor.grad, copied.grad)
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(tensor.redistribute(placements=[Shard(1), Replicate()]))


def test_one_copy_in_one_deep_copy() -> None:
    tensor = made([Shard(0), Replicate()])
    first, second = copy.deepcopy([tensor, tensor])
    assert first is second


@pytest.mark.parametrize("whole", [torch.arange(15.0).reshape(5, 3), torch.arange(15.0).reshape(3, 5).t()], ids=str)
@pytest.mark.parametrize(
    ("placements", "wanted"),
    [([Replicate(), Partial()], ["_local_tensor"]), ([Shard(0), Partial()], ["_t0", "_t1", "_t2", "_t3"])],
)
def test_flatten_and_unflatten(whole: torch.Tensor, placements: list[Any], wanted: list[str]) -> None:
    tensor = sw.distribute_tensor(whole, mesh(), placements)
    names, context = tensor.__tensor_flatten__()
    assert names == wanted
    inner = {name: getattr(tensor, name) for name in names}
    again = DTensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    assert again.spec is tensor.spec
    assert again.stride() == whole.stride()
    for one, other in zip(again.to_local().tensors, tensor.to_local().tensors, strict=True):
        assert one.data_ptr() == other.data_ptr()
    assert DTensor.__metadata_guard__(context, again.__tensor_flatten__()[1])
    evenly = sw.distribute_tensor(torch.ones(4, 3), mesh(), placements).__tensor_flatten__()[1]
    assert DTensor.__metadata_guard__(context, evenly) is (len(wanted) == 1)  # compiled code for one is none for both


def test_flatten_and_unflatten_a_rank_tensor() -> None:
    local = RankTensor([torch.zeros(2), torch.ones(2)])
    names, context = local.__tensor_flatten__()
    again = RankTensor.__tensor_unflatten__({n: getattr(local, n) for n in names}, context, local.shape, local.stride())
    assert again.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(sw.UnsupportedError, match="differ in shape"):
        RankTensor([torch.zeros(2), torch.ones(1)]).__tensor_flatten__()


# ---------------------------------------------------------------- parameters


def test_a_parameter_of_a_dtensor() -> None:
    tensor = made([Shard(0), Replicate()])
    parameter = nn.Parameter(tensor)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, DTensor)
    assert (parameter.requires_grad, parameter.is_leaf, parameter.spec) == (True, True, tensor.spec)
    module = nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter
    parameter.redistribute(placements=[Shard(1), Replicate()]).full_tensor().sum().backward()
    assert parameter.grad.spec is tensor.spec
    assert torch.equal(parameter.grad.full_tensor(), torch.ones(5, 3))
    assert not nn.Parameter(tensor, requires_grad=False).requires_grad
    assert copy.deepcopy(parameter).grad is None  # as in torch


def test_data_is_replaced_and_the_layout_kept() -> None:
    module = nn.Linear(3, 5)
    plain = [parameter.detach().clone() for parameter in module.parameters()]
    sw.distribute_module(
        module, mesh(), lambda name, part, mesh: setattr(part, "weight", nn.Parameter(made([Shard(0), Shard(1)])))
    )
    vector = sw.distribute_tensor(torch.arange(20.0), mesh(), [Replicate(), Shard(0)])
    nn.utils.vector_to_parameters(vector, module.parameters())
    assert module.weight.spec is made([Shard(0), Shard(1)]).spec
    assert torch.equal(module.weight.full_tensor(), torch.arange(15.0).reshape(5, 3))
    assert torch.equal(module.bias.full_tensor(), torch.arange(15.0, 20.0))
    module.bias.data = smaller = vector[:2].to(torch.float64)
    assert (module.bias.shape, module.bias.spec, module.bias.dtype) == ((2,), smaller.spec, torch.float64)
    with pytest.raises(sw.PlainTensorError, match="the data of"):
        module.weight.data = plain[0]


def test_a_module_with_dtensors_is_copied_with_its_parameters() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(made([Shard(0), Replicate()]))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(again.weight, nn.Parameter)
        assert again.weight.spec is module.weight.spec
        assert again.weight is not module.weight


# ---------------------------------------------------------------- the locals of virtual ranks


def test_locals_of_uneven_shards_are_each_of_their_own_shape() -> None:
    local = made([Shard(0), Shard(1)]).to_local()
    assert [tuple(part.shape) for part in local.tensors] == [(3, 2), (3, 1), (2, 2), (2, 1)]
    for same in (local.view_as(local), local.view(local.shape), local.reshape(local.shape), local.expand_as(local)):
        assert same.tolist() == local.tolist()
    for fresh in (torch.zeros_like(local), local.new_zeros(local.shape), local.new_empty(local.shape).zero_()):
        assert [part.shape for part in fresh.tensors] == [part.shape for part in local.tensors]
        assert fresh.sum().tolist() == [0.0] * 4


def test_gradients_of_uneven_locals_are_each_of_their_own_shape() -> None:
    local = RankTensor([torch.ones(n, 4) for n in (2, 2, 1, 0)]).requires_grad_()
    line = sw.init_device_mesh("cpu", (4,))
    for _ in range(2):  # the second time it is added to
        whole = DTensor.from_local(local, line, [Shard(0)], shape=(5, 4)).full_tensor()
        whole.backward(torch.arange(20.0).reshape(5, 4))
    assert [tuple(part.shape) for part in local.grad.tensors] == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert local.grad.tensors[2].tolist() == [[32.0, 34.0, 36.0, 38.0]]


# ---------------------------------------------------------------- factories

FACTORIES: dict[str, tuple[Callable[..., DTensor], float]] = {
    "zeros": (sw.zeros, 0.0),
    "ones": (sw.ones, 1.0),
    "full": (lambda *size, **options: sw.full(size, 3.5, **options), 3.5),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    "placements", [*LAYOUTS, [Partial("product"), Replicate()], [Partial("min"), Shard(1)]], ids=str
)
def test_a_factory_gives_the_value_in_any_layout(name: str, placements: list[Any]) -> None:
    make, value = FACTORIES[name]
    tensor = make(5, 3, device_mesh=mesh(), placements=placements)
    assert (tensor.shape, tensor.dtype, tensor.placements) == ((5, 3), torch.float32, tuple(placements))
    assert torch.equal(tensor.full_tensor(), torch.full((5, 3), value))
    assert all(part.shape == tensor.spec.local_shape(c) for c, part in parts(tensor))


def parts(tensor: DTensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    return list(zip(map(tuple, tensor.device_mesh.coordinates.tolist()), tensor.to_local().tensors, strict=True))


def test_factories_take_what_torch_does() -> None:
    assert sw.zeros((4, 2), device_mesh=mesh()).shape == sw.zeros(4, 2, device_mesh=mesh()).shape == (4, 2)
    assert sw.ones([3], device_mesh=mesh(), dtype=torch.int64).full_tensor().tolist() == [1, 1, 1]
    assert sw.zeros(device_mesh=mesh()).shape == ()
    assert sw.ones(2, device_mesh=mesh(), requires_grad=True).requires_grad
    assert sw.full((2,), 7, device_mesh=mesh()).dtype is torch.int64
    assert sw.full((2,), True, device_mesh=mesh()).dtype is torch.bool
    assert sw.full((2,), 1j, device_mesh=mesh()).dtype is torch.complex64
    for placements in LAYOUTS:
        empty = sw.empty(5, 3, device_mesh=mesh(), placements=placements)
        assert all(part.shape == empty.spec.local_shape(c) for c, part in parts(empty))
    assert sw.empty(0, 3, device_mesh=mesh(), placements=[Shard(0), Shard(1)]).full_tensor().shape == (0, 3)


def test_lists_and_arrays_are_of_the_whole_tensor() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(5.0), mesh, [sw.Shard(0)])
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert x.numpy().tolist() == x.tolist()
    assert torch.from_dlpack(x).tolist() == x.tolist()
    assert f"{x.sum():.2f}" == "10.00"
    assert x.requires_grad_().numpy(force=True).tolist() == x.tolist()
    for refused in (x.detach().share_memory_, lambda: x.detach().apply_(abs)):
        with pytest.raises(sw.UnsupportedError, match="DTensor"):
            refused()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=repr)
def test_factories_take_numbers_of_tensors(placement: sw.Placement) -> None:
    """They read them with the classes of Python hidden."""
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [placement]).requires_grad_()
    total, count = x.sum(), x.long().sum()
    assert torch.tensor([total, 1.0, x[1]]).tolist() == [15.0, 1.0, 1.0]
    assert torch.tensor([[total, count], [x.mean(), 0]]).tolist() == [[15.0, 15.0], [2.5, 0.0]]
    assert torch.tensor((count, count), dtype=torch.int32).tolist() == [15, 15]
    assert torch.as_tensor([total > 3, total > 30]).tolist() == [True, False]
    assert torch.tensor([total.to(torch.complex64)]).tolist() == [15 + 0j]
    assert torch.FloatTensor([total]).tolist() == torch.ones(1).new_tensor([total]).tolist() == [15.0]
    again = x.sum()
    with sw.explain() as report:
        torch.tensor([again])
    assert sum(axis.collectives for axis in report.by_axis.values()) == (placement == Shard(0))
    with pytest.raises(sw.UnsupportedError, match=r"different plain value on each virtual rank|differ"):
        torch.tensor([sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).to_local().sum()])


def test_locals_in_inference_mode_share_the_counter_of_what_was_made_outside() -> None:
    line = sw.init_device_mesh("cpu", (4,))
    x = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    product = weight * x  # saves x
    with torch.inference_mode():
        spread = DTensor.from_local(x, line, [Replicate()])
        assert not spread.is_inference()
        spread.to_local().add_(1)
        fresh = DTensor.from_local(torch.ones(3), line, [Replicate()])
        assert fresh.is_inference()
        assert torch.equal((fresh * 2).to_local().tensors[0], torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_plans_in_inference_mode() -> None:
    line = sw.init_device_mesh("cpu", (4,))
    for width in (8, 7):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5))
        x = torch.randn(3, 6)
        wanted = model(x)
        styles = {"0": sw.parallel.ColwiseParallel(), "2": sw.parallel.RowwiseParallel()}
        sw.parallel.parallelize_module(model, line, styles)
        with torch.inference_mode():
            found: Any = model(x)
        torch.testing.assert_close(found.tensors[0], wanted)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_a_norm_becomes_a_parameter(shape: tuple[int, ...]) -> None:
    """`nn.Parameter` detaches, and wants a tensor of the same class: DoRA of peft does this with a norm."""
    mesh = sw.init_device_mesh("cpu", shape)
    x: Any = sw.distribute_tensor(torch.randn(5, 6), mesh, [sw.Shard(1)] + [sw.Replicate()] * (len(shape) - 1))
    norms = torch.linalg.norm(x.requires_grad_(), dim=1)
    parameter: Any = torch.nn.Parameter(norms)
    torch.testing.assert_close(parameter.full_tensor(), x.full_tensor().norm(dim=1))
    with torch.no_grad():
        parameter.mul_(-2)  # no layout of norms has negative values
    torch.testing.assert_close(parameter.full_tensor(), norms.full_tensor())
    torch.testing.assert_close(norms.full_tensor(), -2 * x.full_tensor().norm(dim=1))
    fresh = torch.linalg.norm(x, dim=1)
    fresh.detach()
    fresh.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), (x / x.norm(dim=1, keepdim=True)).full_tensor().detach())
