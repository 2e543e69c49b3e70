"""The same plan in torch: the same losses, and no more collectives or bytes a step."""

from typing import Any

import pytest

from bench.counting import Calls, Moved, fake_world
from tests.gloo.processes import ProcessPool
from tests.peer.plans import LIBRARIES, PLANS, Training, compare_losses
from tests.virtual.training import make_batches

WORLD = 4
RUNS: list[tuple[str, dict[str, Any]]] = [
    *((plan, {}) for plan in PLANS),
    *((plan, {"reshard_after_forward": False}) for plan in PLANS if plan.startswith("fsdp")),
]


def test_the_same_losses(gloo4: ProcessPool) -> None:
    for plans in gloo4.run(compare_losses, 2, timeout=120):
        assert plans.keys() == set(PLANS)
        for plan, losses in plans.items():
            assert losses["ours"] == pytest.approx(losses["None"], rel=1e-9), plan
            assert losses["torch"] == pytest.approx(losses["None"], rel=1e-9), plan


def moved_in_a_step(plan: str, library: str, **options: Any) -> Moved:
    """What a step issues after two others, in which things are done that are done once."""
    training = Training(plan, library, **options)
    first, second, third = make_batches(3)
    training.step(*first)
    training.step(*second)
    with Calls() as calls:
        training.step(*third)
    return calls.moved


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # that the result is a view is known
@pytest.mark.parametrize(("plan", "options"), RUNS, ids=[f"{p} {list(o)}" for p, o in RUNS])
def test_no_more_communication(plan: str, options: dict[str, Any]) -> None:
    with fake_world(WORLD):
        moved = {name: moved_in_a_step(plan, name, **options) for name in LIBRARIES}
    assert moved["ours"].collectives > 0
    assert moved["ours"].collectives <= moved["torch"].collectives, moved
    assert moved["ours"].received <= moved["torch"].received, moved
