"""The helper that starts real processes: results, failures, time limits, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gloo import processes
from tests.gloo.processes import ProcessPool, RankFailed, RankTimeout, child_processes, run_processes


def rank_and_sum(offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value


def pid() -> int:
    return os.getpid()


def raise_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError(f"rank {bad} says no")
    dist.barrier()


def raise_in_turn(first: int) -> None:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == first:
        store.set("first", b"")
    else:
        store.wait(["first"])
        time.sleep(0.1)  # the first has noted when it raised
    raise ValueError(f"rank {rank} says no")


def die_on(bad: int) -> None:
    if dist.get_rank() == bad:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def hang_on(bad: int) -> None:
    while dist.get_rank() == bad:
        time.sleep(0.05)


def leave_grandchild() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def destroy_group() -> None:
    dist.destroy_process_group()


def return_a_function() -> object:
    return lambda: None


def environment() -> tuple[bool, str, str]:
    return dist.is_initialized(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def test_results_come_in_rank_order(gloo4: ProcessPool) -> None:
    results = gloo4.run(rank_and_sum, 10)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert [value.item() for _, value in results] == [46.0] * 4


def test_pool_keeps_its_processes(gloo4: ProcessPool) -> None:
    pids = gloo4.run(pid)
    assert len(set(pids)) == 4
    assert gloo4.run(pid) == pids == gloo4.pids


def test_pool_survives_a_failing_call(gloo4: ProcessPool) -> None:
    before = gloo4.run(pid)
    with pytest.raises(
        RankFailed, match=r"raise_on: rank 2 of 4 failed first(?s:.*)ValueError: rank 2 says no"
    ) as info:
        gloo4.run(raise_on, 2)
    assert info.value.rank == 2
    assert not set(before) & set(child_processes())
    after = gloo4.run(pid)
    assert not set(before) & set(after)
    assert gloo4.run(rank_and_sum, 0)[3][1].item() == 6.0


def test_failures_and_limits_with_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for what needs fresh ranks each time, so that they are started as few times as possible."""
    monkeypatch.setattr(processes, "GRACE", 30)  # of a busy machine; the second failure ends the wait
    others = set(child_processes())
    with ProcessPool(2) as pool:
        for first in (0, 1):
            with pytest.raises(RankFailed, match=rf"rank {first} of 2 failed first") as failed:
                pool.run(raise_in_turn, first)
            assert f"after it, rank {1 - first}: ValueError" in str(failed.value)

        with pytest.raises(RankFailed, match=r"rank 1 of 2 failed first(?s:.*)exit status 7(?s:.*)last words") as died:
            pool.run(die_on, 1)
        assert died.value.rank == 1

        pool.run(pid)  # start-up is not part of a call's limit
        with pytest.raises(RankTimeout, match=r"no answer within 0\.5 s from rank 1 of 2(?s:.*)hang_on") as hung:
            pool.run(hang_on, 1, timeout=0.5)
        assert hung.value.ranks == (1,)
        assert set(child_processes()) <= others
    assert pool.starts == 4


def test_a_pool_without_its_group_is_started_again() -> None:
    with ProcessPool(1) as pool:
        pool.run(pid)
        pool.run(destroy_group)
        assert pool.run(rank_and_sum, 1)[0][1].item() == 1.0
        assert pool.starts == 2


def test_nothing_is_left_behind() -> None:
    before = set(child_processes())
    (grandchild,) = run_processes(leave_grandchild, 1)
    assert set(child_processes()) <= before
    assert _ends(grandchild)


def test_without_a_group_the_environment_is_that_of_torchrun() -> None:
    assert run_processes(environment, 2, backend=None) == [(False, "0", "2"), (False, "1", "2")]


def test_a_result_that_cannot_be_sent_is_a_failure_of_the_rank() -> None:
    with pytest.raises(RankFailed, match="return_a_function"):
        run_processes(return_a_function, 1)


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(TypeError, match="define it at the top of a module"):
        run_processes(lambda: None, 2)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_an_interrupted_parent(how: signal.Signals, tmp_path: Path) -> None:
    """A parent that is interrupted, or killed outright, in the middle of a call."""
    notes = tmp_path / "pids"
    program = (
        "from pathlib import Path\n"
        "from tests.gloo.processes import ProcessPool\n"
        "from tests.gloo.test_processes import hang_on, pid\n"
        "with ProcessPool(1) as pool:\n"
        "    pids = pool.run(pid)\n"
        f"    Path({str(notes)!r}).write_text(' '.join(map(str, pids)))\n"
        "    pool.run(hang_on, 0)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup and background jobs ignore it
    )
    try:
        deadline = time.monotonic() + 60
        while not (notes.exists() and notes.read_text()):
            assert parent.poll() is None, "the parent ended by itself"
            assert time.monotonic() < deadline, "the parent did not get as far as its call"
            time.sleep(0.05)
        time.sleep(0.2)
        parent.send_signal(how)
        assert parent.wait(30) != 0
    finally:
        parent.kill()
        parent.wait()
    assert all(_ends(int(pid)) for pid in notes.read_text().split())


def _ends(pid: int) -> bool:
    """Whether the process is gone, or a zombie nobody has waited for, within half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
