"""Moving between layouts: bytes, collectives and time, beside torch.distributed.tensor on the same pairs of layouts.

Collectives are counted as they are issued, on either side by one dispatch mode that sees the calls to process groups
(torch's fake backend stands in for the other ranks); the bytes follow from the shapes in the calls. Pairs are random,
with a fixed seed. What "a rank" receives is the mean over all ranks.
"""

import functools
import gc
import itertools
import json
import logging
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.multiprocessing as mp

import shardwise
from bench.counting import Calls, Moved, fake_world
from bench.figures import figure
from bench.timing import Timing, compare, compare_cold
from shardwise.core.layout import intersect
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.plan.cost import CostModel, Link
from shardwise.plan.route import DTensorRedistributePlanner

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (2, 2, 4))
SIZES = (16, 17, 24, 32, 48, 64)
PAIRS = 400
LARGE = {1: (2**24,), 2: (4096, 4096), 3: (256, 256, 256)}  # 64 MiB of float32
FOUR_AXES = ((2, 2, 2, 2), (2, 3, 2, 4), (4, 2, 4, 2), (4, 4, 4, 4))
GLOO_RANKS = 4
GLOO_PAIRS = (
    ((4,), "S0", "R"),
    ((4,), "S1", "R"),
    ((4,), "S0", "S1"),
    ((4,), "S1", "S0"),
    ((4,), "R", "S0"),
    ((4,), "R", "S1"),
    ((4,), "P", "R"),
    ((4,), "P", "S0"),
    ((4,), "P", "S1"),
    ((2, 2), "S0 S1", "S1 S0"),
    ((2, 2), "S0 S1", "R R"),
    ((2, 2), "S0 S0", "R S1"),
    ((2, 2), "P S0", "S0 R"),
    ((2, 2), "P P", "S0 S1"),
)


class Pair(NamedTuple):
    """Two layouts of one tensor, in words that both libraries understand: `S0`, `R`, `P` for each axis of the mesh."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    source: tuple[str, ...]
    target: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.shape} on {self.mesh}: {' '.join(self.source)} -> {' '.join(self.target)}"


def random_pairs(
    count: int, meshes: Sequence[tuple[int, ...]], shapes: Callable[[random.Random], tuple[int, ...]], seed: int = 0
) -> list[Pair]:
    """Different random pairs; Partial only in the source."""
    rng = random.Random(seed)
    found: dict[Pair, None] = {}
    while len(found) < count:
        mesh, shape = rng.choice(meshes), shapes(rng)
        words = ["R", *(f"S{dim}" for dim in range(len(shape)))]
        source = tuple(rng.choice([*words, "P"]) for _ in mesh)
        target = tuple(rng.choice(words) for _ in mesh)
        if source != target:
            found[Pair(mesh, shape, source, target)] = None
    return list(found)


def small_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 3)))


def large_shape(rng: random.Random) -> tuple[int, ...]:
    return LARGE[rng.randint(1, 3)]


def placements(library: Any, words: Sequence[str]) -> list[Any]:
    """The placements of `library` (this one or torch's) for words."""
    made = {"R": library.Replicate, "P": library.Partial}
    return [made[word]() if word in made else library.Shard(int(word[1:])) for word in words]


def specs(pair: Pair) -> tuple[DTensorSpec, DTensorSpec]:
    """The pair on a mesh of this library, of whatever fabric surrounds."""
    mesh = shardwise.init_device_mesh("cpu", pair.mesh)
    source = DTensorSpec(mesh, placements(shardwise, pair.source), TensorMeta(pair.shape))
    return source, source.with_placements(placements(shardwise, pair.target))


class Case(NamedTuple):
    """A pair as a call to each library, on tensors made beforehand."""

    pair: Pair
    ours: Callable[[], object]
    torch: Callable[[], object]


def cases(pairs: Sequence[Pair]) -> list[Case]:
    """The pairs on the process group that is up."""
    meshes = {shape: torch_tensor.init_device_mesh("cpu", shape) for shape in {pair.mesh for pair in pairs}}
    made = []
    for pair in pairs:
        spec = specs(pair)[0]
        local = torch.randn(spec.local_shape(spec.mesh.get_coordinate() or ()))
        theirs = torch_tensor.DTensor.from_local(
            local, meshes[pair.mesh], placements(torch_tensor, pair.source),
            run_check=False, shape=torch.Size(pair.shape), stride=spec.tensor_meta.stride,
        )  # fmt: skip
        ours = shardwise.DTensor.from_local(local, spec.mesh, spec.placements, shape=pair.shape)
        made.append(
            Case(
                pair,
                functools.partial(ours.redistribute, placements=placements(shardwise, pair.target)),
                functools.partial(theirs.redistribute, placements=placements(torch_tensor, pair.target)),
            )
        )
    return made


# ---------------------------------------------------------------- bytes and collectives


def counted(pairs: Sequence[Pair]) -> dict[Pair, tuple[Moved, Moved]]:
    """For each pair, ours and torch's, averaged over the ranks."""
    total: dict[Pair, tuple[list[Moved], list[Moved]]] = {pair: ([], []) for pair in pairs}
    for size, group in itertools.groupby(sorted(pairs, key=lambda p: math.prod(p.mesh)), lambda p: math.prod(p.mesh)):
        chosen = list(group)
        for rank in range(size):
            with fake_world(size, rank), torch.no_grad():
                for case in cases(chosen):
                    for sums, call in zip(total[case.pair], (case.ours, case.torch), strict=True):
                        with Calls() as calls:
                            call()
                        sums.append(calls.moved)
    return {pair: (_mean(ours), _mean(theirs)) for pair, (ours, theirs) in total.items()}


def _mean(moved: Sequence[Moved]) -> Moved:
    return Moved(*(statistics.fmean(column) for column in zip(*moved, strict=True)))


def report_moved(moved: dict[Pair, tuple[Moved, Moved]]) -> None:
    ours, theirs = ([side[i] for side in moved.values()] for i in (0, 1))
    print(f"{len(moved)} random pairs on {', '.join('x'.join(map(str, mesh)) for mesh in MESHES)}; sums over the pairs")
    print(f"  {'':24}  {'ours':>12}  {'torch':>12}  ratio")
    for what, asked in (("received", 0.25), ("collectives", 0.5)):
        a, b = sum(getattr(m, what) for m in ours), sum(getattr(m, what) for m in theirs)
        name = "bytes received by a rank" if what == "received" else what
        print(f"  {name:24}  {a:12.0f}  {b:12.0f}  {figure(f'{name}, to torch', a / b, asked)}")
    for name, partial in (("without Partial", False), ("with Partial", True)):
        sides = [side for pair, side in moved.items() if ("P" in pair.source) is partial]
        a, b = (Moved(*map(sum, zip(*(side[i] for side in sides), strict=True))) for i in (0, 1))
        calls, received = a.collectives / b.collectives, a.received / b.received
        print(f"    {len(sides)} pairs {name}: bytes {received:.3f}, collectives {calls:.3f}")
    with shardwise.virtual():
        needy = sum("P" in pair.source or least_bytes(*specs(pair)) > 0 for pair in moved)
    total = sum(m.collectives for m in theirs)
    print(f"  {needy} pairs cannot do without a collective: with one for each the ratio would be {needy / total:.3f}")
    over = [
        (a.received - b.received, pair)
        for pair, (a, b) in moved.items()
        if a.received > b.received * (1 + 1e-9) and a.collectives >= b.collectives
    ]
    worse = "pairs with more bytes than torch's and not fewer collectives"
    print(f"  {worse}: {figure(worse, len(over), 0)}")
    if over:
        excess, pair = max(over)
        print(f"    the worst, by {excess:.0f} bytes: {pair}; ours {moved[pair][0]}, torch {moved[pair][1]}")


# ---------------------------------------------------------------- the least that must move


def least_bytes(source: DTensorSpec, target: DTensorSpec) -> float:
    """The part of its new block that a rank does not hold already, averaged over the ranks."""
    total = 0
    for row in source.mesh.coordinates.tolist():
        have, want = source.block(row), target.block(row)
        overlaps = (sum(n for _, _, n in intersect(a, b)) for a, b in zip(have.runs, want.runs, strict=True))
        total += math.prod(want.shape) - math.prod(overlaps)
    return total / source.mesh.size() * source.tensor_meta.dtype.itemsize


def report_least(moved: dict[Pair, tuple[Moved, Moved]]) -> None:
    print("bytes over the least that must move (each rank's new block less what it holds), pairs without Partial")
    small = [(pair, sides) for pair, sides in moved.items() if "P" not in pair.source]
    with shardwise.virtual():
        least = sum(least_bytes(*specs(pair)) for pair, _ in small)
        for name, side in (("ours", 0), ("torch", 1)):
            ratio = sum(sides[side].received for _, sides in small) / least
            print(f"  {name:5}  {ratio:7.3f}  of {len(small)} small pairs above, as issued")
        large = [pair for pair in random_pairs(PAIRS, MESHES, large_shape, seed=1) if "P" not in pair.source]
        routes = [DTensorRedistributePlanner().plan(*specs(pair)) for pair in large]
        least = sum(least_bytes(*specs(pair)) for pair in large)
        ratio = sum(route.received for route in routes) / least
        verdict = figure("bytes to the least that must move", ratio, 1.1)
        print(f"  ours   of {len(large)} pairs of 64 MiB, as planned: {verdict}")


# ---------------------------------------------------------------- time in this process


def report_warm() -> None:
    with fake_world(8), torch.no_grad():
        ours, theirs = shardwise.init_device_mesh("cpu", (8,)), torch_tensor.init_device_mesh("cpu", (8,))
        local = torch.randn(4, 4)
        a = shardwise.DTensor.from_local(local, ours, [shardwise.Shard(0)])
        b = torch_tensor.DTensor.from_local(local, theirs, [torch_tensor.Shard(0)], run_check=False)
        group = dist.group.WORLD
        assert group is not None
        timings = compare(
            {
                "ours": lambda: a.redistribute(ours, [shardwise.Replicate()]),
                "process group call alone": lambda: group._allgather_base(torch.empty(32, 4), local).wait(),
                "torch": lambda: b.redistribute(theirs, [torch_tensor.Replicate()]),
            },
            number=500,
            title="redistribute S0 -> R, warm, 8 ranks, no_grad",
        )
        print(f"  {_against_torch('warm redistribute, to torch', timings, 0.25)}")
        timings = compare(
            {
                "ours": lambda: shardwise.DTensor.from_local(local, ours, [shardwise.Shard(0)]),
                "torch": lambda: torch_tensor.DTensor.from_local(
                    local, theirs, [torch_tensor.Shard(0)], run_check=False
                ),
            },
            number=500,
            title="from_local, warm",
        )
        print(f"  {_against_torch('warm from_local, to torch', timings, 0.5)}")


def _against_torch(name: str, timings: Mapping[str, Timing], asked: float) -> str:
    return figure(name, timings["ours"].median / timings["torch"].median, asked)


def report_cold() -> None:
    pairs = random_pairs(PAIRS, MESHES[:4], small_shape, seed=2)
    with fake_world(8), torch.no_grad():
        made = cases(pairs)
        for side in ("ours", "torch"):  # process groups are made on first use: that is not what is measured here
            for case in cases(random_pairs(60, MESHES[:4], small_shape, seed=3)):
                getattr(case, side)()
        timings = compare_cold(
            {"ours": [case.ours for case in made], "torch": [case.torch for case in made]},
            title="first redistribute of a pair: planning, binding, running",
        )
        print(f"  {_against_torch('first redistribute of a pair, to torch', timings, 0.5)}")
        timings = compare_cold(
            {"ours, second call": [case.ours for case in made], "torch, second call": [case.torch for case in made]},
            title="the same pairs again",
        )


def report_planning(count: int = 3000) -> None:
    print(f"planning alone, {count} random pairs on meshes of 4 axes each; milliseconds of this thread")
    print(f"  {'':28}  {'median':>7}  {'p99':>7}  {'max':>7}")
    links = {str(axis): Link(10e-6 * (axis + 1), 1 / (1e9 * (4 - axis))) for axis in range(4)}
    for name, model in (("links alike", CostModel()), ("a link of its own each axis", CostModel(axes=links))):
        planner = DTensorRedistributePlanner(model)
        taken: list[tuple[float, Pair]] = []
        with shardwise.virtual():
            for pair in random_pairs(count, FOUR_AXES, small_shape, seed=4):
                source, target = specs(pair)
                gc.disable()
                start = time.thread_time_ns()
                planner.plan(source, target)
                taken.append(((time.thread_time_ns() - start) / 1e6, pair))
                gc.enable()
        taken.sort()
        times = [ms for ms, _ in taken]
        p99, worst = times[int(0.99 * len(times))], times[-1]
        print(f"  {name:28}  {statistics.median(times):7.3f}  {p99:7.3f}  {worst:7.3f}")
        print(f"  {figure(f'planning on 4 axes at worst, {name}', worst, 20, ' ms')}")
        if worst > 20:
            print(f"    the worst: {taken[-1][1]}")


# ---------------------------------------------------------------- time on real processes


def _gloo_worker(rank: int, folder: str, rounds: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=GLOO_RANKS)
    lines = []
    with torch.no_grad():
        for mesh, source, target in GLOO_PAIRS:
            (case,) = cases([Pair(mesh, LARGE[2], tuple(source.split()), tuple(target.split()))])
            calls = (case.ours, case.torch)
            taken = torch.tensor([_timed_rounds(calls, rounds)], dtype=torch.float64)[0]
            dist.all_reduce(taken, dist.ReduceOp.MAX)  # a collective has taken as long as on the last rank
            ours, theirs = taken.median(dim=0).values.tolist()
            lines.append((f"{'x'.join(map(str, mesh))}: {source} -> {target}", ours, theirs))
    if rank == 0:
        Path(folder, "lines").write_text(json.dumps(lines))
    dist.destroy_process_group()


def _timed_rounds(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Milliseconds of each call in each round, the calls in turn."""
    taken = []
    for index in range(-1, rounds):  # the first round fills caches
        row = [0.0] * len(calls)
        for side in sorted(range(len(calls)), key=lambda side: (side + index) % len(calls)):
            dist.barrier()
            start = time.perf_counter()
            result = calls[side]()
            row[side] = (time.perf_counter() - start) * 1e3
            del result
        if index >= 0:
            taken.append(row)
    return taken


def _report_gloo(lines: Sequence[tuple[str, float, float]], rounds: int) -> None:
    print(f"{GLOO_RANKS} gloo processes, float32[4096,4096], the slowest rank, median of {rounds} rounds; milliseconds")
    print(f"  {'':24}  {'ours':>8}  {'torch':>8}  ratio")
    for name, ours, theirs in lines:
        limit = 0.6 if name.endswith("S0 -> S1") else 1.1
        print(f"  {name:24}  {ours:8.1f}  {theirs:8.1f}  {figure(f'gloo, 64 MiB, {name}', ours / theirs, limit)}")


def report_gloo(rounds: int = 11) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gloo_worker, args=(str(Path(folder)), rounds), nprocs=GLOO_RANKS)  # pyright: ignore[reportPrivateImportUsage]
        _report_gloo(json.loads(Path(folder, "lines").read_text()), rounds)


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        moved = counted(random_pairs(PAIRS, MESHES, small_shape))
        report_moved(moved)
        report_least(moved)
        report_warm()
        report_cold()
        report_planning()
        report_gloo()
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
