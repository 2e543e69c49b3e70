"""Process groups: made at once, with the program's timeout; worlds that come and go; leaks; exits in mid-collective."""

import datetime
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

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


WORLDS = 50


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """The resources of a process."""

    descriptors: int
    threads: int
    groups: int
    memory: int


def held() -> Held:
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    return Held(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups, resident())


def worlds_come_and_go(folder: str) -> list[Held]:
    """What is held after each world, with groups of meshes, a transfer, a checkpoint, checks and plain tensors."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for number in range(WORLDS):
        store = dist.FileStore(f"{folder}/store{number}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        mesh = sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        x = sw.distribute_tensor(torch.arange(8.0) + number, mesh, [sw.Shard(0), sw.Replicate()])
        assert torch.equal(x.full_tensor(), torch.arange(8.0) + number)
        assert (x * torch.ones(8)).sum().item() == 28 + 8 * number
        sw.transfer({"x": x}, sw.DeviceMesh("cpu", [1, 0]), {"x": [sw.Shard(0)]})
        sw.checkpoint.async_save({"x": x}, f"{folder}/step-{number}", keep=1).wait()
        with sw.debug.check_ranks(0.05):
            assert torch.equal(x.full_tensor(), torch.arange(8.0) + number)
        dist.barrier()
        dist.destroy_process_group()
        del store, x
        found.append(held())
    return found


def test_nothing_grows_with_worlds(tmp_path: Path) -> None:
    """The first worlds may leave something behind, such as a group that is kept for what is in flight."""
    for found in run_processes(worlds_come_and_go, 2, str(tmp_path), backend=None, timeout=400):
        early, late = found[WORLDS // 5], found[-1]
        assert late.descriptors <= early.descriptors + 2, found
        assert late.threads <= early.threads + 2, found
        assert late.groups == 0
        assert late.memory <= early.memory + 16 * 2**20, found


def compiled_in_later_worlds(folder: str) -> list[list[list[float]]]:
    """What compiled code computes in each world, in which this process has another rank."""
    first, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    @torch.compile(backend="aot_eager")
    def own_rows(x: sw.DTensor) -> sw.DTensor:
        return (x * 2).redistribute(placements=[sw.Shard(0), sw.Replicate()])

    @torch.compile(backend="aot_eager")
    def own_rows_of_plain(x: torch.Tensor, mesh: sw.DeviceMesh) -> torch.Tensor:
        placements = [sw.Replicate()] * 2
        return sw.DTensor.from_local(x, mesh, placements, run_check=False).redistribute(
            placements=[sw.Shard(0), sw.Replicate()]
        ).to_local()  # fmt: skip

    @torch.compile(backend="aot_eager")
    def gathered(x: sw.DTensor) -> sw.DTensor:
        return x.redistribute(placements=[sw.Replicate(), sw.Replicate()])

    found = []
    for number in range(3):
        rank, store = (first + number) % world, dist.FileStore(f"{folder}/store{number}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        mesh = sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        x = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Replicate()] * 2, src_data_rank=None)
        mine = own_rows(x)
        plain = own_rows_of_plain(torch.arange(4.0), mesh)
        found.append([mine.to_local().tolist(), plain.tolist(), gathered(mine).to_local().tolist()])
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_compiled_code_is_of_one_world(tmp_path: Path) -> None:
    """A graph has the coordinates and groups of a rank, and a process may have another rank in a later world."""
    found = run_processes(compiled_in_later_worlds, 2, str(tmp_path), backend=None, timeout=300)
    for first, by_world in enumerate(found):
        for number, results in enumerate(by_world):
            rank = (first + number) % 2
            rows = torch.arange(4.0)[2 * rank : 2 * rank + 2]
            assert results == [(2 * rows).tolist(), rows.tolist(), [0.0, 2.0, 4.0, 6.0]]


def new_process_joins(folder: str) -> list[float]:
    """Two worlds of three processes, with a mesh of two. One process leaves, and a new one is in the mesh."""
    process, found = int(os.environ["RANK"]), []
    for number, members in enumerate(((0, 1, 2), (0, 3, 1))):
        if process not in members:
            continue
        options = {"rank": members.index(process), "world_size": 3, "timeout": datetime.timedelta(seconds=60)}
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{number}", 3), **options)
        mesh = sw.DeviceMesh("cpu", [0, 1])
        if options["rank"] < 2:
            x = sw.distribute_tensor(torch.arange(4.0) + number, mesh, [sw.Shard(0)], src_data_rank=None)
            found.append(x.full_tensor().sum().item())
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_a_new_process_meets_those_of_a_former_world(tmp_path: Path) -> None:
    found = run_processes(new_process_joins, 4, str(tmp_path), backend=None, timeout=150)
    assert found == [[6.0, 10.0], [6.0], [], [10.0]]


def meshes_come_and_go(store: str) -> list[Held]:
    """A thousand meshes of few shapes, each used."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"store": dist.FileStore(store, world), "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **options)
    found = []
    for number in range(1000):
        shape = ((4,), (2, 2))[number % 2]
        names = tuple(f"axis{number}{i}" for i in range(len(shape)))  # of their own, so that the mesh is a new one
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
        x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)] * mesh.ndim, src_data_rank=None)
        assert x.full_tensor()[7] == 7
        if number % 100 == 99:
            found.append(held())
    return found


def test_meshes_of_the_same_ranks_share_groups(tmp_path: Path) -> None:
    for found in run_processes(meshes_come_and_go, 4, str(tmp_path / "store"), backend=None, timeout=400):
        assert found[0].groups == found[-1].groups == 3, found  # the world, and two pairs
        assert found[-1].descriptors == found[0].descriptors, found
        assert found[-1].threads == found[0].threads, found
        assert found[-1].memory <= found[0].memory + 32 * 2**20, found


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
    dist.init_process_group("gloo", **options)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)], src_data_rank=None)
    x.redistribute(placements=[sw.Replicate()])  # the ranks have met: what follows need not wait for a slow start
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), mesh.get_group())
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
