"""Runs every measurement in turn, or those named: `python -m bench`, `python -m bench import_time`.

Each runs in a process of its own, so that none finds what another has left behind: groups, caches, threads.
"""

import importlib
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import torch

import bench
from bench.figures import figures, leave, table, take_over


def measurements() -> dict[str, Callable[[], object]]:
    """Every module of this folder that has a `main()`, by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(bench.__path__) if not info.name.startswith("_"))
    modules = {name: importlib.import_module(f"bench.{name}") for name in names}
    return {name: module.main for name, module in modules.items() if hasattr(module, "main")}


def cpu_model() -> str:
    """What the machine calls its processor."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """Date, processor, cores, versions: what a number needs beside it to mean anything."""
    lines = [
        f"date    {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        f"cpu     {cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"python  {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        lines.append(f"cuda    {torch.cuda.get_device_name()}, {torch.version.cuda}")
    return "\n".join(lines)


def run_alone(name: str) -> bool:
    """Run one measurement in a process of its own, and take over its figures; says whether it went well."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "figures.json"
        command = [sys.executable, "-c", f"from bench.__main__ import measure; measure({name!r}, {str(kept)!r})"]
        code = subprocess.run(command, check=False).returncode
        if kept.exists():
            take_over(kept)
    if code:
        print(f"{name} ended with {code}", flush=True)
    return code == 0


def measure(name: str, kept: str) -> None:
    """Run one measurement here, and leave its figures in a file."""
    measurements()[name]()
    leave(Path(kept))


def main(names: Sequence[str]) -> int:
    known = measurements()
    if unknown := [name for name in names if name not in known]:
        print(f"no measurement named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    print(machine())
    fine = True
    for name in names or known:
        print(f"\n== {name} ==", flush=True)
        fine = run_alone(name) and fine
    if figures:
        print(f"\n{table()}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
