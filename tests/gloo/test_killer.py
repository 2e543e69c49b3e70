"""A few kills during a save, and trials of two jobs; the modules killer and rival_jobs run as many as one likes."""

import os
import subprocess
import sys
from pathlib import Path


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)}
    environment |= {"OMP_NUM_THREADS": "1"}
    full = [sys.executable, "-m", *command]
    done = subprocess.run(full, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_kill_leaves_whole_checkpoints_alone(tmp_path: Path) -> None:
    assert run(tmp_path, "tests.gloo.killer", "4", "1").count("all whole") == 4


def test_two_jobs_with_one_path_leave_whole_checkpoints(tmp_path: Path) -> None:
    assert "5 trials of two jobs: every name led to a whole checkpoint" in run(tmp_path, "tests.gloo.rival_jobs", "5")
