"""Random states between random meshes: on virtual ranks and on eight processes, bit by bit, and no byte too many.

    python -m tests.gloo.state_transfers --pairs 500 --seed 0 [--virtual]

A pair is two meshes over some of eight ranks (disjoint, overlapping, the same), a few tensors of any shape and dtype in
any layouts, a bucket size, links, and perhaps another dtype. Each rank compares its locals with those of the tensor
distributed by hand, and the bytes that were sent with the elements that the receivers did not hold.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fabric.base import fabric_of
from tests.gloo.processes import ProcessPool

RANKS = 8
SIZES = (0, 1, 2, 3, 5, 7, 8, 16, 33)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
NAMES = ("dp", "tp", "cp")


class Pair(NamedTuple):
    """A random transfer."""

    source: sw.DeviceMesh
    target: sw.DeviceMesh
    whole: dict[str, torch.Tensor]
    before: dict[str, sw.DTensorSpec]
    after: dict[str, sw.DTensorSpec]
    bucket_bytes: int
    model: sw.CostModel


def random_mesh(rng: random.Random, world: int) -> sw.DeviceMesh:
    count = rng.randint(1, world)
    sizes = []
    while count > 1 and len(sizes) < 2:
        divisors = [d for d in range(2, count + 1) if count % d == 0]
        sizes.append(rng.choice(divisors))
        count //= sizes[-1]
    sizes.append(count)
    rng.shuffle(sizes)
    ranks = rng.sample(range(world), math.prod(sizes))
    if rng.random() < 0.5:
        ranks.sort()
    return sw.DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes), mesh_dim_names=rng.sample(NAMES, len(sizes)))


def random_spec(rng: random.Random, mesh: sw.DeviceMesh, meta: sw.TensorMeta) -> sw.DTensorSpec:
    ndim = len(meta.shape)
    placements: list[Any] = []
    taken: set[int] = set()
    for axis in range(mesh.ndim):
        kind = rng.choice(("R", "S", "S", "S", "Z", "T", "G", "O")) if ndim else "R"
        dim = rng.randrange(ndim) if ndim else 0
        if kind in "GO" and dim in taken:
            kind = "S"
        taken.add(dim)
        match kind:
            case "R":
                placements.append(sw.Replicate())
            case "S":
                placements.append(sw.Shard(dim))
            case "Z":
                placements.append(sw.Zigzag(dim))
            case "T":
                placements.append(sw.StridedShard(dim, split_factor=2))
            case "G":
                cuts = sorted(rng.randint(0, meta.shape[dim]) for _ in range(mesh.shape[axis] - 1))
                ends = [0, *cuts, meta.shape[dim]]
                placements.append(sw.Ragged(dim, [b - a for a, b in itertools.pairwise(ends)]))
            case _:
                placements.append(sw.Owned(rng.randrange(mesh.shape[axis]), dim))
    try:
        spec = sw.DTensorSpec(mesh, placements, meta)
        if all(isinstance(placement, sw.Shard | sw.Replicate) for placement in placements):
            axes = [tuple(rng.sample(own, len(own))) for own in spec.dim_axes]
            spec = sw.DTensorSpec.from_dim_axes(mesh, tuple(placements), meta, axes)
        return spec
    except sw.LayoutError:  # sizes that are given for a dim that others split first
        return sw.DTensorSpec(mesh, [sw.Shard(ndim - 1)] * mesh.ndim, meta)


def random_pair(seed: int, world: int) -> Pair:
    rng = random.Random(seed)
    source, target = random_mesh(rng, world), random_mesh(rng, world)
    if rng.random() < 0.1:
        target = source
    whole, before, after = {}, {}, {}
    generator = torch.Generator().manual_seed(seed)
    for name in ("a", "b.weight", "b.bias", "c")[: rng.randint(1, 4)]:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice(DTYPES)
        tensor = torch.randint(0, 250, shape, generator=generator)
        tensor = (
            tensor % 2 == 0 if dtype is torch.bool else (tensor * (0.37 if dtype.is_floating_point else 1)).to(dtype)
        )
        if len(shape) > 1 and rng.random() < 0.3:  # not row-major
            tensor = tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        meta = sw.TensorMeta(shape, tensor.stride(), dtype)
        new = meta
        if dtype.is_floating_point and rng.random() < 0.4:
            new = sw.TensorMeta(shape, tensor.stride(), rng.choice((torch.bfloat16, torch.float64, torch.float16)))
        whole[name], before[name], after[name] = tensor, random_spec(rng, source, meta), random_spec(rng, target, new)
    slow = {name: sw.Link(1e-4, rng.choice((1e-8, 1e-9, 1e-10))) for name in NAMES if rng.random() < 0.5}
    return Pair(source, target, whole, before, after, rng.choice((1, 64, 256, 4096, 2**20)), sw.CostModel(axes=slow))


def distributed(tensor: torch.Tensor, spec: sw.DTensorSpec) -> Any:
    order = {"shard_order": spec.shard_order} if spec.shard_order else {}
    return sw.distribute_tensor(tensor, spec.mesh, spec.placements, src_data_rank=None, **order)


def lacking(pair: Pair, world: int) -> dict[int, int]:
    """Bytes that each rank here wants and does not hold: the indices in its new locals but not in its old."""
    lacks = dict.fromkeys(range(world), 0)
    for name, tensor in pair.whole.items():
        indices = torch.arange(tensor.numel()).reshape(tensor.shape)
        held: dict[int, set[int]] = {}
        for spec, want in ((pair.before[name], False), (pair.after[name], True)):
            laid = distributed(indices, spec)
            fabric = fabric_of(spec.mesh)
            for coordinate, local in fabric.parts(spec.mesh, laid.to_local()):
                rank = spec.mesh.grid_ranks[spec.mesh.coordinates.tolist().index(list(coordinate))]
                found = set(local.flatten().tolist())
                if want:
                    size = min(pair.before[name].tensor_meta.dtype.itemsize, spec.tensor_meta.dtype.itemsize)
                    lacks[rank] += len(found - held.get(rank, set())) * size
                else:
                    held[rank] = found
    return lacks


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def check_pair(seed: int, world: int) -> tuple[int, int]:
    """Transfer one pair and compare; the bytes that the plan says are sent, and the lower bound of the ranks here."""
    pair = random_pair(seed, world)
    former = sw.set_cost_model(pair.model)
    try:
        state = {name: distributed(tensor, pair.before[name]) for name, tensor in pair.whole.items()}
        plan = sw.transfer_plan(
            state,
            pair.target,
            lambda name, spec: pair.after[name],
            dtype=lambda name, spec: pair.after[name].tensor_meta.dtype,
            bucket_bytes=pair.bucket_bytes,
        )
        rng = random.Random(seed)
        reported: list[int] = []
        options = {"async_op": rng.random() < 0.5, "progress": lambda done, total: reported.append(done)}
        moved = plan.run(state, **options)
        moved = moved.wait() if options["async_op"] else moved
        if rng.random() < 0.3:
            moved = plan.run(state, into=moved)
        for name, tensor in pair.whole.items():
            spec = pair.after[name]
            wanted = distributed(tensor.to(spec.tensor_meta.dtype), spec)
            assert (str(moved[name].spec), moved[name].device_mesh) == (str(spec), spec.mesh), seed
            fabric = fabric_of(spec.mesh)
            pairs = zip(
                fabric.parts(spec.mesh, moved[name].to_local()),
                fabric.parts(spec.mesh, wanted.to_local()),
                strict=True,
            )
            for (where, have), (_, want) in pairs:
                assert have.shape == want.shape, (seed, name, where)
                assert torch.equal(bits(have), bits(want)), (seed, name, where)
        lacks = lacking(pair, world)
        for rank, received in plan.received.items():
            assert not lacks[rank] or lacks[rank] == received, (seed, rank, lacks, plan.received)
        return plan.bytes, sum(lacks.values())
    finally:
        sw.set_cost_model(former)


def check_virtual(seed: int, world: int = RANKS) -> None:
    with sw.virtual():
        sent, lower_bound = check_pair(seed, world)
    assert sent == lower_bound, (seed, sent, lower_bound)


@contextmanager
def sends_counted() -> Iterator[list[int]]:
    """The bytes of every message that this process sends."""
    found: list[int] = []
    original = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        found.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counted
    try:
        yield found
    finally:
        dist.batch_isend_irecv = original


def check_on_rank(seeds: list[int], world: int) -> list[tuple[int, int]]:
    """On one process: bytes sent by it, and bytes that it lacked, for each pair. Transferred once."""
    results = []
    for seed in seeds:
        with sends_counted() as sent:
            once = random.Random(seed)
            once.random()
            times = 2 if once.random() < 0.3 else 1
            _, lacked = check_pair(seed, world)
        assert sum(sent) % times == 0
        results.append((sum(sent) // times, lacked))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--virtual", action="store_true", help="on virtual ranks in this process")
    arguments = parser.parse_args()
    seeds, began, total = range(arguments.seed, arguments.seed + arguments.pairs), time.perf_counter(), 0
    if arguments.virtual:
        for seed in seeds:
            check_virtual(seed)
    else:
        with ProcessPool(RANKS) as pool:
            for first in range(0, len(seeds), 20):
                total += check_processes(pool, list(seeds[first : first + 20]))
    where = "virtual ranks" if arguments.virtual else f"{RANKS} processes, {total:,} bytes sent as few as can be"
    print(f"{len(seeds)} pairs on {where}: {time.perf_counter() - began:.0f} s")
    return 0


def check_processes(pool: ProcessPool, seeds: list[int]) -> int:
    """Run pairs on processes; the bytes sent by all, which are those that were lacked."""
    here = importlib.import_module("tests.gloo.state_transfers")  # not as __main__, which processes cannot import
    answers = pool.run(here.check_on_rank, seeds, pool.world_size, timeout=240)
    for seed, of_ranks in zip(seeds, zip(*answers, strict=True), strict=True):
        sent, lacked = (sum(column) for column in zip(*of_ranks, strict=True))
        assert sent == lacked, f"pair {seed}: {sent} bytes sent, {lacked} are enough"
    return sum(sent for of_rank in answers for sent, _ in of_rank)


if __name__ == "__main__":
    sys.exit(main())
