"""Weak scaling: with constant data on each rank, no program takes more memory or receives more on more ranks."""

import math

import pytest

from bench.weak_scaling import PROGRAMS, cost, grows

FEW, MANY = 8, 64
# Most units of a rank's data that a program may hold, forward and backward.
MOST = {"mean": 4, "mean_squared_error": 6}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_grows(name: str) -> None:
    few, many = (cost(PROGRAMS[name], ranks) for ranks in (FEW, MANY))
    assert not grows(few, many, FEW), f"{few} on {FEW} ranks, {many} on {MANY}"
    assert many.collectives == few.collectives
    assert round(many.peak, 2) <= MOST.get(name, math.inf)


@pytest.mark.parametrize("name", ["mean", "centred_columns", "perceptron", "first_row"])
def test_thousands_of_ranks(name: str) -> None:
    few, many = (cost(PROGRAMS[name], ranks) for ranks in (FEW, 4096))
    assert not grows(few, many, FEW), f"{few} on {FEW} ranks, {many} on 4096"
