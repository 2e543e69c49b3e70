"""Saving and loading 1 GiB on 4 gloo processes beside torch.distributed.checkpoint: times as ratios, bytes read.

Both write to the same disk and flush it. Rounds alternate who goes first; the time is that of the slowest rank. Loads
are timed twice: from disk (the pages of the files are dropped from the cache before) and from the page cache, after a
load that is not timed. On a machine that others use as well, seconds of the CPU are the steadier figure: they are those
of all ranks together. Bytes from disk are what the kernel counts for all processes during a load onto another layout,
over the bytes of their shards. Our loads are staged (nothing changes before all is verified) unless it says otherwise;
torch's never are.

Beside both stands the floor: the same bytes as one file of each rank, read into a buffer of 1 MiB that is reused, or
written from one and flushed, by nothing but system calls. A load that verifies first reads everything twice.
"""

import gc
import json
import mmap
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


def timed(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds until the last rank is done, and seconds of the CPU on all ranks."""
    gc.collect()
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    action()
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - start, summed(busy)


def summed(value: float) -> float:
    """The sum over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def bytes_from_disk() -> int:
    """What this process has read from disks so far, as the kernel counts it."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])


def forget(path: Path) -> None:
    """Drop the files' pages from the cache, so that the next load reads from the disk."""
    if dist.get_rank() == 0:
        for file in path.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    dist.barrier()


def raw_read(path: Path) -> None:
    """Read the file of this rank, and nothing else."""
    buffer, at = memoryview(mmap.mmap(-1, 1 << 20)), 0
    fd = os.open(sorted(path.glob("*.safetensors"))[dist.get_rank()], os.O_RDONLY)
    while got := os.preadv(fd, (buffer,), at):
        at += got
    os.close(fd)


def raw_write(path: Path, size: int) -> None:
    """Write and flush a file of this size, and nothing else."""
    buffer = memoryview(mmap.mmap(-1, 1 << 20))
    buffer[:] = bytes([7]) * len(buffer)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:  # not offered by the file system
        fd = os.open(path, flags)
    for _ in range(size // len(buffer)):
        os.write(fd, buffer)
    os.fsync(fd)
    os.close(fd)


def floors(path: Path, state: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The times of reading and writing the bytes of a checkpoint."""
    size = sum(tensor.to_local().nbytes for tensor in state.values())
    written = path.with_name(f"raw{dist.get_rank()}")
    found = {"save": timed(lambda: raw_write(written, size))}
    written.unlink()
    forget(path)
    found["from disk"] = timed(lambda: raw_read(path))
    found["cached"] = timed(lambda: raw_read(path))
    return {f"floor, {name}": times for name, times in found.items()}


def one_round(
    side: Side, path: Path, states: tuple[dict[str, Any], dict[str, Any]]
) -> tuple[dict[str, tuple[float, float]], float]:
    """The times of one side, and its bytes from disk over bytes needed."""
    state, other = states
    ratio = 0.0
    found = {"save": timed(lambda: side.save(state, path))}
    side.load(state, path, staged=True)
    for name, target in (("load", state), ("load on another layout", other)):
        forget(path)
        before = bytes_from_disk()
        found[f"{name}, from disk"] = timed(lambda target=target: side.load(target, path, staged=True))
        ratio = summed(bytes_from_disk() - before) / summed(sum(t.to_local().nbytes for t in target.values()))
        found[f"{name}, cached"] = timed(lambda target=target: side.load(target, path, staged=True))
        forget(path)
        found[f"{name}, from disk, not staged"] = timed(lambda target=target: side.load(target, path, staged=False))
    if side.name == "shardwise":
        found |= floors(path, state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return found, ratio


def worker(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sides = [Side(name) for name in SIDES]
    states = {s.name: (s.state(resharded=False), s.state(resharded=True)) for s in sides}
    rounds: dict[str, list[Any]] = {name: [] for name in SIDES}
    for i in range(ROUNDS):
        for side in sides if i % 2 else sides[::-1]:
            rounds[side.name].append(one_round(side, Path(folder) / f"{side.name}{i}", states[side.name]))
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def report(rounds: dict[str, list[tuple[dict[str, tuple[float, float]], float]]]) -> None:
    print(f"median of {ROUNDS} rounds in seconds, and the ratio of the medians; load of the machine {os.getloadavg()}")
    for name in rounds["torch"][0][0]:
        for number, kind in enumerate(("", ", seconds of the CPU")):
            bound = next(kind for kind in ("save", "cached", "from disk") if kind in name)
            floor = statistics.median(found[f"floor, {bound}"][number] for found, _ in rounds["shardwise"])
            mine, peer = (statistics.median(found[name][number] for found, _ in rounds[side]) for side in SIDES)
            asked = 0.5 if name == "save" else 0.8
            verdict = figure(f"checkpoint, {name}{kind}, to torch", mine / peer, asked)
            print(f"  {name + kind:64} shardwise {mine:6.2f}  torch {peer:6.2f}  floor {floor:5.2f}  {verdict}")
    name = "bytes from disk / needed, another layout"
    mine, peer = (max(ratio for _, ratio in rounds[side]) for side in SIDES)
    print(f"  {name:64} shardwise {mine:.4f}  torch {peer:.4f}  {figure(f'checkpoint, {name}', mine, 1.02)}")


def main() -> None:
    """Run the measurement in a folder of the current directory: /tmp may be memory."""
    size = ROWS * COLUMNS * 4 * TENSORS
    print(f"{TENSORS} tensors of {ROWS} x {COLUMNS} float32, {size / 2**30:.2f} GiB in all, {RANKS} gloo processes")
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-checkpoint-") as folder:
        mp.spawn(worker, args=(str(Path(folder).absolute()),), nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]
        report(json.loads((Path(folder) / "found.json").read_text()))


if __name__ == "__main__":
    main()
