"""The walk: which functions of ours a call goes through, in order, cold and warm, on both kinds of ranks.

Prints for each call how many functions in how many files it enters, and the files in the order of the path.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.peers import start

SOURCE = str(Path(sw.__file__).parent)


class Walk(NamedTuple):
    """The functions of ours that a call entered, each once, in the order of the first visit; and all visits."""

    functions: tuple[tuple[str, str], ...]
    visits: int

    @property
    def files(self) -> list[str]:
        """The files, each once."""
        return list(dict.fromkeys(file for file, _ in self.functions))


def walk(call: Callable[[], object]) -> Walk:
    """Run a call and write down where it went."""
    seen: list[tuple[str, str]] = []

    def visit(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            seen.append((str(Path(code.co_filename).relative_to(SOURCE)), code.co_name))

    sys.setprofile(visit)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(tuple(dict.fromkeys(seen)), len(seen))


def calls(mesh: sw.DeviceMesh, size: int, warming: bool = False) -> dict[str, Callable[[], object]]:
    """Each call, on tensors of a size of its own; while warming, without those whose layouts are to be new."""
    local = torch.ones(size, 8)
    sharded = sw.DTensor.from_local(local, mesh, [sw.Shard(0), sw.Replicate()])
    other = sw.DTensor.from_local(local, mesh, [sw.Shard(0), sw.Replicate()])
    weight = sw.DTensor.from_local(torch.ones(4, 8), mesh, [sw.Replicate(), sw.Shard(0)]).requires_grad_()
    with torch.no_grad():
        made = sharded.clone()

    def linear() -> None:
        F.linear(made, weight).sum().backward()

    mixed = [sw.DTensor.from_local(local, mesh, [sw.Replicate(), sw.Shard(0)]) for _ in range(2)]
    first = {} if warming else {"a + b, the first in these layouts": lambda: mixed[0] + mixed[1]}
    return {
        **first,
        "a + b": lambda: sharded + other,
        "redistribute S0 R -> R R": lambda: sharded.redistribute(placements=[sw.Replicate(), sw.Replicate()]),
        "F.linear, forward and backward": linear,
    }


def main() -> None:
    """Walk through each call with a shape that is new, and when it is known."""
    start(8)
    fabrics: dict[str, Callable[[], sw.DeviceMesh]] = {
        "c10d": lambda: sw.init_device_mesh("cpu", (4, 2)),
        "virtual": lambda: _virtual((4, 2)),
    }
    for fabric, make in fabrics.items():
        mesh = make()
        for call in calls(mesh, 3, warming=True).values():  # what is done once in a process
            call()
        for name, call in calls(mesh, 5).items():
            for heat in ("cold", "warm"):
                found = walk(call)
                for _ in range(3):  # a second gradient is added to the first, which is new once more
                    call()
                print(f"{fabric}, {heat}: {name}: {len(found.functions)} functions in {len(found.files)} files")
                for file in found.files:
                    print(f"    {file}: {', '.join(function for f, function in found.functions if f == file)}")


def _virtual(shape: tuple[int, ...]) -> sw.DeviceMesh:
    with sw.virtual():
        return sw.init_device_mesh("cpu", shape)


if __name__ == "__main__":
    main()
