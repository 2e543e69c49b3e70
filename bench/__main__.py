"""Runs every measurement in turn, or those named: `python -m bench`, `python -m bench import_time`."""

import importlib
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import torch

import bench
from bench.figures import figures, table


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


def main(names: Sequence[str]) -> int:
    known = measurements()
    if unknown := [name for name in names if name not in known]:
        print(f"no measurement named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    print(machine())
    for name in names or known:
        print(f"\n== {name} ==", flush=True)
        known[name]()
    if figures:
        print(f"\n{table()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
