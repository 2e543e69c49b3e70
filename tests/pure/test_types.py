"""A user's program passes a strict type checker: every public name that it uses has a complete type."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("typed_program.py")
SOURCE = Path(__file__).parents[2] / "src"


def errors_of(folder: Path, program: str) -> list[str]:
    """The output of basedpyright for a program in strict mode."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "include": ["program.py"], "extraPaths": [str(SOURCE)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", str(folder)], capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1, done.stdout
    return [f"{each['range']['start']['line'] + 1}: {each['message']}" for each in found["generalDiagnostics"]]


def test_a_program_of_a_user_is_typed_completely(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    assert (SOURCE / "shardwise" / "py.typed").exists()
    program = PROGRAM.read_text(encoding="utf-8")
    wrong = "\n\ndef wrong(x: DTensor) -> int:\n    return x.placements\n"  # which shows that types are seen
    [error] = errors_of(tmp_path, program + wrong)
    assert "tuple[Placement, ...]" in error
