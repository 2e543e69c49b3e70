"""`shardwise doctor`, under torchrun: versions, hosts, devices, clocks, speeds of axes, and collectives with values."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli.arguments import Command
from shardwise.core.mesh import chosen_fabric
from shardwise.core.notation import parse_axes
from shardwise.errors import UnsupportedError
from shardwise.fabric.link_measurements import destroy_when_all_done
from shardwise.fabric.rank_diagnosis import RankFacts, axis_speeds, gather_facts, self_test, slow_ranks
from shardwise.fabric.world import init_device_mesh, is_main
from shardwise.text import human_bytes, human_seconds, print_lines, slim_table

__all__ = ["COMMAND", "problems"]

SKEW = 1.0  # seconds between clocks; beyond it, files and logs of hosts are hard to compare
SHOWN = 16  # ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `doctor`."""
    parser.add_argument("--mesh", help="the mesh of the program: dp=2,tp=4 (default: all ranks along one axis)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace) -> None:
    """Gather, measure, test, and print on rank 0."""
    if chosen_fabric() != "c10d":
        raise UnsupportedError(
            "doctor compares several processes", hint="torchrun --nproc-per-node 4 -m shardwise doctor"
        )
    shape, names = (None, None) if arguments.mesh is None else parse_axes(arguments.mesh)
    mesh = init_device_mesh(arguments.device, shape, mesh_dim_names=names)
    facts = gather_facts(arguments.device)
    wrong, speeds = self_test(mesh), axis_speeds(mesh)
    main = is_main()
    destroy_when_all_done()
    if not main:
        return
    found = problems(facts, wrong)
    if arguments.json:
        report = {
            "mesh": repr(mesh),
            "ranks": [one._asdict() for one in facts],
            "axes": [one._asdict() for one in speeds],
            "self_test": wrong,
            "problems": found,
        }
        print(json.dumps(report, indent=2))
        return
    _print(repr(mesh), facts, speeds, wrong, found)


def problems(facts: list[RankFacts], wrong: dict[str, list[int]]) -> list[str]:
    """The problems found, one sentence each.

    Example:
        >>> facts = [RankFacts(rank, "a", "", f"torch 2.{rank}", 1.0, 0.0) for rank in range(2)]
        >>> for text in problems(facts, {"all_reduce over tp": [1]}):
        ...     print(text)
        all_reduce over tp gives wrong values on ranks 1
        versions differ: torch 2.0 on rank 0, torch 2.1 on rank 1
    """
    found = [
        f"{name} gives wrong values on ranks {', '.join(map(str, ranks))}" for name, ranks in wrong.items() if ranks
    ]
    versions = {one.versions: one.rank for one in reversed(facts)}
    if len(versions) > 1:
        each = sorted(versions.items(), key=lambda pair: pair[1])
        found.append("versions differ: " + ", ".join(f"{text} on rank {rank}" for text, rank in each))
    for rank in slow_ranks(facts):
        found.append(f"rank {rank} on {facts[rank].host} computes more slowly than most")
    hosts = {one.host: one for one in reversed(facts)}
    for host, one in hosts.items():
        if abs(one.clock) > SKEW:
            found.append(f"the clock of {host} is {one.clock:+.1f} s from that of {facts[0].host}")
    return found


def _print(mesh: str, facts: list[RankFacts], speeds: Any, wrong: dict[str, list[int]], found: list[str]) -> None:
    ranks = slim_table("rank", "host", "device", "versions", "work", "clock")
    for one in facts[:SHOWN]:
        cells = one.host, one.device, one.versions, human_seconds(one.seconds), f"{one.clock * 1e3:+.1f} ms"
        ranks.add_row(str(one.rank), *cells)
    axes = slim_table(f"axis of {mesh}", "ranks", "latency", "bandwidth")
    for one in speeds:
        axes.add_row(one.axis, str(one.ranks), human_seconds(one.latency), f"{human_bytes(one.bandwidth)}/s")
    more = [f"and {len(facts) - SHOWN} more ranks"] if len(facts) > SHOWN else []
    tested = f"{len(wrong)} collectives of axes tested, {sum(map(bool, wrong.values()))} with wrong values"
    verdict = [f"problem: {text}" for text in found] or ["no problem was found"]
    print_lines(ranks, *more, "", axes, "", tested, *verdict)


COMMAND = Command(
    "find problems of the processes of a job, under torchrun",
    add_arguments,
    run_doctor,
    """\
Compares versions, hosts, devices and clocks of all ranks, measures latency and
bandwidth of each axis, runs each collective with values that are checked, and
names slow ranks. Clocks are compared after a barrier, so its duration limits
their accuracy.

examples:
  torchrun --nproc-per-node 4 -m shardwise doctor
  torchrun --nnodes 2 ... -m shardwise doctor --mesh dp=2,tp=4
""",
)
