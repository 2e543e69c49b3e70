"""Process groups: made at once, with the program's timeout; worlds that come and go; leaks; exits in mid-collective."""

import datetime
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fabric.c10d import c10d
from tests.gloo.processes import run_processes


def groups_after_init(store: str) -> tuple[int, int, float]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"store": dist.FileStore(store, world), "rank": rank, "world_size": world}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=37), **options)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = len(c10d._groups)
    x = sw.distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [sw.Shard(0), sw.Shard(1)], src_data_rank=None)
    x.redistribute(placements=[sw.Replicate(), sw.Shard(1)])
    x.redistribute(placements=[sw.Shard(0), sw.Replicate()])
    timeout = c10d.group(mesh, (0,))._get_backend(torch.device("cpu")).options._timeout
    return before, len(c10d._groups), timeout.total_seconds()


def test_groups_of_axes_are_made_with_the_mesh_and_keep_the_timeout(tmp_path: Path) -> None:
    for before, after, timeout in run_processes(groups_after_init, 4, str(tmp_path / "store"), backend=None):
        assert before == after == 2
        assert timeout == 37


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def worlds_come_and_go(folder: str) -> list[tuple[int, int]]:
    """Descriptors and threads after each world."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for number in range(6):
        store = dist.FileStore(f"{folder}/store{number}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        mesh = sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        x = sw.distribute_tensor(torch.arange(8.0) + number, mesh, [sw.Shard(0), sw.Replicate()])
        assert torch.equal(x.full_tensor(), torch.arange(8.0) + number)
        assert x.sum().item() == 28 + 8 * number
        dist.barrier()
        dist.destroy_process_group()
        del store, x
        gc.collect()
        threads = len(os.listdir("/proc/self/task"))
        found.append((descriptors(), threads))
    return found


def test_descriptors_and_threads_do_not_grow_with_worlds(tmp_path: Path) -> None:
    """The first worlds may leave something behind, such as a group that is kept for what is in flight."""
    for found in run_processes(worlds_come_and_go, 2, str(tmp_path), backend=None, timeout=120):
        assert found[-1][0] <= found[2][0] + 1, found
        assert found[-1][1] <= found[2][1] + 1, found


IN_FLIGHT = """
import os, sys, torch, torch.distributed as dist, shardwise as sw
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
mesh = sw.init_device_mesh("cpu", (2,))
x = sw.distribute_tensor(torch.arange(1 << 20, dtype=torch.float32), mesh, [sw.Shard(0)], src_data_rank=None)
y = x.redistribute(placements=[sw.Replicate()], async_op=True)
print("left", flush=True)
"""


def test_a_program_may_end_with_a_collective_in_flight(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_FLIGHT)
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = (sys.executable, str(script), str(tmp_path / "store"))
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    for process in ranks:
        said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
        assert said == b"left\n"


def lose_a_rank(store: str) -> str:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"store": dist.FileStore(store, world), "rank": rank, "world_size": world}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20), **options)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)], src_data_rank=None)
    if rank == 1:
        dist.distributed_c10d._world.default_pg = None  # this process no longer takes part
        time.sleep(0.1)
        return ""
    try:
        for _ in range(3):
            x.redistribute(placements=[sw.Replicate()])
    except sw.LostRankError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    text, _ = run_processes(lose_a_rank, 2, str(tmp_path / "store"), backend=None, timeout=90)
    assert "all-gather dim 0 over dp of f32[8] dp:S0 failed on rank 0 of " in text
    assert "at " + __file__ in text
    assert "it communicates with ranks 1, and" in text
