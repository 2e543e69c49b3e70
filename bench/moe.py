"""Tokens to their experts and back, beside a dispatcher written by hand on `all_to_all_single`; 4 gloo processes.

Both sort the choices by expert, exchange sizes, exchange rows, sort what arrives by expert, and go back in the same
manner; forward and backward, with weights of the choices, and both give the same bits on each run. The one by hand
sends a row for each choice, and uses the fastest operators for it (`index_select`). Asked: not slower. Experts do
nothing in some figures, so that dispatch and return are all there is, and are two grouped products in others.
Interleaved, the median of steps, and the least; the slowest rank counts. Processes that share cores wait for each
other, so the time of the processors is there too, of all ranks. So are counts of one step on one rank: functions of
Python, operators on plain tensors, and collectives.

    python -m bench.moe --ranks 2 --repeats 200 --small    # of 512 tokens of 256 alone, experts that do nothing
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from bench.counting import calls
from bench.figures import figure

RANKS = 4
SIZES = ((512, 256), (2048, 512))  # tokens of each rank, their width
CASES = ((8, 1), (8, 2), (64, 8))  # experts and choices
REPEATS = 25


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, so many to each; the gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sent, ctx.got = sent, got
        found = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), got, sent)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return AllToAll.apply(grad, ctx.got, ctx.sent), None, None


def by_hand(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int, compute: Any) -> torch.Tensor:
    """One layer of experts, each rank with its part of all tensors."""
    choices, ranks = ids.shape[1], dist.get_world_size()
    each = experts // ranks
    order = torch.sort(ids.flatten(), stable=True)[1]
    counts = torch.bincount(ids.flatten(), minlength=experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    table = torch.stack([counts, theirs]).view(2, ranks, each)
    sent, got = table.sum(2).tolist()
    arrived = AllToAll.apply(x.index_select(0, order // choices), sent, got)
    expert = torch.repeat_interleave(torch.arange(each).repeat(ranks), theirs, output_size=sum(got))
    by_expert = torch.sort(expert, stable=True)[1]
    offs = table[1].sum(0).cumsum(0).to(torch.int32)
    out = compute(arrived.index_select(0, by_expert), offs)
    inverse = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert)))
    back = AllToAll.apply(out.index_select(0, inverse), got, sent)
    weighted = back * weights.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // choices, weighted)


def ours(x: Any, ids: Any, weights: Any, experts: int, compute: Any) -> Any:
    """The same on DTensors."""
    rows, back = sw.moe.dispatch(x, ids, experts, weights=weights)
    return back(compute(rows, back.offs))


def sides(experts: int, choices: int, products: bool, tokens: int, width: int) -> dict[str, Callable[[], Any]]:
    """A step of each side on this rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ranks = dist.get_world_size()
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    x = torch.randn(tokens, width)
    chances = torch.randn(tokens, experts).softmax(-1)
    weights, ids = chances.topk(choices)
    up, down = (torch.randn(experts // ranks, width, width) / width**0.5 for _ in range(2))
    made: dict[str, Callable[[], Any]] = {}
    for name, layer in (("by hand", by_hand), ("shardwise", ours)):
        given = [x, ids, weights, up, down]
        if name == "shardwise":
            given = [sw.DTensor.from_local(tensor, mesh, [sw.Shard(0)]) for tensor in given]
        own = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]

        def compute(rows: Any, offs: Any, own: list[Any] = own) -> Any:
            if not products:
                return rows
            return F.grouped_mm(F.silu(F.grouped_mm(rows, own[3], offs=offs)), own[4], offs=offs)

        gradient = own[0].detach()  # it is there: losses are no part of the layer

        def step(layer: Any = layer, own: list[Any] = own, compute: Any = compute, gradient: Any = gradient) -> Any:
            y = layer(own[0], own[1], own[2], experts, compute)
            y.backward(gradient)
            for tensor in own:
                tensor.grad = None
            return y

        made[name] = step
    found = [step().detach() for step in made.values()]
    found = [y.to_local() if isinstance(y, sw.DTensor) else y for y in found]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    return made


class Counting(TorchDispatchMode):
    """Counts operators on plain tensors, and collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(kind, sw.DTensor) for kind in types):
            self.operators += 1
            self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def counts(step: Callable[[], Any]) -> str:
    """Functions of Python, operators and collectives of a step."""
    functions = calls(step)
    with Counting() as found:
        step()
    return f"{functions} functions, {found.operators} operators, {found.collectives} collectives"


def on_rank(rank: int, port: int, results: Any, given: argparse.Namespace) -> None:
    """All cases on one process; the first one leaves the medians and the least."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=given.ranks)
    for (tokens, width), products, (experts, choices) in itertools.product(SIZES, (False, True), CASES):
        if tokens > SIZES[0][0] and (products or given.small):
            continue  # as much as takes minutes; what experts cost is the same on both sides
        if products and given.small:
            continue
        steps = sides(experts, choices, products, tokens, width)
        times: dict[str, list[list[float]]] = {name: [] for name in steps}
        for turn in range((given.repeats if tokens == SIZES[0][0] else given.repeats // 2) + 2):
            for name in sorted(steps, reverse=bool(turn % 2)):
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                steps[name]()
                taken, used = torch.tensor([time.perf_counter() - begin, 0]), time.process_time() - used
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                taken[1] = used
                total = taken[1:].clone()
                dist.all_reduce(total)
                times[name].append([taken[0].item(), total.item()])
        counted = {name: counts(step) for name, step in steps.items()}
        if rank == 0:
            steady = {name: list(zip(*found[2:], strict=True)) for name, found in times.items()}
            shown = {n: [*map(statistics.median, found), min(found[0])] for n, found in steady.items()}
            results.put((tokens, width, products, experts, choices, shown, counted))
    dist.destroy_process_group()


def main(arguments: Sequence[str] = ()) -> None:
    """Print the time of a step on each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--small", action="store_true", help="the smaller size alone, experts that do nothing")
    given = parser.parse_args(arguments)
    results: Any = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(on_rank, (29751, results, given), nprocs=given.ranks, start_method="spawn")  # pyright: ignore[reportPrivateImportUsage]
    print(f"{given.ranks} gloo processes, forward and backward")
    while not results.empty():
        tokens, width, products, experts, choices, times, counted = results.get()
        kind = "two grouped products" if products else "dispatch alone"
        what = f"{tokens} tokens of {width} on each rank, {kind}, {experts} experts, top-{choices}"
        shown = ", ".join(
            f"{name} {wall * 1e3:.1f} ms (processors {used * 1e3:.1f} ms, least {least * 1e3:.1f} ms)"
            for name, (wall, used, least) in times.items()
        )
        pairs = zip(times["shardwise"], times["by hand"], strict=True)
        wall, used, least = (ours / theirs for ours, theirs in pairs)
        asked = figure(f"{what}, to a dispatcher by hand", wall, 1.0)
        print(f"  {what}: {shown}; {asked}; processors {used:.2f}; least {least:.2f}")
        if not products:
            print("    " + "; ".join(f"{name}: {text}" for name, text in counted.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
