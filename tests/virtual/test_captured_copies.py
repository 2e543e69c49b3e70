"""Copies that a captured program leaves out, and those that it must keep."""

from collections import Counter
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.capture import captured
from shardwise.capture.copy_propagation import copied_bytes
from shardwise.capture.program import Program
from shardwise.capture.tape import Unit
from tests.transformer import Transformer, loss_of, shard_all, tensor_parallel
from tests.virtual.captured_copies import COLUMNS, ROWS, compare


@pytest.mark.parametrize("seed", [3, 12, 55, 111])  # each fails without one of the conditions of the pass
def test_random_copies(seed: int) -> None:
    compare(seed)


def test_most_copies_go() -> None:
    counts = [compare(seed) for seed in range(20)]
    assert sum(after for _, after in counts) < 0.6 * sum(before for before, _ in counts)


def program_of(step: Any) -> Program:
    assert step._last is not None
    return step._last.program


def operators_of(step: Any) -> Counter[str]:
    """How often each operator runs that computes or copies."""
    calls = [call for _, call in program_of(step).calls]
    return Counter(
        call.name if isinstance(call, Unit) else str(call.op)
        for call in calls
        if isinstance(call, Unit) or not (call.op.is_view or "view" in call.op._opname)
    )


def trained(wrap: Any, **options: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = Transformer(2)
    wrap(model, sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(tokens: Any) -> Any:
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = captured(train, **options)
    tokens = torch.arange(24).reshape(4, 6) % 7
    losses = [step(tokens) for _ in range(5)]
    return step, [(loss.full_tensor() if isinstance(loss, sw.DTensor) else loss).item() for loss in losses]


WRAPS: dict[str, Any] = {
    "fully_shard": lambda model, mesh: shard_all(model, mesh["dp"]),
    "tensor parallel": lambda model, mesh: tensor_parallel(model, mesh["tp"]),
    "both": lambda model, mesh: (tensor_parallel(model, mesh["tp"]), shard_all(model, mesh["dp"])),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_step_on_one_rank_runs_the_operators_of_one_device(name: str) -> None:
    plain, _ = trained(lambda model, mesh: None)
    without, wanted = trained(WRAPS[name], remove_copies=False)
    step, losses = trained(WRAPS[name])
    assert losses == wanted
    assert copied_bytes(program_of(step)) == copied_bytes(program_of(plain)) < copied_bytes(program_of(without))
    extra = operators_of(step) - operators_of(plain)
    extra -= Counter(keep_random_states=9, put_random_states_back=9)  # of virtual ranks
    if name == "fully_shard":
        assert not extra


def test_a_large_memory_is_not_kept_for_a_part_of_it() -> None:
    def function(x: Any) -> Any:
        part = (x * 2)[:1].clone()
        return part + 1

    step = captured(function)
    x = torch.ones(64, COLUMNS)
    for _ in range(3):
        step(x)
    assert "clone" in step.source()


def test_a_copy_that_must_stay_is_taken_by_a_write_to_its_source() -> None:
    def function(x: Any) -> Any:
        before = x.clone()
        x.add_(1)
        return (before * 2).sum()

    step = captured(function)
    x = torch.ones(ROWS, COLUMNS)
    assert [step(x).item() for _ in range(4)] == [128.0 * (1 + call) for call in range(4)]


def test_a_program_without_the_pass_is_used_where_the_pass_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.capture import passes

    made: list[Program] = []

    def broken(program: Program) -> Program:
        """Reads the argument in place of its double."""
        last, call = program.calls[-1]
        calls = [*program.calls[:-1], (last, call._replace(args=(call.args[0], 7)))]
        found = program.with_calls(calls)
        found.simple = program
        made.append(found)
        return found

    monkeypatch.setattr(passes, "without_copies", broken)
    step = captured(lambda x: x * 2 + 1)
    found = [step(torch.ones(3)).tolist() for _ in range(4)]
    assert made
    assert found == [[3.0] * 3] * 4
