"""Weak scaling: with constant data on each rank, no program takes more memory or receives more on more ranks."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from bench.weak_scaling import PROGRAMS, cost, grows
from tests.torch_version import TORCH
from tests.virtual.conformance import database
from tests.virtual.growing_operators import GROWING, REASONS
from tests.virtual.scaling import Cost, Layout, Scaling, audit, read, unexplained, with_column, with_reasons

FEW, MANY, MOST_RANKS = 8, 64, 512
# Operators of torch's test database, sampled: in no layout do they cost more on more ranks.
FLAT = (
    "abs", "add", "amax", "chunk", "constant_pad_nd", "gather", "index_fill", "index_select", "masked_fill", "mean",
    "nn.functional.embedding_bag", "nn.functional.glu", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.mse_loss", "nn.functional.one_hot", "permute", "roll", "stack", "sum", "topk", "tril", "view",
    "where",
)  # fmt: skip
# Most units of a rank's data that a program may hold, forward and backward.
MOST = {"mean": 4, "mean_squared_error": 6}


# Where torch's own formula of a gradient makes a plain tensor of zeros in the global shape, before 2.13.
ZEROS_OF_TORCH = {"repeated", "tiled", "extremes", "largest_of_rows", "sorted_rows", "median_of_rows"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_grows(name: str) -> None:
    if name in ZEROS_OF_TORCH and TORCH < (2, 13):
        pytest.skip(f"torch {torch.__version__} makes zeros of the global shape in this gradient")
    few, many, most = (cost(PROGRAMS[name], ranks) for ranks in (FEW, MANY, MOST_RANKS))
    assert not grows(few, many, FEW), f"{few} on {FEW} ranks, {many} on {MANY}"
    assert not grows(few, most, FEW), f"{few} on {FEW} ranks, {most} on {MOST_RANKS}"
    assert many.collectives == few.collectives
    assert round(most.peak, 2) <= MOST.get(name, math.inf)


@pytest.mark.parametrize("name", ["mean", "centred_columns", "perceptron", "first_row"])
def test_thousands_of_ranks(name: str) -> None:
    few, many = (cost(PROGRAMS[name], ranks) for ranks in (FEW, 4096))
    assert not grows(few, many, FEW), f"{few} on {FEW} ranks, {many} on 4096"


def test_column_of_the_table() -> None:
    page = "| operator | cases |a|b|c|d|e| backward |\n|---|---:|---:|---:|---:|---:|---:|---|\n"
    rows = "| `abs` | 1 | 2 | 3 | 4 | 5 | 6 | free |\n| `add` | 1 | 2 | 3 | 4 | 5 | 6 | free |\n"
    layouts = [Layout(0, 0, (Cost(100, 0),) * 3), Layout(0, 1, (Cost(100, 0), Cost(400, 0), Cost(1600, 0)))]
    once = with_column(page + rows, [Scaling("abs", layouts)])
    assert once.split("\n")[2:4] == [rows.split("\n")[0] + " 50 |", rows.split("\n")[1] + "  |"]
    assert with_column(once, [Scaling("abs", layouts)]) == once


@pytest.mark.parametrize("name", FLAT)
def test_operators_do_not_grow(name: str) -> None:
    found = audit(name)
    assert found.layouts
    assert not [layout for layout in found.layouts if layout.grows]


DATABASE = database()


@pytest.mark.parametrize(
    "name", [next(n for n in names if n in DATABASE) for key, (_, names) in REASONS.items() if key != "results"]
)
def test_operators_with_a_reason_grow(name: str) -> None:
    """One operator of each reason, but of one with thousands of results; the audit's command looks at all."""
    assert audit(name).grows, f"{name} is flat now; take it out of tests/virtual/growing_operators.py"


def test_growth_needs_a_reason_and_a_reason_growth() -> None:
    flat, growing = Layout(0, 0, (Cost(100, 0),) * 3), Layout(0, 0, (Cost(100, 0), Cost(400, 0), Cost(1600, 0)))
    assert flat.grows is False
    assert growing.grows is True
    known = next(iter(GROWING))
    assert unexplained([Scaling("abs", [flat]), Scaling(known, [growing])]) == []
    assert unexplained([Scaling("abs", [growing])]) == ["abs grows without a reason"]
    assert unexplained([Scaling(known, [flat])])[0].startswith(f"{known} does not grow, but has a reason")


def test_a_change_of_algorithm_is_no_growth() -> None:
    few = (Cost(100, 0), Cost(400, 0), Cost(500, 0))
    assert not Layout(0, 0, few, (Cost(9000, 100), Cost(9000, 101))).grows
    assert not Layout(0, 0, few, (Cost(9000, 100), Cost(99000, 100_000), Cost(99000, 110_000))).grows  # bounded
    assert not Layout(0, 0, few, (Cost(9000, 100), Cost(9000, 100 + 100 * 512))).grows  # numbers for each rank
    assert Layout(0, 0, few, (Cost(9000, 100), Cost(64000, 800))).grows
    assert Layout(0, 0, few, (Cost(9000, 100), Cost(9000, 1_000_000))).grows


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    found = [Scaling("abs", [Layout(0, 0, (Cost(100, 0),) * 3, (Cost(9000, 100),))]), Scaling("add")]
    (tmp_path / "costs.json").write_text(json.dumps([dataclasses.asdict(one) for one in found]))
    assert read(tmp_path / "costs.json") == found


def test_page_of_reasons() -> None:
    page = with_reasons("# Operators\n\ntext\n")
    assert page == with_reasons(page)
    assert all(reason in page and all(f"`{name}`" in page for name in names) for reason, names in REASONS.values())


def test_an_operator_has_one_reason() -> None:
    assert len(GROWING) == sum(len(names) for _, names in REASONS.values())
