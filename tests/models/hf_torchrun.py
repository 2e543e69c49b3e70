"""Programs on a model of transformers, for torchrun and for one device; arguments are the program and a folder.

The first process writes what it found to `FOLDER/NAME.json`, or `NAME-plain.json` without torchrun.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from tests.models.architectures import prepare

PARALLEL = "WORLD_SIZE" in os.environ


def sample_config(transformers: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.MixtralConfig(vocab_size=97, num_key_value_heads=2, num_local_experts=4, **sizes, **ends)


def dense_config(transformers: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes, **ends)


def sample_rows() -> torch.Tensor:
    return torch.randint(3, 97, (8, 12), generator=torch.Generator().manual_seed(5))


def mesh_of() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def scalar(value: Any) -> float:
    return float((value.full_tensor() if isinstance(value, sw.DTensor) else value).detach())


def loop(transformers: Any, folder: Path) -> dict[str, Any]:
    """From files, three steps of training, to files, and generating."""
    path = folder / "files"
    if PARALLEL:
        mesh = mesh_of()
        model = sw.hf.from_pretrained(path, mesh["tp"])
        model = sw.hf.shard_batch(sw.fully_shard(model, mesh["dp"]), mesh["dp"])
    else:
        model = transformers.MixtralForCausalLM.from_pretrained(path)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(3):
        rows = sample_rows().roll(step, 0)[:4]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        losses.append(scalar(loss))
        optimizer.step()
        optimizer.zero_grad()
    saved = folder / ("saved" if PARALLEL else "saved-plain")
    if PARALLEL:
        sw.hf.save_pretrained(model, saved)
    else:
        model.save_pretrained(saved)
    model.eval()
    ids = sample_rows()[:4, :5]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    texts: list[Any] = []
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "do_sample": False}):
        torch.manual_seed(7)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=5, **options)
        texts.append((text.full_tensor() if isinstance(text, sw.DTensor) else text).tolist())
    return {"losses": losses, "texts": texts}


def trainer(transformers: Any, folder: Path) -> dict[str, Any]:
    """The Trainer: logs, an evaluation with metrics, checkpoints, and training that resumes."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(dense_config(transformers))
    kind: Any = transformers.Trainer
    if PARALLEL:
        mesh = mesh_of()
        model = sw.hf.shard_batch(sw.fully_shard(sw.hf.parallelize(model, mesh["tp"]), mesh["dp"]), mesh["dp"])
        kind = type("Trainer", (sw.hf.TrainerMixin, transformers.Trainer), {})
    settings = transformers.TrainingArguments(
        output_dir=str(folder / ("run" if PARALLEL else "run-plain")),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2 if "accumulate" in sys.argv else 1,
        max_steps=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        label_smoothing_factor=0.1 if "smooth" in sys.argv else 0.0,
    )
    data = [{"input_ids": row, "labels": torch.where(row < 9, -100, row)} for row in sample_rows()]

    def metrics(found: Any) -> dict[str, float]:
        logits, labels = torch.as_tensor(found.predictions[0]), torch.as_tensor(found.label_ids)
        return {
            "rows": float(len(labels)),
            "mean": float(logits.mean()),
            "right": float((logits.argmax(-1) == labels).sum()),
        }

    def made() -> Any:
        return kind(model=model, args=settings, train_dataset=data, eval_dataset=data[:7], compute_metrics=metrics)

    first = made()
    first.train()
    evaluated = first.evaluate()
    entries = [
        [each["loss"], each["grad_norm"], each["learning_rate"]] for each in first.state.log_history if "loss" in each
    ]
    again = made()
    again.train(resume_from_checkpoint=str(Path(settings.output_dir) / "checkpoint-2"))
    resumed = [[each["loss"], each["grad_norm"]] for each in again.state.log_history if "loss" in each]
    names = ("eval_loss", "eval_rows", "eval_mean", "eval_right")
    return {"entries": entries, "evaluated": [evaluated[name] for name in names], "resumed": resumed}


def accelerated(transformers: Any, folder: Path) -> dict[str, Any]:
    """Accelerate: a model, an optimizer, a loader, a schedule, clipping and gathering."""
    accelerate = importlib.import_module("accelerate")
    torch.manual_seed(0)
    model: Any = transformers.MixtralForCausalLM(sample_config(transformers))
    accelerator = accelerate.Accelerator(cpu=True)
    if PARALLEL:
        model = sw.hf.parallelize(model, sw.init_device_mesh("cpu", (4,)))
        accelerator = sw.hf.one_program(accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rows = torch.utils.data.DataLoader(sample_rows(), batch_size=4, shuffle=True)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    found: list[list[float]] = []
    for batch in rows:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen = accelerator.gather_for_metrics(batch)
        found.append([scalar(loss), scalar(norm), schedule.get_last_lr()[0], float(seen.sum()), float(len(seen))])
    return {"steps": found}


def main() -> None:
    torch.set_num_threads(1)
    prepare("transformers")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    name, folder = sys.argv[1], Path(sys.argv[2])
    found = {"loop": loop, "trainer": trainer, "accelerated": accelerated}[name](transformers, folder)
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{name}{'' if PARALLEL else '-plain'}.json").write_text(json.dumps(found))
    if PARALLEL:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
