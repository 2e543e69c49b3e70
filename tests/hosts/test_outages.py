"""A link that stays down, ranks that are frozen or killed: every other rank ends with an error soon after the timeout.

torch's own client of the store would wait for TCP, a quarter of an hour.
"""

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest

from tests.hosts.outages import Ending, Fault, Outage, cut, freeze, kill

COMPILED = (
    r"(all-gather|all-reduce \(sum\)|reduce-scatter \(sum\)|all-to-all) over (dp|tp|dp x tp) of .* in compiled code"
)
NAMED = {"LostRankError", "PipelineError", "AgreementError"}
FAULTS: dict[str, Fault] = {"cut": cut, "freeze the store": freeze(0), "kill the store": kill(0), "kill": kill(3)}


Case = tuple[str, str]
CASES: list[Case] = [
    ("cut", "groups"),
    ("cut", "transfer"),
    ("cut", "plain_tensors"),
    ("cut", "agreement"),
    ("cut", "pipeline"),
    ("cut", "saving_at_exit"),
    ("cut", "in_flight"),
    ("freeze the store", "groups"),
    ("freeze the store", "pipeline"),
    ("kill", "groups"),
    ("kill", "first_step"),
    ("kill", "captured"),
    ("kill", "compiled"),
    ("cut", "compiled_backward"),
    ("kill the store", "pipeline"),
]


@pytest.fixture(scope="module")
def endings_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], dict[int, Ending]]]:
    """Runs a case. The processes of the next one are started and import while this one waits for its timeout."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen: list[Case] = [
        (str(item.callspec.params["fault"]), str(item.callspec.params["program"]))
        for item in items
        if item.module is request.module
    ]
    started: dict[Case, Outage] = {}
    with contextlib.ExitStack() as all_of_them:

        def start(case: Case) -> None:
            if case not in started:
                started[case] = all_of_them.enter_context(Outage(case[1]))

        def run(case: Case) -> dict[int, Ending]:
            start(case)
            following = chosen[chosen.index(case) + 1 :][:1]
            with started[case] as outage:
                return outage.endings(FAULTS[case[0]], meanwhile=lambda: [start(each) for each in following])

        yield run


@pytest.mark.parametrize(("fault", "program"), CASES)
def test_every_rank_ends_with_an_error_that_names_it(
    fault: str, program: str, endings_of: Callable[[Case], dict[int, Ending]]
) -> None:
    for rank, ended in endings_of((fault, program)).items():
        assert ended.status == 1, (rank, ended.status, ended.text, ended.log)  # None: it hangs; negative: a signal
        assert ended.error in NAMED, (rank, ended.text)
        assert re.search(r"\brank \d.* host\d", ended.text), (rank, ended.text)
        if "compiled" in program:
            assert re.search(COMPILED, ended.text), (rank, ended.text)
