"""The table of architectures: how a tiny model with random weights is made, and what it is trained on.

Each library is imported when a model of it is made, so the table itself can be read without them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ARCHITECTURES", "LIBRARIES", "SAMPLES", "Architecture", "missing", "version_of"]

LIBRARIES = ("transformers", "peft", "torchvision", "diffusers", "torch_geometric")
SAMPLES = 7  # over four ranks: 2, 2, 2 and 1
LENGTH = 10
VOCABULARY = 67
CLASSES = 5

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """A model, its batch and its loss."""

    name: str
    library: str
    build: Callable[[], nn.Module]
    data: Callable[[], Batch]
    loss: Loss
    dims: dict[str, int] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """A model with the same random weights on each call, in training mode."""
        prepare(self.library)
        torch.manual_seed(0)
        model = self.build().train()
        torch.manual_seed(2)  # what the step draws
        return model

    def batch(self) -> Batch:
        """The same batch on each call."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.data()

    def dim(self, name: str) -> int:
        """The dim of a tensor of the batch along which its samples are stacked."""
        return self.dims.get(name, 0)


def missing(library: str) -> str | None:
    """Why models of a library cannot be made here, or None."""
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    try:
        prepare(library)
    except Exception as error:
        return f"{library} cannot be imported: {type(error).__name__}: {error}"
    return None


def version_of(library: str) -> str:
    """The installed version."""
    return importlib.metadata.version(library)


def prepare(library: str) -> None:
    """Import a library. That the compiled operators of torchvision do not fit this torch does no harm here."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            importlib.import_module("torchvision")
    importlib.import_module(library)


# ---------------------------------------------------------------- batches and losses


def tokens() -> Batch:
    ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def padded_tokens() -> Batch:
    """Samples of different lengths, padded on the right; padding is no part of the loss."""
    batch = tokens()
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1))
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": mask.long(),
        "labels": batch["labels"].masked_fill(~mask, -100),
    }


def classified_tokens() -> Batch:
    batch = padded_tokens()
    return batch | {"labels": torch.randint(CLASSES, (SAMPLES,))}


def pairs_of_sequences() -> Batch:
    return tokens() | {"labels": torch.randint(1, VOCABULARY, (SAMPLES, LENGTH - 2))}


def images(size: int = 32, name: str = "pixel_values") -> Batch:
    return {name: torch.randn(SAMPLES, 3, size, size), "labels": torch.randint(CLASSES, (SAMPLES,))}


def spectrograms() -> Batch:
    return {"input_features": torch.randn(SAMPLES, 8, 20), "labels": torch.randint(1, VOCABULARY, (SAMPLES, 6))}


def waveforms() -> Batch:
    return {"input_values": torch.randn(SAMPLES, 400), "labels": torch.randint(CLASSES, (SAMPLES,))}


def images_and_texts() -> Batch:
    batch = padded_tokens()
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "pixel_values": torch.randn(SAMPLES, 3, 32, 32),
    }


def noisy_images() -> Batch:
    return {"sample": torch.randn(SAMPLES, 3, 16, 16), "timestep": torch.randint(10, (SAMPLES,))}


def graph() -> Batch:
    nodes, edges = 21, 60
    return {
        "x": torch.randn(nodes, 12),
        "edge_index": torch.randint(nodes, (2, edges)),
        "labels": torch.randint(CLASSES, (nodes,)),
    }


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that models of transformers compute from their labels."""
    return model(**batch).loss


def classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


def squared(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Diffusion: the output beside the input."""
    return F.mse_loss(model(**batch).sample, batch["sample"])


def nodes_classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["edge_index"]), batch["labels"])


# ---------------------------------------------------------------- transformers

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = LAYERS | {"image_size": 32, "patch_size": 8}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


def pretrained(class_name: str, **config: Any) -> Callable[[], nn.Module]:
    """A model of transformers with random weights."""

    def build() -> nn.Module:
        kind = getattr(importlib.import_module("transformers"), class_name)
        return kind(kind.config_class(**config))

    return build


def decoder(name: str, class_name: str, data: Callable[[], Batch] = tokens, **config: Any) -> Architecture:
    return Architecture(name, "transformers", pretrained(class_name, **(DECODER | config)), data, own_loss)


def encoder(name: str, class_name: str, data: Callable[[], Batch], **config: Any) -> Architecture:
    return Architecture(name, "transformers", pretrained(class_name, **(ENCODER | config)), data, own_loss)


def clip() -> nn.Module:
    transformers = importlib.import_module("transformers")
    text = LAYERS | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24)
    return transformers.CLIPModel(config)


def lora() -> nn.Module:
    peft = importlib.import_module("peft")
    base = pretrained("LlamaForCausalLM", **DECODER)()
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, settings)


BY_TRANSFORMERS = (
    decoder("llama", "LlamaForCausalLM"),
    decoder("mistral", "MistralForCausalLM", padded_tokens, sliding_window=4),
    decoder("qwen2", "Qwen2ForCausalLM", padded_tokens),
    decoder("qwen3", "Qwen3ForCausalLM", head_dim=8),
    decoder("gemma2", "Gemma2ForCausalLM", head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    decoder("gemma3", "Gemma3ForCausalLM", head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    decoder("phi3", "Phi3ForCausalLM"),
    decoder("olmo2", "Olmo2ForCausalLM"),
    decoder("granite", "GraniteForCausalLM"),
    decoder("starcoder2", "Starcoder2ForCausalLM"),
    decoder("glm4", "Glm4ForCausalLM", head_dim=8),
    decoder("cohere", "CohereForCausalLM"),
    decoder("stablelm", "StableLmForCausalLM"),
    decoder("gpt2", "GPT2LMHeadModel", padded_tokens, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    decoder("gpt_neox", "GPTNeoXForCausalLM"),
    decoder("opt", "OPTForCausalLM", padded_tokens, ffn_dim=48, word_embed_proj_dim=32),
    decoder("bloom", "BloomForCausalLM", padded_tokens, n_layer=2, n_head=4),
    decoder("falcon", "FalconForCausalLM", num_kv_heads=2, new_decoder_architecture=True),
    decoder("mixtral", "MixtralForCausalLM", num_local_experts=4),
    decoder("qwen3_moe", "Qwen3MoeForCausalLM", head_dim=8, **EXPERTS),
    decoder("olmoe", "OlmoeForCausalLM", **EXPERTS),
    decoder(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    decoder(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    decoder(
        "gpt_oss",
        "GptOssForCausalLM",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    decoder(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
        **EXPERTS,
    ),
    decoder("mamba", "MambaForCausalLM", state_size=4),
    decoder("mamba2", "Mamba2ForCausalLM", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4),
    encoder("bert", "BertForSequenceClassification", classified_tokens, num_labels=CLASSES),
    encoder("roberta", "RobertaForSequenceClassification", classified_tokens, num_labels=CLASSES),
    encoder("electra", "ElectraForMaskedLM", padded_tokens, embedding_size=16),
    encoder("distilbert", "DistilBertForMaskedLM", padded_tokens, dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    encoder("albert", "AlbertForMaskedLM", padded_tokens, embedding_size=16),
    encoder("modernbert", "ModernBertForMaskedLM", padded_tokens, cls_token_id=1, sep_token_id=2),
    encoder(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        padded_tokens,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
    ),
    encoder(
        "t5",
        "T5ForConditionalGeneration",
        pairs_of_sequences,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    encoder(
        "bart",
        "BartForConditionalGeneration",
        pairs_of_sequences,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    ),
    encoder(
        "whisper",
        "WhisperForConditionalGeneration",
        spectrograms,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    ),
    Architecture(
        "vit",
        "transformers",
        pretrained("ViTForImageClassification", num_labels=CLASSES, hidden_dropout_prob=0.1, **VISION),
        images,
        own_loss,
    ),
    Architecture(
        "dinov2",
        "transformers",
        pretrained("Dinov2ForImageClassification", num_labels=CLASSES, **VISION),
        images,
        own_loss,
    ),
    Architecture(
        "segformer",
        "transformers",
        pretrained(
            "SegformerForImageClassification",
            num_labels=CLASSES,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
        ),
        images,
        own_loss,
    ),
    Architecture(
        "wav2vec2",
        "transformers",
        pretrained(
            "Wav2Vec2ForSequenceClassification",
            num_labels=CLASSES,
            **LAYERS,
            conv_dim=[16, 16, 16],
            conv_stride=[5, 2, 2],
            conv_kernel=[10, 3, 3],
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        waveforms,
        own_loss,
    ),
    Architecture("clip", "transformers", clip, images_and_texts, contrastive),
    Architecture("llama with LoRA", "peft", lora, tokens, own_loss),
)


# ---------------------------------------------------------------- torchvision


def vision(name: str, build: Callable[[Any], nn.Module], size: int = 32) -> Architecture:
    def make() -> nn.Module:
        return build(importlib.import_module("torchvision.models"))

    return Architecture(name, "torchvision", make, lambda: images(size), classified)


def convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    blocks = [block(16, 24, 1), block(24, None, 2)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=CLASSES)


def efficientnet(models: Any) -> nn.Module:
    block = models.efficientnet.MBConvConfig
    blocks = [block(1, 3, 1, 16, 16, 1, 1.0, 1.0), block(4, 3, 2, 16, 24, 2, 1.0, 1.0)]
    return models.EfficientNet(blocks, dropout=0.2, num_classes=CLASSES)


def mobilenet(models: Any) -> nn.Module:
    block = models.mobilenetv3.InvertedResidualConfig
    blocks = [block(16, 3, 16, 16, True, "RE", 2, 1, 1.0), block(16, 5, 32, 24, True, "HS", 2, 1, 1.0)]
    return models.MobileNetV3(blocks, last_channel=32, num_classes=CLASSES)


def regnet(models: Any) -> nn.Module:
    params = models.regnet.BlockParams(
        depths=[1, 2],
        widths=[16, 32],
        group_widths=[8, 8],
        bottleneck_multipliers=[1.0, 1.0],
        strides=[2, 2],
        se_ratio=0.25,
    )
    return models.RegNet(params, num_classes=CLASSES, stem_width=16)


def swin(models: Any) -> nn.Module:
    return models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES
    )


def swin_v2(models: Any) -> nn.Module:
    return models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=CLASSES,
        block=models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=models.swin_transformer.PatchMergingV2,
    )


def maxvit(models: Any) -> nn.Module:
    return models.MaxVit(
        input_size=(32, 32),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 24],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )


def visiontransformer(models: Any) -> nn.Module:
    return models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=48,
        dropout=0.1,
        num_classes=CLASSES,
    )


def resnext(models: Any) -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=8)


BY_TORCHVISION = (
    vision("resnet", lambda models: models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], CLASSES), size=64),
    vision("resnext", resnext, size=64),
    vision("convnext", convnext),
    vision("vision_transformer", visiontransformer),
    vision("swin", swin),
    vision("swin_v2", swin_v2),
    vision("maxvit", maxvit),
    vision("efficientnet", efficientnet),
    vision("mobilenet_v2", lambda models: models.MobileNetV2(CLASSES, 0.5, [[1, 16, 1, 1], [4, 24, 2, 2]])),
    vision("mobilenet_v3", mobilenet),
    vision(
        "densenet",
        lambda models: models.DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=CLASSES),
    ),
    vision("regnet", regnet),
    vision("shufflenet_v2", lambda models: models.ShuffleNetV2([1, 2, 1], [16, 16, 32, 64, 64], CLASSES)),
    vision("squeezenet", lambda models: models.squeezenet1_1(num_classes=CLASSES)),
)


# ---------------------------------------------------------------- diffusers


def diffusion(
    name: str, class_name: str, data: Callable[[], Batch], loss: Loss = squared, **config: Any
) -> Architecture:
    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), class_name)(**config)

    return Architecture(name, "diffusers", build, data, loss)


def conditioned_images() -> Batch:
    return noisy_images() | {"encoder_hidden_states": torch.randn(SAMPLES, 6, 16)}


def noisy_latents() -> Batch:
    return {
        "hidden_states": torch.randn(SAMPLES, 4, 8, 8),
        "timestep": torch.randint(10, (SAMPLES,)),
        "class_labels": torch.randint(CLASSES, (SAMPLES,)),
    }


def latents_and_texts() -> Batch:
    return {
        "hidden_states": torch.randn(SAMPLES, 4, 8, 8),
        "encoder_hidden_states": torch.randn(SAMPLES, 6, 16),
        "pooled_projections": torch.randn(SAMPLES, 12),
        "timestep": torch.randint(10, (SAMPLES,)),
    }


def squared_latents(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).sample.square().mean()


def reconstructed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """An autoencoder with random latents."""
    latents = model.encode(batch["sample"]).latent_dist
    return F.mse_loss(model.decode(latents.sample()).sample, batch["sample"]) + 0.1 * latents.kl().mean()


BLOCKS = {"block_out_channels": (16, 24), "layers_per_block": 1, "norm_num_groups": 4}
BY_DIFFUSERS = (
    diffusion(
        "UNet2D",
        "UNet2DModel",
        noisy_images,
        sample_size=16,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
        **BLOCKS,
    ),
    diffusion(
        "UNet2DCondition",
        "UNet2DConditionModel",
        conditioned_images,
        sample_size=16,
        in_channels=3,
        out_channels=3,
        attention_head_dim=8,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    ),
    diffusion(
        "AutoencoderKL",
        "AutoencoderKL",
        lambda: {"sample": torch.randn(SAMPLES, 3, 16, 16)},
        reconstructed,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **BLOCKS,
    ),
    diffusion(
        "DiT",
        "DiTTransformer2DModel",
        noisy_latents,
        squared_latents,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
        dropout=0.1,
    ),
    diffusion(
        "SD3",
        "SD3Transformer2DModel",
        latents_and_texts,
        squared_latents,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        pos_embed_max_size=8,
    ),
)


# ---------------------------------------------------------------- torch_geometric


def graph_network(class_name: str, **config: Any) -> Architecture:
    def build() -> nn.Module:
        kind = getattr(importlib.import_module("torch_geometric.nn"), class_name)
        return kind(in_channels=12, hidden_channels=16, num_layers=2, out_channels=CLASSES, dropout=0.2, **config)

    return Architecture(class_name, "torch_geometric", build, graph, nodes_classified, {"edge_index": 1})


BY_TORCH_GEOMETRIC = (
    graph_network("GCN"),
    graph_network("GAT", heads=2),
    graph_network("GraphSAGE"),
    graph_network("GIN"),
    graph_network("EdgeCNN"),
)

ARCHITECTURES = {each.name: each for each in (*BY_TRANSFORMERS, *BY_TORCHVISION, *BY_DIFFUSERS, *BY_TORCH_GEOMETRIC)}
