"""Weak scaling of every operator of torch's test database: dry runs with constant locals on 4, 16 and 64 ranks.

A sample of an operator is laid out with one dim of its first tensor sharded; tensors of the same size in that dim are
sharded with it, the others replicated. The dim grows with the ranks. Forward and backward, peak and received bytes.

    python -m tests.virtual.scaling [--only name ...] [--jobs 2] [--write docs/operators.md]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import shardwise as sw
from tests.virtual.conformance import Budget, Sample, database, samples_of

RANKS = (4, 16, 64)
LONGER = (
    32  # times that the sharded dim of a rank is longer than the sample's: samples are too small to be worth moving
)
BUDGET = Budget(samples=6, cases=0, seconds=0.0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A sample with one dim sharded, and what it costs on each number of ranks: bytes at the peak, bytes received."""

    sample: int
    dim: int
    costs: tuple[tuple[int, int], ...]

    @property
    def grows(self) -> bool:
        """Whether more ranks cost more than a tenth more, the (n-1)/n of a reduction and an element or two aside."""
        (peak, received), share = self.costs[0], RANKS[0] / (RANKS[0] - 1)
        return any(p > 1.1 * peak + 64 or r > 1.1 * share * received + 64 for p, r in self.costs[1:])


@dataclasses.dataclass
class Scaling:
    """What is known of an operator's weak scaling."""

    op: str
    layouts: list[Layout] = dataclasses.field(default_factory=list)

    @property
    def flat(self) -> int:
        """Of 100 layouts how many do not grow."""
        return round(100 * sum(not layout.grows for layout in self.layouts) / max(len(self.layouts), 1))

    @property
    def cell(self) -> str:
        """The column of the table."""
        return str(self.flat) if self.layouts else ""


def audit(name: str) -> Scaling:
    """Look at one operator."""
    found = Scaling(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = [
                s for s in samples_of(name, database()[name], BUDGET) if s.variant == "op" and s.tensors[0].dim()
            ]
        except Exception:
            return found
        for sample in list({tuple(t.shape for t in s.tensors): s for s in samples}.values())[:3]:
            for dim in range(sample.tensors[0].dim()):
                costs = _costs(sample, dim)
                if costs is not None:
                    found.layouts.append(Layout(sample.index, dim, costs))
    return found


def _costs(sample: Sample, dim: int) -> tuple[tuple[int, int], ...] | None:
    """None where the call cannot be made with a longer dim, or looks at values."""
    try:
        return tuple(_cost(sample, dim, ranks) for ranks in RANKS)
    except Exception:
        return None


def _cost(sample: Sample, dim: int, ranks: int) -> tuple[int, int]:
    first = sample.tensors[0]
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (ranks,))
        given: list[Any] = []
        for tensor in sample.tensors:
            shape, placement = list(tensor.shape), sw.Replicate()
            if tensor.dim() == first.dim() and shape[dim] == first.shape[dim] and shape[dim] > 1:
                shape[dim] *= LONGER * ranks
                placement = sw.Shard(dim)
            made = sw.zeros(shape, dtype=tensor.dtype, device_mesh=mesh, placements=[placement])
            given.append(made.requires_grad_(tensor.requires_grad))
        if not isinstance(given[0].placements[0], sw.Shard):
            raise ValueError("a dim of size one")
        results = sample.process(sample.call(given))
        graded = [r for r in tree_leaves(results) if isinstance(r, sw.DTensor) and r.requires_grad]
        if graded:
            sum((r.abs() if r.is_complex() else r).sum() for r in graded).backward()
        return run.peak_bytes, run.bytes


def audit_all(names: Sequence[str], jobs: int) -> list[Scaling]:
    """Look at many operators, in processes of their own."""
    if jobs <= 1:
        return [audit(name) for name in names]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(audit, names, chunksize=8))


def with_column(page: str, found: Sequence[Scaling]) -> str:
    """The table of operators with what was found in its last column."""
    cells = {f"`{scaling.op}`": scaling.cell for scaling in found}
    lines = []
    for line in page.split("\n"):
        parts = line.split(" | ")
        name = parts[0].removeprefix("| ")
        if line.startswith("| operator |") and not line.endswith(" flat |"):
            line += " flat |"
        elif line.startswith("|---") and line.count("|") == 9:
            line += "---:|"
        elif name in cells:
            kept = line.split("|")[:9]
            line = "|".join(kept) + f"| {cells[name]} |"
        elif name.startswith("`") and line.count("|") == 9:  # not measured this time
            line += "  |"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.scaling", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these operators")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="every so many-th operator")
    parser.add_argument("--write", type=Path, help="put what is found into the table of operators here")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = [n for n in itertools.islice(database(), 0, None, options.every) if not options.only or n in options.only]
    found = audit_all(names, options.jobs if len(names) > 1 else 1)
    growing = [s for s in found if any(layout.grows for layout in s.layouts)]
    for scaling in growing:
        dims = [(layout.sample, layout.dim, layout.costs) for layout in scaling.layouts if layout.grows]
        print(f"{scaling.op}: {len(dims)} of {len(scaling.layouts)} layouts grow, as sample {dims[0]}")
    measured = sum(bool(s.layouts) for s in found)
    print(f"{len(found)} operators, {measured} measured, {len(growing)} grow in some layout")
    if options.write:
        options.write.write_text(with_column(options.write.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
