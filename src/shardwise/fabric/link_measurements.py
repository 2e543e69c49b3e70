"""Measures the links of the processes: which ranks share a host, the time of collectives by group, kind and size."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.core.mesh import DeviceMesh
from shardwise.errors import UnsupportedError
from shardwise.fabric.c10d import c10d
from shardwise.fabric.machine_file import COLLECTIVES, Machine, Measurement
from shardwise.plan.cost import Link, all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes

__all__ = [
    "RankHosts",
    "destroy_when_all_done",
    "find_hosts",
    "fit_link",
    "host_mesh",
    "measure_machine",
    "slowest_seconds",
    "timed_collective",
]

SAMPLES = 5
LONGEST = 2.0  # seconds that the samples of one measurement may take


class RankHosts(NamedTuple):
    """The host of each rank, by name."""

    names: tuple[str, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts in the order of their first ranks."""
        return tuple(dict.fromkeys(self.names))

    @property
    def ranks_per_host(self) -> int | None:
        """The number of ranks of each host; None if ranks are not numbered host by host with equal counts."""
        count = len(self.names) // len(self.hosts)
        regular = [host for host in self.hosts for _ in range(count)]
        return count if tuple(regular) == self.names else None


def find_hosts() -> RankHosts:
    """The host of every rank. Every process calls it."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return RankHosts(tuple(names))


def destroy_when_all_done() -> None:
    """Destroy the process groups when every process is done: an earlier exit would break the connections of others."""
    dist.barrier()
    dist.destroy_process_group()


def host_mesh(device_type: str, ranks_per_host: int) -> DeviceMesh:
    """The mesh of hosts by the ranks of each."""
    world = dist.get_world_size()
    ranks = torch.arange(world, device="cpu").reshape(world // ranks_per_host, ranks_per_host)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("hosts", "ranks"), fabric=c10d.name)


def slowest_seconds(call: Callable[[], object], device: torch.device, samples: int = SAMPLES) -> float:
    """The median over samples of the time of the slowest rank. Every process calls it, with the same number."""
    call()
    spent: list[float] = []
    count = samples
    while len(spent) < count:
        dist.barrier()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        longest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        spent.append(longest.item())
        count = max(2, min(samples, int(LONGEST / max(spent[-1], 1e-9))))  # equal on all ranks
    return statistics.median(spent)


def timed_collective(
    collective: str, group: Any, nbytes: int, device: torch.device
) -> tuple[Callable[[], object], float]:
    """A collective in which the largest tensor has about `nbytes`, and the bytes that a rank receives in it."""
    ranks = dist.get_world_size(group)
    part = max(1, nbytes // 4 // ranks)
    full, own = torch.ones(part * ranks, device=device), torch.ones(part, device=device)
    block = float(part * 4)
    match collective:
        case "all_reduce":
            return lambda: group.allreduce([full]).wait(), all_reduce_bytes(ranks, block * ranks)
        case "all_gather":
            return lambda: group._allgather_base(full, own).wait(), all_gather_bytes(ranks, block)
        case "reduce_scatter":
            return lambda: group._reduce_scatter_base(own, full).wait(), reduce_scatter_bytes(ranks, block)
        case _:
            target = torch.empty_like(full)
            return lambda: group.alltoall_base(target, full, [], []).wait(), all_to_all_bytes(ranks, block * ranks)


def measure_machine(
    device_type: str, sizes: Sequence[int], say: Callable[[str], object] = lambda text: None
) -> Machine:
    """Measure the collectives of all kinds of groups. Every process calls it.

    Args:
        device_type: "cpu" or "cuda".
        sizes: bytes of the tensors.
        say: called with a description of the next measurement.
    """
    found = find_hosts()
    ranks_per_host = found.ranks_per_host
    if ranks_per_host is None:
        raise UnsupportedError(
            f"ranks are not numbered host by host with as many on each: {', '.join(found.names)}",
            hint="start the same number of processes on each host, in one torchrun",
        )
    mesh = host_mesh(device_type, ranks_per_host)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    measurements: list[Measurement] = []
    kinds = {"inside": (1,), "across": (0,), "mixed": (0, 1)}
    if 1 in mesh.shape:  # the only axis is both
        kinds = {"inside": (1,)} if mesh.shape[1] > 1 else {"across": (0,)}
    if mesh.size() == 1:
        raise UnsupportedError("one process has no links", hint="start several: torchrun --nproc-per-node 2 ...")
    for kind, axes in kinds.items():
        group = c10d.group(mesh, axes)
        ranks = math.prod(mesh.shape[axis] for axis in axes)
        for collective in COLLECTIVES:
            say(f"{collective} {kind}")
            for size in sizes:
                call, received = timed_collective(collective, group, size, device)
                measurements.append(Measurement(kind, ranks, collective, received, slowest_seconds(call, device)))
    fitted = {kind: fit_link([m for m in measurements if m.group == kind]) for kind in kinds}
    only = next(iter(fitted.values()))
    links = [fitted.get(kind, only) for kind in ("inside", "across", "mixed")]
    return Machine(device_type, found.hosts, ranks_per_host, *links, measurements=tuple(measurements))


def fit_link(measurements: Sequence[Measurement]) -> Link:
    """The link that fits measurements of one kind of group, by least squares of relative errors.

    Example:
        >>> seconds = {1e3: 2e-3, 1e6: 3e-3}
        >>> link = fit_link([Measurement("inside", 2, "all_gather", r, s) for r, s in seconds.items()])
        >>> round(link.alpha, 6), round(link.beta, 12)
        (0.001999, 1.001e-09)
    """
    lines = {}
    for collective in dict.fromkeys(m.collective for m in measurements):
        lines[collective] = _fit_line([(m.received, m.seconds) for m in measurements if m.collective == collective])
    alpha = statistics.median(start for start, _ in lines.values())
    beta = min(slope for _, slope in lines.values())
    factors = tuple((name, slope / beta) for name, (_, slope) in lines.items() if slope > beta > 0)
    return Link(alpha, beta, factors)


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Start and slope, none negative, that minimize the squares of relative errors."""
    weights = [1 / seconds for _, seconds in points]
    a = sum(w * w for w in weights)
    b = sum(w * w * x for w, (x, _) in zip(weights, points, strict=True))
    c = sum(w * w * x * x for w, (x, _) in zip(weights, points, strict=True))
    d = sum(weights)
    e = sum(w * x for w, (x, _) in zip(weights, points, strict=True))
    determinant = a * c - b * b
    if determinant > 0:
        start, slope = (d * c - b * e) / determinant, (a * e - b * d) / determinant
        if start >= 0 and slope >= 0:
            return start, slope
        if start < 0:
            return 0.0, e / c
    return d / a, 0.0
