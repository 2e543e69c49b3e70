"""Communication of each operator, against torch.distributed.tensor: the same calls on the same layouts, both counted.

    python -m tests.peer.communication [--all] [--only name ...] [--cases N] [--json FILE]

Every operator of torch's test database, on torch's fake process group: each tensor argument sharded on each dim in
turn, all alike, replicated, Partial; forward, and backward from a gradient that lies as the result does. A case counts
where both libraries carry it out. Values mean nothing here: that ours are right is for tests/virtual to show.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.tensor as theirs
from torch.utils._pytree import tree_flatten

import shardwise as ours
from bench.counting import Calls, Moved, fake_world
from tests.peer.truth import their_placement, why_wrong
from tests.virtual.conformance import Budget, Hung, Sample, database, samples_of, time_limit
from tests.virtual.parity import plain_layouts, random_layout

WORLD = 4
RANK = 2  # where shards are uneven it holds about the mean
MESHES = ((4,), (2, 2))
SECONDS_PER_CASE = 20.0
NOTHING = Moved(0, 0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: which sample, out-of-place or in-place, on which mesh and in which layouts."""

    sample: Sample
    mesh: tuple[int, ...]
    layout: list[list[Any]]

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{tuple(t.shape)} {_words(p)}" for t, p in zip(self.sample.tensors, self.layout, strict=True)
        )
        return f"sample {self.sample.index} {self.sample.variant} on {self.mesh}: {shapes}"

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The operator on these tensors; in place, on the very first of them."""
        if self.sample.variant == "op":
            return self.sample.call(tensors)
        first, args, kwargs = self.sample.arguments(tensors)
        return self.sample.op.inplace_variant(first, *args, **kwargs)


def _words(placements: Sequence[Any]) -> str:
    return " ".join(
        "R" if isinstance(p, ours.Replicate) else "P" if isinstance(p, ours.Partial) else f"S{p.dim}"
        for p in placements
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a case costs one library: the call, its backward, and reducing what the results leave Partial."""

    forward: Moved
    backward: Moved = NOTHING
    owed: Moved = NOTHING
    results: str = ""

    @property
    def call(self) -> Moved:
        return total([self.forward, self.backward])

    @property
    def settled(self) -> Moved:
        return total([self.forward, self.backward, self.owed])


def total(moved: Sequence[Moved]) -> Moved:
    """The sum of several."""
    return Moved(sum(m.collectives for m in moved), sum(m.received for m in moved))


# ---------------------------------------------------------------- cases


def cases_of(name: str, limit: int | None) -> list[Case]:
    """The cases of an operator; with a limit a few of them, always the same."""
    rng = random.Random(f"communication {name}")
    every: list[Case] = []
    budget = Budget(samples=12, cases=0, seconds=0.0, seed=0)
    for sample in samples_of(name, database()[name], budget):
        if sample.dtype is not torch.float32:
            break  # float32 comes first
        shapes = [t.shape for t in sample.tensors]
        for mesh in MESHES:
            layouts = [*plain_layouts(shapes, len(mesh)), random_layout(shapes, len(mesh), rng)]
            every += [Case(sample, mesh, _summable(sample, layout)) for layout in layouts]
    return every if limit is None or len(every) <= limit else rng.sample(every, limit)


def _summable(sample: Sample, layout: list[list[Any]]) -> list[list[Any]]:
    """Partial only for what has a sum."""
    return [
        [ours.Replicate() if isinstance(p, ours.Partial) and tensor.dtype is torch.bool else p for p in placements]
        for tensor, placements in zip(sample.tensors, layout, strict=True)
    ]


# ---------------------------------------------------------------- one case in one library


class Library:
    """One of the two libraries on a mesh of the fake world."""

    def __init__(self, module: Any, shape: tuple[int, ...]) -> None:
        self.module = module
        self.mesh = module.init_device_mesh("cpu", shape)

    def wrap(self, local: torch.Tensor, tensor: torch.Tensor, placements: Sequence[Any]) -> Any:
        """A rank's part of a tensor, as a DTensor."""
        own = placements if self.module is ours else [their_placement(p) for p in placements]
        local = local.detach().clone()
        return self.module.DTensor.from_local(
            local, self.mesh, own, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def cost(self, case: Case, locals_: Sequence[torch.Tensor]) -> Cost:
        """Carry a case out and count."""
        tensors = case.sample.tensors
        given = [self.wrap(*one) for one in zip(locals_, tensors, case.layout, strict=True)]
        if case.sample.variant == "op":
            given = [t.requires_grad_(tensor.requires_grad) for t, tensor in zip(given, tensors, strict=True)]
        torch.manual_seed(0)
        with Calls() as forward:
            result = case.call(given)
        found = [t for t in tree_flatten(result)[0] if isinstance(t, self.module.DTensor)]
        backward = self.backward(case, result, given)
        with Calls() as owed, torch.no_grad():
            for tensor in found:
                self.reduced(tensor.detach())
        return Cost(forward.moved, backward, owed.moved, "; ".join(str(t.placements) for t in found))

    def backward(self, case: Case, result: Any, given: Sequence[Any]) -> Moved:
        """The cost of the gradients of a call, if the gradient of each result has the layout of the result."""
        results = tree_flatten(case.sample.process(result))[0]
        graded = [t for t in results if isinstance(t, self.module.DTensor) and t.requires_grad]
        sources = [t for t in given if t.requires_grad]
        if not graded or not sources:
            return NOTHING
        with torch.no_grad():
            gradients = [self.reduced(torch.ones_like(t.detach())) for t in graded]
        with Calls() as calls:
            torch.autograd.grad(graded, sources, gradients, allow_unused=True)
        return calls.moved

    def reduced(self, tensor: Any) -> Any:
        """With Partial placements replicated."""
        wanted = [self.module.Replicate() if p.is_partial() else p for p in tensor.placements]
        return tensor if wanted == list(tensor.placements) else tensor.redistribute(placements=wanted)


Libraries = dict[tuple[int, ...], tuple[Library, Library]]


@contextlib.contextmanager
def world() -> Iterator[Libraries]:
    """Both libraries on meshes over the fake process group.

    torch replaces an all-to-all by an all-gather on CPUs; it gets what it has on other devices, which moves less.
    """
    exchange = functools.partial(mock.patch, "torch.distributed.tensor.placement_types.shard_dim_alltoall")
    with fake_world(WORLD, RANK), exchange(_shard_dim_alltoall):
        yield {shape: (Library(ours, shape), Library(theirs, shape)) for shape in MESHES}


def _shard_dim_alltoall(local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, axis: int) -> torch.Tensor:
    return torch.ops._dtensor.shard_dim_alltoall(local, gather_dim, shard_dim, mesh.get_group(axis).group_name)


def locals_of(case: Case, mesh: Any) -> list[torch.Tensor]:
    """What the rank holds of each tensor; of a Partial one the value itself, so that an index stays one."""
    found = []
    for tensor, placements in zip(case.sample.tensors, case.layout, strict=True):
        kept = [ours.Replicate() if isinstance(p, ours.Partial) else p for p in placements]
        whole = ours.DTensor.from_local(tensor.detach(), mesh, [ours.Replicate()] * mesh.ndim, run_check=False)
        found.append(whole.redistribute(placements=kept).to_local())
    return found


# ---------------------------------------------------------------- one operator, and all


@dataclasses.dataclass(frozen=True)
class Compared:
    """A case that both carry out."""

    case: str
    ours: Cost
    torch: Cost

    @property
    def excess(self) -> Moved:
        """By how much ours costs more, where it does."""
        pairs = ((self.ours.call, self.torch.call), (self.ours.settled, self.torch.settled))
        return Moved(
            max(0, *(mine.collectives - peer.collectives for mine, peer in pairs)),
            max(0, *(mine.received - peer.received for mine, peer in pairs)),
        )


@dataclasses.dataclass
class Report:
    """What is known of an operator: the cases that both carried out, that one refused, that torch gets wrong."""

    op: str
    compared: list[Compared] = dataclasses.field(default_factory=list)
    errors: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {"ours": [], "torch": []})
    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def sums(self, what: str) -> tuple[Moved, Moved]:
        """Ours and torch's, over the cases."""
        return (
            total([getattr(one.ours, what) for one in self.compared]),
            total([getattr(one.torch, what) for one in self.compared]),
        )

    @property
    def worse(self) -> bool:
        """Whether ours communicates more, also when what a result has only put off is counted."""
        return all(worse(*self.sums(what)) for what in ("call", "settled"))

    @property
    def needless(self) -> list[Compared]:
        """The cases in which ours issues a collective, and torch none nor owes one."""
        return [one for one in self.compared if one.ours.forward.collectives and not _issued(one.torch)]


def _issued(cost: Cost) -> float:
    return cost.forward.collectives + cost.owed.collectives


def worse(mine: Moved, peer: Moved) -> bool:
    """Whether one is more than the other in collectives or in bytes, and less in neither."""
    more = mine.collectives > peer.collectives, mine.received > peer.received * (1 + 1e-9)
    less = mine.collectives < peer.collectives, mine.received < peer.received * (1 - 1e-9)
    return any(more) and not any(less)


def compare(name: str, limit: int | None, libraries: Libraries) -> Report:
    """Count one operator in both libraries."""
    report = Report(name)
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cases = cases_of(name, limit)
        except Exception as error:
            report.errors["ours"].append(f"no samples: {error}")
            return report
        for case in cases:
            _compare_case(report, case, libraries[case.mesh])
    report.seconds = time.monotonic() - started
    return report


def _compare_case(report: Report, case: Case, libraries: tuple[Library, Library]) -> None:
    locals_ = locals_of(case, libraries[0].mesh)
    costs = []
    for name, library in zip(("torch", "ours"), reversed(libraries), strict=True):
        try:
            with time_limit(SECONDS_PER_CASE):
                costs.append(library.cost(case, locals_))
        except (Exception, Hung) as error:
            report.errors[name].append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
            return
    made = Compared(str(case), costs[1], costs[0])
    wrong = why_wrong(case.sample, libraries[1].mesh, case.layout) if made.excess != NOTHING else ""
    if wrong:
        report.wrong.append(f"{case}: {wrong}")
    else:
        report.compared.append(made)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer.communication", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every case of each operator")
    parser.add_argument("--cases", type=int, default=8, help="so many cases of each operator")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these operators (all their variants)")
    parser.add_argument("--json", type=Path, help="write every case here")
    parser.add_argument("--verbose", action="store_true", help="print the worst cases of each operator")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = [n for n in database() if not options.only or n in options.only or n.partition(".")[0] in options.only]
    reports = []
    with world() as libraries:
        for name in names:
            reports.append(compare(name, None if options.all else options.cases, libraries))
            print(f"\r{len(reports)}/{len(names)} {name:60}", end="", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in reports], indent=1))
    print(table(reports, options.verbose))
    return int(any(r.worse for r in reports))


def table(reports: Sequence[Report], verbose: bool = False) -> str:
    """Every operator with what it communicates, ours against torch's, the worst first."""
    head = f"{'ours, torch':50} {'cases':>5} {'collectives':>13} {'bytes':>21}   with what results owe"
    found = sorted((r for r in reports if r.compared), key=_excess, reverse=True)
    lines = [line for report in found for line in _lines(report, verbose)]
    return "\n".join([head, *lines, summary(reports)])


def _excess(report: Report) -> tuple[bool, float, float]:
    mine, peer = report.sums("settled")
    return report.worse, mine.collectives - peer.collectives, mine.received - peer.received


def _lines(report: Report, verbose: bool) -> Iterator[str]:
    columns = [f"{report.op:50} {len(report.compared):5}"]
    for mine, peer in (report.sums("call"), report.sums("settled")):
        columns.append(f"{mine.collectives:6.0f} {peer.collectives:6.0f} {mine.received:10.0f} {peer.received:10.0f}  ")
    yield " ".join([*columns, "WORSE" if report.worse else "", "needless" if report.needless else ""])
    cases = [one for one in report.compared if one.excess != NOTHING] if verbose else []
    for one in sorted(cases, key=lambda one: one.excess, reverse=True)[:4]:
        yield f"    {one.case}\n      ours  {_told(one.ours)}\n      torch {_told(one.torch)}"


def _told(cost: Cost) -> str:
    parts = (("forward", cost.forward), ("backward", cost.backward), ("owed", cost.owed))
    return ", ".join(f"{name} {m.collectives:.0f}/{m.received:.0f}" for name, m in parts) + f" -> {cost.results}"


def totals(reports: Sequence[Report], what: str) -> tuple[Moved, Moved]:
    """Ours and torch's over all operators."""
    sums = [report.sums(what) for report in reports]
    return total([mine for mine, _ in sums]), total([peer for _, peer in sums])


def summary(reports: Sequence[Report]) -> str:
    """The totals over all operators."""
    counted = [r for r in reports if r.compared]
    refused = {side: sum(len(r.errors[side]) for r in reports) for side in ("ours", "torch")}
    told = [
        f"{len(counted)} of {len(reports)} operators, {sum(len(r.compared) for r in counted)} cases in both;",
        f"{sum(r.worse for r in counted)} operators worse, {sum(len(r.needless) for r in counted)} cases needless;",
        f"refused by torch {refused['torch']}, by ours {refused['ours']};",
        f"cheaper but wrong in torch {sum(len(r.wrong) for r in reports)}; {sum(r.seconds for r in reports):.0f} s",
    ]
    lines = [" ".join(told)]
    for what in ("call", "settled"):
        a, b = totals(counted, what)
        ratios = f"{a.collectives / b.collectives:.3f} and {a.received / b.received:.3f} of torch's"
        lines.append(f"{what}: {a.collectives:.0f} collectives, {a.received:.0f} bytes: {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
