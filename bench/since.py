"""This tree beside another one, for example a worktree of an older commit: `python -m bench.since /tmp/before`.

Import time, warm and cold dispatch, in processes that take turns. Times are CPU time, the least of each tree, so that
other programs on the machine change little.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import cold, dispatch
from bench.peers import Peer, start

ROUNDS = 3
REPEATS = 60
CALLS = 20
HERE = Path(__file__).parents[1]
IMPORT = """
import time, torch
begin = time.process_time()
import shardwise
print((time.process_time() - begin) * 1e6)
"""


def least(call: Callable[[], object]) -> float:
    """The least CPU time of a warm call, in microseconds."""
    found = []
    for _ in range(REPEATS):
        begin = time.process_time_ns()
        for _ in range(CALLS):
            call()
        found.append((time.process_time_ns() - begin) / CALLS / 1e3)
    return min(found)


def once(call: Callable[[], object]) -> float:
    """The CPU time of one call, in microseconds."""
    begin = time.process_time_ns()
    call()
    return (time.process_time_ns() - begin) / 1e3


def probes() -> Iterator[tuple[str, float]]:
    """The name and time of each measurement."""
    start(64)
    with torch.no_grad():
        given = dispatch.tensors(Peer("shardwise", (64,)))
        for name, (run, _) in dispatch.OPERATORS.items():
            run(*given)
            yield f"warm {name}", least(lambda run=run: run(*given))
        for shape in ((64,), (8, 8)):
            for name in cold.calls(Peer("shardwise", shape)):
                calls = cold.thunks(Peer("shardwise", shape), name)
                calls[0]()
                yield f"cold {name}, {len(shape)} axes", min(once(call) for call in calls[1:])


def run(tree: Path, *arguments: str) -> str:
    """The last line that Python prints with the package of a tree, and the benchmarks of this one."""
    # with compiled files, as an installed package has them
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": f"{tree}/src{os.pathsep}{HERE}"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=HERE)
    return done.stdout.splitlines()[-1]


def measured(tree: Path) -> dict[str, float]:
    """All probes in fresh processes on the package of a tree."""
    return {"import": float(run(tree, "-c", IMPORT))} | json.loads(run(tree, "-m", "bench.since", "--probe"))


def compare(before: Path) -> None:
    """Print the ratio of this tree to another, for each probe."""
    rounds = [(measured(before), measured(HERE)) for _ in range(ROUNDS)]
    ratios = {}
    for name in rounds[0][0]:
        old, new = (min(each[side][name] for each in rounds) for side in (0, 1))
        ratios[name] = new / old
        print(f"{name:32} {old:10.1f} us {new:10.1f} us {new / old:6.2f}")
    for kind in ("import", "warm", "cold"):
        found = [ratio for name, ratio in ratios.items() if name.startswith(kind)]
        print(f"{kind}: median ratio {statistics.median(found):.2f}, largest {max(found):.2f}")


if __name__ == "__main__":
    if sys.argv[1] == "--probe":
        print(json.dumps(dict(probes())))
    else:
        compare(Path(sys.argv[1]).resolve())
