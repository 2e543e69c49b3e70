"""`shardwise explain`: runs a script on virtual ranks and reports its communication by line, and how to avoid it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shardwise.cli.arguments import Command, writable
from shardwise.cli.script_runner import MESHES, add_script_arguments, end_as, run_script
from shardwise.debug.explain_report.explain_context import explain
from shardwise.debug.explain_report.report import Report
from shardwise.text import print_lines

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `explain`."""
    parser.add_argument("--html", metavar="FILE", help="write the report as an HTML page")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--lock", metavar="FILE", help="write a lock file for check_lock")
    parser.add_argument("--candidates", action="store_true", help="also show the rejected candidates of operators")
    parser.add_argument("--mesh", help="the mesh of scripts that give no shape: dp=2,tp=4 or 2x4")
    add_script_arguments(parser)


def run_explain(arguments: argparse.Namespace) -> None:
    """Run the script and print the report, also after an error of the script, and exit with its status."""
    for name in _files(arguments):
        writable(name)
    with explain(candidates=arguments.candidates) as report:
        failed = run_script(arguments.script, arguments.args, arguments.mesh)
    sys.stdout.flush()
    print_lines(report)
    _write(report, arguments)
    end_as(failed)


def _write(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.html:
        report.to_html(arguments.html)
    if arguments.trace:
        report.to_chrome_trace(arguments.trace)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    if arguments.lock:
        report.save_lock(arguments.lock)
    if written := _files(arguments):
        print(f"\nwrote {', '.join(written)}")


def _files(arguments: argparse.Namespace) -> list[str]:
    return [name for name in (arguments.html, arguments.trace, arguments.json, arguments.lock) if name]


COMMAND = Command(
    "run a script on virtual ranks and show its communication, and how to avoid it",
    add_arguments,
    run_explain,
    """\
The script creates its own meshes, of any number of ranks. All ranks run in this
process.
"""
    + MESHES
    + """
examples:
  shardwise explain train.py --steps 1
  shardwise explain --html page.html --trace trace.json train.py --steps 1
  shardwise explain --lock communication.lock train.py
""",
)
