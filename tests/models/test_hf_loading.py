"""What `sw.hf.from_pretrained` reads and holds, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.hf import pretrained_models
from tests.models.architectures import missing, prepare
from tests.models.hf_tiny_models import carrier_of, tiny_model

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")
MIB = 1 << 20
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
}
# Separate weights, fused ones, a tied head, experts that are stacked.
MODELS = {
    "Llama": SIZES | {"tie_word_embeddings": False},
    "Phi3": SIZES,
    "Gemma2": SIZES | {"head_dim": 64},
    "Mixtral": SIZES | {"num_local_experts": 4, "intermediate_size": 1024},
}


def resident(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at the peak since `forget_peak`."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")


def local_bytes(model: Any) -> int:
    total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, sw.DTensor) else parameter
        total += sum(each.nbytes for each in getattr(local, "tensors", (local,)))
    return total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loading_holds_the_locals_and_one_tensor_and_reads_what_is_needed(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("transformers")
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}ForCausalLM")
    kind(getattr(transformers, f"{name}Config")(**MODELS[name])).save_pretrained(tmp_path, max_shard_size="24MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    mesh = sw.init_device_mesh("cpu", (4,))
    load, read = pretrained_models.load_safetensors, []

    def loading(staged: bool) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            loaded = load(*args, **options | {"staged": staged})
            read.append(loaded.bytes_read)
            return loaded

        return counted

    peaks = []
    for staged in (False, True):  # the second shows that the measurement would notice
        monkeypatch.setattr(pretrained_models, "load_safetensors", loading(staged))
        before = resident("VmRSS")
        forget_peak()
        model = sw.hf.from_pretrained(tmp_path, mesh, dtype=dtype)
        peaks.append(resident("VmHWM") - before)
    local = local_bytes(model)
    needed = local * torch.float32.itemsize // dtype.itemsize  # the files are in float32
    largest = max(parameter.numel() * torch.float32.itemsize for parameter in model.parameters())
    assert 0 < read[0] <= 1.02 * needed
    assert peaks[0] <= local + largest + 8 * MIB
    assert peaks[1] > peaks[0] + local // 4


def saved(name: str, folder: Path) -> Any:
    model: Any = tiny_model(carrier_of(name)).model.eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    model = saved("Llama", tmp_path)
    mesh = sw.init_device_mesh("cpu", (2,))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = next(iter(content["weight_map"].values()))
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    with pytest.raises(sw.CheckpointError, match=lost):
        sw.hf.from_pretrained(tmp_path, mesh)
    (tmp_path / "elsewhere").rename(tmp_path / lost)
    sw.hf.from_pretrained(tmp_path, mesh)
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(sw.UnsupportedError, match=r"pytorch_model\.bin"):
        sw.hf.from_pretrained(tmp_path, mesh)


def test_tensors_beside_the_models_are_a_warning_and_wrong_shapes_an_error(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model: Any = tiny_model(carrier_of("Llama")).model.eval()
    model.save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file(tensors | {"extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    mesh = sw.init_device_mesh("cpu", (2,))
    with pytest.warns(UserWarning, match=r"has tensors that LlamaForCausalLM lacks: extra\.weight"):
        sw.hf.from_pretrained(tmp_path, mesh)
    wrong = tensors | {"model.norm.weight": torch.zeros(5)}
    safetensors.save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(sw.CheckpointMismatchError, match=r"model\.norm\.weight"):
        sw.hf.from_pretrained(tmp_path, mesh)


def test_a_model_is_saved_and_loaded_on_other_meshes(tmp_path: Path) -> None:
    plain = saved("Qwen3Moe", tmp_path / "0")
    path = tmp_path / "0"
    for number, (ranks, plan) in enumerate([(4, "ep"), (3, "tp"), (2, "auto")], 1):
        model = sw.hf.from_pretrained(path, sw.init_device_mesh("cpu", (ranks,)), plan)
        path = tmp_path / str(number)
        sw.hf.save_pretrained(model, path)
    again = type(plain).from_pretrained(path).state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(again[name], value), name
