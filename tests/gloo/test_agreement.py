"""Ranks that part: every rank raises an error that shows where, instead of waiting for the others for ever."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fabric.c10d import c10d
from tests.gloo.processes import LOOPBACK, ProcessPool, _free_port, run_processes

LIMIT = 30  # seconds within which every rank must have ended
INTERVAL = 0.2


def outcome(program: Callable[[], None]) -> tuple[str, float]:
    """The error that a program ends with, and how long it took."""
    start = time.monotonic()
    try:
        program()
    except sw.AgreementError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def sharded(mesh: sw.DeviceMesh, size: int = 8) -> sw.DTensor:
    placements = [sw.Shard(0)] + [sw.Replicate()] * (mesh.ndim - 1)
    return sw.distribute_tensor(torch.arange(float(size)), mesh, placements, src_data_rank=None)


def divergences() -> dict[str, tuple[str, float]]:
    """Three ways to part, each in groups of its own: what one leaves behind in a group does not reach the next."""
    rank = dist.get_rank()
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pairs = sw.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"), fabric="c10d")
    world = sw.init_device_mesh("cpu", (4,))
    found: dict[str, tuple[str, float]] = {}

    def kinds() -> None:
        for _ in range(3):
            sharded(pairs["b"]).full_tensor()
        if rank == 3:
            reduce_over(pairs["b"])
        while True:  # as a training loop does: ranks 1 and 2 go on, and are stopped too
            sharded(pairs["b"]).full_tensor()

    def circle() -> None:
        """0 waits for 1, which waits for 3, which waits for 2, which waits for 0."""
        first, second = ("tp", "dp") if rank in (0, 3) else ("dp", "tp")
        reduce_over(mesh[first])
        reduce_over(mesh[second])

    def extra() -> None:
        if rank == 2:
            reduce_over(world)
        while True:
            sharded(world, 16).full_tensor()

    for name, program in (("kinds", kinds), ("circle", circle), ("extra", extra)):
        with sw.debug.check_ranks(interval=INTERVAL):
            found[name] = outcome(program)
    return found


def reduce_over(mesh: sw.DeviceMesh) -> None:
    total = sw.DTensor.from_local(torch.ones(8), mesh, [sw.Partial()])
    total.redistribute(placements=[sw.Replicate()])


def clean_program() -> int:
    """What does not part goes on as it would: values, groups of all kinds, a scatter, asynchronous moves."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with sw.debug.check_ranks(interval=0.05):
        x = sw.distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [sw.Shard(0), sw.Shard(1)])
        for _ in range(20):
            y = x.redistribute(placements=[sw.Shard(1), sw.Shard(0)], async_op=True)
            assert torch.equal(y.full_tensor(), torch.arange(16.0).reshape(4, 4))
            assert (x.sum()).item() == 120.0
        if dist.get_rank() == 0:
            time.sleep(0.5)  # slow is not apart
        reduce_over(mesh["tp"])
        checked = c10d._check
        assert checked is not None
        count = sum(log.count for log in checked._logs.values())
    assert x.full_tensor().sum() == 120.0  # and without it again
    return count


def test_ranks_that_do_not_part_are_left_alone(gloo4: ProcessPool) -> None:
    counts = gloo4.run(clean_program)
    assert len(set(counts)) == 1
    assert counts[0] > 60


def test_ranks_that_part_all_end_with_the_error() -> None:
    results = run_processes(divergences, 4, timeout=3 * LIMIT)
    expected = {
        "kinds": ("ranks 0 and 3 issue different collectives in the group of ranks 0, 3, from number 5 on",),
        "circle": (
            "the ranks wait for each other in different collectives",
            "rank 0 waits with ranks 0, 1 in a group is made for all-reduce",
        ),
        "extra": (
            "issue different collectives in the group of ranks 0-3, from number",
            "all-reduce (sum) over 0 of f32[8] P",
        ),
    }
    for found in results:
        for name, parts in expected.items():
            text, seconds = found[name]
            assert all(part in text for part in parts), f"{name}: {text}"
            assert __file__ in text
            assert seconds < LIMIT
    assert len({found["kinds"][0] for found in results}) == 1
    assert "> 5. all-gather" in results[0]["kinds"][0]
    assert "> 5. all-reduce" in results[0]["kinds"][0]


PROGRAM = """
import sys
import torch
import shardwise as sw

mesh = sw.init_device_mesh("cpu", (2,))
x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)])
x.full_tensor()
if mesh.get_rank() == 1 and sys.argv[1] == "raises":
    raise ValueError("no more data")
if mesh.get_rank() == 1:
    sw.DTensor.from_local(torch.ones(8), mesh, [sw.Partial()]).full_tensor()
x.full_tensor()
"""


def start(script: Path, how: str) -> list[subprocess.Popen[str]]:
    """Two ranks of a program that parts, checked because the environment says so."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2",
        "SHARDWISE_CHECK": "1", "SHARDWISE_CHECK_INTERVAL": str(INTERVAL),
    }  # fmt: skip
    command = [sys.executable, str(script), how]
    return [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]


def test_whole_programs_end_by_themselves_and_say_why(tmp_path: Path) -> None:
    """One rank raises, or issues another collective: every process ends, although collectives are in flight."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ranks = start(script, "raises") + start(script, "parts")
    try:
        said = [rank.communicate(timeout=3 * LIMIT)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1, 1, 1], said
    assert "AgreementError: rank 1 ended with ValueError: no more data, but rank 0 waits" in said[0]
    assert f"{script}:13" in said[0]
    assert "ValueError: no more data" in said[1]
    for text in said[2:]:
        assert "AgreementError: ranks 0 and 1 issue different collectives in the group of ranks 0, 1" in text
        assert f"all-reduce (sum) over 0 of f32[8] P, at {script}:12" in text
        assert f"all-gather dim 0 over 0 of f32[8] S0, at {script}:13" in text
