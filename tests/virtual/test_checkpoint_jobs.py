"""Checkpoints when others are at work: two jobs and one path, readers beside writers, errors half-way, odd places."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import async_save, load, read, save
from shardwise.checkpoint.format.checkpoint_index import INDEX
from shardwise.checkpoint.io import atomic_directory as atomic
from shardwise.checkpoint.io import host_memory
from shardwise.checkpoint.io.atomic_directory import Staging
from shardwise.checkpoint.io.range_reader import OpenDirectory
from shardwise.checkpoint.operations import checkpoint_series as series
from shardwise.checkpoint.operations import save_checkpoint as writing
from shardwise.checkpoint.operations.background_save import finish_pending
from tests.virtual.checkpoints import mesh_of


@pytest.mark.parametrize("length", [200, 240, 255])
def test_long_names(length: int, tmp_path: Path) -> None:
    name = "ä" * 20 + "n" * (length - 42) + "-1"
    for i in range(2):
        save({"i": i}, tmp_path / name, overwrite=True, keep=1)
    assert read(tmp_path / name)["i"] == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 256, "cannot be a checkpoint: File name too long"),
        ("file/c", "cannot be a checkpoint: Not a directory"),
        ("a\0b", "cannot be a checkpoint: embedded null"),
        ("/proc/1/none/c", "cannot be saved"),
    ],
)
def test_places_that_cannot_be_written(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for saving in (save, async_save):
        with pytest.raises(sw.CheckpointError, match=message):
            saving({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(sw.CheckpointError):
        sw.checkpoint.export_safetensors({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(sw.CheckpointError, match="there is no checkpoint"):
        load({"x": torch.ones(1)}, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------- two jobs, one path


def staged_at(target: Path, number: int) -> Staging:
    """A job that has written a checkpoint, but not published it."""
    aside = target.with_name(f"aside-{number}")
    save({"n": number}, aside)
    staging = atomic.prepare(target)
    for file in aside.iterdir():
        shutil.copy(file, staging.directory)
    shutil.rmtree(aside)
    return staging


@pytest.mark.parametrize("replacing", [False, True])
def test_of_two_jobs_the_first_to_publish_keeps_the_name(replacing: bool, tmp_path: Path) -> None:
    target = tmp_path / "c"
    if replacing:
        save({"n": 0}, target)
    first, second = staged_at(target, 1), staged_at(target, 2)
    assert first.directory != second.directory
    atomic.publish(second)
    with pytest.raises(sw.CheckpointError, match="another job saved to"):
        atomic.publish(first)
    atomic.discard(first)
    assert read(target) == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_job_that_publishes_between_look_and_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "c"
    save({"n": 0}, target)
    mine, other = staged_at(target, 1), staged_at(target, 2)
    exchange = atomic._exchange

    def late(a: Path, b: Path) -> None:
        monkeypatch.setattr(atomic, "_exchange", exchange)
        atomic.publish(other)
        exchange(a, b)

    monkeypatch.setattr(atomic, "_exchange", late)
    with pytest.raises(sw.CheckpointError, match="another job saved to"):
        atomic.publish(mine)
    assert read(target) == {"n": 2}


def test_a_file_system_without_exchange_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"n": 0}, tmp_path / "c")

    def absent(*args: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(atomic, "_rename", absent)
    monkeypatch.setattr(writing, "write_blocks", lambda *args: pytest.fail("something was written"))
    with pytest.raises(sw.CheckpointError, match="cannot replace"):
        save({"n": torch.ones(1)}, tmp_path / "c", overwrite=True)
    monkeypatch.undo()
    monkeypatch.setattr(atomic, "_rename", absent)
    save({"n": 1}, tmp_path / "d")
    assert [read(tmp_path / name)["n"] for name in "cd"] == [0, 1]
    assert len(list(tmp_path.iterdir())) == 2


def test_leftovers_of_the_dead_alone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = atomic._this_process()
    places = {}
    for number, record in enumerate(
        (me, me | {"started": 1}, me | {"boot": "another"}, me | {"boot": "another"}, {}, {"pid": "x"})
    ):
        staging = places[number] = Staging(tmp_path / "old", f"{number:016x}")
        staging.owner.write_text(json.dumps(record))
        staging.directory.mkdir()
        (staging.directory / "blocks-00000.safetensors").touch()
    long_ago = (1.0, 1.0)
    for path in (places[3].owner, places[3].directory, places[3].directory / "blocks-00000.safetensors"):
        os.utime(path, long_ago)
    for path in (places[4].owner, places[4].directory):
        os.utime(path, long_ago)  # but a file in it was written just now
    (tmp_path / f".old.removing-{7:016x}").mkdir()
    kill = os.kill

    def kill_of_others(pid: int, signal: int) -> None:
        if pid == 1:
            raise PermissionError
        kill(pid, signal)

    hidden = Staging(tmp_path / "hidden", "a" * 16)
    hidden.owner.write_text(json.dumps(me | {"pid": 1, "started": atomic._start_time(1)}))
    hidden.directory.mkdir()
    monkeypatch.setattr(os, "kill", kill_of_others)
    (tmp_path / ".mine.saving").mkdir()
    save({"n": 1}, tmp_path / "new")
    left = {number for number, staging in places.items() if staging.directory.exists()}
    assert left == {0, 2, 4, 5}
    assert {number for number, staging in places.items() if staging.owner.exists()} == left
    names = {path.name for path in tmp_path.iterdir() if "old.saving" not in path.name}
    assert names == {"new", ".mine.saving", hidden.directory.name, hidden.owner.name}


def test_keep_leaves_what_another_job_published_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prune(target: Path, keep: int) -> None:
        monkeypatch.undo()
        save({}, tmp_path / "step-9")
        series.prune(target, keep)

    save({}, tmp_path / "step-1")
    monkeypatch.setattr(writing, "prune", prune)
    save({}, tmp_path / "step-2", keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-9"]


@pytest.mark.parametrize("action", ["load", "read", "verify", "inspect", "diff", "reshard"])
def test_a_reader_starts_over_when_its_checkpoint_is_replaced(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "c"
    save({"x": torch.zeros(4), "n": 0}, target)
    opened = OpenDirectory.open
    replaced: list[int] = []

    def slow(self: OpenDirectory, file: str, what: str, *, links: bool = False) -> Any:
        if self.path == target and len(replaced) < 3 and (file != INDEX or len(replaced) % 2):
            replaced.append(1)
            save({"x": torch.full((4,), float(len(replaced))), "n": len(replaced)}, target, overwrite=True)
        return opened(self, file, what, links=links)

    monkeypatch.setattr(OpenDirectory, "open", slow)
    state = {"x": torch.full((4,), -1.0), "n": -1}
    match action:
        case "load":
            load(state, target)
        case "read":
            state = read(target)
        case "verify":
            assert sw.checkpoint.verify(target) == []
            state = read(target)
        case "inspect":
            assert sw.checkpoint.inspect(target).nbytes == 16
            state = read(target)
        case "diff":
            assert sw.checkpoint.diff(target, target) == []
            state = read(target)
        case _:
            sw.checkpoint.reshard(target, tmp_path / "d", mesh_of((2,)))
            state = read(tmp_path / "d")
    assert replaced
    assert torch.equal(state["x"], torch.full((4,), float(state["n"])))


def test_a_reader_that_is_always_overtaken_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"n": torch.zeros(1)}, tmp_path / "c")
    opened = OpenDirectory.open

    def overtaken(self: OpenDirectory, file: str, what: str, *, links: bool = False) -> Any:
        save({"n": torch.zeros(1)}, tmp_path / "c", overwrite=True)
        return opened(self, file, what, links=links)

    monkeypatch.setattr(OpenDirectory, "open", overtaken)
    with pytest.raises(sw.CheckpointError, match="was replaced or removed while it was read"):
        read(tmp_path / "c")


# ---------------------------------------------------------------- a state is loaded as a whole


class Refusing:
    """Something with a state dict that it does not take back from a checkpoint."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if state["value"] == "bad":
            raise ValueError("not this one")


class Taking(Refusing):
    """Something that takes what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_an_object_that_refuses_its_state_leaves_everything_as_it_was(tmp_path: Path) -> None:
    save({"a": Taking(1), "w": torch.ones(2), "r": Taking("bad"), "n": [2], "z": Taking(3)}, tmp_path / "c")
    state = {"a": Taking(0), "w": torch.zeros(2), "r": Refusing("good"), "n": [0], "z": Taking(0)}
    with pytest.raises(ValueError, match="not this one"):
        load(state, tmp_path / "c")
    assert [state[name].value for name in "arz"] == [0, "good", 0]
    assert not state["w"].any()
    assert state["n"] == [0]


def test_what_is_half_loaded_is_named(tmp_path: Path) -> None:
    both = {"t": torch.ones(1), "s": "bad"}
    save({"a": Taking(1), "w": torch.ones(2), "r": Taking({"value": both}), "n": 2}, tmp_path / "c")

    class WithTensors(Refusing):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not this one")

    state = {"a": Taking(0), "w": torch.zeros(2), "r": WithTensors({"value": {"t": torch.zeros(1), "s": ""}}), "n": 0}
    with pytest.raises(sw.CheckpointError) as caught:
        load(state, tmp_path / "c")
    assert "partly loaded: ValueError at r: not this one" in str(caught.value)
    assert "changed on rank 0 before, in this order: a, w, r/value/value/t, plain objects" in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1).expand(3), "x is expanded in the state"),
        (torch.zeros(3).to_sparse(), "x is a torch.sparse_coo tensor"),
        (torch.empty(3, device="meta"), "x has no memory in the state"),
        (torch.zeros(3, dtype=torch.float64), r"x is f32\[3\] in the checkpoint, f64\[3\]"),
    ],
)
def test_tensors_that_cannot_be_filled(tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    save({"a": torch.ones(2), "x": torch.ones(3)}, tmp_path / "c")
    state = {"a": torch.zeros(2), "x": tensor}
    for staged in (True, False):
        with pytest.raises(sw.CheckpointMismatchError, match=message):
            load(state, tmp_path / "c", staged=staged)
    assert not state["a"].any()


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (1, 2), (0, 1)])
def test_windows_that_overlap_cannot_be_filled(strides: tuple[int, int], tmp_path: Path) -> None:
    save({"x": torch.arange(9.0).reshape(3, 3)}, tmp_path / "c")
    windows = torch.zeros(20).as_strided((3, 3), strides)
    with pytest.raises(sw.CheckpointMismatchError, match="its elements share memory"):
        load({"x": windows}, tmp_path / "c")
    assert not windows.any()


@pytest.mark.parametrize("strides", [(3, 1), (1, 3), (4, 1), (2, 6)])
def test_views_without_overlap_are_filled(strides: tuple[int, int], tmp_path: Path) -> None:
    save({"x": torch.arange(9.0).reshape(3, 3)}, tmp_path / "c")
    view = torch.zeros(20).as_strided((3, 3), strides)
    load({"x": view}, tmp_path / "c")
    assert torch.equal(view, torch.arange(9.0).reshape(3, 3))


def test_freed_memory_inference_tensors_and_groups_of_parameters(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, tmp_path / "c")
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(sw.CheckpointMismatchError, match="its storage was freed"):
        load({"x": freed}, tmp_path / "c")
    with torch.inference_mode():
        frozen = torch.zeros(3)
    load({"x": frozen}, tmp_path / "c")
    assert frozen.sum() == 3
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in range(n)], lr=n) for n in (1, 2))
    save({"o": one}, tmp_path / "d")
    with pytest.raises(sw.CheckpointMismatchError, match=r"o/param_groups is \[1\] in the checkpoint, \[2\]"):
        load({"o": other}, tmp_path / "d")
    assert other.param_groups[0]["lr"] == 2


def test_an_interrupt_leaves_nothing_and_the_next_save_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("write_blocks", "_item", "encode_state", "write_index"):
        for saving in (save, lambda *args: async_save(*args).wait()):
            with monkeypatch.context() as patch:

                def stop(*args: Any) -> Any:
                    raise KeyboardInterrupt

                patch.setattr(writing, where, stop)
                with pytest.raises(KeyboardInterrupt):
                    saving({"x": torch.ones(2)}, tmp_path / "c")
            finish_pending()  # the interrupt was raised; it is not raised again
            assert not list(tmp_path.iterdir()), where
    save({"x": torch.ones(2)}, tmp_path / "c")


def test_saves_in_the_background_use_one_buffer(tmp_path: Path) -> None:
    mesh = mesh_of((2,))
    x = sw.ones(6, 3, device_mesh=mesh, placements=[sw.Shard(0)])
    buffers = []
    for step in range(3):
        saving = async_save(
            {"x": x, "n": torch.tensor(step), "c": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / f"{step}"
        )
        x.add_(1)  # the checkpoint has the values before
        saving.wait()
        buffers.append(host_memory._kept[0])
    assert all(buffer is buffers[0] for buffer in buffers)
    for step in range(3):
        found = read(tmp_path / f"{step}")
        assert torch.equal(found["x"], torch.full((6, 3), 1.0 + step))
        assert found["n"].item() == step
    async_save({"x": torch.ones(1000)}, tmp_path / "larger").wait()
    assert host_memory._kept[0].size >= 4000
    async_save({"x": x}, tmp_path / "smaller").wait()
    assert host_memory._kept[0].size < 200
