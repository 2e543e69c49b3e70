"""A sample of the random programs about ranks; `python -m tests.gloo.rank_programs --programs 2000` runs more."""

import warnings

from tests.gloo.processes import ProcessPool
from tests.gloo.rank_programs import Program, check

PROGRAMS = 60


def test_virtual_ranks_hold_what_processes_hold(gloo4: ProcessPool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check(range(PROGRAMS), gloo4)
    assert not report.failures, report.failures[0]
    assert report.outcomes["equal"] > PROGRAMS / 2  # else the programs end too soon to say much


def test_programs_are_the_same_every_time() -> None:
    assert Program.of(3) == Program.of(3)
    assert Program.of(3) != Program.of(4)
