"""Captured steps on a GPU: bits of eager, also by CUDA graphs; hooks in backward; learning rates that change."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise as sw


def _train(wrap: Callable[[Any], Any], virtual: int = 2) -> list[torch.Tensor]:
    mesh = sw.init_device_mesh("cuda", (virtual,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    first, second = (
        nn.Parameter(sw.distribute_tensor(torch.randn(64, 64, device="cuda") / 8, mesh, [sw.Shard(dim)]))
        for dim in (1, 0)
    )
    scale = [1.0]
    second.register_hook(lambda grad: grad * scale[0])
    optimizer = torch.optim.AdamW([first, second], lr=1e-2, fused=True)

    def function(x: Any) -> Any:
        loss = ((x @ first).relu() @ second).tanh().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor()

    step = wrap(function)
    found = []
    for call in range(10):
        optimizer.param_groups[0]["lr"] = 1e-2 / (call + 1)
        scale[0] = 1.0 if call < 7 else 3.0
        torch.manual_seed(call)
        x = sw.distribute_tensor(torch.randn(32, 64, device="cuda"), mesh, [sw.Replicate()])
        found.append(step(x))
    return [getattr(loss, "tensors", [loss])[0].clone() for loss in [*found, first.full_tensor(), second.full_tensor()]]


def _assert_same(wrap: Callable[[Any], Any]) -> None:
    for one, other in zip(_train(lambda function: function), _train(wrap), strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def test_a_captured_step() -> None:
    _assert_same(sw.captured)


def test_a_captured_step_by_cuda_graphs() -> None:
    steps: list[Any] = []

    def wrap(function: Any) -> Any:
        steps.append(sw.captured(function, backend="cudagraphs"))
        return steps[-1]

    _assert_same(wrap)
    assert "graph_" in steps[0].source()


def test_results_of_cuda_graphs_are_kept() -> None:
    """A result of one call is not written over by the next."""
    mesh = sw.init_device_mesh("cuda", (1,))
    weight = sw.distribute_tensor(torch.randn(32, 32, device="cuda"), mesh, [sw.Replicate()])

    def function(x: Any) -> Any:
        return (((x @ weight).relu() + 1).tanh() * 2).sum(1)

    step = sw.captured(function, backend="cudagraphs")
    inputs = [sw.distribute_tensor(torch.randn(8, 32, device="cuda"), mesh, [sw.Replicate()]) for _ in range(8)]
    found = [step(x) for x in inputs]
    for x, one in zip(inputs, found, strict=True):
        a, b = one.full_tensor(), function(x).full_tensor()
        assert torch.equal(getattr(a, "tensors", [a])[0], getattr(b, "tensors", [b])[0])
