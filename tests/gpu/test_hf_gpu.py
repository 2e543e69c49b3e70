"""Models of transformers on a GPU with virtual ranks: training steps and generated text, against one device."""

from __future__ import annotations

import importlib
import importlib.util
import unittest
from collections.abc import Iterator
from typing import Any

import torch

import shardwise as sw
from tests.models.architectures import prepare

if importlib.util.find_spec("transformers") is None:
    raise unittest.SkipTest("needs transformers")

DEVICE = "cuda"
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mixtral": EXPERTS,
    "GptOss": EXPERTS | WINDOW | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "Gemma3": WINDOW | {"query_pre_attn_scalar": 16},
}


def built(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same model on each call."""
    prepare("transformers")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        **SIZES, **FAMILIES[name]
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones would hide wrong gradients
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.set_attn_implementation(attention)
    return model.to(device=DEVICE, dtype=dtype)


def attentions(name: str) -> Iterator[str]:
    """Those that a model has in transformers, without flex_attention, whose kernels are compiled."""
    yield "eager"
    if getattr(type(built(name, "eager")), "_supports_sdpa", False):
        yield "sdpa"


def parallel(model: Any, way: str) -> Any:
    if way == "(2, 2)":
        mesh = sw.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        model = sw.fully_shard(sw.hf.parallelize(model, mesh["tp"]), mesh["dp"])
        return sw.hf.shard_batch(model, mesh["dp"])
    return sw.hf.parallelize(model, sw.init_device_mesh(DEVICE, (4,) if way == "(4,)" else (2,)))


def step(model: Any) -> dict[str, torch.Tensor]:
    """The loss and all gradients, in float32."""
    ids = torch.randint(3, 131, (4, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: full(value).float() for name, value in {"loss": loss, **found}.items()}


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach()


def distances(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the loss and of each gradient: the norm of the difference, relative to that of the right one."""
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in wanted.items()}


def check_float32(name: str, attention: str, ways: tuple[str, ...]) -> None:
    wanted = step(built(name, attention))
    for way in ways:
        for what, distance in distances(step(parallel(built(name, attention), way)), wanted).items():
            assert distance < (1e-5 if what == "loss" else 1e-4), (name, attention, way, what, distance)


def check_bfloat16(name: str, attention: str, ways: tuple[str, ...]) -> None:
    """A parallel model is about as near to float32 as the plain one is: both round, in another order."""
    exact = step(built(name, attention))
    plain = distances(step(built(name, attention, torch.bfloat16)), exact)
    for way in ways:
        found = distances(step(parallel(built(name, attention, torch.bfloat16), way)), exact)
        for what, distance in found.items():
            allowed = 2e-3 + 2 * plain[what] if what == "loss" else 0.02 + 2 * plain[what]
            assert distance < allowed, (name, attention, way, what, distance, plain[what])


WAYS = ("(2,)", "(4,)", "(2, 2)")


def test_llama_and_qwen_train_in_float32() -> None:
    for name in ("Llama", "Qwen3"):
        for attention in attentions(name):
            check_float32(name, attention, WAYS)


def test_gemma_trains_in_float32() -> None:
    for attention in attentions("Gemma3"):
        check_float32("Gemma3", attention, WAYS)


def test_mixtral_and_gpt_oss_train_in_float32() -> None:
    for name in ("Mixtral", "GptOss"):
        for attention in attentions(name):
            check_float32(name, attention, WAYS)


def test_dense_models_train_in_bfloat16() -> None:
    for name in ("Llama", "Qwen3", "Gemma3"):
        for attention in attentions(name):
            check_bfloat16(name, attention, WAYS)


def test_gpt_oss_and_mixtral_compute_in_bfloat16() -> None:
    """Without gradients of routers: another rounding of a router's scores may choose another expert."""
    ids = torch.randint(3, 131, (4, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for name in ("Mixtral", "GptOss"):
        with torch.no_grad():
            plain = full(built(name, "eager", torch.bfloat16)(input_ids=ids, labels=ids).loss)
            for way in WAYS:
                found = full(parallel(built(name, "eager", torch.bfloat16), way)(input_ids=ids, labels=ids).loss)
                assert abs(float(found - plain)) < 0.01 * float(plain), (name, way, found, plain)


def test_flex_attention_trains() -> None:
    """Block masks and kernels that torch compiles, on DTensors."""
    for name in ("Llama", "GptOss"):
        check_float32(name, "flex_attention", ("(2,)",))


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "greedy, static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "sampling, static": {"do_sample": True, "cache_implementation": "static", "disable_compile": True},
}


def texts(model: Any, options: dict[str, Any]) -> list[Any]:
    ids = torch.randint(3, 131, (4, 9), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    torch.manual_seed(3)
    return full(model.eval().generate(ids, attention_mask=mask, max_new_tokens=12, **options)).tolist()


def check_generating(names: tuple[str, ...], generations: dict[str, dict[str, Any]], attention: str) -> None:
    for name in names:
        plain, models = built(name, attention), {way: parallel(built(name, attention), way) for way in WAYS}
        for kind, options in generations.items():
            wanted = texts(plain, options)
            for way, model in models.items():
                assert texts(model, options) == wanted, (name, way, kind)


def test_dense_models_generate_the_text_of_one_device() -> None:
    check_generating(("Llama", "Qwen3", "Gemma3"), GENERATIONS, "sdpa")


def test_experts_generate_the_text_of_one_device() -> None:
    check_generating(("Mixtral", "GptOss"), GENERATIONS, "eager")


def test_a_static_cache_as_transformers_compiles_it() -> None:
    """On a GPU `generate` with a static cache compiles the forward of a model."""
    check_generating(("Llama",), {"compiled": {"do_sample": False, "cache_implementation": "static"}}, "sdpa")
