"""Two ranks, one of which is killed or frozen while the other is in a compiled or captured program.

`python -m tests.gloo.lost_rank_programs KIND FAULT FOLDER`: rank 0 runs each program again and writes what it raised.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw

TIMEOUT = 6.0  # seconds, of the process group, once everything is compiled
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


def model(x: sw.DTensor, weight: sw.DTensor) -> sw.DTensor:
    """An all-gather, an all-reduce, and their backwards."""
    hidden = (x @ weight).relu()
    gathered = hidden.redistribute(placements=[sw.Replicate()] * 2)  # forward
    return (gathered @ weight).pow(2).sum().redistribute(placements=[sw.Replicate()] * 2)


class Programs:
    """Each is ready to run: compiled, with the forward pass or the gradients that it needs."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.mesh = sw.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        self.x = sw.distribute_tensor(torch.ones(4, 8), self.mesh, [sw.Replicate()] * 2, src_data_rank=None)
        self.folder = folder
        self.all: dict[str, Callable[[], object]] = {}
        match kind:
            case "aot_eager":
                self._compiled(kind)
                self._compiled_optimizer(kind)
            case "inductor":
                self._compiled(kind)
            case _:
                self._captured(None)
                self._captured("inductor")

    def weight(self) -> Any:
        value = torch.arange(64.0).reshape(8, 8) / 64
        shards = [sw.Replicate(), sw.Shard(1)]
        return sw.distribute_tensor(value, self.mesh, shards, src_data_rank=None).requires_grad_()

    def _compiled(self, backend: str) -> None:
        weight, compiled = self.weight(), torch.compile(model, backend=backend)
        compiled(self.x, weight).backward()
        loss = compiled(self.x, weight)
        self.all["forward"] = lambda: compiled(self.x, weight)
        self.all["backward"] = lambda: loss.backward()

    def _compiled_optimizer(self, backend: str) -> None:
        weight = self.weight()
        optimizer = torch.optim.SGD([weight], lr=0.1)

        @torch.compile(backend=backend)
        def clip_and_step() -> None:
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()

        model(self.x, weight).backward()
        clip_and_step()
        self.all["optimizer"] = clip_and_step

    def _captured(self, backend: str | None) -> None:
        x, weight = self.x, self.weight()
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def captured_step() -> None:
            model(x, weight).backward()
            optimizer.step()
            optimizer.zero_grad()

        step = sw.captured(captured_step, backend=backend)
        for _ in range(4):
            step()
        self.all[f"captured, {backend}"] = step
        if backend is None:
            path = self.folder / f"program{self.mesh.get_rank()}"
            step.save(path, x=x, weight=weight, optimizer=optimizer)
            self.all["loaded"] = sw.load_captured(path, x=x, weight=weight, optimizer=optimizer)


def main(kind: str, fault: str, folder: Path) -> None:
    """Rank 1 has the fault while rank 0 is in the first program; the other programs run after it."""
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=240))
    programs = Programs(kind, folder)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), programs.mesh["tp"].get_group())
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), FAULTS[fault])
    found = {}
    for name, program in programs.all.items():
        begin = time.monotonic()
        try:
            program()
            error, text = "nothing", ""
        except Exception as raised:
            error, text = type(raised).__name__, "".join(traceback.format_exception_only(raised))
        found[name] = (error, text, time.monotonic() - begin)
    (folder / "found.new").write_text(json.dumps(found))
    (folder / "found.new").rename(folder / "found.json")
    os._exit(0)  # without the other rank


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:3], Path(sys.argv[3]))
