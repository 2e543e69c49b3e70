"""Models with selective scans and gated delta rules: functions of `shardwise.recurrences` in the place of their own."""

import sys
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.recurrences import chunk_gated_delta_rule, mamba2_chunk_scan
from tests.models.architectures import ARCHITECTURES, missing

pytestmark = [
    pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore:.*has no rule"),
]
MODELS = {
    "mamba2": ("mamba2_chunk_scan", mamba2_chunk_scan),
    "qwen3_next": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
}


def module_of(name: str) -> Any:
    return sys.modules[f"transformers.models.{name}.modeling_{name}"]


def gradients(name: str, sharded: bool, replaced: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    task = ARCHITECTURES[name]
    model: Any = task.model()
    batch: dict[str, Any] = task.batch()
    if sharded:
        mesh = sw.init_device_mesh("cpu", (4,))
        model = sw.distribute_module(model, mesh)
        batch = {key: sw.distribute_tensor(x, mesh, [sw.Shard(1)]) for key, x in batch.items()}
    with monkeypatch.context() as patch:
        if replaced:
            patch.setattr(module_of(name), *MODELS[name])
        task.loss(model, batch).backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {key: x.full_tensor() if isinstance(x, sw.DTensor) else x for key, x in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_its_own_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gradients(name, False, False, monkeypatch)
    for sharded in (False, True):
        got = gradients(name, sharded, True, monkeypatch)
        assert got.keys() == wanted.keys()
        worst = max(((got[n] - x).abs().max() / x.abs().max().clamp(min=1e-6)).item() for n, x in wanted.items())
        assert worst < 2e-5  # one device's float32 is 1e-5 from float64: see test_recurrence_precision


def received(run: Any, length: int) -> int:
    mesh = sw.init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(0)
    shapes = (1, length, 4, 8), (1, length, 4), (1, length, 2, 16), (1, length, 2, 16)
    x, dt, b, c = (
        sw.distribute_tensor(torch.randn(s, generator=generator), mesh, [sw.Shard(1)]).requires_grad_() for s in shapes
    )
    decays = sw.distribute_tensor(-torch.ones(4), mesh, [sw.Replicate()])
    with sw.debug.CommDebugMode() as comm:
        run(x, dt, decays, b, c, 16, dt_softplus=True).square().sum().backward()
    return comm.received_bytes


def test_the_models_own_form_receives_the_states_of_all_chunks() -> None:
    """Which is why there is another: a matrix of all pairs of chunks takes every state to every rank."""
    ARCHITECTURES["mamba2"].model()
    own = [received(module_of("mamba2").mamba2_chunk_scan, length) for length in (256, 512)]
    assert own[1] > 1.7 * own[0]
    ours = [received(mamba2_chunk_scan, length) for length in (256, 512)]
    assert ours[0] == ours[1] < own[0]
