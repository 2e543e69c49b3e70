"""Saving and loading 1 GiB on 4 gloo processes beside torch.distributed.checkpoint: times as ratios, bytes read.

Both write to the same disk and flush it. Rounds alternate who goes first; the time is that of the slowest rank. Loads
are timed twice: from disk (the pages of the files are dropped from the cache before) and from the page cache. Bytes
read are what the kernel counts for each process during a load onto another layout, over the bytes of its shards.
Our loads are staged (nothing changes before all is verified) unless it says otherwise; torch's never are.
"""

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as their_mesh

import shardwise as ours
from bench.figures import figure

RANKS = 4
ROUNDS = 3
ROWS, COLUMNS, TENSORS = 2048, 2048, 64  # of float32: 1 GiB
SIDES = ("shardwise", "torch")


class Side:
    """One library: its states, how it saves and how it loads."""

    def __init__(self, name: str) -> None:
        self.name = name
        library: Any = ours if name == "shardwise" else theirs
        init: Any = ours.init_device_mesh if name == "shardwise" else their_mesh
        self.library = library
        self.square, self.line = init("cpu", (2, 2)), init("cpu", (RANKS,))

    def state(self, *, resharded: bool) -> dict[str, Any]:
        """Weights as tensor and data parallelism split them; resharded, the other dim over all ranks."""
        shard = self.library.Shard
        made = {}
        for i in range(TENSORS):
            layout = [shard(i % 2), shard(1 - i % 2)]
            mesh, placements = (self.line, [shard(1)]) if resharded else (self.square, layout)
            size = (ROWS, COLUMNS // RANKS) if resharded else (ROWS // 2, COLUMNS // 2)
            made[f"layer{i}.weight"] = self.library.DTensor.from_local(torch.rand(size), mesh, placements)
        return made

    def save(self, state: dict[str, Any], path: Path) -> None:
        if self.name == "shardwise":
            ours.checkpoint.save(state, path)
        else:
            dcp.save(state, checkpoint_id=path)

    def load(self, state: dict[str, Any], path: Path, *, staged: bool) -> None:
        if self.name == "shardwise":
            ours.checkpoint.load(state, path, staged=staged)
        else:
            dcp.load(state, checkpoint_id=path)


def timed(action: Callable[[], None]) -> float:
    """Seconds until the last rank is done."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def bytes_read() -> int:
    """What this process has read so far, as the kernel counts it."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def forget(path: Path) -> None:
    """Drop the files' pages from the cache, so that the next load reads from the disk."""
    if dist.get_rank() == 0:
        for file in path.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    dist.barrier()


def one_round(side: Side, path: Path, states: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, float]:
    """The times of one side, and its bytes read over bytes needed."""
    state, other = states
    found = {"save": timed(lambda: side.save(state, path))}
    for name, target in (("load", state), ("load on another layout", other)):
        forget(path)
        before = bytes_read()
        found[f"{name}, from disk"] = timed(lambda target=target: side.load(target, path, staged=True))
        found["bytes read / needed"] = (bytes_read() - before) / sum(t.to_local().nbytes for t in target.values())
        found[f"{name}, cached"] = timed(lambda target=target: side.load(target, path, staged=True))
        forget(path)
        found[f"{name}, from disk, not staged"] = timed(lambda target=target: side.load(target, path, staged=False))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return found


def worker(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sides = [Side(name) for name in SIDES]
    states = {s.name: (s.state(resharded=False), s.state(resharded=True)) for s in sides}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for i in range(ROUNDS):
        for side in sides if i % 2 else sides[::-1]:
            rounds[side.name].append(one_round(side, Path(folder) / f"{side.name}{i}", states[side.name]))
    worst: list[Any] = [None] * RANKS
    dist.all_gather_object(worst, {name: max(r["bytes read / needed"] for r in rounds[name]) for name in SIDES})
    if rank == 0:
        found = rounds, {name: max(ratios[name] for ratios in worst) for name in SIDES}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def report(rounds: dict[str, list[dict[str, float]]], worst: dict[str, float]) -> None:
    print(f"median of {ROUNDS} rounds in seconds, and the ratio of the medians")
    for name in rounds["shardwise"][0]:
        if name == "bytes read / needed":
            continue
        mine, peer = (statistics.median(found[name] for found in rounds[side]) for side in SIDES)
        verdict = figure(f"checkpoint, {name}, to torch", mine / peer, 0.8)
        print(f"  {name:44} shardwise {mine:6.2f}  torch {peer:6.2f}  {verdict}")
    name = "bytes read / needed, another layout"
    verdict = figure(f"checkpoint, {name}", worst["shardwise"], 1.02)
    print(f"  {name:44} shardwise {worst['shardwise']:.4f}  torch {worst['torch']:.4f}  {verdict}")


def main() -> None:
    """Run the measurement in a folder of the current directory: /tmp may be memory."""
    size = ROWS * COLUMNS * 4 * TENSORS
    print(f"{TENSORS} tensors of {ROWS} x {COLUMNS} float32, {size / 2**30:.2f} GiB in all, {RANKS} gloo processes")
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-checkpoint-") as folder:
        mp.spawn(worker, args=(str(Path(folder).absolute()),), nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]
        report(*json.loads((Path(folder) / "found.json").read_text()))


if __name__ == "__main__":
    main()
