"""Checkpoints on disks that hosts do not share; started by torchrun with the names of programs, as host_programs.

`LOCAL` is one path with another directory on each host. The first rank of a host makes its faults.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.io.block_writer import FileWriter
from shardwise.checkpoint.operations import local_disks
from tests.hosts.host_programs import LOCAL, hosts_by_ranks

HERE = int(os.environ.get("GROUP_RANK", "0"))  # the number of this host
LEADS = os.environ.get("LOCAL_RANK", "0") == "0"

VALUES = {
    "float": torch.arange(96.0).reshape(12, 8),
    "half": torch.arange(96).reshape(12, 8).bfloat16(),
    "bytes": torch.arange(96).reshape(12, 8).to(torch.int8),
    "complex": torch.complex(torch.arange(96.0), -torch.arange(96.0)).reshape(12, 8),
    "empty": torch.empty(0, 8),
    "scalar": torch.tensor(7.0),
    "wide": torch.arange(3 * 40000.0).reshape(12, 10000),
}


def layouts(kind: str) -> dict[str, list[Any]]:
    """Layouts of all values on hosts x ranks; a scalar is replicated."""
    by = {
        "rows": [sw.Shard(0), sw.Shard(0)],
        "columns": [sw.Shard(1), sw.Shard(1)],
        "crossed": [sw.Shard(1), sw.Shard(0)],
        "strided": [sw.Replicate(), sw.StridedShard(0, 2)],
        "zigzag": [sw.Zigzag(0), sw.Shard(1)],
        "ragged": [sw.Ragged(0, (9, 3)), sw.Shard(1)],
        "replicated": [sw.Replicate(), sw.Replicate()],
    }[kind]
    odd = kind in ("zigzag", "ragged", "strided")
    return {
        name: [sw.Replicate()] * 2 if not value.ndim or (odd and not value.numel()) else by
        for name, value in VALUES.items()
    }


def state_of(kind: str, *, filled: bool = True) -> dict[str, Any]:
    mesh = hosts_by_ranks("dp", "tp")
    return {
        name: sw.distribute_tensor(VALUES[name] if filled else torch.zeros_like(VALUES[name]), mesh, placements)
        for name, placements in layouts(kind).items()
    }


def check(state: dict[str, Any]) -> None:
    for name, value in VALUES.items():
        assert torch.equal(state[name].full_tensor(), value), name


def unchanged(state: dict[str, Any]) -> None:
    assert not any(value.full_tensor().count_nonzero() for value in state.values())


def refused(action: Callable[[], object], *words: str) -> None:
    """Every rank gets one error with these words."""
    text = ""
    try:
        action()
    except sw.CheckpointError as error:
        text = str(error)
    missing = [word for word in words if word not in text]
    assert text, "no error"
    assert not missing, (missing, text)


def here(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} if path.exists() else set()


def fresh(name: str) -> Path:
    """A new folder on each host's disk."""
    folder = LOCAL / name
    dist.barrier()
    return folder


def on_host(number: int, action: Callable[[], object]) -> None:
    """One rank of a host acts; then all go on."""
    dist.barrier()
    if number == HERE and LEADS:
        action()
    dist.barrier()


def loads() -> None:
    """Each host has the files of its ranks and the index; the same layout needs nothing of others, any layout loads."""
    folder = fresh("loads")
    ranks = dist.get_world_size() // 2
    for kind in ("rows", "crossed", "zigzag", "ragged", "strided", "replicated"):
        path = folder / kind
        checkpoint.save(state_of(kind) | {"step": 3}, path)
        files = {f"blocks-{rank:05d}.safetensors" for rank in range(HERE * ranks, (HERE + 1) * ranks)}
        index = {"index.json"}
        assert here(path) - index <= files, here(path)
        assert index <= here(path), here(path)
        assert here(folder) == {*here(folder) & {"rows", "crossed", "zigzag", "ragged", "strided", "replicated"}}
        for other in ("rows", "columns", "zigzag", "ragged", "strided", "replicated", kind):
            for staged in (True, False):
                target = state_of(other, filled=False)
                moved = []
                original = local_disks._missing
                local_disks._missing = lambda *given, o=original, m=moved: (m.extend(o(*given)), m)[1]
                try:
                    loaded = checkpoint.load(target | {"step": 0}, path, staged=staged)
                finally:
                    local_disks._missing = original
                check(target)
                assert loaded.state["step"] == 3
                if other == kind and kind not in ("replicated", "strided"):
                    assert not [part for part in moved if part.tensor != "scalar"], moved


def tools() -> None:
    """latest, keep, async_save and inspect work; base, overwrite, read and verify are refused by name."""
    folder = fresh("tools")
    assert checkpoint.latest(folder) is None
    for step in (1, 2, 3):
        checkpoint.save(state_of("rows"), folder / f"step-{step}", keep=2)
    assert here(folder) == {"step-2", "step-3"}
    saving = checkpoint.async_save(state_of("crossed"), folder / "step-4", keep=2)
    saving.wait()
    assert here(folder) == {"step-3", "step-4"}
    assert checkpoint.latest(folder) == str(folder / "step-4")
    refused(lambda: checkpoint.save(state_of("rows"), folder / "step-4"), "exists already", "step-4")
    refused(lambda: checkpoint.save(state_of("rows"), folder / "step-4", overwrite=True), "do not share", "atomically")
    refused(
        lambda: checkpoint.save(state_of("rows"), folder / "step-5", base=folder / "step-4"), "base=", "do not share"
    )
    dist.barrier()  # until the first rank of each disk has removed what is left
    assert here(folder) == {"step-3", "step-4"}
    assert "is on the disk of host" in " ".join(checkpoint.verify(folder / "step-4"))
    refused(lambda: checkpoint.read(folder / "step-4"), "is on the disk of host")
    assert {known.name for known in checkpoint.inspect(folder / "step-4").tensors} == set(VALUES)
    on_host(1, lambda: (folder / "step-4" / "blocks-00002.safetensors").unlink())
    assert checkpoint.latest(folder) == str(folder / "step-3")
    on_host(0, lambda: shutil.rmtree(folder / "step-3"))
    assert checkpoint.latest(folder) is None
    checkpoint.save(state_of("rows"), folder / "step-6", keep=1)
    assert here(folder) == {"step-6"}


def lost_files() -> None:
    """A lost or damaged file is one error on all ranks, that names host, file and tensor; nothing changes."""
    folder = fresh("lost")
    path = folder / "step-1"
    checkpoint.save(state_of("rows"), path)
    file = path / "blocks-00003.safetensors"
    on_host(1, lambda: _flip(file, -1))
    for kind in ("rows", "columns"):
        target = state_of(kind, filled=False)
        refused(lambda target=target: checkpoint.load(target, path), "does not match its checksum", file.name)
        unchanged(target)
    on_host(1, lambda: os.truncate(file, 5000))
    target = state_of("columns", filled=False)
    refused(lambda: checkpoint.load(target, path), f"{file.name} has 5,000 bytes")
    unchanged(target)
    on_host(1, file.unlink)
    for kind in ("rows", "columns"):
        target = state_of(kind, filled=False)
        refused(lambda target=target: checkpoint.load(target, path), "tensor ", file.name, "the disk of host1")
        unchanged(target)


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def lost_directory() -> None:
    """A host without the directory gets index and parts from the others, if they have all files."""
    folder = fresh("gone")
    path = folder / "step-1"
    checkpoint.save(state_of("rows"), path)
    on_host(1, lambda: os.rename(path, folder / "moved"))
    target = state_of("rows", filled=False)
    refused(lambda: checkpoint.load(target, path), "the disk of host1")
    unchanged(target)
    assert checkpoint.latest(folder) != str(path)
    dist.barrier()
    everything: list[Any] = [None] * dist.get_world_size()
    files = {file.name: file.read_bytes() for file in (folder / "moved").iterdir()} if HERE == 1 and LEADS else {}
    dist.all_gather_object(everything, files)
    on_host(0, lambda: [(path / name).write_bytes(data) for one in everything for name, data in one.items()])
    for kind in ("rows", "columns", "replicated"):
        target = state_of(kind, filled=False)
        checkpoint.load(target, path)
        check(target)
    assert checkpoint.latest(folder) == str(path)
    on_host(0, lambda: shutil.rmtree(path))
    refused(lambda: checkpoint.load(state_of("rows"), path), "there is no checkpoint")


def strangers() -> None:
    """Files of the same names with other contents: never mixed, an error on all ranks, and nothing changes."""
    folder = fresh("strangers")
    other = {name: value + 1 if value.numel() else value for name, value in VALUES.items()}
    mesh = hosts_by_ranks("dp", "tp")
    checkpoint.save(state_of("rows"), folder / "step-1")
    checkpoint.save(
        {name: sw.distribute_tensor(other[name], mesh, by) for name, by in layouts("rows").items()}, folder / "step-2"
    )
    # host 1 has a whole checkpoint of another run under this name
    on_host(
        1, lambda: (os.rename(folder / "step-1", folder / "own"), shutil.copytree(folder / "step-2", folder / "step-1"))
    )
    for kind in ("rows", "columns"):
        target = state_of(kind, filled=False)
        refused(lambda target=target: checkpoint.load(target, folder / "step-1"), "different checkpoints")
        unchanged(target)
    assert checkpoint.latest(folder) == str(folder / "step-2")
    # it has its own index, but the files of the other run
    on_host(1, lambda: shutil.copy(folder / "own" / "index.json", folder / "step-1" / "index.json"))
    for kind in ("rows", "columns", "replicated"):
        target = state_of(kind, filled=False)
        refused(lambda target=target: checkpoint.load(target, folder / "step-1"), "does not match its checksum")
        unchanged(target)
    # a second copy of a file, of the other run, on a host that does not need it: whoever gets parts of it notices
    on_host(1, lambda: (shutil.rmtree(folder / "step-1"), os.rename(folder / "own", folder / "step-1")))
    mine = [None] * dist.get_world_size()
    name = "blocks-00000.safetensors"
    dist.all_gather_object(mine, (folder / "step-2" / name).read_bytes() if HERE == 0 else None)
    on_host(1, lambda: (folder / "step-1" / name).write_bytes(next(data for data in mine if data)))
    target = state_of("columns", filled=False)
    refused(lambda: checkpoint.load(target, folder / "step-1"), "does not match its checksum", name)
    unchanged(target)
    target = state_of("rows", filled=False)
    checkpoint.load({"float": target["float"]}, folder / "step-1", strict=False)  # needs no part of the copy
    assert torch.equal(target["float"].full_tensor(), VALUES["float"])


def late_files() -> None:
    """A file that a disk shows late: the rank that missed it reads it itself."""
    folder = fresh("late")
    checkpoint.save(state_of("rows"), folder / "step-1")
    original = local_disks._missing

    def blind(source: Any, wanted: Any) -> Any:
        hidden = type("Hidden", (), {"contains": lambda self, name: False})()
        return original(hidden if HERE == 1 else source, wanted)

    local_disks._missing = blind
    try:
        target = state_of("rows", filled=False)
        checkpoint.load(target, folder / "step-1")
    finally:
        local_disks._missing = original
    check(target)


def interrupted() -> None:
    """An interrupt on a rank that sends parts is an error on all ranks; nothing changes, and the next load works."""
    folder = fresh("interrupted")
    checkpoint.save(state_of("rows"), folder / "step-1")
    original = local_disks._read

    def interrupt(*given: Any) -> None:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt
        original(*given)

    target = state_of("columns", filled=False)
    kind: type[BaseException] | None = None
    local_disks._read = interrupt
    try:
        checkpoint.load(target, folder / "step-1")
    except (sw.CheckpointError, KeyboardInterrupt) as error:
        kind = type(error)
    finally:
        local_disks._read = original
    assert kind is (KeyboardInterrupt if dist.get_rank() == 0 else sw.CheckpointError), kind
    unchanged(target)
    checkpoint.load(target, folder / "step-1")
    check(target)


def saved_by_many() -> None:
    """Saves for `loaded_by_fewer`."""
    checkpoint.save(state_of("crossed") | {"step": 5}, fresh("fewer") / "step-1")


def loaded_by_fewer() -> None:
    """Fewer ranks on each host load what many saved; one host alone gets an error that names the other."""
    path = fresh("fewer") / "step-1"
    assert checkpoint.latest(path.parent) == str(path)
    for kind in ("rows", "columns", "replicated"):
        target = state_of(kind, filled=False)
        assert checkpoint.load(target | {"step": 0}, path).state["step"] == 5
        check(target)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    refused(
        lambda: checkpoint.load(plain, path, strict=False, process_group=alone),
        f"the disk of host{1 - HERE}",
        "tensor ",
    )
    assert not any(value.count_nonzero() for value in plain.values())


def full_disk() -> None:
    """A full disk on one host is an error on all; nothing is left on any, and the next save works."""
    folder = fresh("full")
    checkpoint.save(state_of("rows"), folder / "step-1")
    small = folder / "small"
    on_host(0, lambda: small.mkdir())
    on_host(1, lambda: _mount(small))
    refused(lambda: checkpoint.save(state_of("rows"), small / "step-2"), "No space left", "small")
    dist.barrier()
    assert not here(small), here(small)
    checkpoint.save({"x": state_of("rows")["float"]}, small / "step-2")
    assert checkpoint.latest(small) == str(small / "step-2")
    assert checkpoint.latest(folder) == str(folder / "step-1")
    on_host(1, lambda: subprocess.run(("umount", "-l", small), check=True))


def _mount(small: Path) -> None:
    small.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=128k", "none", small), check=True)


def directory_disappears() -> None:
    """The staging directory of a host goes away in mid-save: an error on all, nothing is published, the next works."""
    folder = fresh("disappears")
    for host in (0, 1):
        original = FileWriter.__init__

        def gone(self: FileWriter, path: Path, host: int = host, original: Any = original) -> None:
            if host == HERE and LEADS:
                shutil.rmtree(path.parent, ignore_errors=True)
            original(self, path)

        FileWriter.__init__ = gone
        try:
            refused(lambda host=host: checkpoint.save(state_of("rows"), folder / f"step-{host}"), "cannot be written")
        finally:
            FileWriter.__init__ = original
        dist.barrier()
        assert not here(folder), here(folder)
    checkpoint.save(state_of("rows"), folder / "step-1")
    target = state_of("crossed", filled=False)
    checkpoint.load(target, folder / "step-1")
    check(target)


def killed() -> None:
    """A rank is killed while it publishes: a checkpoint that not all disks have does not count."""
    folder = fresh("killed")
    checkpoint.save(state_of("rows"), folder / "step-1")
    from shardwise.checkpoint.io import atomic_directory as atomic

    original = atomic.publish

    def publish(staging: Any) -> None:
        if HERE == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(staging)

    atomic.publish = publish
    try:
        checkpoint.save(state_of("rows"), folder / "step-2")
    except (sw.ShardwiseError, RuntimeError) as error:
        print("refused on rank", dist.get_rank(), str(error).splitlines()[0], flush=True)
    print("left", sorted(here(folder)), flush=True)


def resumed() -> None:
    """After `killed`: the earlier one is the latest, loads, and the next save works."""
    folder = fresh("killed")
    assert checkpoint.latest(folder) == str(folder / "step-1"), (checkpoint.latest(folder), here(folder))
    target = state_of("columns", filled=False)
    checkpoint.load(target, folder / "step-1")
    check(target)
    checkpoint.save(state_of("rows"), folder / "step-3", keep=2)
    assert checkpoint.latest(folder) == str(folder / "step-3")


PROGRAMS = {
    function.__name__: function
    for function in (
        loads, tools, lost_files, lost_directory, strangers, late_files, interrupted, saved_by_many, loaded_by_fewer,
        full_disk, directory_disappears, killed, resumed,
    )
}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        PROGRAMS[name]()
        print(f"{name} done on rank {dist.get_rank()}", flush=True)
    dist.destroy_process_group()
