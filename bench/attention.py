"""Causal attention over a sharded sequence, forward and backward: a ring beside gathering and beside heads.

Four gloo processes, 8192 tokens, 8 heads, the ways in turn in one run. Memory is the growth of a process's peak, in
processes of their own. Asked: a ring is not slower than gathering, and takes less memory.
"""

import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shardwise as sw
from bench.figures import figure
from tests.gloo.processes import run_processes

RANKS, HEADS, TOKENS, WIDTH, ROUNDS = 4, 8, 8192, 64, 5
WAYS = ("ring", "gather", "heads")


def operands(tokens: int = TOKENS) -> list[Any]:
    """Queries, keys, values and the gradient of the result."""
    mesh = sw.init_device_mesh("cpu", (RANKS,))
    shape = (1, HEADS, tokens, WIDTH)
    return [sw.rand(*shape, device_mesh=mesh, placements=[sw.Shard(2)]).requires_grad_(name != "g") for name in "qkvg"]


def step(way: str, q: Any, k: Any, v: Any, g: Any) -> None:
    with sw.attention(prefer=way):
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), g)


def times() -> dict[str, list[float]]:
    """Seconds of each way in each round, on this rank."""
    torch.set_num_threads(1)
    given, small = operands(), operands(64)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        step(way, *small)
        step(way, *given)
    for turn in range(ROUNDS):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            dist.barrier()
            begin = time.perf_counter()
            step(way, *given)
            dist.barrier()
            found[way].append(time.perf_counter() - begin)
    return found


def growth(way: str) -> float:
    """MiB by which the peak memory of this process grows in a step."""
    torch.set_num_threads(1)
    step(way, *operands(64))
    given = operands()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(way, *given)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print seconds and memory of each way."""
    measured = run_processes(times, RANKS, timeout=600)[0]
    medians = {way: statistics.median(seconds) for way, seconds in measured.items()}
    memory = {way: max(run_processes(growth, RANKS, way, timeout=300)) for way in WAYS}
    print(f"causal attention, {TOKENS} tokens, {HEADS} heads of {WIDTH}, {RANKS} gloo processes, {ROUNDS} rounds")
    for way in WAYS:
        print(f"  {way:7} {medians[way]:7.3f} s (best {min(measured[way]):.3f})  {memory[way]:7.1f} MiB")
    print(f"  {figure('a ring to gathering, seconds', medians['ring'] / medians['gather'], 1.0)}")
    print(f"  {figure('a ring to gathering, memory', memory['ring'] / memory['gather'], 1.0)}")
