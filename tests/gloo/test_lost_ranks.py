"""A rank is lost while another is in compiled or captured code: the error names collective, axis, ranks and line."""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gloo import lost_rank_programs
from tests.gloo.lost_rank_programs import TIMEOUT

SOURCE = Path(inspect.getsourcefile(lost_rank_programs) or "")


def line_with(mark: str) -> str:
    """`file:line` of the line of the programs that ends with a comment."""
    lines = SOURCE.read_text().splitlines()
    return f"{SOURCE.name}:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


def raised(kind: str, fault: str, folder: Path) -> dict[str, tuple[str, str, float]]:
    command = (sys.executable, "-m", "tests.gloo.lost_rank_programs", kind, fault, str(folder))
    paths = os.pathsep.join(path for path in sys.path if path)
    ranks = []
    try:
        for rank in range(2):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": paths}
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"cache{rank}")
            with (folder / f"rank{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 400
        while not (folder / "found.json").exists():
            assert ranks[0].poll() in (None, 0), (folder / "rank0.log").read_text()
            assert time.monotonic() < deadline, "rank 0 hangs"
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return json.loads((folder / "found.json").read_text())


PROGRAMS = {
    "aot_eager": ["forward", "backward", "optimizer"],
    "inductor": ["forward", "backward"],
    "captured": ["captured, None", "loaded", "captured, inductor"],
}
COLLECTIVES = r"^\S+: (all-gather|all-reduce|all-reduce \(sum\)|reduce-scatter \(sum\)) over tp\b"


@pytest.mark.parametrize(("kind", "fault"), [*((kind, "kill") for kind in PROGRAMS), ("aot_eager", "freeze")])
def test_compiled_and_captured_code_names_what_it_waits_for(kind: str, fault: str, tmp_path: Path) -> None:
    found = raised(kind, fault, tmp_path)
    assert list(found) == PROGRAMS[kind]
    for name, (error, text, seconds) in found.items():
        assert error == "LostRankError", (name, text)
        assert re.search(COLLECTIVES, text), (name, text)
        assert "failed on rank 0 of " in text, (name, text)
        assert re.search(rf", at \S*{SOURCE.name}:\d+", text), (name, text)
        assert "it communicates with ranks 1, and" in text, (name, text)
        assert seconds < TIMEOUT + 60, (name, seconds)  # of a loaded machine
    place = {"captured": "in the captured function captured_step"}.get(kind, "in compiled code")
    for name in found:
        assert place in found[name][1]
    wanted = "captured, None" if kind == "captured" else "forward"
    assert line_with("forward") in found[wanted][1].partition(" failed on ")[0], found[wanted]  # not that of the call
