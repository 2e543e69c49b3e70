"""Models of transformers, parallel by their own plans, against the plain models."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.operations import safetensors_models
from shardwise.hf import pretrained_models, style_names
from tests.models.architectures import missing
from tests.models.hf_architectures import check_carrier
from tests.models.hf_tiny_models import carrier_of, carriers, tiny_model
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


@pytest.mark.parametrize("name", ["Qwen3Moe"])
def test_a_model_gives_the_numbers_of_the_plain_one(name: str) -> None:
    carrier = carrier_of(name)
    found = check_carrier(carrier)
    assert len(found) == 3 * (carrier.tensor + carrier.experts) + 2
    assert set(found.values()) == {PASSED}


def saved(name: str, folder: Path, **options: Any) -> Any:
    model: Any = tiny_model(carrier_of(name)).model.eval()
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_loading_reads_what_a_rank_needs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_models, "GAP", 0)  # rows of these models are short
    saved(name, tmp_path, max_shard_size="20KB")
    read: list[int] = []
    load = pretrained_models.load_safetensors

    def counted(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        read.append(loaded.bytes_read)
        return loaded

    monkeypatch.setattr(pretrained_models, "load_safetensors", counted)
    model = sw.hf.from_pretrained(tmp_path, sw.init_device_mesh("cpu", (4,)))
    needed = 0
    for parameter in model.parameters():  # plain ones stand for those of every rank, and are read once here
        local = parameter.to_local() if isinstance(parameter, sw.DTensor) else parameter
        needed += sum(each.nbytes for each in getattr(local, "tensors", (local,)))
    assert 0 < read[0] <= 1.02 * needed


def test_dtypes_ties_and_generation_settings(tmp_path: Path) -> None:
    plain = saved("Gemma2", tmp_path)
    plain.generation_config.max_new_tokens = 3
    plain.generation_config.save_pretrained(tmp_path)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sw.hf.from_pretrained(tmp_path, mesh["tp"], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.max_new_tokens == 3
    assert not model.training
    wanted = plain.model.layers[0].mlp.gate_proj.weight.bfloat16()
    assert torch.equal(model.model.layers[0].mlp.gate_proj.weight.full_tensor(), wanted)

    sw.fully_shard(model, mesh["dp"])
    sw.hf.save_pretrained(model, tmp_path / "again", max_shard_size="20KB")
    again = type(plain).from_pretrained(tmp_path / "again")
    assert again.dtype == torch.bfloat16
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["Gemma2ForCausalLM"]
    for name, value in again.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name].bfloat16()), name


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    saved("Llama", tmp_path / "quantised")
    path = tmp_path / "quantised" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(sw.UnsupportedError, match="is quantized by fp8"):
        sw.hf.from_pretrained(tmp_path / "quantised", mesh)
    path.write_text(json.dumps(content | {"architectures": ["Unknown"]}))
    with pytest.raises(sw.CheckpointError, match="none of which transformers has"):
        sw.hf.from_pretrained(tmp_path / "quantised", mesh)
    path.write_text(json.dumps(content | {"num_hidden_layers": 3}))
    with pytest.raises(sw.CheckpointMismatchError, match=r"missing from the checkpoint: model\.layers\.2"):
        sw.hf.from_pretrained(tmp_path / "quantised", mesh)
    with pytest.raises(sw.UnsupportedError, match="is not a model of transformers itself"):
        sw.hf.save_pretrained(torch.nn.Linear(2, 2), tmp_path / "no")


def test_a_batch_that_is_sharded_generates_and_a_static_cache_is_sharded_over_heads() -> None:
    transformers = pytest.importorskip("transformers")
    carrier = carrier_of("Llama")
    ids = torch.randint(4, 60, (4, 5))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    plain: Any = tiny_model(carrier).model.eval()
    wanted = plain.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = sw.hf.parallelize(tiny_model(carrier).model.eval(), mesh["tp"])
    given, seen = (sw.distribute_tensor(each, mesh, [sw.Shard(0), sw.Replicate()]) for each in (ids, mask))
    cache = transformers.StaticCache(config=plain.config, max_cache_len=12)
    for options in ({}, {"past_key_values": cache}):
        found = model.generate(given, attention_mask=seen, max_new_tokens=5, pad_token_id=0, **options)
        assert found.placements == (sw.Shard(0), sw.Replicate())
        assert torch.equal(found.full_tensor(), wanted)
    assert repr(cache.layers[0].keys.spec) == "f32[4,2,12,8] dp:S0 tp:S1"


def test_the_example_says_what_one_device_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat.py", "--tokens", "4"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "chat.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "q_proj of layer 0: f32[64,64] tp:S0" in printed
    assert "as on one device: True" in printed
