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
from tests.virtual.captured_copies import COLUMNS, ROWS, assert_same, compare


@pytest.mark.parametrize("seed", [3, 12, 55, 111])  # each fails without one of the conditions of the pass
def test_random_copies(seed: int) -> None:
    compare(seed)


def test_most_copies_go() -> None:
    counts = [compare(seed) for seed in range(20)]
    assert sum(after for _, after in counts) < 0.6 * sum(before for before, _ in counts)


def source_is_written(x: Any) -> Any:
    y = x * 2
    copy = y.clone()
    y.add_(1)
    return copy + y


def source_is_copied_into(x: Any) -> Any:
    y, z = x * 2, x * 3
    copy = y.clone()
    y.copy_(z)
    return copy + y


def copy_is_written(x: Any) -> Any:
    y = x * 2
    copy = y.clone()
    copy.add_(1)
    return copy * y


def copy_leaves_written(x: Any) -> Any:
    copy = x.clone()
    copy.add_(1)
    return copy, x * 2


def one_of_two_is_written(x: Any) -> Any:
    y = x * 2
    one, other = y.clone(), y.clone()
    one.add_(1)
    return one * 2, other * 3


def copy_of_a_written_copy(x: Any) -> Any:
    y = x * 2
    copy = y.clone()
    copy[1:2].add_(5)
    return copy.clone() * 2, y + 1


def read_before_it_is_filled(x: Any) -> Any:
    y, buffer = x * 2, torch.zeros(ROWS, COLUMNS)
    buffer[:2].copy_(y[:2])
    early = buffer * 1
    buffer[2:].copy_(y[2:])
    return early, buffer * 2


def filled_twice(x: Any) -> Any:
    y, z, buffer = x * 2, x * 3, torch.empty(ROWS, COLUMNS)
    buffer.copy_(y)
    buffer[1:3].copy_(z[1:3])
    return buffer * 2, buffer[1:3] * 3, buffer[0:2] * 4


def partly_filled(x: Any) -> Any:
    y, buffer = x * 2, torch.zeros(ROWS, COLUMNS)
    buffer[1:3].copy_(y[1:3])
    return buffer * 2, buffer[1:3] * 3


def within_one_memory(x: Any) -> Any:
    y = x * 2
    y[:2].copy_(y[2:])
    return y * 3


def another_order(x: Any) -> Any:
    y = x * 2
    copy = torch.empty(COLUMNS, ROWS).t()
    copy.copy_(y)
    return copy, copy.t().reshape(-1) * 2


def other_numbers(x: Any) -> Any:
    y = x * 2.5
    return y.to(torch.float64) * 2, y.to(torch.int32).float() * 3


def seen_as_integers(x: Any) -> Any:
    y = x * 2
    copy = y.clone()
    copy.view(torch.int32).bitwise_xor_(1)
    return copy * 1, (y.clone().view(torch.int32) + 1).float()


def overlapping_sources(x: Any) -> Any:
    y = x * 2
    buffer = torch.cat([y[0:2], y[1:3]])
    one, other = buffer[:2], buffer[2:]
    one.add_(1)
    return one * 2, other * 3


def overlapping_sources_leave(x: Any) -> Any:
    y = x * 2
    buffer = torch.cat([y[0:2], y[1:3]])
    return buffer[:2], buffer[2:]


def copies_of_copies(x: Any) -> Any:
    y = x * 2
    copy = y.clone().clone().clone()
    joined = torch.cat([copy, copy])
    one, other = joined.split(ROWS)
    return one * 2, other * 3, joined.clone()


def shifted_copies(x: Any) -> Any:
    y = torch.cat([x * 2, x * 3])
    buffer = torch.cat([y[2:6], x * 5])
    return buffer[1:3].clone() * 2, buffer[4:].clone() * 3, buffer[3:5] * 4


def nothing_first(x: Any) -> Any:
    joined = torch.cat([torch.empty(0), x * 2])
    return joined * 2, torch.cat([torch.empty(0, COLUMNS), x * 3]) * 2, torch.cat([x[:0], x])[1:2] * 4


def along_columns(x: Any) -> Any:
    joined = torch.cat([(x * 2)[:, :4], (x * 3)[:, 4:]], -1)
    return joined * 2, joined[:, 2:6] * 3


def split_and_written(x: Any) -> Any:
    y = x * 2
    one, other = torch.empty(1, COLUMNS), torch.empty(ROWS - 1, COLUMNS)
    torch.split_with_sizes_copy(y, [1, ROWS - 1], out=[one, other])
    other.mul_(3)
    return one + other, other * 2


def argument_is_written_later(x: Any) -> Any:
    copies = [torch.empty_like(x[:2]), torch.empty_like(x[2:])]
    torch._foreach_copy_(copies, [x[:2], x[2:]])
    first = copies[0] * 2
    x.add_(1)
    return first, copies[1] * 3


def argument_and_copies(x: Any) -> Any:
    return x.clone(), x[1:3].clone(), x


def source_leaves(x: Any) -> Any:
    y = x * 2
    return y, y.clone(), y[:2].clone()


def drawn_into_a_copy(x: Any) -> Any:
    copy = x.clone()
    copy[1:].uniform_()
    return copy * 2, x * 3


def source_leaves_and_the_copy_is_written(x: Any) -> Any:
    y = x * 2
    copy = y.clone()
    copy.add_(1)
    return y, copy * 2


def written_before_and_after(x: Any) -> Any:
    y = x * 2
    copy = y.clone()
    copy.add_(1)
    z = y * 2
    copy.add_(1)
    return copy * 3, z


def seen_as_halves(x: Any) -> Any:
    first, second = x * 2, x * 3
    seen = second.view(torch.int16)
    joined = torch.cat([first, second]).view(torch.int16).view(-1)
    return joined[64:128].float(), seen.float()


def one_of_two_results(x: Any) -> Any:
    return (x * 2).clone().sort(0).values * 2, (x * 3).clone().sort(0).indices * 2.0


def filled_from_a_later_copy(x: Any) -> Any:
    first, second = x * 5, x * 2
    buffer = torch.empty(2 * ROWS, COLUMNS)
    buffer[:ROWS].copy_(first)
    copy = second.clone()
    copy.add_(1)
    buffer[ROWS:].copy_(copy)
    return buffer[ROWS:] * 2, buffer[:ROWS] * 3


def with_gaps(x: Any) -> Any:
    y, buffer = x * 2, torch.zeros(ROWS, COLUMNS)
    buffer[:, :8].copy_(y[:, :8])
    return buffer[:2] * 2, y * 3


KEPT = (
    source_leaves_and_the_copy_is_written, written_before_and_after, seen_as_halves, one_of_two_results,
    filled_from_a_later_copy, with_gaps,
    source_is_written, source_is_copied_into, copy_is_written, copy_leaves_written, one_of_two_is_written,
    copy_of_a_written_copy, read_before_it_is_filled, filled_twice, partly_filled, within_one_memory, another_order,
    other_numbers, seen_as_integers, overlapping_sources, overlapping_sources_leave, copies_of_copies, shifted_copies,
    nothing_first, along_columns, split_and_written, argument_is_written_later, argument_and_copies, source_leaves,
    drawn_into_a_copy,
)  # fmt: skip


@pytest.mark.parametrize("function", KEPT)
def test_each_condition(function: Any) -> None:
    """Programs that come out otherwise where the pass forgets one of its conditions."""

    def alone(x: Any) -> list[torch.Tensor]:
        found = function(x)
        return list(found) if isinstance(found, tuple) else [found]

    step = captured(alone, verify=False)
    for call in range(4):
        torch.manual_seed(call)
        x = torch.rand(ROWS, COLUMNS)
        random = torch.get_rng_state()
        assert_same(step, alone, [x], f"{function.__name__}, call {call}", random)
    assert len(step.programs) == 1


def test_an_optimizer_writes_to_the_source() -> None:
    weight = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def function(x: Any) -> Any:
        before = weight.detach().clone()
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return before * 2

    step = captured(function, verify=False)
    assert [step(torch.ones(ROWS, COLUMNS))[0, 0].item() for _ in range(4)] == [2.0, 1.0, 0.0, -1.0]


# How many bytes are copied: of a function without the pass, and with it.
LEFT_OUT: dict[str, tuple[Any, int, int]] = {
    "a clone": (lambda x: (x * 2).clone() * 3, 256, 0),
    "of an argument": (lambda x: x.clone() * 3, 256, 0),
    "a result of its own": (lambda x: (x * 2).clone(), 256, 0),
    "an argument": (lambda x: x.clone(), 256, 256),
    "through a buffer": (lambda x: torch.cat([x[:2], x[2:]])[1:2] * 3, 256, 0),
    "into a buffer and out of it": (lambda x: [t * 2 for t in torch.cat([x, x * 2]).split(ROWS)], 512, 0),
    "of a part that is a copy": (lambda x: torch.cat([x * 2, x * 3])[ROWS:].clone() * 3, 768, 0),
    "at another alignment": (lambda x: (x * 2).view(-1)[1:33].clone() * 3, 128, 128),
    "of copies": (lambda x: (x * 2).clone().clone()[:1].clone() * 3, 576, 64),
    "that is written to at the end": (lambda x: (x * 2).clone().add_(1) * 3, 256, 0),
    "of an argument, written to": (lambda x: x.clone().add_(1) * 3, 256, 256),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_copies_that_go(name: str) -> None:
    function, before, after = LEFT_OUT[name]
    for remove, wanted in ((False, before), (True, after)):
        step = captured(function, remove_copies=remove)
        for _ in range(3):
            step(torch.ones(ROWS, COLUMNS))
        assert copied_bytes(program_of(step)) == wanted


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
