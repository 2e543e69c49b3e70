"""The same plan in torch: the same losses, and no more collectives or bytes a step."""

import pytest

from bench.counting import Calls, Moved, fake_world
from tests.gloo.processes import ProcessPool
from tests.peer.plans import LIBRARIES, PLANS, Training, compare_losses
from tests.virtual.training import make_batches

WORLD = 4


def test_the_same_losses(gloo4: ProcessPool) -> None:
    for plans in gloo4.run(compare_losses, 2, timeout=120):
        for plan, losses in plans.items():
            assert losses["ours"] == pytest.approx(losses["one"], rel=1e-9), plan
            assert losses["torch"] == pytest.approx(losses["one"], rel=1e-9), plan


@pytest.mark.parametrize("plan", PLANS)
def test_no_more_communication(plan: str) -> None:
    moved: dict[str, Moved] = {}
    with fake_world(WORLD):
        for name in LIBRARIES:
            training = Training(plan, name, WORLD)
            first, second = make_batches(2)
            training.step(*first)  # what is done once
            with Calls() as calls:
                training.step(*second)
            moved[name] = calls.moved
    assert moved["ours"].collectives <= moved["torch"].collectives, moved
    assert moved["ours"].received <= moved["torch"].received, moved
