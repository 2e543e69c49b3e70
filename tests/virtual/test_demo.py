"""The tour runs, says what it computed, and fits a terminal of 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise import demo
from shardwise.cli import main


def test_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert "Traceback" not in printed.out
    assert "NO" not in printed.out.split()
    for number in "12345":
        assert any(line.startswith(f"{number}. ") for line in lines)
    assert "f32[7,10] dp:S0 tp:S1  (4, 3)   (4, 1)   (3, 1)   yes" in lines
    assert "exchange over dpxtp" in printed.out
    assert "on 16,384 ranks" in printed.out


def test_the_command_is_the_same_tour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    assert "5. A dry run" in capsys.readouterr().out


@pytest.mark.parametrize("colour", ["FORCE_COLOR", "NO_COLOR"])
def test_the_module_runs_by_itself(colour: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), colour: "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "shardwise.demo"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert ("\x1b[" in done.stdout) == (colour == "FORCE_COLOR")


def test_what_is_watched_is_forgotten() -> None:
    demo.main()
    assert demo.observers == []
