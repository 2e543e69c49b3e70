"""Models of transformers that lay out their own inputs: samples over one axis, tokens over another."""

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.models.architectures import missing
from tests.models.hf_architectures import GRADIENTS, LOSS
from tests.models.hf_tiny_models import TinyModel, carrier_of, tiny_model
from tests.models.model_check import differences

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")
# Full and sliding attention, sinks, latent attention, experts, linear attention, scans, ties, soft caps, an encoder and
# a decoder, an encoder alone, positions of three parts.
ARCHITECTURES = [
    "Cohere2",
    "DeepseekV3",
    "EuroBert",
    "Gemma2",
    "Gemma3nText",
    "GptOss",
    "GraniteMoeHybrid",
    "Jamba",
    "Llama",
    "Llama4Text",
    "MiniMax",
    "Mistral",
    "Mixtral",
    "NeoMME",
    "Phi3",
    "Qwen2VLText",
    "Qwen3Next",
    "T5GemmaModule",
]

SCANS = {"GraniteMoeHybrid", "Jamba", "MiniMax", "Qwen3Next"}  # scans may shard samples in place of tokens


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach()


def batch_of(tiny: TinyModel) -> dict[str, torch.Tensor]:
    """Its batch, with a sample that is padded on the left and labels that do not count."""
    batch = dict(tiny.batch)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :3] = 0
    if "labels" in batch:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][1, :3] = -100
        batch["labels"][2, 4:6] = -100
    return batch


def step(tiny: TinyModel) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(2)
    outputs: list[Any] = []
    handle = tiny.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = tiny.loss(tiny.model, batch_of(tiny))
    loss.backward()
    handle.remove()
    gradients = {name: whole(each.grad) for name, each in tiny.model.named_parameters() if each.grad is not None}
    hidden = next(each for each in outputs[0].values() if isinstance(each, torch.Tensor) and each.ndim == 3)
    return {"loss": {"": whole(loss)}, "gradient": gradients}, hidden


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for kind, tolerance in (("loss", LOSS), ("gradient", GRADIENTS)):
        assert not list(differences({kind: got[kind]}, {kind: wanted[kind]}, tolerance))


@pytest.mark.filterwarnings("ignore")  # of transformers and torch
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_sharded_beside_a_plan(name: str) -> None:
    carrier = carrier_of(name)
    wanted, _ = step(tiny_model(carrier))
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for placement in (sw.Zigzag, sw.Shard):
        tiny = tiny_model(carrier)
        sw.hf.context_parallel(sw.hf.parallelize(tiny.model, mesh["tp"]), mesh["cp"], placement)
        got, hidden = step(tiny)
        assert not hidden.placements[0].is_replicate()
        assert name in SCANS or hidden.placements[0] == placement(1)
        check(got, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [3, 4])
def test_tokens_are_sharded_without_a_plan(ranks: int) -> None:
    carrier = carrier_of("Gemma2")
    wanted, _ = step(tiny_model(carrier))
    tiny = tiny_model(carrier)
    sw.hf.context_parallel(tiny.model, sw.init_device_mesh("cpu", (ranks,)))
    got, hidden = step(tiny)
    assert isinstance(hidden.placements[0], sw.Zigzag)
    check(got, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_samples_tokens_heads_and_parameters_over_three_axes(name: str) -> None:
    carrier = carrier_of(name)
    wanted, _ = step(tiny_model(carrier))
    mesh = sw.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    tiny = tiny_model(carrier)
    sw.fully_shard(sw.hf.parallelize(tiny.model, mesh["tp"]), mesh["dp"])
    sw.hf.context_parallel(sw.hf.shard_batch(tiny.model, mesh["dp"]), mesh["cp"])
    got, hidden = step(tiny)
    assert hidden.placements[:2] == (sw.Shard(0), sw.Zigzag(1))
    check(got, wanted)


def test_inputs_by_position_and_generating() -> None:
    carrier = carrier_of("Llama")
    plain: Any = tiny_model(carrier).model.eval()
    ids = torch.randint(4, 60, (2, 9))
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model: Any = sw.hf.parallelize(tiny_model(carrier).model.eval(), mesh["tp"])
    sw.hf.context_parallel(model, mesh["cp"])
    logits = model(ids).logits
    assert isinstance(logits.placements[0], sw.Zigzag)
    torch.testing.assert_close(whole(logits), plain(ids).logits, rtol=1e-4, atol=1e-5)
    wanted = plain.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(whole(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)), wanted)


def test_what_cannot_be_sharded_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model: Any = sw.hf.parallelize(tiny_model(carrier_of("Llama")).model, mesh["tp"])
    with pytest.raises(sw.LayoutError, match="is the axis of the plan"):
        sw.hf.context_parallel(model, mesh["tp"])
    with pytest.raises(sw.MeshError, match="over one axis"):
        sw.hf.context_parallel(model, mesh)
    with pytest.raises(sw.LayoutError, match="does not shard tokens"):
        sw.hf.context_parallel(model, mesh["cp"], sw.Replicate)
    sw.hf.context_parallel(model, sw.init_device_mesh("cpu", (2,)))
    with pytest.raises(sw.MeshError, match="meshes that were made separately"):
        model(torch.zeros(2, 4, dtype=torch.long))
    vision = tiny_model(carrier_of("Llama4Vision"))
    sw.hf.context_parallel(sw.hf.parallelize(vision.model, mesh["tp"]), mesh["cp"])
    with pytest.raises(sw.LayoutError, match="none of the inputs of Llama4VisionModel has tokens"):
        vision.model(**vision.batch)
