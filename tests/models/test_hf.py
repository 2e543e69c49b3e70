"""Models of transformers, parallel by their own plans, against the plain models."""

import pytest

from shardwise.hf import style_names
from tests.models.architectures import missing
from tests.models.hf_architectures import check_carrier
from tests.models.hf_tiny_models import carriers
from tests.models.model_check import PASSED

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")


def test_every_style_of_every_configuration_is_known() -> None:
    used = {
        style
        for carrier in carriers()
        for plan in ("base_model_tp_plan", "base_model_ep_plan")
        for style in (getattr(carrier.config, plan, None) or {}).values()
    }
    assert {"colwise", "rowwise", "packed_colwise", "grouped_gemm", "mla_kv_a_proj"} <= used
    assert used <= style_names.KNOWN


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "DeepseekV3"])
def test_a_model_gives_the_numbers_of_the_plain_one(name: str) -> None:
    (carrier,) = (each for each in carriers() if each.name == name)
    found = check_carrier(carrier)
    assert len(found) == 3 * (carrier.tensor + carrier.experts)
    assert set(found.values()) == {PASSED}
