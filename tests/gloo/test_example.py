"""The example itself under torchrun, as its first lines say: every plan, with losses against those of one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llama import PLANS

ROOT = Path(__file__).parent.parent.parent
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (sys.executable, *command), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_under_torchrun() -> None:
    said = run(*LAUNCH, "examples/llama.py", "--plan", *PLANS, "--mesh", "2,2", "--steps", "3", "--dropout", "0.1")
    assert said.count("c10d") == len(PLANS)
    rows = [[float(word) for word in line.split()] for line in said.splitlines() if line[:1].isdigit()]
    assert len(rows) == 3
    for _, one, *several in rows:
        assert several == pytest.approx([one] * len(PLANS), rel=1e-5)
    assert rows[-1][1] < rows[0][1]
