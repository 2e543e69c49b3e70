"""Running somebody's script on virtual ranks: as `python script.py` would, with the mesh that was chosen for it.

What fails in it is the script's own error. Shared by the commands that run scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from shardwise.core.notation import parse_axes
from shardwise.errors import LayoutError
from shardwise.fabric.world import PRESET, virtual

__all__ = ["MESHES", "add_script_arguments", "end_as", "run_script"]

MESHES = """\
A script that makes a mesh without a shape gets the one of --mesh:
  mesh = shardwise.init_device_mesh("cpu")
and one that gives a shape gets that. The axes have the names of --mesh
(dp=2,tp=4), or those that the script gives (2x4). The same script runs under
torchrun: there SHARDWISE_MESH=dp=2,tp=4 in the environment says the same.
"""


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """The script, and what it is given."""
    parser.add_argument("script", help="the script; the meshes that it makes are virtual")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="what the script is given")


def run_script(script: str, args: list[str], mesh: str | None) -> BaseException | None:
    """Run a script as `python script args` would, on virtual ranks; how it ended, if not well.

    Args:
        script: its path.
        args: what it is given.
        mesh: the axes of the mesh that it gets where it gives no shape.
    """
    if not Path(script).is_file():
        raise LayoutError(f"there is no script {script}")
    if mesh is not None:
        parse_axes(mesh)
    with _as_started(script, args, mesh), virtual():
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return end if end.code else None
        except Exception as error:
            return _without_our_frames(error)
    return None


def end_as(failed: BaseException | None) -> None:
    """End as the script did."""
    sys.stdout.flush()
    if isinstance(failed, SystemExit):
        raise failed
    if failed is not None:
        traceback.print_exception(failed)
        raise SystemExit(1)


@contextlib.contextmanager
def _as_started(script: str, args: list[str], mesh: str | None) -> Iterator[None]:
    """The surroundings of a script that was started by itself."""
    argv, path, preset = sys.argv, list(sys.path), os.environ.get(PRESET)
    sys.argv, sys.path[:] = [script, *args], [os.path.dirname(os.path.abspath(script)), *path]
    if mesh is not None:
        os.environ[PRESET] = mesh
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if preset is not None:
            os.environ[PRESET] = preset
        elif mesh is not None:
            os.environ.pop(PRESET, None)


def _without_our_frames(error: Exception) -> Exception:
    """The error with the script's own lines on top: how it was started is not what went wrong."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return error.with_traceback(trace)
