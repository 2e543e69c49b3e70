"""Plans for modules: the same losses and gradients as one device; and whatever people's modules are like."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from shardwise.parallel.tensor_parallel.norm_gradients import add_up
from tests.virtual.training import whole

parallelize_module: Any = sw.parallel.parallelize_module  # what comes back is indexed
R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


def mesh_of(*shape: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 8, bias=bias)).double()


MLP_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def assert_same_gradients(got: nn.Module, want: nn.Module) -> None:
    expected = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        reference = expected[name].grad
        assert (parameter.grad is None) == (reference is None), name
        if reference is not None:
            torch.testing.assert_close(whole(parameter.grad), reference, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------- plain tensors


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3,)])
def test_plain_tensors_in_and_out(shape: tuple[int, ...], bias: bool) -> None:
    """As plans are written for torch: each rank gives and gets plain tensors. Over three ranks shards are uneven."""
    one = mlp(bias)
    spread = parallelize_module(copy.deepcopy(one), mesh_of(*shape), MLP_PLAN)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    want, got = one(x), spread(x)
    assert isinstance(got, sw.RankTensor)
    for tensor in got.tensors:
        torch.testing.assert_close(tensor, want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(spread, one)


def test_plain_parameters_beside_a_plan_have_one_gradient() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64)), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scale) * self.scale

    one, x = Scaled(), torch.randn(4, 8, dtype=torch.float64)
    spread = parallelize_module(copy.deepcopy(one), mesh_of(4), {"inner": MLP_PLAN})
    one(x).square().sum().backward()
    spread(x).square().sum().backward()
    assert type(spread.scale.grad) is torch.Tensor
    assert_same_gradients(spread, one)


def test_plain_parameters_whose_gradients_differ_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(4))
    parallelize_module(model, mesh_of(4), {"0": ColwiseParallel()})
    with pytest.raises(sw.AgreementError, match="SequenceParallel"):
        model(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_embeddings(style: Any, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(*shape)
    one = nn.Embedding(10, 8, padding_idx=3).double()
    spread = parallelize_module(copy.deepcopy(one), mesh["tp"], style(use_local_output=False))
    tokens = torch.randint(10, (4, 6))
    placed = sw.distribute_tensor(tokens, mesh, [S0, R][-mesh.ndim :])
    got, want = spread(placed), one(tokens)
    assert got.device_mesh is mesh
    torch.testing.assert_close(whole(got), want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(spread, one)


def test_rows_of_an_embedding_move_only_what_is_looked_up() -> None:
    mesh = mesh_of(4)
    table = parallelize_module(nn.Embedding(4000, 8), mesh, RowwiseParallel(use_local_output=False))
    tokens = sw.distribute_tensor(torch.randint(4000, (6,)), mesh, [R])
    with CommDebugMode() as comm:
        table(tokens).sum().backward()
    assert comm.get_total_counts() == 1  # the look-up; the gradient stays with its rows
    assert comm.received_bytes == 2 * 3 / 4 * 6 * 8 * 4
    assert table.weight.grad.spec.placements == (S0,)


# ---------------------------------------------------------------- which meshes


def test_a_batch_on_the_larger_mesh_stays_there() -> None:
    mesh = mesh_of(2, 2)
    one = mlp()
    spread = parallelize_module(copy.deepcopy(one), mesh["tp"], MLP_PLAN)
    x = torch.randn(4, 8, dtype=torch.float64)
    got = spread(sw.distribute_tensor(x, mesh, [S0, R]))
    assert isinstance(got, sw.DTensor)  # its local would not say that it is a part of the batch
    assert got.spec.layout == "dp:S0 tp:R"
    got.square().sum().backward()
    one(x).square().sum().backward()
    assert_same_gradients(spread, one)
    assert spread[0].weight.device_mesh is mesh["tp"]


def test_only_the_axis_of_the_plan_moves() -> None:
    mesh = mesh_of(2, 2)
    spread = parallelize_module(mlp(), mesh["tp"], MLP_PLAN)
    batch = sw.distribute_tensor(torch.randn(4, 8, dtype=torch.float64), mesh, [S0, R])
    with CommDebugMode() as comm, torch.no_grad():
        spread(batch)
    assert comm.get_total_counts() == 1


def test_parameters_that_were_moved_to_the_larger_mesh() -> None:
    mesh = mesh_of(2, 2)
    one = mlp()
    spread = parallelize_module(copy.deepcopy(one), mesh["tp"], MLP_PLAN)
    for layer in (spread[0], spread[2]):
        for name, p in list(layer.named_parameters()):
            larger = sw.DTensor.from_local(p.detach().to_local(), mesh, [R, *p.placements])
            layer.register_parameter(name, nn.Parameter(larger))
    x = torch.randn(4, 8, dtype=torch.float64)
    spread(sw.distribute_tensor(x, mesh, [S0, R])).square().sum().backward()
    one(x).square().sum().backward()
    assert_same_gradients(spread, one)


def test_a_forward_that_fails_leaves_the_module_as_it_was() -> None:
    mesh = mesh_of(2, 2)
    spread = parallelize_module(mlp(), mesh["tp"], MLP_PLAN)
    own = dict(spread.named_parameters())
    for given in (torch.ones(4, 7, dtype=torch.float64), torch.ones(4, 8)):  # a wrong size, a wrong dtype
        with pytest.raises(RuntimeError):
            spread(sw.distribute_tensor(given, mesh, [S0, R]))
        with pytest.raises(RuntimeError):
            spread(given)
        assert all(parameter is own[name] for name, parameter in spread.named_parameters())
    assert spread(torch.ones(4, 8, dtype=torch.float64)).shape == (4, 8)


def test_a_tensor_of_another_mesh_is_an_error() -> None:
    spread = parallelize_module(nn.Linear(4, 4), mesh_of(2, 2)["tp"], ColwiseParallel())
    with pytest.raises(sw.MeshError, match="the batch is on"):
        spread(sw.ones(4, 4, device_mesh=mesh_of(3)))
    with pytest.raises(sw.MeshError, match="the batch is on"):
        spread(sw.ones(4, 4, device_mesh=mesh_of(2, 2)["dp"]))


def test_a_plan_is_for_one_axis() -> None:
    with pytest.raises(sw.MeshError, match=r'mesh\["tp"\]'):
        parallelize_module(mlp(), mesh_of(2, 2), MLP_PLAN)
    with pytest.raises(sw.MeshError, match="no mesh was given"):
        parallelize_module(mlp(), None, MLP_PLAN)


# ---------------------------------------------------------------- which modules


def test_keys() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([mlp(), mlp()])
            self.head = nn.Linear(8, 4)

    mesh = mesh_of(2)
    model = parallelize_module(Named(), mesh, {"layers.*.0": ColwiseParallel(), "layers.1": {"[2]": RowwiseParallel()}})
    specs = {name: p.spec.layout for name, p in model.named_parameters() if isinstance(p, sw.DTensor)}
    assert specs == {
        "layers.0.0.weight": "tp:S0", "layers.0.0.bias": "tp:S0", "layers.1.0.weight": "tp:S0",
        "layers.1.0.bias": "tp:S0", "layers.1.2.weight": "tp:S1", "layers.1.2.bias": "tp:R",
    }  # fmt: skip
    parallelize_module(model.head, mesh, {"": ColwiseParallel()})
    assert model.head.weight.spec.layout == "tp:S0"


def test_a_key_that_matches_nothing_is_a_warning_with_the_nearest_names() -> None:
    with pytest.warns(UserWarning, match=r"'layer\.0' matches no module.*nearest: .*layers\.0") as seen:
        parallelize_module(
            nn.ModuleDict({"layers": mlp()}), mesh_of(2), {"layer.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
        )
    assert len(seen) == 1
    with pytest.warns(UserWarning, match="does nothing"):
        parallelize_module(mlp(), mesh_of(2))


UNFIT: dict[str, tuple[nn.Module, Any, str]] = {
    "rows of a norm": (nn.LayerNorm(4), RowwiseParallel(), r"'bad' \(LayerNorm\), RowwiseParallel: the style is for"),
    "columns of a convolution": (nn.Conv2d(2, 2, 1), ColwiseParallel(), r"'bad' \(Conv2d\), ColwiseParallel"),
    "no style": (nn.Linear(4, 4), "columns", "not 'columns'.*'bad'"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_an_error_before_anything_changes(name: str) -> None:
    module, style, match = UNFIT[name]
    model = nn.ModuleDict({"good": nn.Linear(4, 4), "bad": module})
    own = dict(model.named_parameters())
    with pytest.raises(sw.LayoutError, match=f"(?s){match}"):
        parallelize_module(model, mesh_of(2), {"good": ColwiseParallel(), "bad": style})
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    assert not model["good"]._forward_pre_hooks


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.head.weight = self.embedding.weight
            self.other = nn.Linear(8, 12, bias=False)  # no part of the plan
            self.other.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.embedding(tokens))

    mesh = mesh_of(4)
    rows, columns = RowwiseParallel(use_local_output=False), ColwiseParallel(use_local_output=False)
    one = Tied().double()
    spread = parallelize_module(copy.deepcopy(one), mesh, {"embedding": rows, "head": columns})
    assert spread.embedding.weight is spread.head.weight is spread.other.weight
    tokens = torch.randint(12, (4, 3))
    spread(sw.distribute_tensor(tokens, mesh)).square().sum().backward()
    one(tokens).square().sum().backward()
    assert_same_gradients(spread, one)
    apart = copy.deepcopy(one)  # in calls of their own
    parallelize_module(apart, mesh, {"embedding": rows})
    parallelize_module(apart, mesh, {"head": columns})
    assert apart.embedding.weight is apart.head.weight
    with pytest.raises(sw.LayoutError, match="tied"):
        parallelize_module(copy.deepcopy(one), mesh, {"embedding": columns, "head": columns})


def test_a_module_that_stands_twice_is_parallelized_once() -> None:
    shared = nn.Linear(8, 8).double()
    one = nn.Sequential(shared, nn.GELU(), shared)
    spread = copy.deepcopy(one)
    style = ColwiseParallel(output_layouts=R)
    for _ in range(2):  # and a plan that is applied again changes nothing
        parallelize_module(spread, mesh_of(4), {"0": style, "2": ColwiseParallel(output_layouts=R)})
    assert len(spread[0]._forward_hooks) == 1
    x = torch.randn(3, 8, dtype=torch.float64)
    spread(x).square().sum().backward()
    one(x).square().sum().backward()
    assert_same_gradients(spread, one)


def test_parameters_on_the_meta_device_are_never_whole() -> None:
    with torch.device("meta"):
        model = mlp()
    spread = parallelize_module(model, mesh_of(4), MLP_PLAN)
    locals_ = [p.to_local() for p in spread.parameters()]
    assert all(local.is_meta for local in locals_)
    spread.to_empty(device="cpu")
    assert [tuple(p.to_local().shape) for p in spread.parameters()] == [(4, 8), (4,), (8, 4), (8,)]
    assert all(isinstance(p, sw.DTensor) and not p.is_meta for p in spread.parameters())


def test_frozen_parameters_and_copies() -> None:
    one = mlp()
    one[0].weight.requires_grad_(False)
    spread = parallelize_module(copy.deepcopy(one), mesh_of(2), MLP_PLAN)
    assert not spread[0].weight.requires_grad
    assert spread[2].weight.requires_grad
    for twin in (copy.deepcopy(spread), pickle.loads(pickle.dumps(spread))):
        x = torch.randn(3, 8, dtype=torch.float64)
        one.zero_grad()
        one(x).sum().backward()
        twin(x).sum().backward()
        assert_same_gradients(twin, one)
        assert all(a is not b for a, b in zip(twin.parameters(), spread.parameters(), strict=True))


def test_state_and_training_go_on() -> None:
    spread = parallelize_module(mlp(), mesh_of(2), MLP_PLAN)
    state = copy.deepcopy(spread.state_dict())
    other = parallelize_module(mlp(), mesh_of(2), MLP_PLAN)
    other.load_state_dict(state)
    x = torch.randn(3, 8, dtype=torch.float64)
    for mine, theirs in zip(spread(x).tensors, other(x).tensors, strict=True):
        assert torch.equal(mine, theirs)


# ---------------------------------------------------------------- what goes in and out


class Mixed(nn.Module):
    """Tensors, nothing, a tuple and a number in; a tuple out."""

    def forward(self, x: Any, nothing: Any, pair: Any, number: int, *, extra: Any = None) -> Any:
        assert nothing is None
        assert number == 3
        return x + pair[0] + pair[1], extra, nothing


def test_inputs_of_all_kinds() -> None:
    mesh = mesh_of(2)
    prepare = PrepareModuleInput(
        input_layouts=(S0, R, S0, R), desired_input_layouts=(R, R, R, R),
        input_kwarg_layouts={"extra": S0}, desired_input_kwarg_layouts={"extra": R},
    )  # fmt: skip
    model = parallelize_module(Mixed(), mesh, prepare)
    x = torch.ones(2, 3)
    result, extra, _ = model(x, None, (x, sw.ones(4, 3, device_mesh=mesh, placements=[S1])), 3, extra=x)
    assert result.spec.placements == extra.spec.placements == (R,)
    assert result.shape == extra.shape == (4, 3)
    assert torch.equal(whole(result), torch.full((4, 3), 3.0))
    with pytest.raises(sw.LayoutError, match=r"Mixed has 2 inputs.*layouts for 4"):
        model(x, None)


def test_outputs_of_all_kinds() -> None:
    mesh = mesh_of(2)
    both = PrepareModuleInputOutput(
        input_layouts=(R, None, R, None), desired_input_layouts=(R, None, R, None),
        output_layouts=(R, None, None), desired_output_layouts=(S0, None, None), use_local_output=True,
    )  # fmt: skip
    model = parallelize_module(Mixed(), mesh, both)
    x = torch.arange(4.0)
    result, extra, nothing = model(x, None, (x, x), 3, extra="word")
    assert [tensor.tolist() for tensor in result.tensors] == [[0.0, 3.0], [6.0, 9.0]]
    assert (extra, nothing) == ("word", None)
    wrong = PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R))
    with pytest.raises(sw.LayoutError, match="1 outputs"):
        parallelize_module(nn.Identity(), mesh, wrong)(x)


def test_layers_called_by_keyword() -> None:
    one = nn.Linear(4, 8)
    spread = parallelize_module(copy.deepcopy(one), mesh_of(4), ColwiseParallel(output_layouts=R))
    x = torch.randn(2, 4)
    torch.testing.assert_close(spread(input=x).tensors[0], one(x))


def test_plain_inputs_for_prepared_modules_become_plain_again() -> None:
    prepare = PrepareModuleInput(input_layouts=R, desired_input_layouts=S0, use_local_output=True)
    same = parallelize_module(nn.Identity(), mesh_of(2), prepare)
    assert same(torch.arange(4)).tolist() == [[0, 1], [2, 3]]


def test_layouts_that_do_not_go_together() -> None:
    with pytest.raises(sw.LayoutError, match="as many"):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,))
    with pytest.raises(sw.LayoutError, match="as many"):
        PrepareModuleInput(input_layouts=R)
    with pytest.raises(sw.LayoutError, match="different inputs"):
        PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R})
    with pytest.raises(sw.LayoutError, match="not a placement"):
        ColwiseParallel(input_layouts="S0")


def test_sequence_parallel_keeps_what_is_sharded() -> None:
    mesh = mesh_of(4)
    one = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5), nn.RMSNorm(8)).double()
    spread = parallelize_module(copy.deepcopy(one), mesh, {"*": SequenceParallel()})
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    torch.manual_seed(7)
    want = one(x)
    torch.manual_seed(7)
    with CommDebugMode() as comm:
        got = spread(sw.distribute_tensor(x, mesh, [S1]))
    assert comm.get_total_counts() == 0
    assert got.spec.placements == (S1,)
    torch.testing.assert_close(whole(got), want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(spread, one)
    assert spread[0](sw.ones(2, 8, 8, device_mesh=mesh, dtype=torch.float64)).spec.placements == (S1,)


def test_sequence_parallel_where_the_norm_needs_the_sequence() -> None:
    """Right, though it communicates: nothing says that positions are treated alike."""
    mesh = mesh_of(4)
    one = nn.LayerNorm((8, 6)).double()
    spread = parallelize_module(copy.deepcopy(one), mesh, SequenceParallel())
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    torch.testing.assert_close(whole(spread(sw.distribute_tensor(x, mesh, [S1]))), one(x))


def norm_and_mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


SEQUENCE_PLAN = {
    "0": SequenceParallel(),
    "1": ColwiseParallel(use_local_output=False),
    "3": RowwiseParallel(output_layouts=S1, use_local_output=False),
}


def test_gradients_of_norms_are_added_up_in_one_collective() -> None:
    mesh = mesh_of(4)
    one = nn.Sequential(*(norm_and_mlp() for _ in range(3)))
    spread = parallelize_module(copy.deepcopy(one), mesh, {"*": SEQUENCE_PLAN})
    for step in range(2):  # the second is added to the first
        x = torch.randn(2, 8, 8, dtype=torch.float64)
        one(x).square().sum().backward()
        loss = spread(sw.distribute_tensor(x, mesh, [S1])).square().sum()
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 1, step
        assert spread[0][0].weight.grad.spec.placements == spread[0][3].bias.grad.spec.placements == (R,)
        assert_same_gradients(spread, one)


def test_gradients_that_were_added_up_have_the_strides_of_their_locals() -> None:
    rows = [torch.arange(2.0 * count).reshape(2, count) for count in (3, 4)]
    parameters = [sw.zeros(len(row[0]), 2, device_mesh=mesh_of(2), placements=[R]).requires_grad_() for row in rows]
    for parameter, row in zip(parameters, rows, strict=True):
        parameter.grad = sw.distribute_tensor(row, mesh_of(2), [sw.Partial()]).t()
    add_up(parameters)
    for gradient, row in zip([parameter.grad for parameter in parameters], rows, strict=True):
        assert gradient.stride() == gradient.to_local().stride()
        assert torch.equal(gradient.full_tensor(), row.t())


def test_a_backward_that_fails_does_not_disturb_the_next() -> None:
    mesh = mesh_of(2)
    one = norm_and_mlp()
    spread = parallelize_module(copy.deepcopy(one), mesh, SEQUENCE_PLAN)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    batch = sw.distribute_tensor(x, mesh, [S1]).requires_grad_()

    def fail(gradient: Any) -> None:
        raise ValueError("on purpose")

    handle = batch.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        spread(batch).sum().backward()
    handle.remove()
    spread.zero_grad()
    spread(batch).square().sum().backward()
    one(x).square().sum().backward()
    assert_same_gradients(spread, one)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    mesh = mesh_of(2)
    one = norm_and_mlp()
    spread = parallelize_module(copy.deepcopy(one), mesh, SEQUENCE_PLAN)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    batch = sw.distribute_tensor(x, mesh, [S1]).requires_grad_()
    torch.utils.checkpoint.checkpoint(spread, batch, use_reentrant=reentrant).square().sum().backward()
    one(x).square().sum().backward()
    assert_same_gradients(spread, one)


def test_without_gradients_and_in_another_precision() -> None:
    mesh = mesh_of(2)
    one = norm_and_mlp().float()
    spread = parallelize_module(copy.deepcopy(one), mesh, SEQUENCE_PLAN)
    x = torch.randn(2, 4, 8)
    batch = sw.distribute_tensor(x, mesh, [S1])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(whole(spread(batch)), one(x))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = spread(batch), one(x)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(whole(got), want, rtol=2e-2, atol=2e-2)
    got.float().square().sum().backward()
    assert spread[1].weight.grad.dtype is torch.float32


def test_a_model_changes_its_dtype_after_a_backward() -> None:
    mesh, model = mesh_of(2), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=S1, use_local_output=False)}
    parallelize_module(model, mesh, plan)
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2, 8, 8, dtype=dtype)
        model.to(dtype)
        reference.to(dtype)
        for _ in range(2):
            model(sw.distribute_tensor(x, mesh, [S1])).square().sum().backward()
            reference(x).square().sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert_same_gradients(model, reference)


STYLES: dict[str, Any] = {
    "sequence": SequenceParallel(),
    "plan": ColwiseParallel(input_layouts=S1, use_local_output=False),
    "parametrization": ColwiseParallel(input_layouts=S1, use_local_output=False),
}


@pytest.mark.parametrize("how", [*STYLES, "distribute_module", "fully_shard"])
def test_hooks_and_attributes_of_replaced_parameters_are_kept(how: str) -> None:
    """As a mask for gradients, registered before the model is sharded. The bias is frozen at that time."""
    mesh = mesh_of(2)
    model: Any = nn.LayerNorm(8) if how == "sequence" else nn.Linear(8, 8)
    weight = model.weight
    mask, totals = torch.arange(8.0), list[Any]()
    weight.rate = 0.1
    weight.register_hook(lambda gradient: gradient * mask)
    weight.register_post_accumulate_grad_hook(totals.append)
    model.bias.register_hook(lambda gradient: gradient * mask)
    model.bias.requires_grad_(False)
    if how == "parametrization":
        parametrize.register_parametrization(model, "weight", nn.Identity())
    if how in STYLES:
        parallelize_module(model, mesh, STYLES[how])
    elif how == "distribute_module":
        sw.distribute_module(model, mesh)
    else:
        sw.parallel.fully_shard(model, mesh=mesh)
    weight, bias = model.weight, model.bias
    if how == "parametrization":
        weight = model.parametrizations.weight.original
    assert weight.rate == 0.1
    assert not bias.requires_grad
    bias.requires_grad_()
    (model(sw.distribute_tensor(torch.rand(4, 8, 8), mesh, [S0])) ** 2).sum().backward()
    assert len(totals) == 1
    assert totals[0] is weight
    for parameter in (weight, bias):
        zero = whole(parameter.grad).eq(0)
        assert zero[..., 0].all()
        assert not zero[..., 1:].any()


def test_the_same_on_locals_and_on_dtensors() -> None:
    """A subclass with a forward of its own is not known to be a linear layer, and goes by DTensors."""

    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            assert isinstance(self.weight, sw.DTensor)
            return super().forward(input)

    class Seen(nn.GELU):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            assert isinstance(input, sw.DTensor)
            return super().forward(input)

    mesh = mesh_of(2)
    torch.manual_seed(4)
    known = norm_and_mlp()
    own = nn.Sequential(nn.LayerNorm(8), Own(8, 16), Seen(), Own(16, 8)).double()
    own.load_state_dict(known.state_dict())
    x, outcomes = torch.randn(2, 4, 8, dtype=torch.float64), []
    for model in (known, own):
        parallelize_module(model, mesh, SEQUENCE_PLAN)
        with CommDebugMode() as comm:
            out = model(sw.distribute_tensor(x, mesh, [S1]))
            out.square().sum().backward()
        outcomes.append((out, comm.get_comm_counts(), comm.received_bytes))
    assert outcomes[0][1:] == outcomes[1][1:]
    torch.testing.assert_close(whole(outcomes[0][0]), whole(outcomes[1][0]))
    for a, b in zip(known.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad), whole(b.grad))


def test_a_style_of_ones_own() -> None:
    class Halves(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            assert self.src_data_rank is None
            weight = sw.distribute_tensor(module.weight.detach(), device_mesh, [S0])
            module.register_parameter("weight", nn.Parameter(weight * 0.5))
            return module

    linear = parallelize_module(nn.Linear(4, 4, bias=False), mesh_of(2), Halves(), src_data_rank=None)
    assert linear.weight.spec.placements == (S0,)


# ---------------------------------------------------------------- distribute_module


def test_distribute_module() -> None:
    mesh = mesh_of(2, 2)
    one = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    one[2].requires_grad_(False)
    visited = []

    def partition(name: str, module: nn.Module, given: sw.DeviceMesh) -> None:
        visited.append(name)
        if name == "0":
            weight = sw.distribute_tensor(module.weight.detach(), given, [R, S0])
            module.register_parameter("weight", nn.Parameter(weight))

    spread: Any = sw.distribute_module(
        copy.deepcopy(one), mesh, partition,
        lambda module, inputs, mesh: sw.distribute_tensor(inputs[0], mesh, [S0, R]),
        lambda module, output, mesh: output.full_tensor(),
    )  # fmt: skip
    assert visited == ["", "0", "1", "2"]
    layouts = {name: t.spec.layout for name, t in spread.state_dict().items()}
    assert layouts.pop("0.weight") == "dp:R tp:S0"
    assert set(layouts.values()) == {"dp:R tp:R"}
    assert len(layouts) == 8
    assert not spread[2].weight.requires_grad
    x = torch.randn(4, 4, dtype=torch.float64)
    want, got = one(x), spread(x)
    torch.testing.assert_close(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_same_gradients(spread, one)
    for name, buffer in one.named_buffers():  # running statistics
        torch.testing.assert_close(whole(dict(spread.named_buffers())[name]), buffer)


def test_shared_parameters_stay_shared_when_replicated() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    sw.distribute_module(model, mesh_of(2))
    assert model["a"].weight is model["b"].weight


# ---------------------------------------------------------------- the loss over sharded classes

LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore": {"ignore_index": 7},
    "weights": {"weight": True},
    "weights, ignore": {"weight": True, "ignore_index": 7},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, weights": {"label_smoothing": 0.1, "weight": True, "reduction": "sum"},
}
ROWS, CLASSES = 6, 4096


@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (2, CLASSES, 3)])
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy_moves_only_numbers_of_rows(name: str, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(4)
    options = dict(LOSSES[name])
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(CLASSES, (shape[0], *shape[2:]))
    targets.view(-1)[1] = 7
    weight = torch.rand(CLASSES, dtype=torch.float64)
    spread = sw.distribute_tensor(logits.detach(), mesh, [S1]).requires_grad_()
    plain, placed = dict(options), dict(options)
    if options.get("weight"):
        plain["weight"], placed["weight"] = weight, sw.distribute_tensor(weight, mesh, [R])
    want = F.cross_entropy(logits, targets, **plain)
    with CommDebugMode() as comm, loss_parallel():
        got = F.cross_entropy(spread, sw.distribute_tensor(targets, mesh, [R]), **placed)
        got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(whole(got), want)
    torch.testing.assert_close(whole(spread.grad), logits.grad)
    assert spread.grad.placements == (S1,)
    numbers = ROWS * 8
    assert comm.received_bytes <= 8 * numbers, f"{comm.received_bytes} bytes, {comm.get_comm_counts()}"
