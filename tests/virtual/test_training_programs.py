"""Training programs beside the same program on one device: what users do around data parallel modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import shardwise as sw
from shardwise.errors import UnsupportedError

MESHES = [(2,), (3,), (2, 2)]
NAMES = ("replica", "dp")


def mesh_of(shape: tuple[int, ...]) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (6, 3))  # pyright: ignore[reportReturnType]


def as_one(model: Any, mesh: sw.DeviceMesh) -> Any:
    return sw.fully_shard(model, mesh)


def by_child(model: Any, mesh: sw.DeviceMesh) -> Any:
    for child in model.children():
        if any(True for _ in child.parameters()):
            sw.fully_shard(child, mesh)
    return sw.fully_shard(model, mesh)


def replicated(model: Any, mesh: sw.DeviceMesh) -> Any:
    return sw.replicate(model, mesh)


WRAPS = [as_one, by_child, replicated]
Program = Callable[[Any, Callable[[torch.Tensor], Any]], None]


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor


def check_model(model: nn.Module, expected: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        for ours, theirs in ((parameters[name], parameter), (parameters[name].grad, parameter.grad)):
            assert (ours is None) == (theirs is None), name
            if theirs is not None:
                torch.testing.assert_close(
                    full(ours), theirs, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                )


def check_program(
    program: Program, wrap: Callable[..., Any], shape: tuple[int, ...], make: Callable[[], Any] = small
) -> Any:
    """Run a program on a data parallel model and on one device: parameters and gradients are the same."""
    mesh, expected = mesh_of(shape), make()
    model = wrap(make(), mesh)
    program(model, lambda tensor: sw.distribute_tensor(tensor, mesh, [sw.Shard(0)] * mesh.ndim))
    program(expected, lambda tensor: tensor)
    check_model(model, expected)
    return model


def unsynced(model: Any) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


# ---------------------------------------------------------------- interrupted steps


class Fails(nn.Module):
    """A layer that raises in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.where, self.error = nn.Linear(7, 7), "", KeyboardInterrupt

    def forward(self, x: Any) -> Any:
        if self.where == "forward":
            raise self.error
        x = self.layer(x)
        if self.where == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, grad: Any) -> None:
        raise self.error


def failing() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), Fails(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("shape", MESHES)
def test_an_interrupted_step_does_not_change_those_after_it(
    shape: tuple[int, ...], wrap: Callable[..., Any], where: str, error: type[BaseException]
) -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x, y = map(put, batch(4 + step, step))
            model[1].where, model[1].error = where if step in (1, 3) else "", error
            try:
                F.mse_loss(model(x), y).backward()
            except error:
                optimizer.zero_grad()
                assert [*model.parameters()] == optimizer.param_groups[0]["params"]  # the stored ones
                continue
            optimizer.step()
            optimizer.zero_grad()

    check_program(program, wrap, shape, failing)


def test_after_an_interrupt_operators_save_tensors_as_before() -> None:
    model = by_child(failing(), mesh_of((2,)))
    model[1].where = "forward"
    with pytest.raises(KeyboardInterrupt):
        model(sw.ones(4, 6, device_mesh=mesh_of((2,)), dtype=torch.float64))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    other = by_child(small(), mesh_of((2,)))
    x = sw.ones(4, 6, device_mesh=mesh_of((2,)), dtype=torch.float64)
    with sw.debug.CommDebugMode() as comm:
        other(x)
    assert comm.get_total_counts() == 3  # and gathers as always: once each


# ---------------------------------------------------------------- gradients that wait


class Alternating(nn.Module):
    """Two layers, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x: Any, number: int) -> Any:
        return self.first(x) if number % 2 == 0 else self.second(x)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("shape", MESHES)
def test_a_backward_reduces_what_earlier_ones_left_in_other_modules(
    shape: tuple[int, ...], wrap: Callable[..., Any]
) -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            x, y = map(put, batch(5 + step, step))
            for number in range(2):
                with unsynced(model):
                    F.mse_loss(model(x, number), y).backward()
            F.mse_loss(model(x, 0), y).backward()  # does not reach `second`
            optimizer.step()

    check_program(program, wrap, shape, Alternating)


@pytest.mark.parametrize("who", ["optimizer", "model", "child"])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("shape", MESHES)
def test_zero_grad_drops_gradients_that_wait(shape: tuple[int, ...], wrap: Callable[..., Any], who: str) -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = map(put, batch(5, 0))
        with unsynced(model):
            F.mse_loss(model(x), y).backward()
        {"optimizer": optimizer, "model": model, "child": model[0]}[who].zero_grad()
        F.mse_loss(model(2 * x), y).backward()

    check_program(program, wrap, shape)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("wrap", [as_one, by_child])
def test_zero_grad_drops_gradients_that_wait_for_the_replicas(wrap: Callable[..., Any], every: int) -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        optimizer = torch.optim.SGD([*model.parameters()][::every], lr=0.1)
        reduce_over_replicas = getattr(model, "set_requires_all_reduce", lambda _: None)
        x, y = map(put, batch(5, 0))
        reduce_over_replicas(False)
        for factor in (1, 2):
            F.mse_loss(model(factor * x), y).backward()
        optimizer.zero_grad()
        reduce_over_replicas(True)
        F.mse_loss(model(3 * x), y).backward()

    check_program(program, wrap, (2, 2))


def test_zero_grad_drops_gradients_of_reductions_in_flight() -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        is_last = getattr(model, "set_is_last_backward", lambda _: None)
        x, y = map(put, batch(5, 0))
        is_last(False)
        F.mse_loss(model(x), y).backward()
        model.zero_grad()
        is_last(True)
        F.mse_loss(model(3 * x), y).backward()

    check_program(program, by_child, (2,))


@pytest.mark.parametrize("wrap", WRAPS)
def test_an_optimizer_does_not_step_while_gradients_wait(wrap: Callable[..., Any]) -> None:
    mesh = mesh_of((2,))
    model, other = wrap(small(), mesh), wrap(small(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (sw.distribute_tensor(each, mesh, [sw.Shard(0)]) for each in batch(5, 0))
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    with pytest.raises(UnsupportedError, match="not reduced over the ranks"):
        optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # another model's gradients do not wait
    F.mse_loss(model(x), y).backward()
    optimizer.step()


# ---------------------------------------------------------------- parameters that change


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("shape", MESHES)
def test_parameters_frozen_between_forward_and_backward_get_no_gradient(
    shape: tuple[int, ...], wrap: Callable[..., Any]
) -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        x, y = map(put, batch(5, 0))
        loss = F.mse_loss(model(x), y)
        model[2].requires_grad_(False)
        loss.backward()

    check_program(program, wrap, shape)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("shape", MESHES)
def test_layers_may_be_pruned_after_they_are_sharded(shape: tuple[int, ...], wrap: Callable[..., Any]) -> None:
    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        prune.l1_unstructured(model[0], "weight", amount=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [tuple(map(put, batch(5 + step, step))) for step in range(2)]
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        x, y = batches[-1]
        prune.remove(model[0], "weight")
        F.mse_loss(model(x), y).backward()

    check_program(program, wrap, shape)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("how", ["model", "blocks"])
def test_an_interrupted_compiled_step_does_not_change_those_after_it(how: str) -> None:
    interrupts = [False]

    @torch.compiler.disable
    def interrupt() -> None:
        if interrupts[0]:
            raise KeyboardInterrupt

    def program(model: Any, put: Callable[[torch.Tensor], Any]) -> None:
        model[2].register_forward_hook(lambda *_: interrupt())
        run = torch.compile(model, backend="eager") if how == "model" else model
        for child in model if how == "blocks" else ():
            child.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x, y = map(put, batch(5, step))
            interrupts[0] = step == 1
            optimizer.zero_grad()
            with contextlib.suppress(KeyboardInterrupt):
                F.mse_loss(run(x), y).backward()
            assert [*model.parameters()] == optimizer.param_groups[0]["params"]
            optimizer.step()

    check_program(program, by_child, (2,))
    torch._dynamo.reset()
