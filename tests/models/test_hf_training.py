"""Training loops of transformers, accelerate and peft on a parallel model, against the plain one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.models.architectures import ARCHITECTURES, missing

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")
LLAMA = ARCHITECTURES["llama"]


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach()


def parallel(model: nn.Module) -> Any:
    return sw.hf.parallelize(model, sw.init_device_mesh("cpu", (2,)))


def step(model: Any) -> dict[str, torch.Tensor]:
    loss = model(**LLAMA.batch()).loss
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": whole(loss), **gradients}


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradient_checkpointing_and_implementations_of_attention(attention: str) -> None:
    plain: Any = LLAMA.model()
    model = parallel(LLAMA.model())
    model.gradient_checkpointing_enable()
    for each in (plain, model):
        each.set_attn_implementation(attention)
    check(step(model), step(plain))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
def test_compiled_blocks() -> None:
    model = parallel(LLAMA.model())
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    check(step(model), step(LLAMA.model()))


@pytest.mark.filterwarnings("ignore")  # of torch, while it traces
def test_a_model_that_is_compiled() -> None:
    """transformers breaks the graph inside of a model, so hooks of layers run between two graphs."""
    model = sharded(LLAMA.model())
    model.compile(backend="aot_eager")
    check(step(model), step(LLAMA.model()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["parallel", "sharded"])
def test_flex_attention_with_padding(way: str) -> None:
    """Without gradients: torch has none of it on a CPU. On a GPU see tests/gpu/test_hf_gpu.py."""
    ids = LLAMA.batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    plain: Any = LLAMA.model().eval()
    model = {"parallel": parallel, "sharded": sharded}[way](LLAMA.model().eval())
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        wanted = plain(input_ids=ids, attention_mask=mask).logits
        found = whole(model(input_ids=ids, attention_mask=mask).logits)
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_sequence_that_is_sharded() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model: Any = sw.hf.parallelize(LLAMA.model(), mesh["tp"])
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(1), sw.Replicate()]) for k, v in LLAMA.batch().items()}
    loss = model(**batch).loss
    loss.backward()
    wanted = step(LLAMA.model())
    torch.testing.assert_close(whole(loss), wanted["loss"])
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(whole(grad), wanted["model.layers.0.self_attn.q_proj.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["the plan first", "the adapters first"])
def test_adapters_of_peft(order: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, settings)

    wanted = step(adapted(LLAMA.model()))
    model = adapted(parallel(LLAMA.model())) if order == "the plan first" else parallel(adapted(LLAMA.model()))
    assert all("lora" in name for name in wanted if name != "loss")
    check(step(model), wanted)


def sharded(model: nn.Module) -> Any:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return sw.hf.shard_batch(sw.fully_shard(sw.hf.parallelize(model, mesh["tp"]), mesh["dp"]), mesh["dp"])


def replicated(model: nn.Module) -> Any:
    mesh = sw.init_device_mesh("cpu", (2,))
    return sw.hf.shard_batch(sw.replicate(model, mesh), mesh)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("way", [parallel, sharded, replicated])
def test_the_trainer(way: Callable[[nn.Module], Any], smoothing: float, tmp_path: Path) -> None:
    """The Trainer as it is. With label smoothing it shifts the labels of models that it knows by their class's name."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = LLAMA.batch()["input_ids"]
    histories = []
    for model in (LLAMA.model(), way(LLAMA.model())):
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=3,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            label_smoothing_factor=smoothing,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        histories.append([(entry["loss"], entry["grad_norm"]) for entry in logged])
    assert len(histories[0]) == 3
    assert histories[1] == [pytest.approx(entry, rel=1e-4) for entry in histories[0]]


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    norms = []
    for model in (LLAMA.model(), parallel(LLAMA.model())):
        accelerator = accelerate.Accelerator(cpu=True)
        ready, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        accelerator.backward(ready(**LLAMA.batch()).loss)
        norms.append(whole(accelerator.clip_grad_norm_(ready.parameters(), 1.0)))
        optimizer.step()
        norms.append(whole(next(iter(ready.parameters()))))
    torch.testing.assert_close(norms[2:], norms[:2], rtol=1e-4, atol=1e-5)
