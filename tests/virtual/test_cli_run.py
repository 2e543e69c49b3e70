"""`shardwise run`: a script runs as a script would, on virtual ranks, with the mesh that was chosen for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.fabric.world import PRESET

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(f"import sys\nimport shardwise as sw\n{text}\n")
        return str(path)

    return written


@pytest.mark.parametrize(
    ("mesh", "call", "expected"),
    [
        ("dp=2,tp=4", "'cpu'", "DeviceMesh(cpu dp=2 tp=4, virtual)"),
        ("2x4", "'cpu'", "DeviceMesh(cpu 2 4, virtual)"),
        ("2x4", "'cpu', mesh_dim_names=('dp', 'tp')", "DeviceMesh(cpu dp=2 tp=4, virtual)"),
        ("dp=2,tp=4", "'cpu', mesh_dim_names=('dp', 'tp')", "DeviceMesh(cpu dp=2 tp=4, virtual)"),
        ("8", "'cpu', (3,)", "DeviceMesh(cpu 3, virtual)"),
    ],
)
def test_a_script_gets_the_mesh(
    mesh: str, call: str, expected: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--mesh", mesh, write(f"print(sw.init_device_mesh({call}))")]) == 0
    assert capsys.readouterr().out.strip() == expected


def test_it_runs_as_a_script_would(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neighbour_of_script.py").write_text("name = 'beside'")
    script = write("import neighbour_of_script\nprint(__name__, sys.argv[1:], neighbour_of_script.name)")
    before = (list(sys.path), list(sys.argv), os.environ.get(PRESET))
    assert main(["run", "--mesh", "4", script, "--steps", "3", "--mesh", "5"]) == 0
    assert (list(sys.path), list(sys.argv), os.environ.get(PRESET)) == before
    assert capsys.readouterr().out.strip() == "__main__ ['--steps', '3', '--mesh', '5'] beside"
    sys.modules.pop("neighbour_of_script")


def test_real_numbers_are_computed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "mesh = sw.init_device_mesh('cpu')\n"
        "x = sw.ones(6, 4, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)])\n"
        "print(x.sum().item(), mesh.size())"
    )
    assert main(["run", "--mesh", "2x4", script]) == 0
    assert capsys.readouterr().out.strip() == "24.0 8"


def test_errors_are_the_scripts_own(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--mesh", "2", write("raise sw.LayoutError('mine')")])
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[1].endswith('script.py", line 3, in <module>')
    assert lines[-1] == "shardwise.errors.LayoutError: mine"


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("'what went wrong'", "what went wrong")])
def test_the_exit_status_is_the_scripts_own(code: str, status: object, write: Write) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--mesh", "2", write(f"sys.exit({code})")])
    assert ended.value.code == status


def test_a_script_that_ends_well_does(write: Write) -> None:
    assert main(["run", "--mesh", "2", write("sys.exit(0)")]) == 0


def test_explain_gives_a_mesh_too(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "mesh = sw.init_device_mesh('cpu')\n"
        "sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)]).sum(1).exp()"
    )
    assert main(["explain", "--mesh", "dp=2,tp=2", script]) == 0
    assert "on DeviceMesh(cpu dp=2 tp=2, virtual)" in capsys.readouterr().out


# ---------------------------------------------------------------- meshes without a shape


def test_without_a_shape_and_a_preset_virtual_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRESET, raising=False)
    with pytest.raises(sw.MeshError, match=r"needs a shape\n  hint: give one, or .*shardwise run --mesh"):
        sw.init_device_mesh("cpu")


def test_names_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESET, "dp=2,tp=4")
    with pytest.raises(sw.MeshError, match="names the axes x, y, and SHARDWISE_MESH=dp=2,tp=4 names them otherwise"):
        sw.init_device_mesh("cpu", mesh_dim_names=("x", "y"))
    monkeypatch.setenv(PRESET, "2xfour")
    with pytest.raises(sw.NotationError, match="expected a number of ranks"):
        sw.init_device_mesh("cpu")


def test_a_dry_run_takes_the_preset_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESET, "dp=64,tp=8")
    with sw.dry_run():
        assert str(sw.init_device_mesh("cuda")) == "DeviceMesh(cuda dp=64 tp=8, dry)"


def test_sizes_of_the_world_are_set(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write("import os\nprint(os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'], sw.is_main())")
    for given, expected in ((["-n", "8"], "8 8 True"), (["--mesh", "dp=2,tp=3"], "6 6 True")):
        assert main(["run", *given, script]) == 0
        assert capsys.readouterr().out.strip() == expected
    assert "WORLD_SIZE" not in os.environ
    assert main(["run", "-n", "4", write("print(sw.init_device_mesh('cpu'))")]) == 0
    assert capsys.readouterr().out.strip() == "DeviceMesh(cpu 4, virtual)"
    assert main(["run", "-n", "4", "--mesh", "4", script]) != 0
    assert "both --mesh and -n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "rank = int(__import__('os').environ['RANK'])",
        "rank = int(__import__('os').environ['LOCAL_RANK'])",
        "rank = __import__('torch').distributed.get_rank()",
        "__import__('torch').distributed.barrier()",
        "rank = sw.init_device_mesh('cpu').get_rank()",
        "rank = sw.init_device_mesh('cpu').get_local_rank()",
    ],
)
def test_a_line_that_asks_for_its_rank_is_shown_with_what_to_write(
    line: str, write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")  # of whoever started us
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "4", write(line)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert line in said
    assert "script.py" in said
    assert "shardwise.is_main()" in said
    assert os.environ["RANK"] == "3"
