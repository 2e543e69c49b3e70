"""The whole table of attention over a sharded sequence beside one device: results and gradients.

Masks and options, ways, `Shard` and `Zigzag`, meshes of one, two and three axes, even, uneven and different lengths,
fewer tokens than ranks, float64 (1e-12 of the norm) and float32 (1e-6).

    python -m tests.virtual.attention_table [--only MASK ...] [--ways WAY ...] [--every N]

Prints how often each way was taken for each mask, and every row that is not right. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import collections
import itertools
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
    """Compare one call with one device, and return the ways that its kernels took."""
    with sw.explain() as report:
        got = on_mesh(given, sw.init_device_mesh("cpu", row.shape), row.placements, row.way)
    assert_close(got, wanted)
    if row.option != "dropout":  # which torch computes from matrix products; these choose layouts of their own
        assert all(x.placements == row.placements for x in got), [x.placements for x in got]
    return {record.way for record in report.records if "flash" in record.name}


def sweep(chosen: Sequence[Row]) -> tuple[dict[str, collections.Counter[str]], list[str]]:
    """The ways that calls of each mask took, and what is not right."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.attention_table", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MASKS, default=MASKS, help="only these masks")
    parser.add_argument("--ways", nargs="+", choices=[way or "any" for way in WAYS], help="only these ways")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th row")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    ways = WAYS if options.ways is None else [None if way == "any" else way for way in options.ways]
    chosen = [row for row in rows() if row.mask in options.only and row.way in ways][:: options.every]
    begin, wrong = time.perf_counter(), []
    for mask in options.only:
        taken, found = sweep([row for row in chosen if row.mask == mask])
        for name, counts in taken.items():
            print(f"{name}: {', '.join(f'{way} {count}' for way, count in sorted(counts.items()))}", flush=True)
        for line in found:
            print(f"WRONG {line}", flush=True)
        wrong += found
    print(f"{len(chosen)} calls, forward and backward, {len(wrong)} wrong, {time.perf_counter() - begin:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
