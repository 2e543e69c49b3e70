"""Facts of every rank and checks of their communication, for `shardwise doctor`. Every process calls each function."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.core.mesh import DeviceMesh
from shardwise.fabric.c10d import c10d
from shardwise.fabric.link_measurements import slowest_seconds, timed_collective

__all__ = ["AxisSpeed", "RankFacts", "axis_speeds", "gather_facts", "self_test", "slow_ranks"]

SLOW = 2.0  # times the median, from which a rank counts as slow
WORK = 192  # rows of the matrices that every rank multiplies
SMALL, LARGE = 1 << 10, 1 << 20  # bytes: latency, bandwidth


class RankFacts(NamedTuple):
    """The facts of one rank."""

    rank: int
    host: str
    device: str
    versions: str
    seconds: float  # time of its matrix products
    clock: float  # seconds that its clock is ahead of the first rank's


class AxisSpeed(NamedTuple):
    """Latency and bandwidth of the groups along an axis, by an all-reduce."""

    axis: str
    ranks: int
    latency: float
    bandwidth: float


def gather_facts(device_type: str) -> list[RankFacts]:
    """The facts of every rank, in order."""
    device = torch.cuda.get_device_name() if device_type == "cuda" else f"{os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {dist.get_backend()}"
    spent = _seconds_of_work(device_type)
    dist.barrier()
    clocks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(clocks, time.time())
    mine = RankFacts(dist.get_rank(), socket.gethostname(), device, versions, spent, time.time())
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, mine)
    return [one._replace(clock=clock - clocks[0]) for one, clock in zip(facts, clocks, strict=True)]


def _seconds_of_work(device_type: str) -> float:
    """The minimum time of some matrix products, so that other load for a moment does not count."""
    x = torch.ones(WORK, WORK, device=device_type)
    spent = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(5):
            x.mm(x)
        if device_type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - begin)
    return min(spent)


def slow_ranks(facts: list[RankFacts]) -> list[int]:
    """The ranks whose work took much longer than the median.

    Example:
        >>> times = (1.0, 1.1, 5.0)
        >>> slow_ranks([RankFacts(rank, "a", "", "", seconds, 0.0) for rank, seconds in enumerate(times)])
        [2]
    """
    usual = statistics.median(one.seconds for one in facts)
    return [one.rank for one in facts if one.seconds > SLOW * usual]


def axis_speeds(mesh: DeviceMesh) -> list[AxisSpeed]:
    """Latency and bandwidth of each axis."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    found = []
    for axis, ranks in enumerate(mesh.shape):
        if ranks > 1:
            group = c10d.group(mesh, (axis,))
            (small, _), (large, received) = (timed_collective("all_reduce", group, n, device) for n in (SMALL, LARGE))
            latency, seconds = slowest_seconds(small, device), slowest_seconds(large, device)
            found.append(AxisSpeed(mesh.axis_name(axis), ranks, latency, received / max(seconds - latency, 1e-9)))
    return found


def self_test(mesh: DeviceMesh) -> dict[str, list[int]]:
    """For each axis and collective the ranks that got wrong values."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    wrong: dict[str, list[int]] = {}
    for axis, size in enumerate(mesh.shape):
        if size == 1:
            continue
        group = c10d.group(mesh, (axis,))
        for name, run in _collectives(group, device).items():
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, bool(run()))
            wrong[f"{name} over {mesh.axis_name(axis)}"] = [rank for rank, right in enumerate(said) if not right]
    return wrong


def _collectives(group: Any, device: torch.device) -> dict[str, Callable[[], bool]]:
    """Each collective with values that depend on the rank, and whether the result is right."""
    count, me = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.arange(count, dtype=torch.float32, device=device)
    total = float(count * (count - 1) // 2)

    def all_reduce() -> bool:
        x = torch.full((5,), float(me), device=device)
        group.allreduce([x]).wait()
        return bool((x == total).all())

    def all_gather() -> bool:
        out = torch.empty(count * 3, device=device)
        group._allgather_base(out, torch.full((3,), float(me), device=device)).wait()
        return torch.equal(out, rows.repeat_interleave(3))

    def reduce_scatter() -> bool:
        out = torch.empty(2, device=device)
        group._reduce_scatter_base(out, (rows + me).repeat_interleave(2)).wait()
        return bool((out == me * count + total).all())

    def all_to_all() -> bool:
        out = torch.empty(count, device=device)
        group.alltoall_base(out, rows + 100.0 * me, [], []).wait()
        return torch.equal(out, 100.0 * rows + me)

    def broadcast() -> bool:
        x = torch.full((4,), float(me), device=device)
        group.broadcast(x, 0).wait()
        return bool((x == 0).all())

    return {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
    }
