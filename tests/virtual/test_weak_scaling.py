"""Weak scaling: with constant data on each rank, no program takes more memory or receives more on more ranks."""

import math

import pytest
import torch

from bench.weak_scaling import PROGRAMS, cost, grows
from tests.torch_version import TORCH
from tests.virtual.scaling import Layout, Scaling, audit, with_column

FEW, MANY, MOST_RANKS = 8, 64, 512
# Operators of torch's test database, sampled: in no layout do they cost more on more ranks.
FLAT = (
    "abs", "add", "amax", "gather", "index_select", "masked_fill", "mean", "nn.functional.layer_norm",
    "nn.functional.linear", "nn.functional.mse_loss", "permute", "roll", "stack", "sum", "topk", "where",
)  # fmt: skip
# Operators that grow along a sharded dim where no other dim is as long as there are ranks, and why.
ORDER = "the order of all elements of the dim is needed, so it is exchanged for another dim, or gathered"
VALUES = "which rows are asked for is known only from the indices, which are sharded too"
GROWING = {"sort": ORDER, "kthvalue": ORDER, "median": ORDER, "mode": ORDER, "take_along_dim": VALUES}
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
    layouts = [Layout(0, 0, ((100, 0), (100, 0), (100, 0))), Layout(0, 1, ((100, 0), (400, 0), (1600, 0)))]
    once = with_column(page + rows, [Scaling("abs", layouts)])
    assert once.split("\n")[2:4] == [rows.split("\n")[0] + " 50 |", rows.split("\n")[1] + "  |"]
    assert with_column(once, [Scaling("abs", layouts)]) == once


@pytest.mark.parametrize("name", FLAT)
def test_operators_do_not_grow(name: str) -> None:
    found = audit(name)
    assert found.layouts
    assert not [layout for layout in found.layouts if layout.grows]


@pytest.mark.parametrize("name", GROWING)
def test_operators_that_must_grow_do(name: str) -> None:
    assert any(layout.grows for layout in audit(name).layouts), f"{name} is flat now; take it out of GROWING"
