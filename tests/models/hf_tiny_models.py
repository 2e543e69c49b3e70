"""A tiny model with random weights of every configuration of transformers that carries a plan.

Sizes are overridden by name, wherever a configuration has one of that name, so that a new architecture needs no entry.
Some sizes do not divide over the ranks on purpose: 2 heads of keys and 46 features over 4 ranks.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models.architectures import prepare

__all__ = ["Carrier", "TinyModel", "carrier_of", "carriers", "tiny_model"]

SAMPLES, LENGTH, VOCABULARY = 4, 10, 67
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 46,
    "ffn_hidden_size": 46,
    "dense_intermediate_size": 46,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "share_expert_dim": 24,
    "moe_hidden_size": 32,
    "num_attention_heads": 4,
    "num_sliding_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "v_head_dim": 8,
    "swa_v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "rotary_dim": 4,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "model_max_length": 64,
    "sliding_window": 4,
    "sliding_window_size": 4,
    "attention_chunk_size": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "zero_expert_num": 2,
    "n_group": 1,
    "n_shared_experts": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "index_head_dim": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_kpool": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_chunk_size": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 4,
    "n_groups": 2,
    "chunk_size": 4,
    "block_size": 4,
    "depth": 2,
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "router_hidden_size": 8,
    "embedding_rank": 8,
    "prediction_head_size": 16,
    "gated_norm_rank": 4,
    "d_rel": 4,
    "rel_extent": 8,
    "query_pre_attn_scalar": 8,
    "hc_lowrank": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
MODELS = (
    "ForCausalLM",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForTokenClassification",
    "Model",
    "Encoder",
    "Decoder",
)


@dataclass(frozen=True)
class Carrier:
    """A configuration that carries a plan."""

    name: str
    config: type
    tensor: bool
    experts: bool


@dataclass(frozen=True)
class TinyModel:
    """A model, its inputs and the name of its class."""

    model: nn.Module
    batch: dict[str, Any]
    class_name: str

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """The model's own loss, or a random projection of what it gives."""
        output = model(**batch)
        if getattr(output, "loss", None) is not None:
            return output.loss
        hidden = next(
            value for value in output.values() if isinstance(value, torch.Tensor) and value.is_floating_point()
        )
        generator = torch.Generator().manual_seed(3)
        return (hidden * torch.randn(hidden.shape[1:], generator=generator)).square().mean()


def carriers() -> Iterator[Carrier]:
    """Every configuration of the installed transformers that carries a plan, by its module's name and its own."""
    prepare("transformers")
    transformers, models = (importlib.import_module(name) for name in ("transformers", "transformers.models"))
    for package in pkgutil.iter_modules(models.__path__):
        for name in _configurations(models.__name__, package.name):
            module = importlib.import_module(name)
            for key, kind in vars(module).items():
                if (
                    inspect.isclass(kind)
                    and issubclass(kind, transformers.PreTrainedConfig)
                    and kind.__module__ == name
                ):
                    tensor, experts = (bool(getattr(kind, f"base_model_{p}_plan", None)) for p in ("tp", "ep"))
                    if tensor or experts:
                        yield Carrier(key.removesuffix("Config"), kind, tensor, experts)


def carrier_of(name: str) -> Carrier:
    """The carrier of this name, without `Config`."""
    return next(each for each in carriers() if each.name == name)


def _configurations(models: str, package: str) -> list[str]:
    found = importlib.import_module(f"{models}.{package}")
    return [
        f"{models}.{package}.{each.name}"
        for each in pkgutil.iter_modules(found.__path__)
        if each.name.startswith("configuration_")
    ]


def tiny_model(carrier: Carrier) -> TinyModel:
    """The same model on each call. Raises where it cannot be made tiny by the sizes above."""
    kind = _model_class(carrier)
    config = carrier.config
    if (outer := INSIDE.get(config.__name__)) is not None:
        config = getattr(importlib.import_module(config.__module__), outer)
    torch.manual_seed(0)
    model: Any = kind(tiny_config(config)).train()
    with torch.no_grad():
        for path, parameter in model.named_parameters():  # zeros and ones would hide wrong gradients
            if kind.__name__ in UNINITIALISED and ".experts." in path:
                parameter.zero_()
            parameter.add_(0.02 * torch.randn_like(parameter))
    most = sum(parameter.numel() for parameter in model.parameters())
    if most > 8_000_000:
        raise ValueError(f"{kind.__name__} has {most} parameters: a size of its configuration is not known here")
    return TinyModel(model, _batch(model), kind.__name__)


def tiny_config(kind: Any) -> Any:
    """A configuration with small sizes, and a layer of each type that its default has."""
    default = kind()
    known = default.to_dict()
    sizes = {
        name: value for name, value in TINY.items() if known.get(name) is not None or (name in known and name in NEEDED)
    }
    if (
        known.get("qk_rope_head_dim") is not None
    ):  # latent attention: as many keys as queries, and heads of several parts
        sizes |= {name: value for name, value in LATENT.items() if name in known}
    if not EXPERTS & known.keys():
        sizes |= {"intermediate_size": 46} if "intermediate_size" in known else {}
    kinds = {name: list(dict.fromkeys(known[name])) for name in PER_LAYER if isinstance(known.get(name), list)}
    layers = max([2, *map(len, kinds.values())])
    sizes |= {name: [each[at % len(each)] for at in range(layers)] for name, each in kinds.items()}
    sizes |= {name: layers for name in ("num_hidden_layers", "num_layers") if name in known}
    parts = {name: value for name, value in vars(default).items() if isinstance(value, _base_config())}
    sizes |= {name: tiny_config(type(value)) for name, value in parts.items()}
    rotary = known.get("rope_parameters")
    if isinstance(rotary, dict) and (kind.__name__ in SECTIONS or "mrope_section" in rotary):
        half: int = SECTIONS.get(kind.__name__) or sizes.get("head_dim", 8) // 2
        sizes["rope_parameters"] = rotary | {"mrope_section": [half - half // 2, half // 4, half // 2 - half // 4]}
    return kind(**(sizes | SPECIAL.get(kind.__name__, {})))


def _base_config() -> Any:
    return importlib.import_module("transformers").PreTrainedConfig


NEEDED = {
    "head_dim",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_experts_per_tok",
    "num_key_value_heads",
    "top_k_experts",
}
EXPERTS = {"n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"}
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
# Half of the features of a head that are rotated, where positions have three parts.
SECTIONS = {
    "Glm4vMoeTextConfig": 2,
    "Glm4vTextConfig": 4,
    "GlmImageTextConfig": 4,
    "GlmOcrTextConfig": 4,
    "PaddleOCRTextConfig": 4,
    "Qwen2VLTextConfig": 4,
    "Qwen2_5OmniTextConfig": 4,
    "Qwen2_5_VLTextConfig": 4,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
ERNIE = {"moe_intermediate_size": [24, 24], "rope_parameters": ROTARY | {"mrope_section": [1, 1, 2]}}
SPECIAL: dict[str, dict[str, Any]] = {
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DeepseekV4Config": {"head_dim": 8, "num_key_value_heads": 1, "qk_rope_head_dim": 4},
    "Ernie4_5_VLMoeTextConfig": ERNIE,
    "Ernie4_5_VL_MoeTextConfig": ERNIE,
    "EsmcConfig": {"num_key_value_heads": 4},
    "Gemma4VisionConfig": {"pooling_kernel_size": 2, "position_embedding_size": 16},
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "JambaConfig": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Llama4VisionConfig": {"intermediate_size": 128},
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": dict(ROTARY), "sliding_attention": dict(ROTARY)},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "Mistral4Config": {
        "rope_parameters": ROTARY | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "eos_token_id": 2,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 4,
        "ple_embed_dim": 32,
        "ple_layer_ids": [1],
        "split_ngram_parts": 4,
    },
    "MuseGlimmerAssistantConfig": {"target_layer_ids": [0, 1]},
    "MuseGlimmerVisionConfig": {"pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4},
    "MuseSparkAudioConfig": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    "NeoMMEConfig": {"head_dim": 16},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},
    "Step3p7TextConfig": {"sliding_window": 4},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
# Models that name another configuration than the one they are made with, or of which another is taken than of most.
MODEL_OF = {
    "DeepseekOcr2VisionEncoderConfig": "DeepseekOcr2VisionEncoder",
    "Ernie4_5_VL_MoeTextConfig": "Ernie4_5_VLMoeTextModel",
    "Ernie4_5_VL_MoeVisionConfig": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "MistralLarge4TextConfig": "MistralLarge4ForConditionalGeneration",
    "Qwen3OmniMoeTalkerCodePredictorConfig": "Qwen3OmniMoeTalkerCodePredictorModel",
    "T5GemmaModuleConfig": "T5GemmaForConditionalGeneration",
}
# Configurations that are parts of the one which a model is made with.
INSIDE = {"MistralLarge4TextConfig": "MistralLarge4Config", "T5GemmaModuleConfig": "T5GemmaConfig"}


def _model_class(carrier: Carrier) -> Any:
    module = importlib.import_module(carrier.config.__module__.replace(".configuration_", ".modeling_"))
    if (name := MODEL_OF.get(carrier.config.__name__)) is not None:
        return getattr(module, name)
    base = importlib.import_module("transformers").PreTrainedModel
    found = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, base) and getattr(kind, "config_class", None) is carrier.config
    ]
    for suffix in MODELS:
        for kind in found:
            if kind.__name__.endswith(suffix) and not kind.__name__.endswith("PreTrainedModel"):
                return kind
    raise ValueError(f"no model of {carrier.config.__name__} by itself")


UNINITIALISED = {"Qwen3OmniMoeTalkerModel"}  # transformers leaves their experts as torch.empty made them
# The name of the patches among the inputs, and their size.
GRIDS = {
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel": ("hidden_states", 3 * 8 * 8),
    "MuseGlimmerVisionModel": ("pixel_values", 2 * 3 * 8 * 8),
}
EMBEDDED = {"Qwen3OmniMoeTalkerCodePredictorModel", "Qwen3OmniMoeTalkerModel"}
BESIDE = {"T5Gemma2Decoder": "encoder_hidden_states", "VoxtralRealtimeTextModel": "t_cond"}


def _batch(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    hidden = torch.randn(SAMPLES, LENGTH, 32)
    name = type(model).__name__
    if name in EMBEDDED:
        return {"inputs_embeds": hidden}
    if name in GRIDS:  # images of 4 x 4 patches, one after another
        patches = torch.randn(16 * SAMPLES, GRIDS[name][1])
        return {GRIDS[name][0]: patches, "grid_thw": torch.tensor([[1, 4, 4]] * SAMPLES)}
    if name == "Gemma4VisionModel":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
        return {"pixel_values": torch.rand(SAMPLES, 16, 192), "pixel_position_ids": places.expand(SAMPLES, 16, 2)}
    if name == "MuseGlimmerAssistantModel":
        seen = torch.ones(SAMPLES, 1, 4, 10, dtype=torch.bool)  # 4 queries, 6 + 4 keys
        return {
            "noise_embeds": hidden[:, :4],
            "context_hidden_states": torch.randn(SAMPLES, 6, 64),
            "attention_mask": seen,
        }
    if name == "DeepseekOcr2VisionEncoder":
        return {"inputs_embeds": hidden, "num_patches": 6}
    if "input_ids" in takes:
        ids = torch.randint(4, VOCABULARY, (SAMPLES, LENGTH))
        classes = 2 if name.endswith("ForTokenClassification") else VOCABULARY
        labels = {"labels": ids % classes} if "labels" in takes else {}
        return {"input_ids": ids} | labels | ({BESIDE[name]: hidden[:, :1]} if name in BESIDE else {})
    if "pixel_values" in takes:
        return {"pixel_values": torch.randn(SAMPLES, 3, 32, 32)}
    if "inputs_embeds" in takes:
        return {"inputs_embeds": hidden}
    raise ValueError(f"{name} takes {', '.join(takes)}")
