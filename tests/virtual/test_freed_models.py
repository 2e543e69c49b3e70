"""Models are freed with all that they hold: nothing of the library keeps one that the program has deleted."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROOT = Path(__file__).parents[2]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def line() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def batch() -> sw.DTensor:
    return sw.distribute_tensor(torch.ones(4, 4), line(), [Shard(0)])


def each_sharded() -> nn.Sequential:
    model = layers()
    for layer in (model[0], model[2]):
        sw.fully_shard(layer, line())
    return sw.fully_shard(model, line())


def replicated() -> nn.Sequential:
    return sw.replicate(layers(), line())


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ArithmeticError("on purpose")


def trained(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def after_forward(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    model(batch())
    return model


def unsharded() -> nn.Module:
    model = each_sharded()
    model.unshard()
    model[0].unshard()
    return model


def failed() -> nn.Module:
    model = each_sharded()
    model[2].register_forward_pre_hook(lambda _, args: (Failing.apply(args[0]),))
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(ArithmeticError):
        loss.backward()
    return model


def accumulated() -> nn.Module:
    model = each_sharded()
    with model.no_sync():  # pyright: ignore[reportCallIssue]
        model(batch()).sum().backward()
    return model


def planned() -> nn.Module:
    return parallelize_module(layers(), line(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def captured() -> nn.Module:
    model = each_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = sw.captured(train)
    for _ in range(4):
        step(batch())
    return model


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "fully_shard": lambda: trained(each_sharded),
    "fully_shard, forward": lambda: after_forward(each_sharded),
    "fully_shard, unshard": unsharded,
    "fully_shard, a failed backward": failed,
    "fully_shard, no_sync": accumulated,
    "replicate": lambda: trained(replicated),
    "replicate, forward": lambda: after_forward(replicated),
    "a plan": planned,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_deleted_model_is_freed(program: str) -> None:
    model = PROGRAMS[program]()
    seen = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)


CAPTURED = """
import gc, weakref
from tests.virtual.test_freed_models import captured

model = captured()
seen = [weakref.ref(module) for module in model.modules()]
del model
gc.collect()
print([reference() for reference in seen] == [None] * len(seen))
"""


def test_the_model_of_a_captured_step_is_freed() -> None:
    """In a process without type checks, which keep functions inside of functions, and what they refer to."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize("make", [each_sharded, replicated])
def test_gradients_reach_the_parameters_of_a_model_that_was_deleted_after_forward(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    plain, x = layers(), torch.randn(4, 4)

    def run() -> tuple[torch.Tensor, list[Any]]:
        model = make()
        with torch.no_grad():
            for own, one in zip(model.parameters(), plain.parameters(), strict=True):
                own.copy_(sw.distribute_tensor(one.detach(), line(), own.placements))  # pyright: ignore[reportAttributeAccessIssue]
        return model(sw.distribute_tensor(x, line(), [Shard(0)])).square().sum(), list(model.parameters())

    loss, parameters = run()
    gc.collect()
    loss.backward()
    plain(x).square().sum().backward()
    for own, one in zip(parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), one.grad)


def test_leaves_of_a_deleted_model_are_refused_in_backward() -> None:
    model = sw.fully_shard(nn.Linear(4, 4), line())
    model.unshard()
    loss = model.weight.square().sum()
    del model
    gc.collect()
    with pytest.raises(sw.UnsupportedError, match="was deleted after forward"):
        loss.backward()
