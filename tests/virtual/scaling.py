"""Weak scaling of every operator of torch's test database: dry runs with constant locals on up to 512 ranks.

A sample of an operator is laid out with one dim of its first tensor sharded; tensors of the same size in that dim are
sharded with it, the others replicated; kernels and tables, which have equal sizes by accident, stay as they are. The
dim grows with the ranks. Forward and backward, peak and received bytes, on 4, 16 and 64 ranks. Where these are not
constant the call is looked at again on 64, 512 and 4,096 ranks, with longer locals: to grow means to cost more with
every rank. No growth are a change from one algorithm to another between two numbers of ranks, a few numbers for each
rank, which an exchange takes, and rows that move because shards of a slightly longer dim begin elsewhere, at most a
rank's part.

    python -m tests.virtual.scaling [--only name ...] [--jobs 2] [--json FILE] [--write docs/operators.md]
    python -m tests.virtual.scaling --known FILE [--only name ...] ...   # of the others, what FILE says

Exit status 1 if an operator grows without a reason in `growing_operators`, or has a reason and does not grow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from tests.virtual.conformance import Budget, Hung, Sample, database, samples_of, time_limit
from tests.virtual.growing_operators import GROWING, REASONS

RANKS, MORE_RANKS = (4, 16, 64), (64, 512, 4096)
# Times that the sharded dim of a rank is longer than the sample's: samples are too small to be worth moving.
LONGER, STILL_LONGER = 32, 256
NUMBERS = 256  # bytes for each rank that exchanges may take: counts, and one element from a rank to itself
HELD = 64  # bytes for each rank that may be held at the peak: counts and offsets
PATIENCE = 20  # seconds of processor time for the calls on more ranks
BUDGET = Budget(samples=6, cases=0, seconds=0.0)
# Operators with a kernel or a table behind the first tensor: the dim of it that goes with the channels, if any does.
CHANNELS = {
    **{f"nn.functional.conv{space}d": 1 for space in (1, 2, 3)},
    **{f"nn.functional.conv_transpose{space}d": 0 for space in (1, 2, 3)},
    "nn.functional.embedding": None,
    "nn.functional.embedding_bag": None,
}
# Losses: the position of the labels, which have no dim of classes.
LABELS = {
    "nn.functional.cross_entropy": 1,
    "nn.functional.nll_loss": 1,
    "nn.functional.multi_margin_loss": 1,
}
HEADING = "## Operators that grow"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs a rank: bytes at the peak, bytes received; and how many operators it calls."""

    peak: int
    received: int
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """A sample with one dim sharded, and what it costs on RANKS; on MORE_RANKS if that was not constant."""

    sample: int
    dim: int
    costs: tuple[Cost, ...]
    more: tuple[Cost, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether the call costs more with every rank."""
        if not rises(self.costs, RANKS):
            return False
        steps = zip(itertools.pairwise(self.more), itertools.pairwise(MORE_RANKS), strict=False)
        return all(rises(costs, ranks, NUMBERS * ranks[-1], HELD * ranks[-1]) for costs, ranks in steps)


def rises(costs: Sequence[Cost], ranks: Sequence[int], received: int = 64, peak: int = 64) -> bool:
    """Whether more ranks cost more than a tenth more than the fewest; (n-1)/n of a reduction and some bytes aside."""
    first, share = costs[0], ranks[0] / (ranks[0] - 1)
    most = Cost(int(1.1 * first.peak) + peak, int(1.1 * share * first.received) + received)
    return any(cost.peak > most.peak or cost.received > most.received for cost in costs[1:])


@dataclasses.dataclass
class Scaling:
    """The results of an operator's weak scaling."""

    op: str
    layouts: list[Layout] = dataclasses.field(default_factory=list)

    @property
    def grows(self) -> bool:
        """Whether it grows in some layout."""
        return any(layout.grows for layout in self.layouts)

    @property
    def summary(self) -> str:
        """The layouts that grow, and the costs of one of them."""
        growing = [layout for layout in self.layouts if layout.grows]
        costs = ", ".join(f"{cost.peak} {cost.received}" for cost in (*growing[0].costs, *growing[0].more))
        which = f"sample {growing[0].sample} dim {growing[0].dim}: {costs}"
        return f"{self.op}: {len(growing)} of {len(self.layouts)} layouts grow, as {which}"

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
        by_shapes: dict[Any, list[Sample]] = {}
        for sample in samples:  # those of floats come first
            by_shapes.setdefault(tuple(t.shape for t in sample.tensors), []).append(sample)
        for alike in list(by_shapes.values())[:3]:
            for dim in range(alike[0].tensors[0].dim()):
                # the first that can be measured: some need values, which a dry run has not
                dtypes = [tensor.dtype for tensor in alike[0].tensors]
                fitting = (sample for sample in alike if [tensor.dtype for tensor in sample.tensors] == dtypes)
                layout = next((made for sample in fitting if (made := _layout(sample, dim)) is not None), None)
                if layout is not None:
                    found.layouts.append(layout)
    return found


def _layout(sample: Sample, dim: int) -> Layout | None:
    """None where the call cannot be made with a longer dim, or looks at values."""
    try:
        costs = tuple(_cost(sample, dim, ranks, LONGER) for ranks in RANKS)
        more = ()
        if rises(costs, RANKS) and costs[-1].calls < 2 * costs[0].calls:  # else it goes step by step
            with contextlib.suppress(Hung), time_limit(PATIENCE, of_processor=True):  # else window by window
                more = _more_costs(sample, dim)
    except Exception:
        return None
    return Layout(sample.index, dim, costs, more)


def _more_costs(sample: Sample, dim: int) -> tuple[Cost, ...]:
    """What the call costs on MORE_RANKS, as long as it costs more each time."""
    found = [_cost(sample, dim, MORE_RANKS[0], STILL_LONGER)]
    for ranks in MORE_RANKS[1:]:
        found.append(_cost(sample, dim, ranks, STILL_LONGER))
        if not Layout(0, 0, (Cost(1, 0), Cost(1000, 0)), tuple(found[-2:])).grows:
            break
    return tuple(found)


def _goes_with(sample: Sample, position: int, dim: int) -> int | None:
    """The dim of another tensor that gets longer with `dim` of the first, if one does."""
    first, tensor = sample.tensors[0], sample.tensors[position]
    if sample.op.name in CHANNELS and position:
        channels = first.dim() - (tensor.dim() - 1)
        return CHANNELS[sample.op.name] if position == 1 and dim == channels else None
    if LABELS.get(sample.op.name) == position and tensor.dim() == first.dim() - 1 and first.dim() > 1:
        return None if dim == 1 else max(dim - 1, 0)
    same = tensor.dim() == first.dim() and tensor.shape[dim] == first.shape[dim] and tensor.shape[dim] > 1
    return dim if same else None


def _cost(sample: Sample, dim: int, ranks: int, longer: int) -> Cost:
    with sw.dry_run() as run, _Calls() as calls:
        mesh = sw.init_device_mesh("cpu", (ranks,))
        given: list[Any] = []
        for position, tensor in enumerate(sample.tensors):
            shape, placement = list(tensor.shape), sw.Replicate()
            at = _goes_with(sample, position, dim)
            if at is not None:
                shape[at] *= longer * ranks
                placement = sw.Shard(at)
            made = sw.zeros(shape, dtype=tensor.dtype, device_mesh=mesh, placements=[placement])
            given.append(made.requires_grad_(tensor.requires_grad))
        if not isinstance(given[0].placements[0], sw.Shard):
            raise ValueError("a dim of size one")
        results = sample.process(sample.call(given))
        graded = [r for r in tree_leaves(results) if isinstance(r, sw.DTensor) and r.requires_grad]
        if graded:
            sum((r.abs() if r.is_complex() else r).sum() for r in graded).backward()
        return Cost(run.peak_bytes, run.bytes, calls.count)


class _Calls(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def audit_all(names: Sequence[str], jobs: int) -> list[Scaling]:
    """Look at many operators, in processes of their own."""
    if jobs <= 1:
        found = [audit(name) for name in names]
        print("\n".join(scaling.summary for scaling in found if scaling.grows))
        return found
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        tasks = [pool.submit(audit, name) for name in names]
        for task in concurrent.futures.as_completed(tasks):
            if task.result().grows:
                print(task.result().summary, flush=True)
        return [task.result() for task in tasks]


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


def with_reasons(page: str) -> str:
    """The page with what grows, and why, at its end."""
    body = page.partition(f"\n{HEADING}\n")[0].rstrip("\n")
    lines = [
        f"{reason}\n\n{', '.join(f'`{name}`' for name in sorted(names))}" for reason, names in REASONS.values() if names
    ]
    head = "In some layout these cost a rank more with every further rank. The others measured do not.\n"
    return "\n".join([body, "", HEADING, "", head, "\n\n".join(lines), ""])


def read(path: Path) -> list[Scaling]:
    """What an earlier run has found."""

    def costs(values: Sequence[Any]) -> tuple[Cost, ...]:
        return tuple(Cost(**value) for value in values)

    return [
        Scaling(one["op"], [Layout(x["sample"], x["dim"], costs(x["costs"]), costs(x["more"])) for x in one["layouts"]])
        for one in json.loads(path.read_text())
    ]


def unexplained(found: Sequence[Scaling]) -> list[str]:
    """Errors of the table of reasons, a line for each operator."""
    wrong = []
    for scaling in found:
        if scaling.grows and scaling.op not in GROWING:
            wrong.append(f"{scaling.op} grows without a reason")
        if scaling.op in GROWING and not scaling.grows:
            wrong.append(f"{scaling.op} does not grow, but has a reason: {GROWING[scaling.op]}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.scaling", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these operators")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="every so many-th operator")
    parser.add_argument("--known", type=Path, help="take what is not among --only from this file of an earlier run")
    parser.add_argument("--json", type=Path, help="write every cost here")
    parser.add_argument("--write", type=Path, help="put what is found into the table of operators here")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = {scaling.op: scaling for scaling in read(options.known)} if options.known else {}
    wanted = set(options.only or (() if known else database()))
    names = [name for name in itertools.islice(database(), 0, None, options.every) if name in wanted]
    measured_now = {scaling.op: scaling for scaling in audit_all(names, options.jobs if len(names) > 1 else 1)}
    found = [(known | measured_now)[name] for name in database() if name in known or name in measured_now]
    growing = [s for s in found if s.grows]
    wrong = unexplained(found)
    print("\n".join(wrong))
    measured = sum(bool(s.layouts) for s in found)
    print(f"{len(found)} operators, {measured} measured, {len(growing)} grow in some layout")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(s) for s in found]))
    if options.write:
        options.write.write_text(with_reasons(with_column(options.write.read_text(), found)))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
