"""Mistakes of users: each is an error of the library's own, in the user's terms, with a hint."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard, errors
from shardwise.parallel import ColwiseParallel, SequenceParallel, parallelize_module

LINE = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
GRID = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def network(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))


def on_line() -> Any:
    return sw.distribute_tensor(torch.randn(8, 12), LINE, [Shard(0)])


def uneven() -> Any:
    return sw.distribute_tensor(torch.randn(7, 3), LINE, [Shard(0)])


def on_grid() -> Any:
    return sw.distribute_tensor(torch.randn(8, 12), GRID, [Shard(0), Shard(1)])


def columns(plan: Any, model: Any = None, mesh: Any = LINE) -> Any:
    return parallelize_module(network() if model is None else model, mesh, plan)


# the mistake, the class of the error, words of its message, words of its hint
MISTAKES: list[tuple[Callable[[], Any], type[errors.ShardwiseError], str, str]] = [
    # meshes
    (lambda: GRID["pp"], errors.MeshError, "has no axis 'pp'", "it has dp, tp"),
    (lambda: sw.init_device_mesh("cpu", (0,)), errors.MeshError, "(0,) is not the shape of a mesh", "at least 1"),
    (lambda: sw.init_device_mesh("cpu", (-1,)), errors.MeshError, "(-1,) is not the shape of a mesh", "at least 1"),
    (lambda: sw.init_device_mesh("gpu", (2,)), errors.MeshError, "'gpu' is not a type of device", "cuda"),
    (lambda: sw.init_device_mesh((2, 4)), errors.MeshError, "(2, 4) is not a type of device", "cuda"),  # pyright: ignore[reportArgumentType]
    (lambda: sw.DeviceMesh("gpu", range(2)), errors.MeshError, "'gpu' is not a type of device", "cuda"),
    (lambda: sw.DeviceMesh("cuda:1", range(2)), errors.MeshError, "'cuda:1' is one device", '"cuda"'),
    (lambda: sw.DeviceMesh(torch.device("cpu", 0), range(2)), errors.MeshError, "is one device", '"cpu"'),  # pyright: ignore[reportArgumentType]
    (lambda: sw.DeviceMesh(0, range(2)), errors.MeshError, "0 is not a type of device", "cuda"),  # pyright: ignore[reportArgumentType]
    (lambda: sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)), errors.MeshError, "1 names", "each axis"),
    (lambda: sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")), errors.MeshError, "repeat", "different"),
    (lambda: sw.zeros(4), errors.MeshError, "no mesh was given", "init_device_mesh"),
    (lambda: sw.distribute_tensor(torch.ones(4), "cpu", [Shard(0)]), errors.MeshError, "'cpu'", "init_device_mesh"),
    (lambda: on_line() + on_grid(), errors.MeshError, "different meshes", "redistribute"),
    (lambda: sw.distribute_tensor(on_grid(), LINE, [Shard(0)]), errors.MeshError, "is a DTensor on", "redistribute"),
    (lambda: GRID.get_local_rank("tp"), errors.UnsupportedError, "no 'my rank'", "is_main"),
    (lambda: GRID.get_group("tp"), errors.UnsupportedError, "no process groups", "torchrun"),
    # layouts
    (lambda: on_line().redistribute(placements=[Shard(5)]), errors.LayoutError, "dims 0 to 1", "one of its 2 dims"),
    (lambda: on_grid().redistribute(placements=[Shard(0)]), errors.LayoutError, "which has 2 axes", "each axis"),
    (lambda: on_line().redistribute(placements=[0]), errors.LayoutError, "0 is not a placement", "Shard(dim)"),
    (lambda: on_line().redistribute(placements=3), errors.LayoutError, "not a list of placements", "each axis"),
    (lambda: on_line().redistribute([Shard(0)]), errors.MeshError, "is not a DeviceMesh", "init_device_mesh"),
    (lambda: on_line().redistribute(placements=[Partial()]), errors.LayoutError, "cannot redistribute", "Replicate()"),
    (lambda: Shard("0"), errors.LayoutError, "needs an integer dim", "dim=1"),  # pyright: ignore[reportArgumentType]
    (lambda: Partial("mean"), errors.LayoutError, "unknown reduction", "avg"),
    (lambda: sw.zeros(9, device_mesh=LINE, placements=[sw.Owned(9)]), errors.LayoutError, "4 ranks", "0 to 3"),
    # tensors
    (lambda: sw.distribute_tensor([1.0], LINE, [Shard(0)]), errors.LayoutError, "not list", "as_tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: sw.distribute_tensor(np.ones(4), LINE, [Shard(0)]), errors.LayoutError, "not ndarray", "as_tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: sw.DTensor.from_local([1.0], LINE, [Shard(0)]), errors.LayoutError, "not list", "as_tensor"),  # pyright: ignore[reportArgumentType]
    (
        lambda: sw.DTensor.from_local(sw.rand(7, device_mesh=LINE, placements=[Shard(0)]).to_local(), LINE, [Shard(0)]),
        errors.LayoutError, "gave a local of shape (1,)", "shape=(...)",
    ),
    (lambda: on_line().to_local().numpy(), errors.UnsupportedError, "a tensor for each rank", "global array"),
    (lambda: setattr(on_line(), "data", torch.ones(8, 12)), errors.PlainTensorError, "plain", "distribute_tensor"),
    (lambda: on_line() @ on_line().to_local().T, errors.AgreementError, "'mat2'", "from_local"),
    (lambda: uneven() + uneven().to_local(), errors.AgreementError, "(2/2/2/1, 3) among", "from_local"),
    (lambda: uneven().add_(uneven().to_local()), errors.AgreementError, "sizes differ between them", "from_local"),
    (lambda: torch.cat([uneven(), uneven().to_local()]), errors.AgreementError, "sizes differ", "from_local"),
    (lambda: torch.where(uneven().to_local() > 0, uneven(), 0.0), errors.AgreementError, "sizes differ", "from_local"),
    # modules
    (lambda: columns({"0": "colwise"}), errors.LayoutError, "not 'colwise' (for module '0')", "ColwiseParallel()"),
    (lambda: columns({"0": ColwiseParallel}), errors.LayoutError, "a plan is a ParallelStyle", "ColwiseParallel()"),
    (lambda: columns({"0": ColwiseParallel()}, nn.Sequential(nn.GELU())), errors.LayoutError, "'0' (GELU)", "norms"),
    (lambda: columns({"0": ColwiseParallel()}, mesh=GRID), errors.MeshError, "for one axis", 'mesh["tp"]'),
    (lambda: columns({"0": SequenceParallel()}, [network()]), errors.LayoutError, "not a list", "module itself"),
    (lambda: sw.fully_shard(torch.ones(4), LINE), errors.LayoutError, "not a Tensor", "distribute_tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: sw.replicate([network()], LINE), errors.LayoutError, "not a list", "module itself"),  # pyright: ignore[reportArgumentType]
    (lambda: sw.fully_shard(sw.fully_shard(network(), LINE), LINE), errors.UnsupportedError, "already", "once"),
    (lambda: sw.fully_shard(network()), errors.MeshError, "no mesh was given", "init_device_mesh"),
    (lambda: sw.pipeline(network(), LINE, split=["7"], microbatches=4), errors.LayoutError, "no module '7'", "0, 1"),
    (lambda: sw.remesh({"m": sw.fully_shard(network(), LINE)}, GRID), errors.LayoutError, "'m'", "into="),
]  # fmt: skip


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_are_errors_of_ours_with_a_hint(mistake: int) -> None:
    function, kind, problem, hint = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        function()
    assert problem in caught.value.problem
    assert hint in (caught.value.hint or "")


def test_a_checkpoint_of_another_model_names_the_entries_that_differ(tmp_path: Path) -> None:
    sw.checkpoint.save({"model": sw.fully_shard(network(), LINE)}, tmp_path / "saved")
    with pytest.raises(
        errors.CheckpointMismatchError, match=r"model/0.weight is f32\[16,8\].* f32\[32,8\] in the state"
    ):
        sw.checkpoint.load({"model": sw.fully_shard(network(32), LINE)}, tmp_path / "saved")


def test_an_unknown_name_in_a_plan_is_a_warning_with_the_nearest_names() -> None:
    with pytest.warns(UserWarning, match="'up' matches no module of Sequential; nearest: 0, 1"):
        columns({"up": ColwiseParallel()})


def test_one_placement_is_taken_for_a_list_of_one() -> None:
    assert on_line().redistribute(placements=Replicate()).placements == (Replicate(),)


def test_a_local_in_place_of_a_global_tensor_is_named() -> None:
    x = on_line()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            torch.add(x, torch.ones(2, 12))
        assert "'other' is a plain torch.Tensor of shape (2, 12)" in caught.value.__notes__[0]
        assert "local of f32[8,12] dp:S0" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught:
        torch.add(x, torch.ones(3, 12))  # not the shape of a local either
    assert not hasattr(caught.value, "__notes__")


# ---------------------------------------------------------------- an optimizer made too early


def by_hand(model: nn.Module) -> None:
    def rows(name: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, parameter in list(module._parameters.items()):
            module.register_parameter(key, nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    sw.distribute_module(model, LINE, rows)


SHARDINGS: dict[str, Callable[[nn.Module], Any]] = {
    "fully_shard": lambda model: sw.fully_shard(model, LINE),
    "replicate": lambda model: sw.replicate(model, LINE),
    "parallelize_module": lambda model: columns({"0": ColwiseParallel(use_local_output=False)}, model),
    "distribute_module": by_hand,
}


def a_loss(model: nn.Module) -> Any:
    batch = sw.distribute_tensor(torch.randn(4, 8), LINE, [Replicate()])
    return F.mse_loss(model(batch), torch.zeros(4, 8))


@pytest.mark.parametrize(("who", "strict"), list(itertools.product(SHARDINGS, (False, True))))
def test_an_optimizer_made_before_the_model_was_sharded_is_refused(who: str, strict: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    SHARDINGS[who](model)
    a_loss(model).backward()
    mode = sw.strict() if strict else contextlib.nullcontext()
    with mode, pytest.raises(errors.LayoutError, match=rf"SGD has a parameter of shape .* {who} has repl") as caught:
        optimizer.step()
    assert caught.value.hint == "make the optimizer after the model is sharded"


@pytest.mark.parametrize("who", SHARDINGS)
def test_an_optimizer_made_afterwards_steps(who: str) -> None:
    model = network()
    SHARDINGS[who](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model.get_parameter("0.weight")
    before = weight.full_tensor().clone()
    a_loss(model).backward()
    optimizer.step()
    assert not torch.equal(before, weight.full_tensor())


def test_a_replaced_parameter_that_another_module_still_uses_is_trained() -> None:
    weight = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    other = nn.Linear(8, 8)
    other.weight = weight.weight
    sw.fully_shard(other, LINE)
    weight(torch.ones(2, 8)).sum().backward()
    before = weight.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, weight.weight)


def test_a_plan_and_then_fully_shard() -> None:
    model = columns({"0": ColwiseParallel(use_local_output=False)}, mesh=GRID["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sw.fully_shard(model, GRID["dp"])
    with pytest.raises(errors.LayoutError, match="fully_shard has replaced it"):
        optimizer.step()


@pytest.mark.parametrize("who", SHARDINGS)
@pytest.mark.parametrize("zeroed", [False, True])
def test_an_early_optimizer_is_refused_though_its_parameters_have_gradients(who: str, zeroed: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(4, 8)).square().mean().backward()
    if zeroed:
        optimizer.zero_grad(set_to_none=False)
    SHARDINGS[who](model)
    a_loss(model).backward()
    with pytest.raises(errors.LayoutError, match=f"{who} has replaced it"):
        optimizer.step()


def test_steps_without_gradients_of_a_parameter_that_another_module_uses() -> None:
    first, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = first.weight
    sw.fully_shard(first, LINE)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    copy.deepcopy(other.weight)
    again = columns({"0": ColwiseParallel(use_local_output=False)}, nn.Sequential(other))
    torch.optim.SGD(again.parameters(), lr=1.0).step()


def test_frozen_parameters_of_an_early_optimizer_are_no_mistake() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    columns({"": ColwiseParallel(use_local_output=False)}, model[0])
    before = model[1].weight.detach().clone()
    model[1](torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[1].weight)


def test_copies_of_a_replaced_parameter_are_parameters_of_their_own() -> None:
    model = columns({"0": ColwiseParallel(use_local_output=False)}, mesh=GRID["tp"])
    weight = model.get_parameter("0.weight")
    sw.fully_shard(model, GRID["dp"])
    copies = [nn.Parameter(copied) for copied in (copy.copy(weight), pickle.loads(pickle.dumps(weight)))]
    torch.optim.SGD([copy.deepcopy(weight), *copies], lr=1.0).step()
    with pytest.raises(errors.LayoutError, match="fully_shard has replaced it"):
        torch.optim.SGD([weight], lr=1.0).step()


def test_a_parameter_that_a_module_gets_back_is_its_own() -> None:
    first, other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    other.weight = first.weight
    columns({"": ColwiseParallel(use_local_output=False)}, first, GRID["tp"])
    sw.fully_shard(first, GRID["dp"])
    columns({"": ColwiseParallel(use_local_output=False)}, other, GRID["tp"])
    torch.optim.SGD(other.parameters(), lr=1.0).step()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("make", [torch.nested.nested_tensor, torch.nested.as_nested_tensor])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_dtensors(make: Callable[..., Any], layout: torch.layout) -> None:
    with pytest.raises(sw.UnsupportedError, match=r"a nested tensor cannot be made of DTensors.*\n  hint: pad"):
        make([on_line(), on_line()], layout=layout)
