"""Captured training steps of transformers' models: the bits of eager ones."""

from typing import Any

import pytest
import torch

from tests.models.architectures import missing, prepare
from tests.models.hf_captured import CALLS, MODELS, WRAPPED, compare, tiny

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_eager(name: str, how: str, dropout: float) -> None:
    prepare("transformers")

    def make() -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(3, 64, (4, 10), generator=torch.Generator().manual_seed(1))
        return tiny(name, dropout), {"input_ids": ids, "labels": ids.clone()}

    ran, programs = compare(make, how)
    assert ran >= 2  # the second call is recorded; each change of size, mode and bound makes one more
    assert programs + ran <= CALLS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("name", MODELS)
def test_steps_with_padding_are_those_of_eager(name: str, how: str) -> None:
    """Transformers reads whether a mask has padding: each answer has a program."""
    prepare("transformers")

    def make() -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(3, 64, (4, 10), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(10)[None] < torch.tensor([10, 7, 4, 9])[:, None]).long()
        return tiny(name, 0.0), {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}

    ran, programs = compare(make, how, calls=12, reads="guard")
    assert ran >= 4
    assert programs >= 2
