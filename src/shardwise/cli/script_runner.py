"""Runs a user's script on virtual ranks, as `python script.py` would, with a preset mesh.

Used by the commands `run` and `explain`. Exceptions of the script are shown as its own.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from shardwise.core.notation import parse_axes
from shardwise.errors import LayoutError
from shardwise.fabric import rank_threads
from shardwise.fabric.c10d import c10d
from shardwise.fabric.rank_threads import RankThreads, torchrun_environment
from shardwise.fabric.thread_group import forget_groups, thread_groups
from shardwise.fabric.world import PRESET, virtual

__all__ = ["MESHES", "add_script_arguments", "end_as", "run_script", "run_script_in_threads"]

SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")  # variables of torchrun with one value for all ranks of a machine
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")  # variables that differ by rank

MESHES = """\
A script that creates a mesh without a shape gets the mesh of --mesh:
  mesh = shardwise.init_device_mesh("cpu")
A shape in the script takes precedence. The axes have the names of --mesh
(dp=2,tp=4), or those of the script (2x4). The same script runs under torchrun;
set SHARDWISE_MESH=dp=2,tp=4 in the environment in place of --mesh.
"""


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments."""
    parser.add_argument("script", help="the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")


def run_script(script: str, args: list[str], mesh: str | None) -> BaseException | None:
    """Run a script as `python script args` would, on virtual ranks. Returns its exception, None on success.

    Args:
        script: its path.
        args: its arguments.
        mesh: the axes of the default mesh.
    """
    _check_script(script, mesh)
    with _as_started(script, args, mesh), virtual():
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return end if end.code else None
        except Exception as error:
            return _with_remedy(_without_our_frames(error))
    return None


def run_script_in_threads(script: str, args: list[str], ranks: int, mesh: str | None) -> BaseException | None:
    """Run a script as `torchrun --nproc-per-node ranks script args` would, with ranks as threads.

    Returns the exception of the first rank that failed, None on success.

    Args:
        script: its path.
        args: its arguments.
        ranks: the number of ranks.
        mesh: the axes of the default mesh.
    """
    _check_script(script, mesh)
    if mesh is not None and math.prod(parse_axes(mesh)[0]) != ranks:
        raise LayoutError(f"--mesh {mesh} does not have {ranks} ranks", hint="set -n to the number of ranks of --mesh")

    def program(rank: int) -> None:
        try:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
            c10d.end()  # as at the end of a process
        finally:
            forget_groups()

    with _as_started(script, args, mesh), thread_groups():
        roots = [os.path.dirname(os.path.abspath(script)), os.getcwd()]
        failure = RankThreads(ranks, roots, torchrun_environment(ranks)).run(program)
    if failure is None:
        return None
    rank, error = failure
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, Exception):
        error = _without_our_frames(error)
        error.add_note(f"raised by rank {rank} of {ranks}")
    return error


def _check_script(script: str, mesh: str | None) -> None:
    if not Path(script).is_file():
        raise LayoutError(f"there is no script {script}", hint="give the path of a Python file")
    if mesh is not None:
        parse_axes(mesh)


def end_as(failed: BaseException | None) -> None:
    """Exit with the status of the script."""
    sys.stdout.flush()
    if isinstance(failed, SystemExit):
        raise failed
    if failed is not None:
        traceback.print_exception(failed)
        raise SystemExit(1)


@contextlib.contextmanager
def _as_started(script: str, args: list[str], mesh: str | None) -> Iterator[None]:
    """Set argv, path and environment as for a script started by Python."""
    argv, path = sys.argv, list(sys.path)
    before = {name: os.environ.get(name) for name in (PRESET, *SIZES, *RANKS)}
    sys.argv, sys.path[:] = [script, *args], [os.path.dirname(os.path.abspath(script)), *path]
    for name in RANKS:
        os.environ.pop(name, None)
    if mesh is not None:
        os.environ[PRESET] = mesh
        os.environ.update(dict.fromkeys(SIZES, str(math.prod(parse_axes(mesh)[0]))))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _with_remedy(error: Exception) -> Exception:
    """Add a hint to the error of a line that reads its rank."""
    asked_environment = isinstance(error, KeyError) and error.args and error.args[0] in RANKS
    if asked_environment or "process group has not been initialized" in str(error):
        error.add_note(
            "virtual ranks run in lockstep, so the script has no single rank\n"
            "  hint: `shardwise run -n N` runs each rank as a thread, torchrun as a process; in lockstep, put the work "
            "of one rank (printing, saving) under `if shardwise.is_main():`, and use a RankTensor or a DTensor for "
            "data that differs by rank"
        )
    return error


def _without_our_frames(error: Exception) -> Exception:
    """Remove the frames of the script runner from the traceback."""
    trace = error.__traceback__
    ours = (__file__, rank_threads.__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return error.with_traceback(trace)
