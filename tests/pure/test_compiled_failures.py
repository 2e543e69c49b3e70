"""Calls of functional collectives: what they started is known until it is waited for, and named where it fails."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import traceback as fx_traceback

from shardwise.errors import LostRankError
from shardwise.fabric import compiled_failures
from shardwise.fabric.compiled_failures import NamedCollective, NamedWait, note_traced_line


def over_tp(group: Any) -> tuple[str, Sequence[int]]:
    return f"over {group}", [4, 5]


def failing(text: str) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise RuntimeError(text)

    return fail


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    compiled_failures._started.clear()
    compiled_failures._traced.clear()


def test_a_failing_wait_names_the_collective_that_was_started() -> None:
    start = NamedCollective("all_reduce_", over_tp, lambda tensor, *_: tensor)
    started = start(torch.ones(2, 3), "sum", "tp")
    with pytest.raises(
        LostRankError, match=r"^all-reduce \(sum\) over tp of local tensors f32\[2,3\] in compiled code fai"
    ):
        NamedWait("wait_tensor", over_tp, failing("Connection closed by peer"))(started)


def test_a_collective_that_fails_at_once_is_named() -> None:
    start = NamedCollective("all_gather_into_tensor", over_tp, failing("Timed out waiting 10ms"))
    with pytest.raises(LostRankError, match=r"^all-gather over tp of local tensors b8\[\] [\s\S]*ranks 4, 5, and one"):
        start(torch.tensor(True), 2, "tp")


def test_each_of_several_tensors_is_known() -> None:
    start = NamedCollective("all_reduce_coalesced", over_tp, lambda tensors, *_: [t + 1 for t in tensors])
    _, second = start([torch.ones(2), torch.ones(3)], "max", "tp")
    with pytest.raises(LostRankError, match=r"all-reduce \(max\) over tp of local tensors f32\[2\]"):
        NamedWait("wait_tensor", over_tp, failing("connection reset"))(second)


def test_a_tensor_of_an_unknown_collective() -> None:
    with pytest.raises(LostRankError, match=r"a functional collective failed on [\s\S]*with other ranks, and"):
        NamedWait("wait_tensor", over_tp, failing("broken pipe"))(torch.ones(2))


def test_other_errors_pass() -> None:
    for call in (NamedCollective("all_reduce", over_tp, failing("shapes differ")),
                 NamedWait("wait_tensor", over_tp, failing("shapes differ"))):  # fmt: skip
        with pytest.raises(RuntimeError, match="shapes differ") as raised:
            call(torch.ones(2), "sum", "tp")
        assert not isinstance(raised.value, LostRankError)


def test_nothing_is_kept_of_what_was_waited_for_and_little_of_what_was_not() -> None:
    start = NamedCollective("all_reduce", over_tp, lambda tensor, *_: tensor + 1)
    wait = NamedWait("wait_tensor", over_tp, lambda tensor: tensor)
    for _ in range(10):
        wait(start(torch.ones(2), "sum", "tp"))
    assert not compiled_failures._started
    kept = [start(torch.ones(1), "sum", "tp") for _ in range(compiled_failures.MAX_STARTED + 10)]
    assert len(kept) > len(compiled_failures._started) > 0


def test_operators_stay_keys_of_tables() -> None:
    def original(*args: Any) -> None:
        pass

    assert hash(NamedCollective("all_reduce", over_tp, original)) == hash(original)


@pytest.mark.parametrize(("shape", "line"), [((2, 3), "model.py:7"), ((2, 4), "model.py:9"), ((2, 3, 1), None)])
def test_the_line_is_that_of_a_traced_collective_of_the_same_sizes(
    shape: tuple[int, ...], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, sizes in ((7, (2, 3)), (9, (2, 4))):
        trace = f'  File "model.py", line {number}, in forward\n  File "{torch.__file__}", line 5, in sum\n'
        monkeypatch.setattr(fx_traceback, "current_meta", {"stack_trace": trace})
        note_traced_line("all_reduce", torch.empty(sizes), "tp")
    with pytest.raises(LostRankError) as raised:
        NamedCollective("all_reduce", over_tp, failing("timed out"))(torch.ones(shape), "sum", "tp")
    said = str(raised.value).partition(" failed on ")[0]
    assert said.endswith(f"in compiled code of {line}" if line else "in compiled code")
