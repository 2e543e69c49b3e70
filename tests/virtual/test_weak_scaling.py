"""Weak scaling: with constant data on each rank, no program takes more memory or receives more on more ranks."""

import math

import pytest
import torch

from bench.weak_scaling import PROGRAMS, cost, grows
from tests.virtual.scaling import audit

FEW, MANY = 8, 64
# Operators of torch's test database, sampled: in no layout do they cost more on more ranks.
FLAT = (
    "abs", "add", "amax", "gather", "index_select", "masked_fill", "mean", "nn.functional.layer_norm",
    "nn.functional.linear", "nn.functional.mse_loss", "permute", "stack", "sum", "where",
)  # fmt: skip
# Operators that must grow along a sharded dim, and why.
GROWING = {
    "kthvalue": "the order of all elements of the dim is needed; where no other dim can be sharded, it is gathered",
    "median": "as kthvalue",
}
# Most units of a rank's data that a program may hold, forward and backward.
MOST = {"mean": 4, "mean_squared_error": 6}


# Where torch's own formula of a gradient makes a plain tensor of zeros in the global shape, before 2.13.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
ZEROS_OF_TORCH = {"extremes", "largest_of_rows", "sorted_rows", "median_of_rows"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_grows(name: str) -> None:
    if name in ZEROS_OF_TORCH and TORCH < (2, 13):
        pytest.skip(f"torch {torch.__version__} makes zeros of the global shape in this gradient")
    few, many = (cost(PROGRAMS[name], ranks) for ranks in (FEW, MANY))
    assert not grows(few, many, FEW), f"{few} on {FEW} ranks, {many} on {MANY}"
    assert many.collectives == few.collectives
    assert round(many.peak, 2) <= MOST.get(name, math.inf)


@pytest.mark.parametrize("name", ["mean", "centred_columns", "perceptron", "first_row"])
def test_thousands_of_ranks(name: str) -> None:
    few, many = (cost(PROGRAMS[name], ranks) for ranks in (FEW, 4096))
    assert not grows(few, many, FEW), f"{few} on {FEW} ranks, {many} on 4096"


@pytest.mark.parametrize("name", FLAT)
def test_operators_do_not_grow(name: str) -> None:
    found = audit(name)
    assert found.layouts
    assert not [layout for layout in found.layouts if layout.grows]


@pytest.mark.parametrize("name", GROWING)
def test_operators_that_must_grow_do(name: str) -> None:
    assert any(layout.grows for layout in audit(name).layouts), f"{name} is flat now; take it out of GROWING"
