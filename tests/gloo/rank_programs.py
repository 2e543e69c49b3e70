"""Random programs on virtual ranks and on four processes: every rank has the same values, or there is an error.

    python -m tests.gloo.rank_programs --programs 2000 --seed 0 --jobs 1

A program is run on virtual ranks first. The processes run as far as it went there, and what each of them holds is
compared. An error on virtual ranks must be one on all processes too, or say that one plain tensor, generator or
number cannot be that of every rank: then the processes go on, and differ in one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import AgreementError, ShardwiseError, UnsupportedError
from shardwise.fabric import base
from shardwise.fabric.c10d import c10d
from tests.gloo.processes import ProcessPool, RankFailed, RankTimeout
from tests.gloo.rank_statements import statements

RANKS = 4
LENGTH = 12  # statements after the beginning
CHUNK = 20  # programs for one call of the processes
SHARE = 200  # programs for one start of the processes
TIME_LIMIT = 120.0  # seconds for that call
State = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A mesh of four ranks and the statements to run on it."""

    seed: int
    mesh: tuple[int, ...]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, seed: int) -> Program:
        mesh, lines = statements(seed, LENGTH)
        return cls(seed, mesh, tuple(lines))

    def __str__(self) -> str:
        return f"# program {self.seed}, mesh {self.mesh}\n" + "\n".join(self.lines)


@dataclass(frozen=True)
class End:
    """How far a program got, and what there was then: by name what each rank holds, or what all of them share."""

    count: int
    error: str | None
    owned: dict[str, list[Any]]
    shared: State


# ---------------------------------------------------------------- running


def fill(shape: Sequence[int], number: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.arange(1, count + 1, dtype=torch.float64).mul(number + 0.37).sin().reshape(tuple(shape))


def each_virtually(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return sw.RankTensor(list(tensors))


def each_here(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[dist.get_rank()]


def namespace(program: Program, each: Any) -> State:
    torch.manual_seed(program.seed)
    mesh = sw.init_device_mesh("cpu", program.mesh, mesh_dim_names=("dp", "tp")[-len(program.mesh) :])
    return {
        "torch": torch, "sw": sw, "nn": nn, "F": F, "checkpoint": checkpoint, "fill": fill, "each": each,
        "mesh": mesh, "tp": mesh["tp"], "seq": lambda x: sw.distribute_tensor(x, mesh["tp"], [sw.Shard(1)]),
        "generator": torch.Generator().manual_seed(program.seed),
    }  # fmt: skip


def named_values(scope: State) -> State:
    """Everything that a program holds: tensors and gradients, parameters and buffers, optimizer states, numbers."""
    found: State = {"default generator": torch.get_rng_state(), "generator": scope["generator"].get_state()}
    for name, value in scope.items():
        if isinstance(value, torch.Tensor | torch.SymInt | int | float | bool):
            found[name] = value
        elif isinstance(value, nn.Module):
            found |= {f"{name}.{path}": tensor for path, tensor in value.named_parameters()}
            found |= {f"{name}.{path}": tensor for path, tensor in value.named_buffers()}
        elif isinstance(value, torch.optim.Optimizer):
            for i, state in enumerate(value.state.values()):
                found |= {
                    f"{name}[{i}].{key}": v for key, v in state.items() if isinstance(v, torch.Tensor | int | float)
                }
    gradients = {f"{name}.grad": value.grad for name, value in found.items() if _is_leaf_with_grad(value)}
    return found | gradients


def _is_leaf_with_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None


def value_of(tensor: Any) -> Any:
    """What is compared of a value: of DTensors the local and the layout, of sums what they add up to."""
    if isinstance(tensor, sw.DTensor):
        with torch.no_grad():
            settled = tensor.detach().redistribute(placements=[
                sw.Replicate() if isinstance(p, sw.Partial) else p for p in tensor.placements
            ])  # fmt: skip
        return settled.to_local()
    return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor


def run_virtually(program: Program) -> End:
    """The program as far as it goes on virtual ranks."""
    scope, before, error = namespace(program, each_virtually), {}, None
    count = 0
    for count, line in enumerate(program.lines):  # noqa: B007
        before = _copied(named_values(scope))
        try:
            exec(line, scope)
        except Exception as problem:
            error = _described(problem)
            break
    else:
        count, before = len(program.lines), _copied(named_values(scope))
    owned, shared = {}, {}
    for name, value in before.items():
        if isinstance(value, sw.RankTensor):
            owned[name] = list(value.tensors)
        elif isinstance(value, torch.SymInt):
            owned[name] = list(value.node.values)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            shared[name] = value
    return End(count, error, owned, shared)


def _copied(values: State) -> State:
    with torch.random.fork_rng(devices=[]):
        return {
            name: v.clone() if isinstance(v, torch.Tensor) else v
            for name, v in ((name, value_of(value)) for name, value in values.items())
        }


def _described(problem: Exception) -> str:
    line = str(problem).splitlines()[0] if str(problem) else ""
    return f"{_kind(problem)}: {type(problem).__name__}: {line[:300]}"


def _kind(problem: Exception) -> str:
    if isinstance(problem, AgreementError):
        return "differs"
    if isinstance(problem, UnsupportedError) and "different plain value" in str(problem):
        return "differs"
    if "SymIntArrayRef expected" in str(problem):  # a plain tensor of a size that is each rank's own
        return "differs"
    return "ours" if isinstance(problem, ShardwiseError) else "theirs"


def run_here(programs: Sequence[tuple[Program, int, bool]]) -> list[tuple[State, str | None, State]]:
    """On this process each program's first `count` statements; then the next one too, if that is asked for."""
    warnings.simplefilter("ignore")
    return [_run_here(*given) for given in programs]


def _run_here(program: Program, count: int, further: bool) -> tuple[State, str | None, State]:
    scope = namespace(program, each_here)
    for i, line in enumerate(program.lines[:count]):
        error = _tried(line, scope)
        if error is not None:
            return {}, f"statement {i}: {error}", {}
    held = _copied(named_values(scope))
    if not further:
        return held, None, {}
    error = _tried(program.lines[count], scope, settle=True)
    if error is not None:
        check_afresh()
    return held, error, {} if error is not None else _copied(named_values(scope))


def check_afresh() -> None:
    """Forget that plain tensors of the ranks were found to differ: that ends a program, but not those after it."""
    dist.barrier()
    if c10d._plain is not None:
        c10d._plain.close(wait=True)
    c10d._plain = None
    c10d._worlds += 1
    base.found_errors.clear()
    base._raised.clear()
    dist.barrier()


def _tried(line: str, scope: State, settle: bool = False) -> str | None:
    """Run a statement; the error of the first rank that has one, on all ranks. `settle`: also what is found later."""
    error = None
    try:
        exec(line, scope)
    except Exception as problem:
        error = _described(problem)
    if settle:
        try:
            c10d.settle_checks()
        except AgreementError as problem:
            error = error or _described(problem)
    errors: list[Any] = [None] * RANKS
    dist.all_gather_object(errors, error)
    return next((f"{e} (on ranks {[r for r in range(RANKS) if errors[r]]})" for e in errors if e), None)


# ---------------------------------------------------------------- comparing


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        return torch.allclose(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)
    return bool(a == b or (a != a and b != b))


def problems(program: Program, end: End, ranks: Sequence[tuple[State, str | None, State]]) -> tuple[str, list[str]]:
    """The kind of outcome, and what is wrong with it."""
    errors = [error for _, error, _ in ranks]
    if not ranks[0][0]:
        return "wrong", [f"only processes fail: {errors[0]}"]
    wrong = []
    for rank, (held, _, _) in enumerate(ranks):
        names = end.owned.keys() | end.shared.keys()
        if names != held.keys():
            wrong.append(f"rank {rank} holds other names: {sorted(names ^ held.keys())}")
        for name in names & held.keys():
            ours = end.owned[name][rank] if name in end.owned else end.shared[name]
            if not same(ours, held[name]):
                wrong.append(f"{name} on rank {rank}: virtual {_short(ours)}, process {_short(held[name])}")
    if wrong or end.error is None:
        return ("wrong", wrong) if wrong else ("equal", [])
    if errors[0] is not None:
        return "both raise", []
    if not end.error.startswith("differs"):
        return "wrong", [f"only virtual ranks fail: {end.error}"]
    after = [state for _, _, state in ranks]
    changed = [
        name for name in after[0] if name not in end.owned and any(not _bitwise(s[name], after[0][name]) for s in after)
    ]
    if not changed and not any(
        "closure" in line or "backward" in line for line in program.lines[end.count : end.count + 1]
    ):
        return "wrong", [f"the processes agree, but virtual ranks do not: {end.error}"]
    return "differs", []


def _bitwise(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return a == b


def _short(value: Any) -> str:
    return (
        hashlib.sha1(value.numpy().tobytes()).hexdigest()[:8]
        if isinstance(value, torch.Tensor) and value.numel() > 12
        else str(value)
    )


@dataclass
class Report:
    """How many programs had which outcome, and those that are wrong."""

    outcomes: Counter[str]
    failures: list[str]

    def line(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcomes.items()))
        return f"{sum(self.outcomes.values())} programs: {counts}"


def check(seeds: Sequence[int], pool: ProcessPool) -> Report:
    """Run programs on virtual ranks and on the processes of a pool."""
    report = Report(Counter(), [])
    for start in range(0, len(seeds), CHUNK):
        chunk = [Program.of(seed) for seed in seeds[start : start + CHUNK]]
        ends = [run_virtually(program) for program in chunk]
        for program, end, ranks in zip(chunk, ends, _on_processes(chunk, ends, pool), strict=True):
            kind, wrong = ("wrong", [ranks]) if isinstance(ranks, str) else problems(program, end, ranks)
            report.outcomes[kind] += 1
            if wrong:
                lines = "\n".join([str(program), f"# ended at statement {end.count}: {end.error}", *wrong[:6]])
                report.failures.append(lines)
    return report


def _on_processes(chunk: Sequence[Program], ends: Sequence[End], pool: ProcessPool) -> list[Any]:
    """For each program what each rank answered; one that hangs or kills a rank is found by running them one by one."""
    given = [(program, end.count, end.error is not None) for program, end in zip(chunk, ends, strict=True)]
    try:
        return list(zip(*pool.run(run_here, given, timeout=TIME_LIMIT), strict=True))
    except (RankFailed, RankTimeout) as problem:
        if len(chunk) == 1:
            return [str(problem)]
    return [found for i in range(len(chunk)) for found in _on_processes(chunk[i : i + 1], ends[i : i + 1], pool)]


def check_alone(seeds: Sequence[int]) -> Report:
    """The same on processes of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with ProcessPool(RANKS) as pool:
        return check(seeds, pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help=f"worlds of {RANKS} processes at a time")
    options = parser.parse_args()
    began, end = time.monotonic(), options.seed + options.programs
    shares = [range(first, min(first + SHARE, end)) for first in range(options.seed, end, SHARE)]
    total = Report(Counter(), [])
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as jobs:
        for report in jobs.map(check_alone, shares):
            total = Report(total.outcomes + report.outcomes, total.failures + report.failures)
            print(*report.failures, f"{total.line()} so far", sep="\n\n", flush=True)
    print(f"{total.line()}; {time.monotonic() - began:.0f} s")
    sys.exit(bool(total.failures))


if __name__ == "__main__":
    importlib.import_module("tests.gloo.rank_programs").main()  # by the name by which the processes know it
