"""Two jobs that save to one path, readers beside them, kills at random: the name always leads to a whole checkpoint.

`python -m tests.gloo.rival_jobs TRIALS [SEED]`. Each trial forks two jobs and a reader. The jobs save to the same
paths, over what is there or not, plainly or behind their back, until one or both are killed or a number of saves is
over; the reader loads what it finds. The jobs are processes of one rank: what ranks of a job do to each other is in
checkpoint_faults.py, and kills of several ranks are in killer.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.checkpoint import async_save, inspect, load, read, save, verify

SIZE = 1 << 16
MESH = (3,)
NOTHING = "there is no checkpoint"


def state_of(number: int) -> dict[str, Any]:
    mesh = sw.init_device_mesh("cpu", MESH)
    rows = sw.full((SIZE // 64, 64), float(number), device_mesh=mesh, placements=[sw.Shard(0)])
    return {"rows": rows, "plain": torch.full((1000,), number), "number": number}


def is_of_one_save(state: dict[str, Any]) -> bool:
    number = state["number"]
    rows = state["rows"]
    rows = rows.full_tensor() if isinstance(rows, sw.DTensor) else rows
    return bool((rows == number).all()) and bool((state["plain"] == number).all())


def job(folder: Path, me: int, seed: str, out: int) -> None:
    """Save again and again; a line for each save: that it is there, or which error there was."""
    rng = random.Random(seed)
    for i in range(rng.randint(3, 8)):
        number = 1000 * me + i
        name = rng.choice(("last", "last", f"step-{i}"))
        keep = 2 if name != "last" and rng.random() < 0.5 else None
        saving = rng.choice((save, lambda *args, **options: async_save(*args, **options).wait()))
        time.sleep(rng.uniform(0, 0.01))
        try:
            saving(state_of(number), folder / name, overwrite=name == "last" or rng.random() < 0.3, keep=keep)
            os.write(out, f"{name} {number} saved\n".encode())
        except sw.CheckpointError as error:
            if "another job saved to" not in str(error) and "exists already" not in str(error):
                raise
            os.write(out, f"{name} {number} refused\n".encode())


def reader(folder: Path, me: int, seed: str, out: int) -> None:
    """Read whatever is there, until killed; anything that is not one job's save is an error, which ends the trial."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(("last", "last", "step-1", "step-2"))
        kind = rng.randrange(4)
        try:
            if kind == 0:
                problems = verify(folder / name)
                assert not [line for line in problems if NOTHING not in line], problems
            elif kind == 1:
                assert is_of_one_save(read(folder / name)), "a mixture of two saves"
            elif kind == 2:
                state = state_of(-1)
                load(state, folder / name, staged=rng.random() < 0.5)
                assert is_of_one_save(state), "a mixture of two saves"
            else:
                inspect(folder / name)
        except sw.CheckpointError as error:
            if NOTHING not in str(error):
                raise
            continue
        os.write(out, b"r")


def forked(run: Any, folder: Path, me: int, seed: str, out: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        run(folder, me, seed, out)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def trial(folder: Path, seed: str) -> tuple[str, int]:
    """Two jobs and a reader; what the jobs reported, and how often something was read."""
    rng = random.Random(seed)
    receive, out = os.pipe()
    received, read_out = os.pipe()
    os.set_blocking(received, False)
    jobs = [forked(job, folder, me, f"{seed} {me}", out) for me in (1, 2)]
    watching = forked(reader, folder, 0, f"{seed} r", read_out)
    os.close(out)
    doomed = rng.choice(((), (0,), (1,), (0, 1)))
    codes = {}
    try:
        if doomed:
            time.sleep(rng.uniform(0, 0.15))
            for i in doomed:
                os.kill(jobs[i], signal.SIGKILL)
    finally:
        for i, pid in enumerate(jobs):
            codes[i] = os.waitpid(pid, 0)[1]
        early, status = os.waitpid(watching, os.WNOHANG)
        if not early:
            os.kill(watching, signal.SIGKILL)
            status = os.waitpid(watching, 0)[1]
    assert os.WIFSIGNALED(status), "the reader met something that is not a whole checkpoint"
    for i, code in codes.items():
        assert code == 0 or (i in doomed and os.WIFSIGNALED(code)), f"job {i} ended with {code}"
    with os.fdopen(receive) as told:
        report = told.read()
    with os.fdopen(read_out, "wb"), os.fdopen(received, "rb") as reads:
        count = len(reads.read() or b"")
    look(folder, report)
    return report, count


def look(folder: Path, report: str) -> None:
    """Every name leads to a whole checkpoint of one save, and a name that was saved to is there."""
    for path in folder.iterdir():
        if not path.name.startswith("."):
            assert verify(path) == [], path.name
            assert is_of_one_save(read(path)), path.name
    if any(line.startswith("last ") and line.endswith("saved") for line in report.splitlines()):
        assert is_of_one_save(read(folder / "last"))
    save({"number": -2}, folder / "after")  # removes what the dead left behind
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert load({"number": 0}, folder / "after").state["number"] == -2


def run(trials: int, seed: int = 0) -> dict[str, int]:
    """How many saves were done and refused, and how often readers read something."""
    counts = {"saved": 0, "refused": 0, "reads": 0}
    with tempfile.TemporaryDirectory() as place:
        for number in range(trials):
            folder = Path(place) / str(number)
            folder.mkdir()
            report, reads = trial(folder, f"{seed} {number}")
            counts["saved"] += report.count("saved")
            counts["refused"] += report.count("refused")
            counts["reads"] += reads
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    amount = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    found = run(amount, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{amount} trials of two jobs: every name led to a whole checkpoint; {found}")
