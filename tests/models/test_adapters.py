"""Adapters of peft on a transformer with a plan, whichever comes first, against plain torch."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.models.architectures import ARCHITECTURES, missing

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def adapted(model: nn.Module, use_dora: bool) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, use_dora=use_dora)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("order", ["the plan first", "the adapters first"])
def test_adapters_and_a_plan(order: str, use_dora: bool) -> None:
    llama = ARCHITECTURES["llama"]
    if missing(llama.library) or missing("peft"):
        pytest.skip("needs transformers and peft")
    mesh, tokens = sw.init_device_mesh("cpu", (2,)), llama.batch()["input_ids"]
    if order == "the plan first":
        ours = adapted(parallelize_module(llama.model(), mesh, PLAN), use_dora)
    else:
        ours = adapted(llama.model(), use_dora)
        parallelize_module(ours.get_base_model(), mesh, PLAN)
    theirs = adapted(llama.model(), use_dora)
    found = []
    for model in (ours, theirs):
        logits = model(tokens).logits
        logits.square().mean().backward()
        found.append(logits)
    assert isinstance(found[0], sw.RankTensor)
    torch.testing.assert_close(found[0].tensors[1], found[1])
    trained = [(name, p) for name, p in ours.named_parameters() if p.requires_grad]
    others = [p for p in theirs.parameters() if p.requires_grad]
    assert len(trained) == len(others) > 10
    for (name, a), b in zip(trained, others, strict=True):
        assert "lora" in name
        grad = a.grad.full_tensor() if isinstance(a.grad, sw.DTensor) else a.grad
        grad = grad.tensors[0] if isinstance(grad, sw.RankTensor) else grad
        torch.testing.assert_close(grad, b.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
