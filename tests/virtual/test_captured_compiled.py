"""Compiled programs: segments keep values and memory apart; inductor agrees within rounding; failures are errors."""

import functools
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.capture import captured, compiled_program
from shardwise.errors import UnsupportedError
from tests.virtual import captured_steps


def copying(graph: Any, examples: Any) -> Any:
    """A backend that runs the operators, and returns every result in memory of its own, as a compiler may."""

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in graph(*given)
        ]

    return run


@pytest.mark.parametrize("seed", [1, 4])
def test_segments_give_the_bits_of_eager(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled_program.BACKENDS, "copying", copying)
    monkeypatch.setattr(captured_steps, "captured", functools.partial(captured, backend="copying"))
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ran, _ = captured_steps.compare(seed, mesh, calls=6)
    assert ran


def test_views_of_one_memory_stay_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled_program.BACKENDS, "copying", copying)
    x = sw.rand(6, 4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])

    def function(buffer: Any) -> Any:
        made = ((buffer * 2 + 1).exp() / 3).sin()
        flat, turned = made.view(-1, 2, 2), made.t()
        noise = torch.rand_like(x)  # random numbers are drawn between segments
        made.add_(noise)
        rest = ((flat + 1) * 2).sqrt().relu().exp()
        made.mul_(2)
        return made, turned, rest, flat

    step = captured(function, backend="copying")
    found: Any = None
    for seed in range(4):
        torch.manual_seed(seed)
        found = step(x)
        torch.manual_seed(seed)
        wanted = function(x)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())
    assert step.source().count("compiled_") == 2
    found[0].add_(1)
    assert torch.equal(found[0].t().full_tensor(), found[1].full_tensor())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when inductor is first imported
def test_inductor() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = torch.nn.Parameter(sw.randn(8, 8, device_mesh=mesh, placements=[sw.Shard(0)]))

    def function(x: Any) -> Any:
        hidden = torch.nn.functional.gelu(x @ weight.t())
        loss = (hidden * 2 + 1).square().sum()
        loss.backward()
        found, weight.grad = weight.grad, None
        return found

    step = captured(function, backend="inductor")
    for _ in range(4):
        x = sw.randn(4, 8, device_mesh=mesh)
        torch.testing.assert_close(step(x).full_tensor(), function(x).full_tensor())
    code = [line for line in step.source().splitlines() if not line.strip().startswith("#")]
    assert any("compiled_" in line for line in code)
    assert not any("gelu" in line for line in code)
    assert step.explain().operators["backward"] > 2


def test_what_a_backend_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    with pytest.raises(UnsupportedError, match="no backend 'other'"):
        captured(lambda: x, backend="other")

    def failing(graph: Any, examples: Any) -> Any:
        raise RuntimeError("no such kernel")

    def wrong(graph: Any, examples: Any) -> Any:
        return lambda *given: [result + 0.01 for result in graph(*given)]

    def shared(graph: Any, examples: Any) -> Any:
        return lambda *given: _shared(graph(*given))

    total = sw.zeros(4, device_mesh=mesh, placements=[sw.Shard(0)])

    def function() -> Any:
        total.add_(1)
        a = ((x * 2 + 1).exp() / 3).sin()
        return a, a * 2

    for name, backend, message in (("failing", failing, "no such kernel"), ("wrong", wrong, "beyond rounding")):
        monkeypatch.setitem(compiled_program.BACKENDS, name, backend)
        step = captured(function, backend=name)
        before, ran = total.full_tensor().clone(), []
        with pytest.raises(UnsupportedError, match=message):
            ran.extend(1 for _ in range(4) if step())
        assert torch.equal(
            total.full_tensor() - before, torch.full((4,), float(len(ran)))
        )  # refused, it changed nothing
    monkeypatch.setitem(compiled_program.BACKENDS, "shared", shared)
    step = captured(function, backend="shared")
    found: Any = None
    for _ in range(3):
        found = step()
    assert "operators_" in step.source()
    found[0].add_(1)
    assert torch.equal(found[1].full_tensor(), function()[1].full_tensor())


def _shared(results: Any) -> list[torch.Tensor]:
    """Results next to each other in one memory."""
    together = torch.cat([result.reshape(-1) for result in results])
    parts = together.split([result.numel() for result in results])
    return [part.view(result.shape) for part, result in zip(parts, results, strict=True)]
