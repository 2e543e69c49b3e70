"""Checkpoints at URLs of fsspec, series of checkpoints, and checkpoints that share files with an earlier one."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import shardwise as sw
from shardwise.checkpoint import async_save, diff, inspect, latest, load, read, reshard, save, verify
from shardwise.checkpoint.io import remote_directory
from tests.virtual.checkpoints import mesh_of


class Faulty(MemoryFileSystem):
    """A file system in memory that fails at writes of some files, or at reads."""

    protocol = "faulty"
    cachable = False
    fails = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def _fail(self, path: str, what: str) -> None:
        if self.fails and self.fails in f"{what} {path}":
            raise PermissionError(f"no {what} of {path}")

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        self._fail(path, "write" if "w" in mode else "read")
        return super()._open(path, mode, *args, **options)

    def pipe_file(self, path: str, value: bytes, *args: Any, **options: Any) -> None:
        self._fail(path, "write")
        super().pipe_file(path, value, *args, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        self._fail(path, "read")
        return super().cat_file(path, start, end, **options)


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}" if request.param == "file" else f"memory://{secrets.token_hex(4)}"


def state_of(value: float) -> dict[str, Any]:
    mesh = mesh_of((2, 2))
    x = sw.distribute_tensor(torch.arange(48.0).reshape(6, 8) + value, mesh, [sw.Shard(0), sw.Shard(1)])
    return {"x": x, "empty": torch.ones(0, 3), "one": torch.tensor(value), "step": int(value)}


def test_all_functions_at_a_url(url: str) -> None:
    save(state_of(1), f"{url}/run/a")
    other = {"x": sw.zeros(6, 8, device_mesh=mesh_of((3,)), placements=[sw.Shard(1)])}
    loaded = load(other, f"{url}/run/a", strict=False)
    assert torch.equal(other["x"].full_tensor(), torch.arange(48.0).reshape(6, 8) + 1)
    assert set(loaded.unexpected) == {"empty", "one", "step"}
    async_save(state_of(2), f"{url}/run/b").wait()
    assert read(f"{url}/run/b")["step"] == 2
    assert [tensor.name for tensor in inspect(f"{url}/run/b").tensors] == ["x", "empty", "one"]
    assert verify(f"{url}/run/b") == []
    assert {name for name, _ in diff(f"{url}/run/a", f"{url}/run/b")} == {"x", "one", "step"}
    reshard(f"{url}/run/b", f"{url}/run/c", mesh_of((3,)))
    assert diff(f"{url}/run/b", f"{url}/run/c") == []
    with pytest.raises(sw.CheckpointError, match="exists already"):
        save(state_of(3), f"{url}/run/b")
    save(state_of(3), f"{url}/run/b", overwrite=True)
    assert read(f"{url}/run/b")["step"] == 3
    system, root = fsspec.core.url_to_fs(f"{url}/run/b")
    assert len(system.ls(root)) == 5  # those of the checkpoint before are gone
    with pytest.raises(sw.CheckpointError, match="there is no checkpoint"):
        read(f"{url}/run/none")


def test_a_url_and_a_path_have_the_same_contents(tmp_path: Path) -> None:
    save(state_of(1), f"file://{tmp_path}/a b/ä")
    assert diff(tmp_path / "a b" / "ä", f"file://{tmp_path}/a b/ä") == []
    assert verify(tmp_path / "a b" / "ä") == []


def test_long_runs_are_read_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are of the announced ranges, in order, and of no other bytes."""
    monkeypatch.setattr(remote_directory, "RANGE", 1000)
    x = torch.randn(128, 256)
    save({"x": x, "y": torch.ones(5)}, (place := f"faulty://{secrets.token_hex(4)}/c"))
    asked: list[tuple[int, int]] = []
    cat_file = Faulty.cat_file
    monkeypatch.setattr(
        Faulty,
        "cat_file",
        lambda self, path, start=None, end=None: asked.append((start, end)) or cat_file(self, path, start, end),
    )
    mesh = mesh_of((4,))
    for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
        target = sw.zeros(128, 256, device_mesh=mesh, placements=[placement])
        load({"x": target}, place, strict=False)
        assert torch.equal(target.full_tensor(), x)
    blocks = [pair for pair in asked if pair != (None, None)]
    assert max(end - start for start, end in blocks) <= 1000
    total = sum(end - start for start, end in blocks)
    assert total <= (1 + 4 + 4) * x.nbytes  # of four columns side by side, each reads the gaps as well


@pytest.mark.parametrize("fails", ["write", "blocks-00002", "index.json", "read"])
def test_a_write_that_fails_leaves_no_checkpoint(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"faulty://{secrets.token_hex(4)}/runs"
    save(state_of(1), f"{place}/step-1")
    monkeypatch.setattr(Faulty, "fails", "step-2/index" if fails == "index.json" else fails)
    if fails == "read":
        with pytest.raises(sw.CheckpointError, match="PermissionError"):
            read(f"{place}/step-1")
    else:
        for action in (save, lambda state, path: async_save(state, path).wait()):
            with pytest.raises(sw.CheckpointError, match="PermissionError"):
                action(state_of(2), f"{place}/step-2")
    monkeypatch.setattr(Faulty, "fails", "")
    assert latest(place) == f"{place}/step-1"
    assert {path.split("/")[-2] for path in Faulty().find(place[9:])} == {"step-1"}
    save(state_of(2), f"{place}/step-2", keep=1)
    assert latest(place) == f"{place}/step-2"
    assert not Faulty().exists(f"{place[9:]}/step-1")


def test_a_reader_finds_half_a_checkpoint(url: str) -> None:
    save(state_of(1), f"{url}/run/step-1")
    save(state_of(2), f"{url}/run/step-2")
    system, root = fsspec.core.url_to_fs(f"{url}/run/step-2")
    for file in system.ls(root, detail=False):
        if file.endswith("index.json"):
            system.rm_file(file)
    with pytest.raises(sw.CheckpointError, match="there is no checkpoint"):
        read(f"{url}/run/step-2")
    assert os.path.basename(latest(f"{url}/run") or "") == "step-1"
    save(state_of(5), f"{url}/run/step-2")  # the leftovers are no obstacle
    assert read(f"{url}/run/step-2")["step"] == 5


def test_a_checkpoint_replaced_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"faulty://{secrets.token_hex(4)}/c"
    save(state_of(1), place)
    once = [True]
    opened = remote_directory.RemoteDirectory.open

    def late(self: Any, *args: Any, **options: Any) -> Any:
        if once.pop() if once else False:
            save(state_of(2), place, overwrite=True)
        return opened(self, *args, **options)

    monkeypatch.setattr(remote_directory.RemoteDirectory, "open", late)
    state = state_of(0)
    load(state, place)
    assert (state["step"], state["one"].item(), state["x"].full_tensor()[0, 0].item()) == (2, 2.0, 2.0)


def test_two_jobs_and_one_url() -> None:
    place = f"memory://{secrets.token_hex(4)}/c"
    first, second = (
        remote_directory.RemoteStaging.prepare(remote_directory.RemotePath(place), False) for _ in range(2)
    )
    save({"n": 1}, place)
    assert first.token != second.token
    with pytest.raises(sw.CheckpointError, match="another job saved"):
        first.finish(fsspec.filesystem("memory").cat_file(f"{place[8:]}/index.json"))
    first.discard()
    assert read(place) == {"n": 1}


def test_damage_at_a_url(url: str) -> None:
    save(state_of(1), f"{url}/c")
    system, root = fsspec.core.url_to_fs(f"{url}/c")
    file = next(path for path in system.ls(root, detail=False) if "blocks-00001" in path)
    data = bytearray(system.cat_file(file))
    data[-1] ^= 1
    system.pipe_file(file, bytes(data))
    state = state_of(7)
    with pytest.raises(sw.CheckpointError, match="does not match its checksum; nothing was loaded"):
        load(state, f"{url}/c")
    assert state["one"].item() == 7
    system.pipe_file(file, bytes(data[:-1]))
    with pytest.raises(sw.CheckpointError, match="bytes instead of"):
        load(state, f"{url}/c")
    assert latest(url) is None


def test_a_protocol_that_nobody_knows() -> None:
    with pytest.raises(sw.CheckpointError, match="nowhere://x cannot be opened: ValueError"):
        save({"a": 1}, "nowhere://x")


# ---------------------------------------------------------------- series


def test_the_newest_complete_one(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None
    for step in (9, 10, 8):
        save({"w": torch.ones(3), "step": step}, tmp_path / f"step-{step}")
    assert latest(tmp_path) == str(tmp_path / "step-8")  # published last: a run that was resumed from an older one
    (tmp_path / "step-8" / "index.json").write_bytes(b"{}")
    assert latest(str(tmp_path)) == str(tmp_path / "step-10")
    os.truncate(tmp_path / "step-10" / "blocks-00000.safetensors", 10)
    assert latest(tmp_path) == str(tmp_path / "step-9")
    os.unlink(tmp_path / "step-9" / "blocks-00000.safetensors")
    assert latest(tmp_path) is None
    (tmp_path / ".step-11.saving-0123456789abcdef").mkdir()
    shutil.copy(tmp_path / "step-8" / "index.json", tmp_path / ".step-11.saving-0123456789abcdef")
    assert latest(tmp_path) is None


def test_the_newest_one_of_copies(tmp_path: Path) -> None:
    """Copies have new times as files, in any order."""
    for step in (9, 10):
        save({"w": torch.ones(3), "step": step}, tmp_path / "run" / f"step-{step}")
    for step in (10, 9):
        shutil.copytree(
            tmp_path / "run" / f"step-{step}", tmp_path / "moved" / f"step-{step}", copy_function=shutil.copy
        )
        os.utime(tmp_path / "moved" / f"step-{step}" / "index.json", (2e9 - step, 2e9 - step))
    assert latest(tmp_path / "moved") == str(tmp_path / "moved" / "step-10")
    assert latest(f"file://{tmp_path}/moved") == f"file://{tmp_path}/moved/step-10"
    shutil.copytree(tmp_path / "run" / "step-9", tmp_path / "run" / "before", copy_function=shutil.copy)
    reshard(tmp_path / "run" / "step-9", tmp_path / "run" / "wider-11", mesh_of((3,)))  # the state is that of step 9
    assert latest(tmp_path / "run") == str(tmp_path / "run" / "step-10")
    save({"w": torch.ones(3)}, tmp_path / "moved" / "step-11", keep=2)
    assert sorted(os.listdir(tmp_path / "moved")) == ["step-10", "step-11"]


def test_a_clock_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, clock in ((1, 2000), (2, 1000), (3, 1500)):
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: clock * 10**9)
        save({"step": step}, tmp_path / f"step-{step}")
        assert latest(tmp_path) == str(tmp_path / f"step-{step}")


def test_a_clock_that_is_behind_at_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"memory://{secrets.token_hex(4)}"
    for step, clock in ((1, 2000), (2, 1000), (3, 1500)):
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: clock * 10**9)
        save({"step": step}, f"{place}/step-{step}", keep=2)
        assert latest(place) == f"{place}/step-{step}"


def test_a_time_that_no_clock_has(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.json").write_text("{}")
    os.utime(tmp_path / "site" / "index.json", (4.7e9, 4.7e9))
    save({"step": 1}, tmp_path / "step-1")
    assert latest(tmp_path) == str(tmp_path / "step-1")


@pytest.mark.parametrize("version", [1, 2])
def test_formats_without_the_time_of_the_save(version: int, tmp_path: Path) -> None:
    for step in (2, 1):
        save({"w": torch.full((3,), step), "step": step}, tmp_path / f"step-{step}")
        index = tmp_path / f"step-{step}" / "index.json"
        content = json.loads(index.read_bytes())["index"]
        del content["saved"]
        content["version"] = version
        for known in content["files"].values():
            known |= {"host": "a"} if version == 2 else {}
        body = json.dumps(content).encode()
        index.write_bytes(b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", "index": ' + body + b"}\n")
        os.utime(index, (10 - step, 10 - step))
        assert torch.equal(read(tmp_path / f"step-{step}")["w"], torch.full((3,), step))
    assert latest(tmp_path) == str(tmp_path / "step-1")
    save({"step": 3}, tmp_path / "step-3")
    assert latest(tmp_path) == str(tmp_path / "step-3")


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in range(5):
        save({"w": torch.ones(3), "step": step}, tmp_path / f"step-{step}")
    for damaged in (2, 4):
        os.truncate(tmp_path / f"step-{damaged}" / "blocks-00000.safetensors", 10)
    save({"w": torch.ones(3)}, tmp_path / "step-5", keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3", "step-4", "step-5"]
    save({"w": torch.ones(3)}, tmp_path / "step-6", keep=1)
    assert os.listdir(tmp_path) == ["step-6"]


# ---------------------------------------------------------------- files of an earlier checkpoint


def inodes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.glob("*.safetensors")}


def trained(value: float, frozen: float = 0.0) -> dict[str, Any]:
    mesh = mesh_of((2, 2))
    big = sw.distribute_tensor(torch.arange(8192.0).reshape(64, 128) + frozen, mesh, [sw.Shard(0), sw.Shard(1)])
    small = sw.full((6, 5), value, device_mesh=mesh, placements=[sw.Shard(0), sw.Replicate()])
    return {"frozen": {"big": big, "ids": torch.arange(300), "none": torch.ones(0)}, "small": small, "step": int(value)}


@pytest.mark.parametrize("background", [False, True])
def test_unchanged_files_are_linked(background: bool, tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    save(trained(1), one)
    for place, base, value in ((two, one, 2), (three, two, 3)):
        if background:
            async_save(trained(value), place, base=base).wait()
        else:
            save(trained(value), place, base=base)
        assert verify(place) == []
        found, wanted = read(place), trained(value)
        assert torch.equal(found["frozen"]["big"], wanted["frozen"]["big"].full_tensor())
        assert torch.equal(found["small"], torch.full((6, 5), float(value)))
    linked = set(inodes(one).values()) & set(inodes(two).values()) & set(inodes(three).values())
    assert len(linked) == 4
    assert sum(inspect(three).files.values()) - sum(inspect(one).files.values()) < 4 * 4096 + 200
    assert {name for name, _ in diff(one, three)} == {"small", "step"}
    shutil.rmtree(one)
    shutil.rmtree(two)
    assert verify(three) == []
    target = trained(0, 9)
    load(target, three)
    assert target["step"] == 3
    assert torch.equal(target["frozen"]["big"].full_tensor(), torch.arange(8192.0).reshape(64, 128))
    reshard(three, tmp_path / "four", mesh_of((3,)))
    assert diff(three, tmp_path / "four") == []


def test_what_changed_is_written_again(tmp_path: Path) -> None:
    save(trained(1), tmp_path / "one")
    save(trained(1, frozen=1), tmp_path / "two", base=tmp_path / "one")
    assert not set(inodes(tmp_path / "one").values()) & set(inodes(tmp_path / "two").values())
    assert torch.equal(read(tmp_path / "two")["frozen"]["big"], torch.arange(8192.0).reshape(64, 128) + 1)
    state = trained(1) | {"frozen": {"big": torch.arange(8192.0).reshape(64, 128).double(), "new": torch.ones(3)}}
    save(state, tmp_path / "three", base=tmp_path / "one")
    assert read(tmp_path / "three")["frozen"]["big"].dtype is torch.float64


def test_retention_keeps_files_that_others_use(tmp_path: Path) -> None:
    for step in range(6):
        before = latest(tmp_path)
        save(trained(step), tmp_path / f"step-{step}", keep=2, base=before)
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-5"]
    assert verify(tmp_path / "step-4") == verify(tmp_path / "step-5") == []


def test_a_block_with_equal_checksum_and_other_bytes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.checkpoint.operations.unchanged_blocks.checksum", lambda data, at: 0)
    monkeypatch.setattr("shardwise.checkpoint.io.block_writer.checksum", lambda data, at: 0)
    save({"x": torch.zeros(2000)}, tmp_path / "one")
    save({"x": torch.ones(2000)}, tmp_path / "two", base=tmp_path / "one")
    monkeypatch.undo()
    assert not set(inodes(tmp_path / "one").values()) & set(inodes(tmp_path / "two").values())


@pytest.mark.parametrize("kind", ["missing", "damaged", "other", "url"])
def test_a_base_that_cannot_be_used(kind: str, tmp_path: Path) -> None:
    save(trained(1), tmp_path / "one")
    base: Any = tmp_path / "one"
    match kind:
        case "missing":
            base = tmp_path / "none"
        case "damaged":
            (base / "index.json").write_bytes(b"x")
        case "other":
            os.truncate(base / "blocks-00001.safetensors", 5000)
        case _:
            base = f"memory://{secrets.token_hex(4)}"
    with pytest.raises(sw.CheckpointError):
        save(trained(2), tmp_path / "two", base=base)
    assert os.listdir(tmp_path) == ["one"]


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(trained(1), tmp_path / "one")

    def refused(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "link", refused)
    save(trained(2), tmp_path / "two", base=tmp_path / "one")
    assert not set(inodes(tmp_path / "one").values()) & set(inodes(tmp_path / "two").values())
    assert verify(tmp_path / "two") == []
    assert "blocks-00001-1.safetensors" in inspect(tmp_path / "two").files
