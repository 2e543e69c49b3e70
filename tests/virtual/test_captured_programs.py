"""A sample of random functions, the same on each run; `python -m tests.virtual.captured_programs` runs any number."""

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.virtual import captured_programs
from tests.virtual.captured_comparison import Refused
from tests.virtual.captured_programs import CALLS, compare, made_by


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_programs(first: int) -> None:
    ran = refused = 0
    for seed in range(first, first + 10):
        try:
            ran += compare(seed)[0]
        except Refused:
            refused += 1
    assert ran > CALLS
    assert refused < 5


def test_gradients_that_are_zeros_without_memory() -> None:
    """The second derivative of `abs` is such a tensor; operators on it read no memory while they are recorded."""
    mesh = sw.init_device_mesh("cpu", (2,))
    found = []
    for capture in (False, True):
        torch.manual_seed(0)
        x = sw.distribute_tensor(torch.randn(6, 5), mesh, [sw.Shard(0)]).requires_grad_()

        def penalty(x: Any) -> Any:
            first = torch.autograd.grad(x.var(-1, correction=0).abs().sum(), x, create_graph=True)[0]
            return torch.autograd.grad((first * first).sum(), x)[0]

        function = sw.captured(penalty) if capture else penalty
        found.append([function(x).full_tensor() for _ in range(3)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_programs_use_what_they_are_made_for() -> None:
    programs = [captured_programs.make(seed)[0] for seed in range(150)]
    lines = [line for program in programs for line in program.lines]
    for text in ("S.", "M(", "scaled(", "ordered(", "S.kept =", "M.seen", ".detach()", "generator", "C("):
        assert sum(text in line for line in lines) > 1, text
    assert {program.derivative for program in programs} == set(captured_programs.DERIVATIVES)
    assert sum(len(made_by(program)) for program in programs) > 600


def test_a_value_that_is_fixed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that leaves numbers of Python out of the key is caught."""
    from shardwise.capture.reachable import Reachable

    visit = Reachable.visit

    def blind(self: Reachable, value: object, path: str) -> None:
        if not isinstance(value, float):
            visit(self, value, path)

    monkeypatch.setattr(Reachable, "visit", blind)
    found = 0
    for seed in range(200):
        try:
            compare(seed)
        except Refused:
            continue
        except AssertionError:
            found += 1
            break
    assert found


def test_writes_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without its writes to the caller's tensors is caught."""
    from shardwise.capture import program

    needed = program._needed

    def without_writes(calls: list[object], wanted: object) -> list[object]:
        return [(at, call) for at, call in needed(calls, wanted) if not getattr(call, "writes", ())]  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(program, "_needed", without_writes)
    found = 0
    for seed in range(60):
        try:
            compare(seed)
        except Refused:
            continue
        except (AssertionError, RuntimeError):
            found += 1
            break
    assert found


def test_a_function_of_no_tensors_that_is_read() -> None:
    """The gradient of a split with parts that nobody uses is made with zeros, which are compared with zero."""
    mesh = sw.init_device_mesh("cpu", (2,))

    def function(x: Any) -> Any:
        first, _, last = (x * 2).chunk(3, 1)
        return torch.autograd.grad((first * last).sum(), x)[0]

    step = sw.captured(function)
    for call in range(4):
        x = sw.distribute_tensor(torch.arange(12.0).reshape(2, 6) + call, mesh, [sw.Shard(0)]).requires_grad_()
        assert torch.equal(step(x).full_tensor(), function(x).full_tensor())
    assert len(step.programs) == 1
