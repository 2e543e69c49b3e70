"""Routes planned with equal links and with those of hosts, under torchrun: values, bytes between hosts, seconds.

`-m tests.hosts.topology_program ROWS COLUMNS ROUNDS`: rank 0 prints one line of JSON for each change of layout.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.core.notation import parse_spec
from shardwise.fabric.base import fabric_of

CHANGES = (
    ("all-reduce", "8", "P", "R"),
    ("all-gather", "8", "S0", "R"),
    ("reduce-scatter", "8", "P", "S0"),
    ("all-reduce", "dp=2,tp=4", "P R", "R R"),
    ("all-gather", "dp=2,tp=4", "S0 R", "R R"),
    ("exchange", "dp=2,tp=4", "S0 R", "S1 R"),
)
# Inside ten times faster; what counts for a plan is the ratio. Of gloo's collectives reduce-scatter is the slow one.
SLOWER = (("reduce_scatter", 3.0),)
INSIDE, ACROSS = sw.Link(1e-4, 1e-9, SLOWER), sw.Link(1e-4, 1e-8, SLOWER)
MODEL = sw.CostModel(hosts={"cpu": sw.HostLinks(4, INSIDE, ACROSS, ACROSS)})


def sent_bytes() -> int:
    """Bytes that this host has sent to others."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return sum(int(words[9]) for words in lines if words[0].startswith("eth"))


def main(rows: int, columns: int, rounds: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, axes, old, new in CHANGES:
        shape, names = (8,), None
        if "=" in axes:
            shape, names = (2, 4), ("dp", "tp")
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
        source, target = (parse_spec(f"f32[{rows},{columns}] {layout}", mesh) for layout in (old, new))
        if "P" in old:  # each rank has its part of the sum
            x = sw.DTensor.from_local(torch.full((rows, columns), float(dist.get_rank())), mesh, source.placements)
            wanted = torch.full((rows, columns), 28.0 if len(shape) == 1 else 0.0)
            if len(shape) == 2:  # replicated over tp: the values of its first rank
                x = sw.DTensor.from_local(
                    torch.full((rows, columns), float(dist.get_rank() // 4)), mesh, source.placements, run_check=False
                )
                wanted = torch.full((rows, columns), 1.0)
        else:
            wanted = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
            x = sw.distribute_tensor(wanted, mesh, source.placements, src_data_rank=None)
        found: dict[str, dict[str, Any]] = {}
        calls = {}
        for kind, model in (("flat", sw.CostModel()), ("hosts", MODEL)):
            route = sw.DTensorRedistributePlanner(model).plan(source, target)
            calls[kind] = fabric_of(mesh).bind_route(route)
            result = calls[kind](x.to_local())
            gathered = sw.DTensor.from_local(result, mesh, target.placements, run_check=False).full_tensor()
            assert torch.equal(gathered, wanted), f"{name} on {axes}: {route}"
            found[kind] = {"route": str(route), "seconds": [], "bytes": []}
        for _ in range(rounds):
            for kind, call in calls.items():
                dist.barrier()
                sent = sent_bytes()  # before any rank begins
                dist.barrier()
                begin = time.perf_counter()
                call(x.to_local())
                dist.barrier()
                found[kind]["seconds"].append(time.perf_counter() - begin)
                found[kind]["bytes"].append(sent_bytes() - sent)
        for kind in found.values():
            kind["seconds"] = statistics.median(kind["seconds"])
            kind["bytes"] = min(kind["bytes"])  # some may be sent again
        if dist.get_rank() == 0:
            print(json.dumps({"collective": name, "mesh": axes, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    main(*map(int, sys.argv[1:]))
