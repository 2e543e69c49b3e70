"""Random functions, captured and eager, by their seeds: what is compared, and the command that runs many of them."""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

import shardwise as sw
from shardwise.fabric.rank_tensor import parts_of

Compare = Callable[..., tuple[int, int]]  # of a seed: how many calls ran as programs, and how many programs there were
Outcome = tuple[int, int, int, str]
NOT_BEGUN = "no time left"
STUCK = 60.0  # seconds after which a seed is taken to hang, and its stack is printed


class Refused(Exception):
    """The captured function was refused by name, and everything is as it was before the call."""


def refusal(error: Exception) -> Exception:
    """What a refusal counts as. A program that gives other values than its function is a failure here.

    All operators of the random functions are torch's, and those of a CPU give the same bits twice.
    """
    text = str(error).splitlines()[0]
    return AssertionError(text) if "gives other values" in text else Refused(text)


def bits(tensor: Any) -> Any:
    """Everything that a caller can see of a tensor; another object itself."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local = tensor._local_tensor if isinstance(tensor, sw.DTensor) else tensor
    spec = str(tensor.spec) if isinstance(tensor, sw.DTensor) else ""
    values = [_bytes(part.detach()) for part in parts_of(local)]
    return spec, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.grad_fn is None, values


def _bytes(part: torch.Tensor) -> bytes:
    copy = torch.empty(part.numel(), dtype=part.dtype)
    return copy.copy_(part.reshape(-1)).view(torch.uint8).numpy().tobytes()


def _timed(compare: Compare, given: tuple[int, int, float]) -> Outcome:
    """The outcome of one seed, if there is time left for it."""
    seed, calls, end = given
    if time.time() > end:
        return seed, 0, 0, NOT_BEGUN
    faulthandler.dump_traceback_later(STUCK, file=sys.__stderr__)
    try:
        ran, programs = compare(seed, calls=calls)
        return seed, ran, programs, ""
    except Refused as refused:
        return seed, 0, 0, f"refused: {refused}"
    except Exception:
        return seed, 0, 0, traceback.format_exc(limit=-4)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _cause(text: str) -> str:
    """The last line of an error without the numbers of this program, so that alike ones are counted together."""
    line = [line for line in text.strip().splitlines() if line.strip()][-1]
    hints = [line for line in text.strip().splitlines() if "Error: " in line]
    return re.sub(r"0x[0-9a-f]+|\d+", "N", (hints[-1] if hints else line).strip())[:200]


def run_seeds(compare: Compare, calls: int, description: str | None, arguments: list[str] | None) -> int:
    """The command that compares the functions of many seeds; returns the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--calls", type=int, default=calls)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no program later than this")
    parser.add_argument("--show", type=int, default=5, help="how many failures are shown in full")
    options = parser.parse_args(arguments)
    end = time.time() + options.seconds
    seeds = range(options.seed, options.seed + options.programs)
    torch.set_num_threads(1)
    was = signal.signal(signal.SIGTERM, _stop)
    totals = _Totals(options.calls, options.show)
    left = set(seeds)
    timed, given = functools.partial(_timed, compare), [(seed, options.calls, end) for seed in seeds]
    # kept to the end: the finalizer of a pool that lost a worker waits forever
    pool = multiprocessing.get_context("spawn").Pool(options.jobs, _begin_worker) if options.jobs > 1 else None
    try:
        for found in map(timed, given) if pool is None else _by_workers(pool, timed, given):
            left.discard(found[0])
            if found[3] != NOT_BEGUN:
                totals.add(found)
    except KeyboardInterrupt:
        totals.show()
        print(f"stopped: {len(left)} seeds gave no result, the first are {sorted(left)[:40]}", flush=True)
        _end()
    finally:
        signal.signal(signal.SIGTERM, was)
    for seed in sorted(left):
        totals.add((seed, 0, 0, "no result: its process died or hangs"))
    totals.show()
    if left:
        _end()
    if pool is not None:
        pool.terminate()
    return 1 if totals.failed else 0


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _end() -> None:
    """End all processes at once: a worker may hang, and threads of autograd may be in the middle of a step."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(1)


def _by_workers(
    pool: Any, timed: Callable[[tuple[int, int, float]], Outcome], given: list[tuple[int, int, float]]
) -> Iterator[Outcome]:
    """The outcomes of seeds as they come, until none comes for a while: a worker that dies takes its seed with it."""
    outcomes = pool.imap_unordered(timed, given)
    for _ in given:
        try:
            yield outcomes.next(timeout=2 * STUCK)
        except multiprocessing.TimeoutError:
            return


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends them
    faulthandler.enable()
    torch.set_num_threads(1)


class _Totals:
    """Counts of outcomes; failures are printed as they come."""

    def __init__(self, calls: int, shown: int) -> None:
        self.calls, self.shown = calls, shown
        self.steps = self.ran = self.programs = self.failed = self.refused = 0
        self.causes: dict[str, list[int]] = collections.defaultdict(list)
        self.start = time.time()

    def add(self, outcome: Outcome) -> None:
        seed, ran, programs, text = outcome
        self.steps, self.ran, self.programs = self.steps + 1, self.ran + ran, self.programs + programs
        if text.startswith("refused: "):
            self.refused += 1
        elif text:
            self.failed += 1
            if self.failed <= self.shown:
                print(f"seed {seed}:\n{text}", file=sys.stderr, flush=True)
        if text:
            self.causes[_cause(text)].append(seed)
        if self.steps % 50 == 0:
            print(self.line(), flush=True)

    def line(self) -> str:
        return (
            f"{self.steps} steps, {self.calls} calls each: {self.ran} calls ran as programs, {self.programs} programs, "
            f"{self.refused} refused by name, {self.failed} failed ({time.time() - self.start:.0f} s)"
        )

    def show(self) -> None:
        for cause, seeds in sorted(self.causes.items(), key=lambda item: -len(item[1])):
            print(f"{len(seeds)} times, seeds {seeds[:8]}: {cause}")
        print(self.line(), flush=True)
