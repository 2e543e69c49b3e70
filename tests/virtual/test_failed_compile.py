"""A compilation that fails changes nothing: eager programs give the same results as before."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_eager_programs_are_the_same_after_each_failure() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.virtual.failed_compile"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    stages = done.stdout.splitlines()
    assert len(stages) == 13, done.stdout
    for stage in stages:
        assert "did not fail" not in stage
        assert stage.endswith("changed: nothing"), stage
