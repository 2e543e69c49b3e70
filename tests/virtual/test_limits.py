"""Budgets and lock files: communication that exceeds them is an error that names the operator and its line."""

import warnings
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.debug.limits.lock_check import difference
from shardwise.debug.limits.lock_file import Amount, Lock
from tests.virtual.block import Block, batch, line_of, train

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


# ---------------------------------------------------------------- budgets


def test_what_is_within_the_budget_is_counted(mesh: sw.DeviceMesh) -> None:
    model, x = Block(mesh), batch(mesh)
    with sw.comm_budget(bytes=384 + 768 + 384, collectives=3) as budget:
        train(model, x)
    assert (budget.spent_bytes, budget.spent_collectives) == (1536, 3)


def test_the_first_operator_over_the_budget_is_named_and_does_not_run(mesh: sw.DeviceMesh) -> None:
    model, x = Block(mesh), batch(mesh)
    with sw.explain() as report, pytest.raises(sw.CommunicationError) as caught, sw.comm_budget(bytes=1000) as budget:
        train(model, x)
    message = str(caught.value)
    assert f"block.py:{line_of('tanh')} would all-reduce" in message
    assert "aten.tanh in forward" in message
    assert "1,152 bytes of 1,000" in message
    assert "f32[8,16] tp:P -> tp:R" in message
    assert (budget.spent_bytes, budget.spent_collectives) == (384, 1)
    assert report.records[-1].error == "CommunicationError"


def test_a_budget_holds_in_backward_and_on_swallowed_errors(mesh: sw.DeviceMesh) -> None:
    model, x = Block(mesh), batch(mesh)
    with pytest.raises(sw.CommunicationError, match="redistribute in backward"), sw.comm_budget(collectives=2):
        train(model, x)
    y = sw.distribute_tensor(torch.randn(8), mesh, [S0])

    def swallow() -> None:
        with sw.comm_budget(collectives=0), pytest.raises(sw.CommunicationError):
            y.full_tensor()

    with pytest.raises(sw.CommunicationError, match="1 collectives of 0"):
        swallow()
    y.full_tensor()  # outside, nothing is limited


# ---------------------------------------------------------------- lock files


def recorded(mesh: sw.DeviceMesh) -> sw.debug.Report:
    model, x = Block(mesh), batch(mesh)
    with sw.explain() as report:
        train(model, x)
    return report


def test_a_lock_file_is_readable_and_has_no_lines_in_it(mesh: sw.DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "communication.lock"
    recorded(mesh).save_lock(path)
    assert (
        path.read_text()
        == """\
{
  "shardwise_lock": 1,
  "total": {"count": 3, "received_bytes": 1536},
  "communication": {
    "backward in Block from block.py Block.forward": {
      "redistribute: reduce_scatter over tp": {"count": 1, "received_bytes": 384}
    },
    "forward in Block from block.py Block.forward": {
      "aten.tanh: all_reduce over tp": {"count": 1, "received_bytes": 768},
      "redistribute: all_gather over tp": {"count": 1, "received_bytes": 384}
    }
  }
}
"""
    )
    assert Lock.read(path) == recorded(mesh).lock()


def test_more_communication_fails_with_a_diff(mesh: sw.DeviceMesh, tmp_path: Path) -> None:
    path, model, x = tmp_path / "communication.lock", Block(mesh), batch(mesh)
    recorded(mesh).save_lock(path)
    with sw.check_lock(path):
        train(model, x)

    def train_and_look() -> None:
        train(model, x)
        x.detach().full_tensor()

    with pytest.raises(sw.CommunicationError) as caught, sw.check_lock(path):
        train_and_look()
    message = str(caught.value)
    assert "3 x, 1,536 bytes -> 4 x, 1,920 bytes" in message
    assert (
        "  + forward from test_limits.py test_more_communication_fails_with_a_diff.<locals>.train_and_look: "
        "full_tensor: all_gather over tp: 0 x, 0 bytes -> 1 x, 384 bytes" in message
    )
    assert "SHARDWISE_UPDATE_LOCK=1" in message


def test_less_communication_is_said(mesh: sw.DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "communication.lock"
    recorded(mesh).save_lock(path)
    with pytest.warns(UserWarning, match="less communication"), sw.check_lock(path):
        pass


def test_a_report_can_be_checked_afterwards(mesh: sw.DeviceMesh, tmp_path: Path) -> None:
    path, report = tmp_path / "communication.lock", recorded(mesh)
    with sw.explain() as nothing:
        pass
    nothing.save_lock(path)
    with pytest.raises(sw.CommunicationError, match="more communication"):
        sw.check_lock(path, report)
    report.save_lock(path)
    sw.check_lock(path, report)


def test_the_environment_updates_a_lock(
    mesh: sw.DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path, model, x = tmp_path / "communication.lock", Block(mesh), batch(mesh)
    with pytest.raises(sw.ShardwiseError, match="there is no lock file"), sw.check_lock(path):
        train(model, x)
    monkeypatch.setenv("SHARDWISE_UPDATE_LOCK", "1")
    with sw.check_lock(path):
        train(model, x)
    monkeypatch.delenv("SHARDWISE_UPDATE_LOCK")
    with sw.check_lock(path):
        train(model, x)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shardwise_lock": 2}', '{"shardwise_lock": 1, "communication": 3}'])
def test_what_is_no_lock_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "communication.lock"
    path.write_text(text)
    with pytest.raises(sw.ShardwiseError, match="is not a lock file"), sw.check_lock(path):
        pass


def test_a_renamed_function_is_no_difference() -> None:
    moved = "aten.mm: all_reduce over tp"
    before = Lock({("forward in Net from a.py Net.forward", moved): Amount(2, 64)})
    after = Lock({("forward in Net from b.py Net.run", moved): Amount(2, 64)})
    assert difference(before, after) == ([], [])
    larger = Lock({("forward in Net from b.py Net.run", moved): Amount(2, 65)})
    more, less = difference(before, larger)
    assert (len(more), len(less)) == (1, 1)
    backward = Lock({("backward in Net from a.py Net.forward", moved): Amount(2, 64)})
    assert len(difference(before, backward).more) == 1


def test_an_error_inside_is_not_hidden_by_the_lock(mesh: sw.DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "communication.lock"
    recorded(mesh).save_lock(path)
    with warnings.catch_warnings(), pytest.raises(ZeroDivisionError), sw.check_lock(path):
        raise ZeroDivisionError
