"""How far gradients of the gated delta rule of qwen3_next may differ: less than one device's float32 from float64."""

import inspect
import sys
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.models.architectures import ARCHITECTURES, missing

pytestmark = [
    pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore:.*has no rule"),
]
FUNCTION = "torch_chunk_gated_delta_rule"


def gradients(dtype: torch.dtype, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    task = ARCHITECTURES["qwen3_next"]
    model: Any = task.model().to(dtype)
    model.set_experts_implementation("eager")  # grouped products take no float64
    if dtype is torch.float64:  # the function converts to float32
        module = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
        source = inspect.getsource(inspect.unwrap(getattr(module, FUNCTION)))
        names = dict(vars(module))
        exec(source[source.index("def ") :].replace("torch.float32", "torch.float64"), names)
        monkeypatch.setattr(module, FUNCTION, names[FUNCTION])
    batch: dict[str, Any] = task.batch()
    if sharded:
        mesh = sw.init_device_mesh("cpu", (4,))
        model = sw.distribute_module(model, mesh)
        batch = {name: sw.distribute_tensor(x, mesh, [sw.Shard(1)]) for name, x in batch.items()}
    task.loss(model, batch).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (x.full_tensor() if isinstance(x, sw.DTensor) else x).double() for name, x in found.items()}


def test_the_difference_is_the_models_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, sharded = (gradients(torch.float32, on, monkeypatch) for on in (False, True))
    exact = gradients(torch.float64, False, monkeypatch)

    def worst(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
        return max(((first[n] - x).abs().max() / x.abs().max()).item() for n, x in second.items())

    own = worst(alone, exact)
    assert worst(sharded, alone) <= 0.5 * own
    assert worst(sharded, exact) <= 1.1 * own
