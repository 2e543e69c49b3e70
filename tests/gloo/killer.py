"""SIGKILL at random moments of a save, on real processes: after each, every checkpoint that has its name is whole.

`python -m tests.gloo.killer COUNT [SEED]`. This process imports torch once and forks two ranks for each trial; they
save one checkpoint after another, in turns plainly, behind their back, and over an existing one, until they are killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint import async_save, latest, load, read, save, verify

RANKS = 2


def save_for_ever(rank: int, folder: Path, store: Path, ready: int, first: int) -> None:
    """One rank: checkpoint after checkpoint, each full of its own number. A line in `done` for each that is there."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    mesh = sw.init_device_mesh("cpu", (RANKS,))
    log = os.open(folder / "done", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = first
    while True:
        state = state_of(number, mesh)
        path = folder / ("last" if number % 3 == 2 else f"step-{number}")
        if number % 3 == 1:
            async_save(state, path, keep=2, base=latest(folder)).wait()
        else:
            save(state, path, keep=None if path.name == "last" else 2, overwrite=path.name == "last")
        save(state, f"file://{folder}/remote/step-{number}", keep=2)
        if rank == 0:
            os.write(log, f"{number}\n".encode())
        if number == first:
            os.write(ready, b".")
        number += 1


def state_of(number: int, mesh: sw.DeviceMesh) -> dict[str, object]:
    rows = sw.full((512, 1024), float(number), device_mesh=mesh, placements=[sw.Shard(0)])
    frozen = sw.ones(512, 1024, device_mesh=mesh, placements=[sw.Shard(0)])
    return {"rows": rows, "frozen": frozen, "plain": torch.full((1000,), number), "number": number}


def fork_rank(rank: int, folder: Path, store: Path, ready: int, first: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        save_for_ever(rank, folder, store, ready, first)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def trial(folder: Path, rng: random.Random, first: int) -> bool:
    """Start, kill, look. Whether the kill met a save that was under way."""
    receive, ready = os.pipe()
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [fork_rank(rank, folder, Path(meeting) / "store", ready, first) for rank in range(RANKS)]
        os.close(ready)
        try:
            for _ in ranks:
                assert os.read(receive, 1) == b".", "a rank ended before its first checkpoint"
            time.sleep(rng.uniform(0, 0.4))
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            for pid in ranks:
                os.waitpid(pid, 0)
            os.close(receive)
    return look(folder)


def look(folder: Path) -> bool:
    """Every checkpoint that has a name is whole, none that was reported is lost, and the last one loads."""
    reported = [int(line) for line in (folder / "done").read_text().split()]
    found: dict[str, int] = {}
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in ("done", "remote"):
            continue
        assert verify(path) == [], path.name
        state = read(path)
        number = state["number"]
        assert path.name in (f"step-{number}", "last")
        assert torch.equal(state["rows"], torch.full((512, 1024), float(number)))
        assert torch.equal(state["plain"], torch.full((1000,), number))
        found[path.name] = number
    newest = max(number for number in reported if number % 3 != 2)
    assert max(number for name, number in found.items() if name != "last") >= newest
    over = [number for number in reported if number % 3 == 2]
    assert not over or found["last"] >= max(over)
    with sw.virtual():
        target = state_of(-1, sw.init_device_mesh("cpu", (3,)))
        newest_name = max(found, key=lambda name: found[name])
        assert latest(folder) == str(folder / newest_name)
        assert load(target, folder / newest_name).state["number"] == found[newest_name]
        remote = latest(f"file://{folder}/remote")
        assert remote is not None
        assert verify(remote) == []
        assert load(target, remote).state["number"] >= max(reported)
    return any(".saving-" in path.name for path in folder.iterdir())


def run(count: int, seed: int = 0) -> int:
    """How many of `count` kills met a save that was under way."""
    rng = random.Random(seed)
    met = 0
    with tempfile.TemporaryDirectory(dir=".", prefix=".killer-") as place:
        folder = Path(place).absolute()
        first = 0
        for number in range(count):
            met += trial(folder, rng, first)
            first = max(map(int, (folder / "done").read_text().split())) + 2
            print(f"kill {number + 1}: all whole", flush=True)
    return met


if __name__ == "__main__":
    torch.set_num_threads(1)
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    during = run(kills, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{kills} kills, {during} of them during a save; every checkpoint with a name was whole")
