"""Backward in two parts against one backward: the same gradients, operators and hooks, for any graph of autograd."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.pipelines.split_backward import input_gradients

EVENTS: list[Any] = []


class Scaled(torch.autograd.Function):
    """Written in Python: it gives all its gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        EVENTS.append("scaled")
        return gradient * w, (gradient * x).sum(0)


class Everything(nn.Module):
    """Shared and tied weights, weights computed from others, broadcasting, writes, hooks, checkpointing, recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.w, self.free = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.norm(self.a(x))
        h = F.linear(h + F.gelu(self.b(h)), self.b.weight)  # the same weight twice
        h = F.linear(h, self.a.weight, self.a.bias)
        h = Scaled.apply(h.flatten(0, 1), self.w).view_as(h)
        h = h * self.w + self.w
        h = h + self.attention(h, h, h)[0]
        h = checkpoint(lambda t: self.normed(torch.tanh(self.a(t))), h, use_reentrant=False)
        h = h + self.gru(h)[0]
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        written = h.clone()
        written[:, 0] = h[:, 0] * self.w
        written[:, 1:].add_(self.w)
        written.register_hook(lambda g: (EVENTS.append("hook of an activation"), g * 1.5)[1])
        h = F.linear(written, self.b.weight)
        h.register_hook(lambda g: (EVENTS.append("hook of a result"), g * 2)[1])
        return h, self.free * self.w, h.detach() * self.free


def hooked(module: Everything) -> Everything:
    module.b.weight.register_hook(lambda g: (EVENTS.append("hook of a weight"), g * 3)[1])
    module.a.bias.register_hook(lambda g: (EVENTS.append("hook of a bias"), g * 3)[1])
    module.a.bias.register_post_accumulate_grad_hook(lambda p: EVENTS.append("accumulated"))
    module.norm.register_full_backward_hook(lambda *_: EVENTS.append("hook of a module"))
    module.normed.register_full_backward_pre_hook(lambda *_: EVENTS.append("hook before a module"))
    return module


def both_ways(
    make: Callable[[], nn.Module], x: torch.Tensor, steps: int = 2
) -> tuple[nn.Module, nn.Module, list[tuple[torch.Tensor, torch.Tensor]], list[Any], list[Any]]:
    """A module after backwards in one and in two parts; the gradients of its input; the events of both."""
    first, second = make(), make()
    events: tuple[list[Any], list[Any]] = ([], [])
    inputs = []
    for _ in range(steps):
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = first(one)
        gradients = [torch.randn_like(result) for result in results]
        EVENTS.clear()
        torch.autograd.backward(results, gradients)
        events[0].append(sorted(EVENTS))
        again = second(two)
        EVENTS.clear()
        (found,), rest = input_gradients(again, gradients, [two])
        assert found is not None
        assert one.grad is not None
        rest.run()
        events[1].append(sorted(EVENTS))
        inputs.append((found, one.grad))
    return first, second, inputs, *events


def test_any_module_gets_the_gradients_of_one_backward() -> None:
    torch.manual_seed(0)
    module = Everything().double()
    x = torch.randn(2, 5, 8, dtype=torch.double)
    one, two, inputs, events, again = both_ways(lambda: hooked(copy.deepcopy(module)), x)
    assert events == again
    assert all("hook of a bias" in step for step in events)
    for found, wanted in inputs:
        assert torch.equal(found, wanted)
    for (name, wanted), (_, found) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        if name == "w":  # used in many places: the sum of its parts in another order
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-13, atol=1e-13)
        else:
            assert torch.equal(found.grad, wanted.grad), name


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_the_parts_share_the_work() -> None:
    """Products of matrices in both parts together are those of one backward: nothing is computed twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    result = model(x).sum()
    with Operators() as whole:
        result.backward()
    model.zero_grad()
    result = model(x).sum()
    with Operators() as inputs:
        _, rest = input_gradients([result], [torch.ones(())], [x])
    with Operators() as weights:
        rest.run()
    assert whole.counts["aten.mm.default"] == 6
    assert inputs.counts["aten.mm.default"] == weights.counts["aten.mm.default"] == 3


def test_without_inputs_everything_is_left_to_the_weights() -> None:
    layer = nn.Linear(3, 2)
    found, rest = input_gradients([layer(torch.ones(1, 3))], [torch.ones(1, 2)], [])
    assert found == []
    assert layer.weight.grad is None
    rest.run()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
    rest.run()  # nothing is left
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))


def test_an_input_that_is_not_used_has_no_gradient() -> None:
    layer, x, y = nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True), torch.ones(1, requires_grad=True)
    found, rest = input_gradients([layer(x)], [torch.ones(1, 2)], [x, y])
    assert found[1] is None
    assert torch.equal(found[0], layer.weight.sum(0, keepdim=True))  # pyright: ignore[reportArgumentType]
    rest.run()
    assert layer.bias.grad is not None


@pytest.mark.parametrize("placements", [[sw.Shard(0)], [sw.Replicate()]])
def test_distributed_tensors(placements: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))
    sw.fully_shard(model[0], mesh)
    sw.fully_shard(model, mesh)
    plain = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    value, gradient = torch.randn(6, 4), torch.randn(6, 4)
    x = sw.distribute_tensor(value, mesh, placements).requires_grad_()
    found = None
    for _ in range(2):
        (found,), rest = input_gradients([model(x)], [sw.distribute_tensor(gradient, mesh, placements)], [x])
        assert isinstance(found, sw.DTensor)
        rest.run()
    leaf = value.clone().requires_grad_()
    for _ in range(2):
        plain(leaf).backward(gradient)
    assert isinstance(found, sw.DTensor)
    torch.testing.assert_close(2 * found.full_tensor(), leaf.grad)
    for have, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(have.grad, sw.DTensor)
        torch.testing.assert_close(have.grad.full_tensor(), want.grad)
