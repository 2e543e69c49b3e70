"""Training under torchrun whose ranks are killed: it goes on with fewer, and the losses are those of one run."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.gloo.processes import LOOPBACK, ProcessPool
from tests.remeshing import MOVES, build, mesh_of, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
STEPS = 40
# Seconds: how long a meeting waits for more than it needs, and after how long a silent machine counts as gone.
MEETING = "is_host=0,last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=5"
# torchrun, begun when all four have imported torch: its agents time out if one comes when the others have begun.
TORCHRUN = """
import sys
import torch.distributed as dist
import torch.distributed.run
store = dist.TCPStore("127.0.0.1", int(sys.argv.pop(1)))
if store.add("imported", 1) == 4:
    store.set("all imported", b"")
store.wait(["all imported"])
torch.distributed.run.main()
"""


def agent(port: int, folder: Path, number: int) -> subprocess.Popen[bytes]:
    """torchrun as on one of several machines, with one process."""
    command = [
        *(sys.executable, "-c", TORCHRUN, str(port), "--nnodes", "3:4", "--nproc-per-node", "1"),
        *("--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf", MEETING),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.2", "--local-addr", "127.0.0.1"),
        *(str(EXAMPLE), "--folder", str(folder), "--steps", str(STEPS)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    # a new store for each meeting: that of the agents has addresses of processes that are gone, under the number of a
    # restart that agents count differently
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with (folder / f"agent{number}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )


def lines_of(folder: Path) -> list[tuple[int, int, float]]:
    """Step, number of ranks and loss of each step so far."""
    path = folder / "losses.txt"
    found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), int(ranks), float(loss)) for step, ranks, loss in found]


def wait_for(done: Any, agents: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        ended = [number for number, one in enumerate(agents) if one.poll() not in (None, 0)]
        if ended or time.monotonic() > end:
            logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("agent*.log")))
            raise AssertionError(f"agents {ended} ended; losses {lines_of(folder)}\n{logs}")
        time.sleep(0.05)


def test_training_goes_on_with_three_of_four_processes(tmp_path: Path) -> None:
    # agents meet at a store of their own, as they should: the one that is lost must not take it away
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [agent(meeting.port, tmp_path, number) for number in range(4)]
    try:
        wait_for(lambda: len(lines_of(tmp_path)) >= 5, agents, tmp_path, 240)
        before = len(lines_of(tmp_path))
        assert before < STEPS, "killed too late to show anything"
        lost = agents.pop()
        end(lost)
        wait_for(lambda: all(one.poll() == 0 for one in agents), agents, tmp_path, 240)
    finally:
        for one in agents:
            end(one)
    found = lines_of(tmp_path)
    assert {ranks for _, ranks, _ in found} == {4, 3}
    assert [ranks for _, ranks, _ in found] == sorted([ranks for _, ranks, _ in found], reverse=True)
    assert sorted({step for step, _, _ in found}) == list(range(STEPS))
    example = runpy.run_path(str(EXAMPLE))
    mesh = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    wanted = example["train"](example["build"](mesh), mesh, STEPS)
    for step, _, loss in found:  # steps that ran twice have the same loss twice
        assert loss == pytest.approx(wanted[step], rel=1e-4)


def end(one: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its process, which has a session of its own."""
    if one.poll() is None:
        for process in children(one.pid):
            os.kill(process, signal.SIGKILL)
        os.killpg(one.pid, signal.SIGKILL)
    one.wait()


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


def move_and_train(move: Any) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses on the old mesh and on the new one; only their ranks train."""
    old, new = (mesh_of(*where) for where in move)
    rank = int(os.environ["RANK"])
    state = build(old)
    before = train(state, old, 3) if rank in old.grid_ranks else []
    moved = sw.remesh(state, new, into=build(new))
    inside = rank in new.grid_ranks
    facts = {"step": moved["step"], "seen": moved["model"].seen.tolist(), "epoch": moved["scheduler"].last_epoch}
    return before, train(moved, new, 3) if inside else [], facts


@pytest.mark.parametrize("move", MOVES)
def test_live_states_on_processes(gloo4: ProcessPool, move: Any) -> None:
    """Ranks of the old mesh alone, of the new one alone, of both; new ranks get plain tensors and numbers, too."""
    old, new = (mesh_of(*where) for where in move)
    wanted = train(build(old), old, 6)
    for rank, (before, after, facts) in enumerate(gloo4.run(move_and_train, move, timeout=120)):
        if rank in old.grid_ranks:
            torch.testing.assert_close(torch.tensor(before), torch.tensor(wanted[:3]), rtol=1e-5, atol=1e-6)
        if rank in new.grid_ranks:
            torch.testing.assert_close(torch.tensor(after), torch.tensor(wanted[3:]), rtol=1e-5, atol=1e-6)
            assert facts == {"step": 3, "seen": [3.0] * 3, "epoch": 3}
