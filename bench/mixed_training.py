"""Mixed training for a given time: shapes, layouts and meshes change, memory, caches and the time of a round must not.

A round has one step of each kind: a plan with `fully_shard`, attention over a sharded sequence of a new length, experts
whose sizes change, a captured step with a new learning rate, random changes of layout, a mesh of other axes, and every
tenth round a checkpoint that is saved and loaded. On virtual ranks, or on processes.

    python -m bench.mixed_training --minutes 60
    python -m bench.mixed_training --minutes 60 --processes 4
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, EXPERTS = 16, 6
PLACEMENTS = (sw.Shard(0), sw.Shard(1), sw.Replicate())


class Sample(NamedTuple):
    """State of the process after some rounds; flat means that it does not grow."""

    rounds: int
    seconds: float  # of this process, for each round since the last sample
    resident: float  # MiB
    allocated: float  # MiB that malloc has given out; without what it keeps for later
    blocks: int  # of Python's own allocator
    entries: int
    routes: int
    threads: int
    files: int


class Job:
    """Models and optimizers on four ranks, and one round of training of all of them."""

    def __init__(self, folder: str) -> None:
        self.random = random.Random(0)
        self.folder = folder
        torch.manual_seed(0)
        self.world = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.line = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        self.model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
        parallelize_module(self.model, self.world["tp"], {"0": columns, "3": rows})
        sw.fully_shard(self.model, self.world["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.q, self.k, self.v = (
            sw.randn(WIDTH, WIDTH, device_mesh=self.line, placements=[sw.Replicate()], requires_grad=True)
            for _ in "qkv"
        )
        self.up, self.down = (
            sw.randn(EXPERTS, WIDTH, WIDTH, device_mesh=self.line, placements=[sw.Shard(0)], requires_grad=True)
            for _ in range(2)
        )
        self.others = torch.optim.SGD([self.q, self.k, self.v, self.up, self.down], lr=1e-3, momentum=0.9)
        self.weight = sw.randn(WIDTH, WIDTH, device_mesh=self.line, placements=[sw.Shard(1)], requires_grad=True)
        self.small = torch.optim.SGD([self.weight], lr=0.1)
        self.step = sw.captured(self.captured_part)

    def round(self, number: int) -> None:
        """One step of each kind."""
        self.planned(self.random.choice((2, 3, 4, 5, 8)))
        self.sequence(self.random.randrange(8, 40), zigzag=number % 2 == 0)
        self.experts(self.random.randrange(4, 30))
        for group in self.small.param_groups:
            group["lr"] = 0.1 / (1 + number)
        self.step(sw.full((4, WIDTH), 0.5, device_mesh=self.line, placements=[sw.Shard(0)]))
        self.layouts()
        if number % 10 == 9:
            self.saved()

    def planned(self, rows: int) -> None:
        batch = sw.randn(rows, WIDTH, device_mesh=self.world, placements=[sw.Shard(0), sw.Replicate()])
        self.model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sequence(self, length: int, zigzag: bool) -> None:
        x = sw.randn(2, length, WIDTH, device_mesh=self.line, placements=[sw.Zigzag(1) if zigzag else sw.Shard(1)])
        q, k, v = ((x @ each).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean().backward()

    def experts(self, tokens: int) -> None:
        x = sw.randn(tokens, WIDTH, device_mesh=self.line, placements=[sw.Shard(0)])
        weights, ids = x[:, :EXPERTS].softmax(-1).topk(2)
        rows, back = sw.moe.dispatch(x, ids, EXPERTS)
        hidden = F.silu(F.grouped_mm(rows, self.up, offs=back.offs))
        back(F.grouped_mm(hidden, self.down, offs=back.offs), weights).square().mean().backward()
        self.others.step()
        self.others.zero_grad()

    def captured_part(self, x: Any) -> Any:
        loss = (x @ self.weight).square().mean()
        loss.backward()
        self.small.step()
        self.small.zero_grad()
        return loss.detach()

    def layouts(self) -> None:
        """Random layouts on meshes of several shapes."""
        shape = self.random.choice(((4,), (2, 2), (1, 4), (4, 1)))
        mesh = sw.init_device_mesh("cpu", shape)
        sizes = self.random.choice(((8, 8), (7, 5), (3, 9), (16, 4)))
        x: Any = sw.ones(*sizes, device_mesh=mesh, placements=[sw.Replicate()] * len(shape))
        for _ in range(3):
            x = x.redistribute(placements=[self.random.choice(PLACEMENTS) for _ in shape]) * 1.5

    def saved(self) -> None:
        path = f"{self.folder}/round"
        sw.checkpoint.save({"model": self.model, "optimizer": self.optimizer}, path, overwrite=True)
        sw.checkpoint.load({"model": self.model, "optimizer": self.optimizer}, path)


def resident() -> float:
    """MiB of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def allocated() -> float:
    """MiB that glibc's malloc has given out and that were not freed, of all arenas, without what it keeps for later."""

    class Mallinfo(ctypes.Structure):
        _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return (info.field4 + info.field7) / 2**20  # hblkhd: mapped; uordblks: in use


def train(minutes: float, folder: str) -> list[Sample]:
    """Train until the time is over, on all ranks alike; a sample after each tenth of the rounds of the first guess."""
    job = Job(folder)
    for number in range(30):  # shapes, programs and routes are met
        job.round(number)
    begin, number, samples = time.monotonic(), 30, []
    tenth = minutes * 6
    while len(samples) < 10:
        start, first = time.process_time(), number
        while number == first or not _agreed(time.monotonic() - begin > tenth * (len(samples) + 1)):
            for _ in range(10):
                job.round(number)
                number += 1
        gc.collect()
        info = sw.cache_info()
        spent = (time.process_time() - start) / (number - first)
        files = len(os.listdir("/proc/self/fd"))
        memory = resident(), allocated(), sys.getallocatedblocks()
        samples.append(Sample(number, spent, *memory, info.entries, info.routes, threading.active_count(), files))
        if sw.is_main():
            print(samples[-1], flush=True)
    return samples


def _agreed(over: bool) -> bool:
    """Whether the time is over on the first rank, which decides for all."""
    if not dist.is_initialized():
        return over
    flag = torch.tensor([int(over)])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def main_of_rank(minutes: float, folder: str) -> list[Sample]:
    torch.set_num_threads(1)
    return train(minutes, folder)


def show(samples: list[Sample]) -> None:
    """The last tenth beside the first."""
    first, last = samples[0], samples[-1]
    print(*samples, sep="\n")
    print(f"rounds {last.rounds}; processor time of a round, last tenth to first: {last.seconds / first.seconds:.3f}")
    print(
        f"resident {first.resident:.0f} -> {last.resident:.0f} MiB, entries {first.entries} -> {last.entries}, ", end=""
    )
    print(f"routes {first.routes} -> {last.routes}, threads {first.threads} -> {last.threads}, ", end="")
    print(f"files {first.files} -> {last.files}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--processes", type=int, default=0)
    given = parser.parse_args()
    place = tempfile.mkdtemp()
    try:
        if given.processes:
            from bench.mixed_training import main_of_rank as of_rank  # by its importable name, for other processes
            from tests.gloo.processes import run_processes

            show(run_processes(of_rank, given.processes, given.minutes, place, timeout=given.minutes * 90 + 600)[0])
        else:
            show(train(given.minutes, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
