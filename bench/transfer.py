"""Weights of 1 GiB from a trainer (FSDP x TP) to a generator (TP): 4 + 4 gloo processes, beside gathering by hand.

By hand: the trainer's ranks all-gather each tensor, the first of them broadcasts it to the generator's, and these cut
their part out; tensor by tensor, with torch.distributed alone. Rounds alternate who goes first; the time is that of the
slowest rank. Both write to memory that is there. Peak memory is what the kernel counts for a process (VmHWM) above what
it held before, beside what the transfer may stage.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from bench.figures import figure

TRAINER, GENERATOR = ((0, 1), (2, 3)), (4, 5, 6, 7)
RANKS, ROUNDS, BUCKET = 8, 3, 64 * 2**20
ROWS, COLUMNS, TENSORS = 2048, 2048, 64  # of float32: 1 GiB


def memory(field: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def timed(action: Callable[[], None]) -> float:
    """Seconds until the last rank is done."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def by_hand(state: dict[str, Any], result: dict[str, Any], trainer: Any, crossing: Any, rank: int) -> None:
    """Gather and broadcast, as a program without a library for it does."""
    for number, name in enumerate(state):
        full = torch.empty(ROWS, COLUMNS)
        if rank < 4:
            local = state[name].to_local()
            parts = [torch.empty_like(local) for _ in range(4)]
            dist.all_gather(parts, local, group=trainer)
            halves = [torch.cat(parts[2 * i : 2 * i + 2], 1 - number % 2) for i in range(2)]
            full = torch.cat(halves, number % 2)
        if rank == 0 or rank >= 4:
            dist.broadcast(full, 0, group=crossing)
        if rank >= 4:
            result[name].to_local().copy_(full.chunk(4, 1 - number % 2)[rank - 4])


def worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    trainer = sw.DeviceMesh("cpu", TRAINER, mesh_dim_names=("dp", "tp"))
    generator = sw.DeviceMesh("cpu", GENERATOR, mesh_dim_names=("tp",))
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [0, *GENERATOR])]
    torch.manual_seed(rank)
    state, result, layouts = {}, {}, {}
    for i in range(TENSORS):
        name = f"layer{i}.weight"
        placements = [sw.Shard(i % 2), sw.Shard(1 - i % 2)]
        state[name] = sw.DTensor.from_local(torch.rand(ROWS // 2, COLUMNS // 2), trainer, placements)
        shape = (ROWS, COLUMNS // 4) if i % 2 == 0 else (ROWS // 4, COLUMNS)
        layouts[name] = [sw.Shard(1 - i % 2)]
        result[name] = sw.DTensor.from_local(torch.zeros(shape), generator, layouts[name])
    began = time.perf_counter()
    plan = sw.transfer_plan(state, generator, layouts, bucket_bytes=BUCKET)
    plan.run(state, into=result)  # binds the plan and makes its group
    found: dict[str, Any] = {"plan": time.perf_counter() - began, "text": str(plan) if rank == 0 else ""}
    ways = {
        "ours": lambda: plan.run(state, into=result),
        "hand": lambda: by_hand(state, result, groups[0], groups[1], rank),
    }
    kept = [tensor.to_local().clone() for tensor in result.values()]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name in ways if turn % 2 == 0 else reversed(ways):
            times[name].append(timed(ways[name]))
            same = all(torch.equal(a, b.to_local()) for a, b in zip(kept, result.values(), strict=True))
            assert same, f"{name} gives other values"
    del kept
    for name, way in ways.items():
        gc.collect()
        before = memory("VmRSS")
        reset_peak()
        way()
        found[f"{name} peak"] = memory("VmHWM") - before
    found["held"] = sum(t.to_local().nbytes for t in (*state.values(), *result.values()))
    found["times"] = times
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (folder,), nprocs=RANKS, start_method="spawn")  # pyright: ignore[reportPrivateImportUsage]
        found = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    ours, hand = (
        [max(of_rank["times"][name][turn] for of_rank in found) for turn in range(ROUNDS)] for name in ("ours", "hand")
    )
    print(found[0]["text"])
    print(f"plan, its group and the first run: {max(of_rank['plan'] for of_rank in found):.2f} s")
    for name, times in (("transfer", ours), ("gather and broadcast by hand", hand)):
        print(f"{name}: {statistics.median(times):.2f} s (of {', '.join(f'{one:.2f}' for one in times)})")
    ratio = statistics.median([a / b for a, b in zip(ours, hand, strict=True)])
    print(figure("weight synchronisation of 1 GiB, 4 + 4 processes, to gathering and broadcasting by hand", ratio, 0.5))
    peak = max((one["held"] + one["ours peak"]) / (one["held"] + BUCKET) for one in found)
    for name in ("ours", "hand"):
        print(f"{name}: at most {max(one[f'{name} peak'] for one in found) / 2**20:.0f} MiB above what a rank holds")
    print(figure("peak memory of a rank, to what it holds and one bucket", peak, 1.1))


if __name__ == "__main__":
    main()
