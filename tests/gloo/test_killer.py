"""A few kills during a save; `python -m tests.gloo.killer` does as many as one likes."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_kill_leaves_whole_checkpoints_alone(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gloo.killer", "4", "1"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all whole") == 4
