"""Captured functions that read values from tensors (`reads="guard"`): a program for each value, the bits of eager."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.virtual.captured_data_parallel import bits

WIDTH = 6


def mesh_of_two() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


class Job:
    """A model with an optimizer, and a step that looks at a mask."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        torch.manual_seed(0)
        self.ran = 0
        self.weight = nn.Parameter(sw.distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [sw.Shard(0)]))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)

    def step(self, x: Any, mask: Any) -> Any:
        if mask.all():
            h = x @ self.weight.t()
        elif (~mask).all():
            h = 0 * (x @ self.weight.t())
        else:
            length = int(mask.sum(-1).max())  # a size that follows from values
            h = (x[:, :length] @ self.weight.t()) * mask[:, :length, None]
        loss = h.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def masks(mesh: sw.DeviceMesh, kind: str) -> list[Any]:
    draw = random.Random(1)
    found: list[Any] = []
    for call in range(24):
        lengths = draw.choice([[4, 4], [2, 3], [0, 0], [1, 1], [3, 2]])
        mask = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
        if kind == "DTensor":
            mask = sw.distribute_tensor(mask, mesh, [sw.Replicate()])
        found.append((call, mask))
    return found


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_each_value_has_a_program(kind: str) -> None:
    mesh = mesh_of_two()
    jobs = [Job(mesh), Job(mesh)]
    step = captured(jobs[1].step, reads="guard")
    ran = 0
    for call, mask in masks(mesh, kind):
        torch.manual_seed(call)
        x = sw.distribute_tensor(torch.randn(2, 4, WIDTH), mesh, [sw.Replicate()])
        before = len(step.programs)
        want, found = jobs[0].step(x, mask), step(x, mask)
        ran += before > 0 and len(step.programs) == before
        assert bits(found) == bits(want)
        assert bits(jobs[1].weight) == bits(jobs[0].weight)
    assert len(step.programs) == 4  # all, none, and two lengths
    assert ran >= 15


def calls(function: Callable[..., Any], values: list[Any], **options: Any) -> Any:
    """Compare calls with given numbers, captured and eager; returns the captured function."""
    step = captured(function, reads="guard", **options)
    x = sw.distribute_tensor(torch.ones(4), mesh_of_two(), [sw.Shard(0)])
    for value in values:
        given = torch.tensor(value)
        assert bits(step(x, given)) == bits(function(x, given)), value
    return step


def test_numbers_are_compared_by_their_bits() -> None:
    values = [0.0, 0.0, 0.0, -0.0, 0.0, float("nan"), float("nan"), float("inf"), -0.0, float("nan")]
    step = calls(lambda x, t: x * (1 / t.item() if t.item() else 3.0 * float(str(t.item()))) + 1, values)
    assert len(step.programs) == 4


def test_a_value_of_the_state_is_read() -> None:
    flag = torch.ones(())

    def function(x: Any, t: Any) -> Any:
        return x * 2 if flag > 0 else x * t

    step = captured(function, reads="guard")
    x = sw.distribute_tensor(torch.ones(4), mesh_of_two(), [sw.Shard(0)])
    for value in (1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0):
        flag.fill_(value)
        assert bits(step(x, torch.tensor(5.0))) == bits(function(x, torch.tensor(5.0)))


def test_a_branch_that_sets_an_attribute_of_the_argument() -> None:
    count = torch.zeros(())

    def function(x: Any) -> Any:
        count.add_(1)
        if x.sum() > 0:
            return x + 1
        x.mark = 1
        return x - 1

    step = captured(function, reads="guard")
    signs = (-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0)
    for calls, sign in enumerate(signs, 1):
        x = torch.full((4,), sign)
        assert torch.equal(step(x), torch.full((4,), 2 * sign))
        assert (getattr(x, "mark", None), count.item()) == (1 if sign < 0 else None, calls)


def test_programs_are_bounded() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = calls(lambda x, t: x * int(t), [*range(12), 11, 11, 3], max_programs=4)
    assert len(step.programs) <= 4
    assert any("differ only in a value" in str(each.message) for each in caught)


def _sharded(x: Any, t: Any) -> Any:
    return x * 2 if x.sum() > 0 else x


def _random(x: Any, t: Any) -> Any:
    return x * 2 if torch.rand(()) < 0.5 else x


def _written(x: Any, t: Any) -> Any:
    t.mul_(2)
    return x * 2 if t > 3 else x


def _listed(x: Any, t: Any) -> Any:
    return x * torch.tensor([t, t, t, t]).sum()


def _long(x: Any, t: Any) -> Any:
    for _ in range(70):
        t = t + 1
    return x * 2 if t > 3 else x


def _numpy(x: Any, t: Any) -> Any:
    return x * float(t.numpy())


@pytest.mark.parametrize("function", [_sharded, _random, _written, _listed, _long, _numpy])
def test_other_values_are_refused(function: Callable[..., Any]) -> None:
    step = captured(function, reads="guard")
    x = sw.distribute_tensor(torch.ones(4), mesh_of_two(), [sw.Shard(0)])
    t = torch.tensor(1.0)
    with pytest.raises(UnsupportedError, match="captured"):
        _three_times(lambda: step(x, t.fill_(1.0)))
    assert t.item() == 1.0


def _three_times(call: Callable[[], Any]) -> None:
    for _ in range(3):
        call()


def test_parameters_after_the_step_of_an_optimizer_are_refused() -> None:
    job = Job(mesh_of_two())
    plain = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([plain], lr=0.1)

    def function(x: Any) -> Any:
        (plain * x.sum().full_tensor()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return x * 2 if plain > 0 else x

    step = captured(function, reads="guard")
    x = sw.distribute_tensor(torch.ones(4), job.weight.device_mesh, [sw.Shard(0)])
    with pytest.raises(UnsupportedError, match=r"written|optimizer"):
        _three_times(lambda: step(x))


def test_a_program_for_some_values_is_not_saved(tmp_path: Path) -> None:
    step = calls(lambda x, t: x * 2 if t > 0 else x, [1.0, 1.0, 1.0])
    with pytest.raises(UnsupportedError, match=r"save: .* read"):
        step.save(tmp_path)
    with pytest.raises(UnsupportedError, match=r"export: .* read"):
        step.export()


def test_unknown_choice() -> None:
    with pytest.raises(UnsupportedError, match="reads"):
        captured(_long, reads="split")
