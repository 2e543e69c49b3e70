"""Plans of the example against one device, a sample: `python -m tests.virtual.training` runs all of them.

Every plan, every mesh, both kinds of batches and both kinds of sizes are in it.
"""

import pytest
import torch

from examples.llama import PLANS
from tests.virtual.training import SHAPES, Case, Sort, Step, assert_trains_as_one_device, make_model, train

DROPOUT, ROUNDED, ODD = Sort(dropout=0.1), Sort(torch.float32), Sort(odd=True)
STEPS = {DROPOUT: 4, ROUNDED: 5, ODD: 2, Sort(): 2}
SAMPLE = (
    (DROPOUT, Case("tp", (2, 4))),
    (DROPOUT, Case("tp+sp", (2, 2))),
    (DROPOUT, Case("tp+sp", (2,))),
    (DROPOUT, Case("fsdp", (4,))),
    (DROPOUT, Case("fsdp", (2, 2))),
    (DROPOUT, Case("fsdp-tp", (2, 2))),
    (DROPOUT, Case("ddp", (2,))),
    (DROPOUT, Case("ddp-tp", (2, 2))),
    (ROUNDED, Case("fsdp-tp", (2, 2))),
    (ROUNDED, Case("tp", (4,))),
    (ODD, Case("fsdp-tp", (2, 2))),
    (ODD, Case("fsdp", (3,))),
    (ODD, Case("ddp-tp", (2, 2))),
    (DROPOUT, Case("dp-cp-tp", (2, 2))),
    (ODD, Case("dp-cp-tp", (2, 2, 2))),
    (Sort(), Case("fsdp-tp", (2, 2), plain=True)),
    (Sort(), Case("ddp-tp", (2, 2), plain=True)),
    (Sort(), Case("fsdp", (2, 2), plain=True)),
    (Sort(), Case("tp+sp", (2,), plain=True)),
)


@pytest.fixture(scope="module")
def expected() -> dict[Sort, list[Step]]:
    return {sort: train(make_model(sort), steps) for sort, steps in STEPS.items()}


@pytest.mark.parametrize(("sort", "case"), SAMPLE, ids=[f"{sort}: {case}" for sort, case in SAMPLE])
def test_as_on_one_device(sort: Sort, case: Case, expected: dict[Sort, list[Step]]) -> None:
    assert_trains_as_one_device(case, sort, expected[sort])


def test_the_sample_has_everything_and_dropout_matters(expected: dict[Sort, list[Step]]) -> None:
    assert {case.plan for _, case in SAMPLE} == set(PLANS)
    assert {case.shape for _, case in SAMPLE} >= set(SHAPES)
    assert not torch.allclose(expected[DROPOUT][0][0], expected[Sort()][0][0])
