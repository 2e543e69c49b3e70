"""Captured steps of modules under `fully_shard` and `replicate`: the bits of eager, and its memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.transformer import Transformer, loss_of, shard_all
from tests.virtual.captured_data_parallel import bits, compare_virtual

# The others run by `python -m tests.virtual.captured_data_parallel`.
GLOBAL = ("frozen",)
OF_RANKS = ("microbatches replicated", "checkpointed dropout")


@pytest.mark.parametrize("name", GLOBAL)
def test_a_global_batch(name: str) -> None:
    ran, programs = compare_virtual(name, of_ranks=False)
    assert ran >= 1, (ran, programs)


@pytest.mark.parametrize("name", OF_RANKS)
def test_batches_of_ranks(name: str) -> None:
    ran, programs = compare_virtual(name, of_ranks=True)
    assert ran >= 1, (ran, programs)


def model_and_batch() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Transformer(1)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shard_all(model, mesh)
    return model, sw.distribute_tensor(torch.zeros(4, 6, dtype=torch.int64), mesh, [sw.Shard(0)])


def test_gathers_and_reductions_are_steps_of_the_program() -> None:
    model, tokens = model_and_batch()

    def step(tokens: Any) -> Any:
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        return loss

    run = captured(step)
    for _ in range(3):
        run(tokens)
        model.zero_grad()
    entered = []
    for module in model.modules():
        state = getattr(module, "_shardwise_data_parallel", None)
        if state is not None:
            state._join = lambda *_: entered.append(1)
    assert run(tokens) is not None  # no hook runs any more
    assert not entered
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("fails", ["read", "raise in forward"])
def test_a_refused_step_leaves_modules_usable(fails: str) -> None:
    model, tokens = model_and_batch()
    flag = [False]
    if fails == "raise in forward":
        model.head.register_forward_hook(lambda module, args, out: out.sum().item() if flag[0] else None)

    def step(tokens: Any) -> Any:
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        return loss.detach() if not flag[0] else loss.item()

    run = captured(step)
    run(tokens)
    before = [(bits(p), bits(p.grad)) for p in model.parameters()]
    flag[0] = True
    with pytest.raises(UnsupportedError, match="value of a tensor is read"):
        run(tokens)
    assert before == [(bits(p), bits(p.grad)) for p in model.parameters()]
    flag[0] = False
    results = [bits(run(tokens)) for _ in range(3)]
    assert all(result == bits(step(tokens)) for result in results)


def test_what_a_user_has_gathered_is_refused() -> None:
    model, tokens = model_and_batch()
    run = captured(lambda tokens: model(tokens).detach())
    run(tokens)
    model.blocks[0].unshard()
    with pytest.raises(UnsupportedError, match=r"reshard\(\)"):
        run(tokens)
    model.blocks[0].reshard()
    assert bits(run(tokens)) == bits(model(tokens).detach())
    model.set_is_last_backward(False)
    with pytest.raises(UnsupportedError, match="set_is_last_backward"):
        run(tokens)


def test_replaced_parameters_and_eager_calls_between() -> None:
    model, tokens = model_and_batch()
    run = captured(lambda tokens: model(tokens).detach())
    for _ in range(3):
        run(tokens)
    count = len(run.programs)
    with torch.no_grad():
        eager = model(tokens)
    assert bits(run(tokens)) == bits(eager)
    assert len(run.programs) == count
    changed = {name: nn.Parameter(2 * value.detach()) for name, value in model.state_dict().items()}
    model.load_state_dict(changed, assign=True)
    found = [bits(run(tokens)) for _ in range(3)]
    with torch.no_grad():
        assert all(each == bits(model(tokens)) for each in found)
    assert found[0] != bits(eager)


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that were allocated at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events: Any = found.profiler
    now = most = 0
    for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_memory_is_that_of_eager() -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    for layer in model:
        sw.fully_shard(layer, mesh)
    sw.fully_shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = sw.ones(8, 128, device_mesh=mesh, placements=[sw.Shard(0)])
    run = captured(step)
    for _ in range(4):
        run(x)
    assert run.programs
    gathered = sum(p.numel() * p.element_size() for p in model.parameters()) * mesh.size()
    assert peak(lambda: run(x)) <= peak(lambda: step(x)) < gathered
