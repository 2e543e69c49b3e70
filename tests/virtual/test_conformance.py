"""Every operator of torch's test database, a few cases of each: as on one device, or named here with the reason."""

import itertools
from collections.abc import Iterator

import pytest

from tests.virtual.conformance import check_operator, database, line_of, sampled

pytestmark = pytest.mark.usefixtures("always_decomposing")

SEED = 0
CHUNKS = 48  # so that workers can share them

# Operators that fail now, and why. One that passes again must be taken out.
KNOWN: dict[str, str] = {
    "to_sparse": "there are no sparse DTensors",
}


def names_in(chunk: int) -> Iterator[str]:
    """Every CHUNKS-th operator."""
    return itertools.islice(database(), chunk, None, CHUNKS)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators(chunk: int) -> None:
    """Each operator gives one device's values and gradients, or is known not to."""
    wrong = []
    for name in names_in(chunk):
        report = check_operator(name, sampled(SEED))
        if report.failures and name not in KNOWN:
            wrong.append(line_of(report))
        elif not report.failures and name in KNOWN:
            wrong.append(f"{name}: passes now; remove it from KNOWN")
    assert not wrong, "\n".join(wrong)


def test_known_operators_exist() -> None:
    """No entry outlives its operator."""
    assert not set(KNOWN) - set(database())
