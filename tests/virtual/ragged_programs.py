"""Random layouts of given sizes, empty shards among them: redistributions and operators against one device.

    python -m tests.virtual.ragged_programs --moves 5000 --calls 2000 --seed 0
    python -m tests.virtual.ragged_programs --moves 1000 --calls 400 --processes

Tensors hold different integers in float64, so that sums and products are exact and no order of them is right alone.
Values and gradients are compared bit by bit, but for the operators in `ROUNDED`. A redistribution must receive exactly
the bytes that ranks lack, in one collective at most.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import warnings
from collections import Counter
from typing import Any

import torch

import shardwise as sw
from shardwise import Owned, Partial, Ragged, Replicate, Shard
from tests.virtual.layout_operators import OPERATORS

MESHES = ((4,), (2, 2), (3,))
R = Replicate()
# Operators whose results are rounded, in an order of operations that depends on the blocks; and the sigmoid of torch,
# whose last bits depend on whether an element is in a full vector of the loop or in its remainder.
ROUNDED = {
    "pointwise",
    "norm of all", "mean and variance", "softmax", "log_softmax of the last dim", "cumprod", "logcumsumexp",
    "layer norm", "group norm", "cross entropy", "cross entropy of classes", "interpolate", "distances",
}  # fmt: skip


def random_sizes(rng: random.Random, size: int, parts: int) -> list[int]:
    """Sizes of parts that together are `size`, empty ones among them."""
    if rng.random() < 0.2:  # one rank has nearly everything
        bounds = [0] * rng.randrange(parts) + [size] * parts
        bounds = [0, *bounds[: parts - 1], size]
    else:
        bounds = [0, *sorted(rng.choices(range(size + 1), k=parts - 1)), size]
    return [high - low for low, high in itertools.pairwise(bounds)]


def random_layout(rng: random.Random, mesh: sw.DeviceMesh, shape: tuple[int, ...]) -> list[Any]:
    """Ragged dims among others. A dim that one axis has split evenly may be split again."""
    left: dict[int, int] = dict(enumerate(shape))  # what axes leave of each dim; without those split unevenly
    made: list[Any] = []
    for ranks in mesh.shape:
        kind = rng.choice(("ragged", "ragged", "ragged", "owned", "shard", "replicate"))
        if not left or kind == "replicate":
            made.append(R)
            continue
        dim = rng.choice(sorted(left))
        size = left[dim]
        if kind == "ragged":
            made.append(Ragged(dim, random_sizes(rng, size, ranks)))
            del left[dim]
        elif kind == "owned":
            made.append(Owned(rng.randrange(ranks), dim))
            del left[dim]
        else:
            made.append(Shard(dim))
            if size % ranks == 0:
                left[dim] = size // ranks
            else:
                del left[dim]
    return made


def integers(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Different integers, as floating point numbers."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    count = 1
    for size in shape:
        count *= size
    return (torch.randperm(count, generator=generator).reshape(shape) - count // 2).double()


def missing_bytes(before: sw.DTensorSpec, after: sw.DTensorSpec) -> float:
    """The bytes of its block afterwards that a rank does not hold before, on average; by counting elements."""
    missing = 0
    for coordinate in before.mesh.coordinates.tolist():
        held = [torch.zeros(before.shape, dtype=torch.bool) for _ in range(2)]
        for mask, spec in zip(held, (before, after), strict=True):
            dims = spec.block(coordinate).runs
            indices = [torch.cat([torch.arange(run.start, run.start + run.length) for run in runs]) for runs in dims]
            mask[torch.meshgrid(*indices, indexing="ij")] = True
        missing += int((held[1] & ~held[0]).sum())
    return missing * before.tensor_meta.dtype.itemsize / before.mesh.size()


def distributed(tensor: torch.Tensor, mesh: sw.DeviceMesh, placements: list[Any]) -> Any:
    return sw.distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def check_move(seed: int, meshes: tuple[tuple[int, ...], ...] = MESHES) -> None:
    """One redistribution, forward and backward."""
    rng = random.Random(seed)
    mesh = sw.init_device_mesh("cpu", rng.choice(meshes))
    shape = tuple(rng.randrange(1, 10) for _ in range(rng.randrange(1, 4)))
    x, weights = integers(rng, shape), integers(rng, shape)
    before, after = random_layout(rng, mesh, shape), random_layout(rng, mesh, shape)
    laid = distributed(x, mesh, before)
    if rng.random() < 0.15:  # a sum that waits on an axis that does not split it
        axis = rng.choice([axis for axis, placement in enumerate(before) if placement is R] or [None])
        if axis is not None:
            laid = laid.redistribute(placements=[Partial() if a == axis else p for a, p in enumerate(before)])
    laid = laid.detach().requires_grad_()
    with sw.debug.CommDebugMode() as comm:
        moved = laid.redistribute(placements=after)
    where = f"{laid.spec} -> {moved.spec.layout}"
    assert torch.equal(moved.full_tensor(), x), f"values of {where}"
    if not laid.spec.partial_axes:
        assert comm.get_total_counts() <= 1, f"{comm.get_total_counts()} collectives for {where}"
        lacking = missing_bytes(laid.spec, moved.spec)
        assert abs(comm.received_bytes - lacking) < 1, f"{comm.received_bytes} bytes instead of {lacking} for {where}"
    moved.backward(distributed(weights, mesh, random_layout(rng, mesh, shape)))
    assert torch.equal(laid.grad.full_tensor(), weights), f"gradient of {where}"


def check_call(seed: int, meshes: tuple[tuple[int, ...], ...] = MESHES) -> bool:
    """One operator, forward and backward; whether it was compared bit by bit."""
    rng = random.Random(seed)
    name = rng.choice(sorted(OPERATORS))
    mesh = sw.init_device_mesh("cpu", rng.choice(meshes))
    shape = (2, rng.randrange(8, 17), 4)
    x, fn = integers(rng, shape), OPERATORS[name]
    exact = name not in ROUNDED
    if not exact:
        x = x / 16
    placements = random_layout(rng, mesh, shape)
    plain, laid = x.clone().requires_grad_(), distributed(x, mesh, placements).requires_grad_()
    wanted, got = fn(plain), fn(laid)
    where = f"{name} of {laid.spec}"
    _same(got.full_tensor(), wanted.detach(), exact, f"values of {where}")
    if wanted.requires_grad:
        weights = integers(rng, tuple(wanted.shape))
        (plain_grad,), (grad,) = (
            torch.autograd.grad((result * weights).sum(), source) for result, source in ((wanted, plain), (got, laid))
        )
        _same(grad.full_tensor(), plain_grad, exact, f"gradient of {where}")
    return exact


def _same(got: torch.Tensor, wanted: torch.Tensor, exact: bool, what: str) -> None:
    if exact:
        assert torch.equal(got, wanted), (
            f"{what}: {(got - wanted).abs().max() if got.shape == wanted.shape else got.shape}"
        )
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}")


def run(seeds: range, calls: bool, meshes: tuple[tuple[int, ...], ...] = MESHES) -> tuple[Counter[str], list[str]]:
    """What was checked, and what differed."""
    warnings.simplefilter("ignore", sw.ReplicationWarning)  # boolean masks, as on other dims than the first
    counts, wrong = Counter[str](), list[str]()
    for seed in seeds:
        try:
            exact = check_call(seed, meshes) if calls else check_move(seed, meshes) is None
            counts["bit by bit" if exact else "within rounding"] += 1
        except Exception as error:
            wrong.append(f"{'call' if calls else 'move'} {seed}: {type(error).__name__}: {error}")
    return counts, wrong


def run_on_processes(seeds: range, calls: bool) -> tuple[Counter[str], list[str]]:
    """The same on each of four processes."""
    return run(seeds, calls, ((4,), (2, 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--processes", action="store_true", help="on four gloo processes instead of virtual ranks")
    given = parser.parse_args()
    failed = False
    for name, count, calls in (("redistributions", given.moves, False), ("operator calls", given.calls, True)):
        seeds = range(given.seed, given.seed + count)
        counts, wrong = _on_pool(seeds, calls) if given.processes else run(seeds, calls)
        print(f"{name}: {dict(counts)}, {len(wrong)} differ")
        print(*wrong[:20], sep="\n")
        failed = failed or bool(wrong)
    sys.exit(failed)


def _on_pool(seeds: range, calls: bool) -> tuple[Counter[str], list[str]]:
    processes = importlib.import_module("tests.gloo.processes")  # which virtual ranks do not need
    here = importlib.import_module("tests.virtual.ragged_programs")  # not as __main__: the processes import it
    counts, wrong = Counter[str](), list[str]()
    with processes.ProcessPool(4) as pool:
        for start in range(seeds.start, seeds.stop, 100):
            part = range(start, min(start + 100, seeds.stop))
            results = pool.run(here.run_on_processes, part, calls, timeout=600)
            counts.update(results[0][0])
            wrong += dict.fromkeys(text for _, texts in results for text in texts)
    return counts, wrong


if __name__ == "__main__":
    main()
