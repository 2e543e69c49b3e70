"""`shardwise explain`: the script runs as a script would, and its report is shown and written."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli import main

SCRIPT = """\
import sys
import torch
import shardwise as sw
import beside

assert __name__ == "__main__"
print("given", sys.argv[1:])
mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)])
y = beside.double(x).sum(1).exp()
if "--fail" in sys.argv:
    raise ValueError("the script's own")
sys.exit(3 if "--exit" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "beside.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    yield str(tmp_path / "script.py")
    sys.modules.pop("beside", None)


def test_a_script_is_run_and_its_report_is_shown_and_written(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("page.html", "trace.json", "data.json", "communication.lock")}
    options = [f"--{kind}={path}" for kind, path in zip(("html", "trace", "json", "lock"), files.values(), strict=True)]
    path, argv = list(sys.path), list(sys.argv)
    assert main(["explain", *options, "--candidates", script, "--steps", "1"]) == 0
    assert (sys.path, sys.argv) == (path, argv)
    printed = capsys.readouterr()
    assert printed.err == ""
    given, report = printed.out.split("\n", 1)
    assert given == "given ['--steps', '1']"
    assert "all_reduce tp" in report
    assert "script.py:10" in report
    data = json.loads(files["data.json"].read_text())
    assert data["total"]["collectives"] == 1
    assert json.loads(files["trace.json"].read_text())["traceEvents"]
    assert "</html>" in files["page.html"].read_text()
    assert "aten.exp: all_reduce over tp" in files["communication.lock"].read_text()


def test_errors_are_the_scripts_own(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", script, "--fail"])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "1 collective" in printed.out  # as far as it went
    lines = printed.err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[1].endswith('script.py", line 12, in <module>')
    assert lines[-1] == "ValueError: the script's own"


def test_the_exit_status_is_the_scripts_own(script: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", script, "--exit"])
    assert ended.value.code == 3


def test_a_script_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "no_such_script.py"]) == 2
    assert "there is no script no_such_script.py" in capsys.readouterr().err
