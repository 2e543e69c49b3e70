"""What `import shardwise` adds to `import torch`, in fresh processes. Asked: at most 50 ms."""

import os
import statistics
import subprocess
import sys

from bench.figures import figure

LIMIT_MS = 50.0
ROUNDS = 7
PROBE = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
{statement}
end = time.perf_counter()
print((end - start) * 1e3, (end - middle) * 1e3)
"""


def measure(statement: str) -> tuple[float, float]:
    """Milliseconds for `import torch` and the statement together, and for the statement alone."""
    program = PROBE.format(statement=statement)
    # with compiled files, as an installed package has them
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    whole, added = map(float, result.stdout.split())
    return whole, added


def main() -> None:
    without: list[float] = []
    whole: list[float] = []
    added: list[float] = []
    measure("import shardwise")  # writes the .pyc files, warms the disk cache
    for _ in range(ROUNDS):
        without.append(measure("pass")[0])
        both, alone = measure("import shardwise")
        whole.append(both)
        added.append(alone)
    difference = statistics.median(whole) - statistics.median(without)
    alone = statistics.median(added)
    print(f"import torch                   {statistics.median(without):8.1f} ms (median of {ROUNDS} processes)")
    print(f"import torch, import shardwise {statistics.median(whole):8.1f} ms; difference {difference:+.1f} ms")
    print(f"import shardwise after torch   {figure('import shardwise after torch', alone, LIMIT_MS, ' ms')}")


if __name__ == "__main__":
    main()
