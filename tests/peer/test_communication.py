"""No more communication than torch.distributed.tensor: every operator of torch's test database that both carry out."""

from collections.abc import Iterator

import pytest

from tests.peer.communication import Report, compare, totals, world
from tests.virtual.conformance import database

CASES = 6  # of each operator, always the same
UNREDUCED = "reads each rank's own part of a sum"
KERNEL = "takes a sharded kernel for a whole one"
PARTS = "parts of a sum overflow, and are rounded, where the sum is not"
DRAWS = "other numbers than one device draws"

# Operators that cost torch less because it gives something else than one device does.
WRONG_IN_TORCH: dict[str, str] = {}

SEVERAL = "a sum that several operators read is added up by each of them"
SHORT = "a row has so few elements that its maximum and sum are no less: rows are not gathered whatever their length"
ONE = "a dim of size one is sharded: only one rank has anything"

# Operators that cost more on the small tensors here, and why that is so.
MORE: dict[str, str] = {}


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    """Every operator, counted once for all tests."""
    with world() as libraries:
        yield [compare(name, CASES, libraries) for name in database()]


def test_no_operator_communicates_more(reports: list[Report]) -> None:
    """In collectives and bytes together, forward and backward, over the cases of each operator."""
    worse = {r.op: (*r.sums("call"), *r.sums("settled")) for r in reports if r.worse}
    assert not {op: sums for op, sums in worse.items() if op not in WRONG_IN_TORCH and op not in MORE}


def test_nothing_is_issued_where_torch_issues_nothing(reports: list[Report]) -> None:
    found = [f"{r.op}: {one.case}" for r in reports for one in r.needless if r.op not in WRONG_IN_TORCH]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("what", ["call", "settled"])
def test_all_together(reports: list[Report], what: str) -> None:
    """Both counts, over all operators; with and without the reductions that results put off."""
    mine, peer = totals(reports, what)
    assert sum(len(r.compared) for r in reports) > 2000
    assert mine.collectives < peer.collectives
    assert mine.received < peer.received


def test_tables_name_operators() -> None:
    assert not {*WRONG_IN_TORCH, *MORE} - set(database())
    assert not WRONG_IN_TORCH.keys() & MORE.keys()
