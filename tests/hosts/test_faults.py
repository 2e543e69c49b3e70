"""A fault of each kind at a random moment: the right values, or an error that names rank and host; nothing is lost."""

import pytest

from tests.hosts.fault_campaign import KINDS, run, table


@pytest.mark.parametrize("kinds", [("kill a process", "a slow rank", "directory removed", "clock jumps")])
def test_faults_end_well(kinds: tuple[str, ...]) -> None:
    trials = run(len(kinds), 3, kinds, report=lambda trial: None)
    assert [trial.kind for trial in trials] == list(kinds)
    for trial in trials:
        assert trial.outcome in ("continued", "refused"), trial


def test_the_table_counts_by_kind() -> None:
    lines = table([(KINDS[0], "refused"), (KINDS[0], "hang"), (KINDS[1], "continued")]).splitlines()
    assert lines[2] == f"| {KINDS[0]} | 2 | 0 | 1 | 0 | 1 | 0 | 0 |"
    assert lines[-1] == "| all | 3 | 1 | 1 | 0 | 1 | 0 | 0 |"
