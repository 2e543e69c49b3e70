"""Runs the measurements in turn, or those named: `python -m bench`, `python -m bench import_time`.

    python -m bench --keep figures.json --write docs/performance.md --plots docs/images    # one sitting

`--keep FILE` writes figures and points to a file after each measurement. Named measurements replace theirs in that
file; a run of all begins it again, so that all are of one sitting. `--write PAGE` replaces the table of a page,
`--plots FOLDER` draws the plots as SVG. A measurement that fails or takes too long is named in the table, and the
others go on; what has not begun when `--minutes` are over is named, too.

Each runs in a process of its own, so that none finds what another has left behind: groups, caches, threads. Without
names, those of `APART` are left out.
"""

import argparse
import contextlib
import importlib
import os
import pkgutil
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import torch

import bench
from bench.figures import Measured, draw_plots, leave, read, table, write

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
# Left out unless named: they need a GPU, root or another library, or measure no figure.
APART = ("captured_h200", "dry_prediction", "hosts", "jax_devices", "walk")
# At the end: dry runs, whose counts and bytes depend on no machine.
LAST = ("dry_ranks", "memory_ranks", "weak_scaling")


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
    """Processor, cores, versions: what a number needs beside it to mean anything."""
    lines = [
        f"cpu     {cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"python  {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        lines.append(f"cuda    {torch.cuda.get_device_name()}, {torch.version.cuda}")
    return "\n".join(lines)


def now() -> str:
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"


def run_alone(name: str, limit: float) -> Measured:
    """Run one measurement in a process of its own, within a number of seconds."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "figures.json"
        command = [sys.executable, "-c", f"from bench.__main__ import measure; measure({name!r}, {str(kept)!r})"]
        begin, failed = time.monotonic(), ""
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                code = process.wait(limit)
                failed = f"it ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                failed = f"it took more than {limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # and whatever it has started
                    os.killpg(process.pid, signal.SIGKILL)
        print(f"{name}: {failed or 'measured'} ({time.monotonic() - begin:.0f} s)", flush=True)
        found = read(kept)[""] if kept.exists() else Measured(now(), failed)
    return found._replace(failed=failed)


def measure(name: str, kept: str) -> None:
    """Run one measurement here, and leave its figures in a file, those before an error, too."""
    when = now()
    try:
        measurements()[name]()
    finally:
        leave(Path(kept), when)


def write_table(page: Path, on: str, measured: Mapping[str, Measured]) -> None:
    """Replace what is between the two comments of a page by the dates, the machine and the table."""
    text = page.read_text()
    begin, end = (text.index(mark) for mark in (BEGIN, END))
    dates = sorted(one.when for one in measured.values())
    head = f"```text\ndate    {dates[0]} to {dates[-1]}\n{on}\n```" if dates else ""
    page.write_text(f"{text[: begin + len(BEGIN)]}\n\n{head}\n\n{table(measured)}\n\n{text[end:]}")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", help="measurements; all but those of APART by default")
    parser.add_argument("--keep", type=Path, help="file to which figures and points are written")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    parser.add_argument("--write", type=Path, help="page whose table of figures is replaced")
    parser.add_argument("--show", action="store_true", help="measure nothing; show what the file of --keep has")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one measurement may take")
    parser.add_argument("--minutes", type=float, default=20, help="after which no further one is begun")
    asked = parser.parse_args(words)
    known = measurements()
    if unknown := [name for name in asked.names if name not in known]:
        print(f"no measurement named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    on = machine()
    print(on)
    kept = bool(asked.names or asked.show) and asked.keep and asked.keep.exists()
    measured = read(asked.keep) if kept else {}
    ordinary = [name for name in known if name not in (*APART, *LAST)]
    names = () if asked.show else asked.names or [*ordinary, *LAST]
    end = time.monotonic() + asked.minutes * 60
    for name in names:
        print(f"\n== {name} ==", flush=True)
        late = time.monotonic() > end
        measured[name] = Measured(now(), "the time was over") if late else run_alone(name, asked.limit)
        if asked.keep:
            write(measured, asked.keep)
    print(f"\n{table(measured)}")
    if asked.write:
        write_table(asked.write, on, measured)
    if asked.plots:
        print(*draw_plots(measured.values(), asked.plots), sep="\n")
    return 1 if any(measured[name].failed for name in names) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
