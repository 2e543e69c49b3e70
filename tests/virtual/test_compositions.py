"""Kinds of parallelism together, each combination with one of the options: the matrix of `compositions`, sampled."""

import pytest

from tests.virtual.compositions import OPTIONS, Case, check, combinations

# Every combination is here, and every option with many of them; the command has all cells.
SAMPLE = [Case(data, axes, OPTIONS[at % len(OPTIONS)]) for at, (data, axes) in enumerate(combinations())]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.name}-{case.option}")
@pytest.mark.filterwarnings("ignore")
def test_trains_as_one_device(case: Case) -> None:
    assert check(case).partition(":")[0] in ("right", "refused")
