"""Ranks that part: every rank raises an error that shows where, instead of waiting for the others for ever."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fabric.c10d import c10d
from tests.gloo.processes import LOOPBACK, ProcessPool, _free_port, run_processes

LIMIT = 60  # seconds within which every rank must have ended
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
        scattered = sw.DTensor.from_local(torch.ones(8, 2), mesh, [sw.Partial(), sw.Partial()])
        for _ in range(3):  # gloo's reduce-scatters are done only when they are waited for
            assert scattered.redistribute(placements=[sw.Shard(0), sw.Shard(1)]).full_tensor().sum() == 64.0
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
            "rank 0 waits with ranks 0, 1 in all-reduce (sum) over tp of f32[8] tp:P",
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


def start(
    script: Path, *args: str, ranks: Sequence[int | None] = (0, 1), silence: int = 30
) -> list[subprocess.Popen[str]]:
    """Two ranks of a program that parts, checked because the environment says so; None: it starts them itself.

    A rank that says nothing for `silence` seconds counts as lost: only a test of that wants it soon.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2",
        "SHARDWISE_CHECK": "1", "SHARDWISE_CHECK_INTERVAL": str(INTERVAL), "SHARDWISE_CHECK_SILENCE": str(silence),
    }  # fmt: skip
    command = [sys.executable, str(script), *args]
    return [
        subprocess.Popen(
            command, env=environment | ({} if rank is None else {"RANK": str(rank)}), stderr=subprocess.PIPE, text=True
        )
        for rank in ranks
    ]


def ended(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """The exit status of each process, and its output."""
    try:
        said = [rank.communicate(timeout=3 * LIMIT)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], said


def test_whole_programs_end_by_themselves_and_say_why(tmp_path: Path) -> None:
    """One rank raises, or issues another collective: every process ends, although collectives are in flight."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    status, said = ended(start(script, "raises") + start(script, "parts"))
    assert status == [1, 1, 1, 1], said
    assert "AgreementError: rank 1 ended with ValueError: no more data, but rank 0 waits" in said[0]
    assert f"{script}:13" in said[0]
    assert "ValueError: no more data" in said[1]
    for text in said[2:]:
        assert "AgreementError: ranks 0 and 1 issue different collectives in the group of ranks 0, 1" in text
        assert f"all-reduce (sum) over 0 of f32[8] P, at {script}:12" in text
        assert f"all-gather dim 0 over 0 of f32[8] S0, at {script}:13" in text


# ---------------------------------------------------------------- the last second

ENDS = Path(__file__).with_name("ends.py")
PARTED = "ranks 0 and 1 issue different collectives in the group of ranks 0, 1, from number 3 on"


@pytest.mark.parametrize("how", ["swapped", "skipped", "destroyed"])
def test_a_difference_just_before_the_end_is_an_error_on_all_ranks(how: str, tmp_path: Path) -> None:
    status, said = ended(start(ENDS, how, str(tmp_path / "saved")))
    assert status == [1, 1], said
    assert all(PARTED in text for text in said), said


def test_a_program_that_does_not_part_ends_well(tmp_path: Path) -> None:
    """With a checkpoint that is written meanwhile, and groups that are destroyed."""
    assert ended(start(ENDS, "fine", str(tmp_path / "saved"))) == ([0, 0], ["", ""])
    assert (tmp_path / "saved").exists()


def test_a_rank_that_is_interrupted_inside_a_collective(tmp_path: Path) -> None:
    status, said = ended(start(ENDS, "interrupted", str(tmp_path / "saved")))
    assert status[0] == 1
    assert status[1] != 0
    assert "rank 1 ended with KeyboardInterrupt, but rank 0 waits" in said[0], said
    assert "KeyboardInterrupt" in said[1]


def test_a_rank_that_stops_before_a_checkpoint(tmp_path: Path) -> None:
    ranks = start(ENDS, "stopped", str(tmp_path / "saved"), silence=5)
    try:
        said = ranks[0].communicate(timeout=3 * LIMIT)[1]
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert f"rank 1 of {socket.gethostname()} has not been heard of for" in said, said
    assert "an exchange of a checkpoint" in said
    assert not (tmp_path / "saved").exists()


def test_processes_that_a_program_starts_itself(tmp_path: Path) -> None:
    """A rank that ends early, with status 0: the program that started it hears of both."""
    status, said = ended(start(ENDS, "early", str(tmp_path / "saved"), ranks=[None]))
    assert status == [1], said
    assert PARTED in said[0]
    assert "the end of the program" in said[0]


def last_moves() -> dict[str, str]:
    """Ways to part after which nothing more is issued, each in a check of its own."""
    rank = dist.get_rank()
    mesh = sw.init_device_mesh("cpu", (2,))
    line = torch.arange(8.0)

    def dtypes() -> None:
        whole = line.int() if rank else line
        sw.distribute_tensor(whole, mesh, [sw.Shard(0)], src_data_rank=None).full_tensor()

    def placements() -> None:
        square = torch.arange(16.0).reshape(4, 4)
        sw.distribute_tensor(square, mesh, [sw.Shard(rank)], src_data_rank=None).full_tensor()

    def random_states() -> None:
        for seed in (0, rank):
            torch.manual_seed(seed)
            sw.rand(8, device_mesh=mesh, placements=[sw.Shard(0)])

    def threads() -> None:
        """Two threads gather, and which comes first differs."""
        tensors = [sharded(mesh), sharded(mesh).reshape(2, 4)]
        first = tensors[rank].redistribute(placements=[sw.Replicate()], async_op=True)
        other = threading.Thread(target=tensors[1 - rank].full_tensor, name="gatherer")
        other.start()
        other.join()
        first.to_local()

    def nothing() -> None:
        sharded(mesh).full_tensor()

    found = {}
    for program in (dtypes, placements, random_states, nothing, threads):
        found[program.__name__] = outcome(lambda program=program: checked(program))[0]
    return found


def checked(program: Callable[[], None]) -> None:
    with sw.debug.check_ranks(interval=60):  # no look before the end
        program()


def test_the_last_moves_are_compared_when_a_check_ends() -> None:
    for found in run_processes(last_moves, 2, timeout=3 * LIMIT):
        assert "f32[8] S0" in found["dtypes"], found
        assert "i32[8] S0" in found["dtypes"]
        assert "f32[4,4] S1" in found["placements"]
        assert "aten.uniform_.default from the random state" in found["random_states"]
        assert found["nothing"] == "no error"
        assert "in thread gatherer" in found["threads"]
