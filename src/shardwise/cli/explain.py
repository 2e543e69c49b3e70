"""`shardwise explain`: runs a script on virtual ranks and says what moved, from which lines, and how to avoid it."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from shardwise.cli.command import Command
from shardwise.debug.explaining import explain
from shardwise.debug.report import Report
from shardwise.errors import LayoutError
from shardwise.fabric.world import virtual
from shardwise.text import print_lines

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `explain`."""
    parser.add_argument("--html", metavar="FILE", help="write a page to look at")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--json", metavar="FILE", help="write everything for programs")
    parser.add_argument("--lock", metavar="FILE", help="write the lock file that check_lock compares with")
    parser.add_argument("--candidates", action="store_true", help="also show what operators could have done instead")
    parser.add_argument("script", help="the script; the meshes that it makes are virtual")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="what the script is given")


def run(arguments: argparse.Namespace) -> None:
    """Run the script and show the report; one that fails is shown as far as it went, and its error is its own."""
    if not Path(arguments.script).is_file():
        raise LayoutError(f"there is no script {arguments.script}")
    report, failed = _run_script(arguments.script, arguments.args, arguments.candidates)
    sys.stdout.flush()
    print_lines(report)
    _write(report, arguments)
    if isinstance(failed, SystemExit):
        raise failed
    if failed is not None:
        traceback.print_exception(failed)
        raise SystemExit(1)


def _run_script(script: str, args: list[str], candidates: bool) -> tuple[Report, BaseException | None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:] = [script, *args], [os.path.dirname(os.path.abspath(script)), *path]
    failed: BaseException | None = None
    with virtual(), explain(candidates=candidates) as report:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            failed = end if end.code else None
        except Exception as error:
            failed = _without_our_frames(error)
        finally:
            sys.argv, sys.path[:] = argv, path
    return report, failed


def _without_our_frames(error: Exception) -> Exception:
    """The error with the script's own lines on top: how it was started is not what went wrong."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _write(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.html:
        report.to_html(arguments.html)
    if arguments.trace:
        report.to_chrome_trace(arguments.trace)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    if arguments.lock:
        report.save_lock(arguments.lock)
    written = [name for name in (arguments.html, arguments.trace, arguments.json, arguments.lock) if name]
    if written:
        print(f"\nwrote {', '.join(written)}")


COMMAND = Command(
    "run a script on virtual ranks and show what moved, from which lines, and how to avoid it",
    add_arguments,
    run,
    """\
The script makes its own meshes, of as many ranks as it likes; they are all run in this process.

examples:
  shardwise explain train.py --steps 1
  shardwise explain --html report.html --trace trace.json train.py --steps 1
  shardwise explain --lock communication.lock train.py
""",
)
