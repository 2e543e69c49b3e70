"""What a captured program says of itself: its text, its communication, its memory, its picture."""

import ast
import weakref
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.capture import Captured, captured
from shardwise.errors import UnsupportedError


class Layers(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        h = self.up(x).relu()
        return self.down(h)


def trained() -> tuple[Captured[Any], Any]:
    """A captured training step that has run as a program, and the function."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plan = {"up": sw.parallel.ColwiseParallel(), "down": sw.parallel.RowwiseParallel()}
    model = sw.parallel.parallelize_module(Layers(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(4, 8)

    def train() -> Any:
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = captured(train)
    for _ in range(4):
        step()
    assert len(step.programs) == 1
    return step, train


@pytest.fixture(scope="module")
def training() -> tuple[Captured[Any], Any]:
    return trained()


def test_the_sums_are_those_of_an_eager_step(training: tuple[Captured[Any], Any]) -> None:
    step, train = training
    with sw.explain() as eager:
        train()
    report = step.explain()
    assert report.total == eager.total
    assert report.by_collective == eager.by_collective
    assert report.by_axis == eager.by_axis
    assert report.total.collectives > 1
    shown = str(report)
    assert "test_captured_reports.py" in shown
    assert "Layers.down" in shown
    assert "2 virtual ranks" in shown


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes of storages that are alive after an operator, without those in `known`."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(found):  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                where = storage.data_ptr()
                if where and where not in self.known and where not in self.live:
                    self.live[where] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, where, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return found


def test_the_peak_is_that_of_a_run() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = sw.randn(64, 64, device_mesh=mesh, placements=[sw.Shard(0)])

    def function(x: Any) -> Any:
        a = (x @ weight.t()).relu()
        b = (a @ weight).exp()
        return (b * 2).sum(0)

    step = captured(function)
    x = sw.randn(16, 64, device_mesh=mesh, placements=[sw.Replicate()])
    for _ in range(3):
        step(x)
    program = step.programs[next(iter(step.programs))].program
    given = [part for tensor in (weight, x) for part in tensor._local_tensor.tensors]
    inputs: dict[int, Any] = dict.fromkeys(program.inputs())
    assert len(inputs) <= len(given)
    order = [part for tensor in step._reach().tensors for part in tensor._local_tensor.tensors]  # pyright: ignore[reportAttributeAccessIssue]
    numbered = [*order, *x._local_tensor.tensors]
    with LiveBytes({part.untyped_storage().data_ptr() for part in numbered}) as live, torch.no_grad():
        program.run(numbered)
    report = step.explain()
    assert live.peak == report.memory.peak
    assert report.peak_memory == report.memory.peak + 2 * (32 * 64 * 4 + 16 * 64 * 4)
    assert sum(report.memory_by_line.values()) == sum(report.memory_by_module.values()) == report.memory.peak


def test_the_text_has_a_comment_for_each_line(training: tuple[Captured[Any], Any]) -> None:
    step, _ = training
    text = step.source()
    ast.parse(text)
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
    assert any(line.endswith("h = self.up(x).relu()") for line in comments)
    assert any("backward of " in line and line.endswith("h = self.up(x).relu()") for line in comments)
    assert sum("all-reduce over tp (2 ranks)" in line for line in comments) == step.explain().total.collectives
    assert "adamw_step_" in text


def test_the_picture(training: tuple[Captured[Any], Any]) -> None:
    step, _ = training
    picture = sw.draw(step)
    ElementTree.fromstring(picture.svg)
    spans = picture.svg.count('class="span"')
    assert spans > step.explain().total.collectives
    assert "over tp" in picture.svg
    assert "gradients" in picture.svg


def test_without_a_program() -> None:
    step = captured(lambda x: x)
    for ask in (step.source, step.explain, step.timeline):
        with pytest.raises(UnsupportedError, match="no program yet"):
            ask()
