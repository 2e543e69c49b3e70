"""A program whose two ranks part just before it ends: `ends.py HOW [PATH]`. Without a check it ends with status 0."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw


def main(how: str, path: str) -> None:
    """End as `how` says."""
    mesh = sw.init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)])
    y = sw.distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [sw.Shard(0)])
    match how:
        case "swapped" | "destroyed":
            for tensor in (x, y) if rank else (y, x):
                tensor.full_tensor()
        case "skipped":
            if rank == 0:
                x.full_tensor()
        case "early":
            if rank == 1:
                sys.exit(0)
            x.full_tensor()
        case "interrupted":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and background jobs ignore it
            interrupted = Path(f"{path}.interrupted")
            if rank == 0:  # joins the collective only when rank 1 has left it, however slow the machine is
                while not interrupted.exists():
                    time.sleep(0.05)
            else:
                threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                x.full_tensor()
            except KeyboardInterrupt:
                interrupted.touch()
                raise
        case "stopped":
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            sw.checkpoint.save({"x": x}, path)
        case _:
            x.full_tensor()
            saving = sw.checkpoint.async_save({"x": x}, path)
            y.full_tensor()
            saving.wait()
    if how in ("destroyed", "fine"):
        dist.destroy_process_group()


def spawned(rank: int, how: str, path: str) -> None:
    """One rank of a program that starts its own processes."""
    os.environ["RANK"] = str(rank)
    main(how, path)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], sys.argv[2])
    else:
        mp.spawn(spawned, args=(sys.argv[1], sys.argv[2]), nprocs=2)  # pyright: ignore[reportAttributeAccessIssue]
