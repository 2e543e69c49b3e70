"""The full table of attention over a sharded sequence against one device: results and gradients.

Masks and options, ways, `Shard` and `Zigzag`, meshes of one, two and three axes, even, uneven and different lengths,
fewer tokens than ranks, float64 (1e-12 of the norm) and float32 (1e-6).

    python -m tests.virtual.attention_table [--only MASK ...] [--ways WAY ...] [--every N] [--jobs N]

Prints how often each way was taken for each mask, and every row that is not right. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import shardwise as sw
from tests.sequence_attention import (
    LAYOUTS,
    LENGTHS,
    MASKS,
    OPTIONS,
    ZIGZAGS,
    Case,
    assert_close,
    case,
    on_mesh,
    on_one_device,
)

WAYS = ("ring", "gather", "heads", "halo", None)
DTYPES = (torch.float64, torch.float32)


class Row(NamedTuple):
    """One call of the table."""

    mask: str
    option: str
    lengths: tuple[int, int]
    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    way: str | None

    def __str__(self) -> str:
        layout = " ".join(map(str, self.placements))
        return f"{self.mask}, {self.option}, {self.lengths}, {self.dtype}, {self.shape} {layout}, {self.way}"


def rows() -> Iterator[Row]:
    """All calls; those of one device's reference follow each other."""
    laid = (*LAYOUTS, *ZIGZAGS)
    for mask, option, lengths, dtype in itertools.product(MASKS, OPTIONS, LENGTHS, DTYPES):
        for (shape, placements), way in itertools.product(laid, WAYS):
            yield Row(mask, option, lengths, dtype, shape, placements, way)


def check(row: Row, given: Case, wanted: list[torch.Tensor]) -> set[str]:
    """Compare one call with one device, and return the algorithms that it used."""
    with sw.explain() as report:
        got = on_mesh(given, sw.init_device_mesh("cpu", row.shape), row.placements, row.way)
    assert_close(got, wanted)
    assert all(x.placements == row.placements for x in got), [x.placements for x in got]
    return {record.way for record in report.records if "flash" in record.name or "flex" in record.name}


def sweep(chosen: Sequence[Row]) -> tuple[dict[str, collections.Counter[str]], list[str]]:
    """The algorithms that calls of each mask used, and the differences."""
    taken: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong: list[str] = []
    for (mask, option, lengths, dtype), group in itertools.groupby(chosen, key=lambda row: row[:4]):
        given = case(mask, lengths, dtype, option=option)
        wanted = on_one_device(given)
        for row in group:
            try:
                ways = check(row, given, wanted)
            except Exception as error:
                wrong.append(f"{row}: {type(error).__name__}: {error}")
                continue
            taken[f"{mask}, {option}"].update(f"{row.way or 'any'}: {way or 'rule'}" for way in ways or {"no kernel"})
    return taken, wrong


def _sweep(chosen: Sequence[Row]) -> tuple[dict[str, collections.Counter[str]], list[str], int]:
    """The same in a process of its own, and how many calls it was."""
    torch.set_num_threads(1)
    return *sweep(chosen), len(chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.attention_table", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MASKS, default=MASKS, help="only these masks")
    parser.add_argument("--ways", nargs="+", choices=[way or "any" for way in WAYS], help="only these ways")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th row")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the calls")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    ways = WAYS if options.ways is None else [None if way == "any" else way for way in options.ways]
    chosen = [row for row in rows() if row.mask in options.only and row.way in ways][:: options.every]
    groups = [list(group) for _, group in itertools.groupby(chosen, key=lambda row: row[:4])]
    begin = time.perf_counter()
    taken: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong: list[str] = []
    done = 0
    with contextlib.ExitStack() as stack:
        results: Iterator[Any] = map(_sweep, groups)
        if options.jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context)
            results = stack.enter_context(pool).map(_sweep, groups)
        for counts, found, calls in results:
            for name, of_name in counts.items():
                taken[name] += of_name
            for line in found:
                print(f"WRONG {line}", flush=True)
            wrong, done = wrong + found, done + calls
    for name, of_name in taken.items():
        print(f"{name}: {', '.join(f'{way} {count}' for way, count in sorted(of_name.items()))}")
    print(f"{done} calls, forward and backward, {len(wrong)} wrong, {time.perf_counter() - begin:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
