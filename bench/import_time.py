"""What `import shardwise` adds to `import torch`, in fresh processes. Asked: at most 50 ms.

The import loads data types alone. What a program loads when it makes its first mesh is measured beside it, and what
torch's own DTensor loads. Times are CPU time, the median of processes that take turns.
"""

import os
import statistics
import subprocess
import sys

from bench.figures import figure

LIMIT_MS = 50.0
ROUNDS = 7
PROBE = """
import sys, time
import torch
loaded, start = set(sys.modules), time.process_time()
{statement}
print((time.process_time() - start) * 1e3, len(set(sys.modules) - loaded))
"""
IMPORT = "import shardwise"
FIRST_MESH = "import shardwise; shardwise.init_device_mesh('cpu', (2,))"
PEER = "import torch.distributed.tensor"


def measure(statement: str) -> tuple[float, int]:
    """Milliseconds of CPU time for a statement after `import torch`, and how many modules it loads."""
    # with compiled files, as an installed package has them
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    milliseconds, modules = result.stdout.split()
    return float(milliseconds), int(modules)


def main() -> None:
    measure(FIRST_MESH)  # writes the .pyc files, warms the disk cache
    found: dict[str, list[tuple[float, int]]] = {IMPORT: [], FIRST_MESH: [], PEER: []}
    for _ in range(ROUNDS):
        for statement, times in found.items():
            times.append(measure(statement))
    middle = {statement: statistics.median(time for time, _ in times) for statement, times in found.items()}
    modules = {statement: times[0][1] for statement, times in found.items()}
    shown = figure("import shardwise after torch", middle[IMPORT], LIMIT_MS, " ms")
    print(f"import shardwise               {shown}, {modules[IMPORT]} modules")
    print(f"import shardwise, first mesh   {middle[FIRST_MESH]:8.1f} ms, {modules[FIRST_MESH]} modules")
    print(f"import torch.distributed.tensor {middle[PEER]:7.1f} ms, {modules[PEER]} modules")


if __name__ == "__main__":
    main()
