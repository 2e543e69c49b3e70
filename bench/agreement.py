"""What rank agreement costs: its own work for a collective, and warm collectives with and without it on two processes.

python -m bench agreement
"""

import time
import timeit

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fabric.rank_agreement import RankCheck
from tests.gloo.processes import run_processes

ROUNDS, CALLS = 30, 100
SIZES = (1_000, 100_000, 1_000_000)


def _round(x: sw.DTensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        x.redistribute(placements=[sw.Replicate()])
    return (time.perf_counter() - start) / CALLS * 1e6


def measure() -> list[tuple[int, float, float]]:
    """For each size the least microseconds of an all-gather, without the check and with it, in turns."""
    mesh = sw.init_device_mesh("cpu", (2,))
    found = []
    for size in SIZES:
        x = sw.distribute_tensor(torch.zeros(size), mesh, [sw.Shard(0)])
        plain, checked = [], []
        for _ in range(ROUNDS):
            plain.append(_round(x))
            with sw.debug.check_ranks():
                x.redistribute(placements=[sw.Replicate()])  # bound anew
                checked.append(_round(x))
            x.redistribute(placements=[sw.Replicate()])
        found.append((size, min(plain), min(checked)))
    return found


def own_work() -> tuple[float, float]:
    """Microseconds that the check itself takes for a collective, and for one look at the others."""
    check = RankCheck(dist.HashStore(), 0, 1, interval=3600.0)
    text = "all-gather dim 0 over dp of f32[4096,4096] dp:S0 tp:R"
    enter = min(timeit.repeat(lambda: check.enter((0, 1), text), number=2000, repeat=20)) / 2000 * 1e6
    look = min(timeit.repeat(check._look, number=100, repeat=10)) / 100 * 1e6
    check.close()
    return enter, look


def main() -> None:
    """Print the check's own work, and a row for each size."""
    enter, look = own_work()
    print(f"the check's own work: {enter:.1f} us a collective; {look:.0f} us a look, once a second, in another thread")
    results = run_processes(measure, 2, timeout=600)[0]
    print(f"{'all-gather of':>16}  {'plain':>10}  {'checked':>10}  {'more':>10}")
    for size, plain, checked in results:
        print(f"{size:>10} floats  {plain:7.1f} us  {checked:7.1f} us  {checked - plain:7.1f} us")


if __name__ == "__main__":
    main()
