"""Training of a mixture of experts with other sizes in each step: what the library keeps of them.

    python -m tests.virtual.expert_steps --steps 1000
    python -m tests.virtual.expert_steps --steps 1000 --processes

A router, experts and AdamW; the batch has another number of tokens in each step, and the router's bias moves, so that
the sizes of all shards are new. Printed ten times: specs, shapes and sizes that exist, entries of all bounded caches,
objects of Python in all, and the memory of the process.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.core.cache import BoundedCache

KINDS = (sw.DTensorSpec, sw.TensorMeta, sw.Ragged)
EXPERTS, WIDTH = 8, 4


class Kept(NamedTuple):
    """What there is after some steps; memory in MiB."""

    interned: int
    cached: int
    objects: int
    memory: float
    loss: float


class Steps:
    """A layer of experts with its router and optimizer, and what is kept after some steps of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mesh = sw.init_device_mesh("cpu", (4,))
        router, up, down = torch.randn(EXPERTS, WIDTH), torch.randn(EXPERTS, WIDTH, 8), torch.randn(EXPERTS, 8, WIDTH)
        placed = ((router, sw.Replicate()), (up, sw.Shard(0)), (down, sw.Shard(0)))
        self.parameters = [sw.distribute_tensor(t, self.mesh, [p]).requires_grad_() for t, p in placed]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.loss = float("nan")

    def run(self, count: int) -> None:
        """So many steps, each with other tokens and experts."""
        router, up, down = self.parameters
        for _ in range(count):
            tokens = int(torch.randint(1, 40, ()))
            x = sw.distribute_tensor(torch.randn(tokens, WIDTH), self.mesh, [sw.Shard(0)], src_data_rank=None)
            bias = sw.distribute_tensor(torch.randn(EXPERTS) * 3, self.mesh, [sw.Replicate()], src_data_rank=None)
            weights, ids = (F.linear(x, router) + bias).softmax(-1).topk(2)
            rows, back = sw.moe.dispatch(x, ids, EXPERTS)
            made = F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=back.offs)), down, offs=back.offs)
            loss = (back(made, weights) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = float(loss.detach().full_tensor())

    def kept(self) -> Kept:
        """What there is now."""
        gc.collect()
        objects = gc.get_objects()
        interned = sum(type(one) in KINDS for one in objects)
        cached = sum(len(one) for one in objects if type(one) is BoundedCache)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Kept(interned, cached, len(objects), pages / 256, self.loss)


def run(count: int) -> list[Kept]:
    """What there is after each tenth of so many steps, on this process."""
    steps, found = Steps(), list[Kept]()
    for _ in range(10):
        steps.run(max(1, count // 10))
        found.append(steps.kept())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--processes", action="store_true", help="on four gloo processes instead of virtual ranks")
    given = parser.parse_args()
    if given.processes:
        processes = importlib.import_module("tests.gloo.processes")
        here = importlib.import_module("tests.virtual.expert_steps")  # not as __main__: the processes import it
        found = processes.run_processes(here.run, 4, given.steps, timeout=3600)[0]
    else:
        found = run(given.steps)
    for tenth, kept in enumerate(found, 1):
        print(
            f"{tenth * max(1, given.steps // 10)} steps: {kept.interned} specs, shapes and sizes, {kept.cached} entries"
            f" of caches, {kept.objects} objects, {kept.memory:.1f} MiB; loss {kept.loss:.3f}"
        )


if __name__ == "__main__":
    main()
