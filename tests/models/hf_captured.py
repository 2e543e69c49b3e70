"""Training steps of models of transformers, captured and eager, over calls with other sizes, rates and modes.

Two copies of one model run the same calls; after each call parameters, gradients, states and results must have the
same bits. All configurations that carry a plan: `python -m tests.models.hf_captured`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.models.hf_tiny_models import Carrier, carriers, tiny_model
from tests.virtual.captured_data_parallel import Job, visible

__all__ = ["MODELS", "WRAPPED", "compare", "tiny"]

CALLS = 8
SHORTER, EVALUATED, CLIPPED_MORE = 4, 5, 6  # calls with something else
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
# name: the module, the model, its configuration, sizes, and the names of its probabilities of dropout
MODELS: dict[str, tuple[str, str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", "LlamaForCausalLM", "LlamaConfig", SMALL, ("attention_dropout",)),
    "qwen": ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 8}, ("attention_dropout",)),
    "mixtral": (
        "mixtral", "MixtralForCausalLM", "MixtralConfig", SMALL | {"num_local_experts": 4}, ("attention_dropout",),
    ),
    "gpt2": (
        "gpt2", "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "bert": (
        "bert", "BertForMaskedLM", "BertConfig", SMALL, ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "t5": (
        "t5", "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        ("dropout_rate",),
    ),
}  # fmt: skip


def tiny(name: str, dropout: float) -> Any:
    """A model with random weights, the same on each call."""
    folder, kind, config, sizes, probabilities = MODELS[name]
    module: Any = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(0)
    if not probabilities and dropout:
        raise ValueError(name)
    return getattr(module, kind)(getattr(module, config)(**sizes, **dict.fromkeys(probabilities, dropout))).train()


def tensor_parallel(model: Any, mesh: sw.DeviceMesh) -> None:
    sw.hf.parallelize(model, mesh["tp"])


def fully_sharded(model: Any, mesh: sw.DeviceMesh) -> None:
    wrapped: set[int] = set()
    for module in list(model.modules()):  # outer ones first: lists inside a block belong to it
        if isinstance(module, nn.ModuleList) and id(module) not in wrapped:
            for block in module:
                if any(True for _ in block.parameters()):
                    wrapped.update(map(id, block.modules()))
                    sw.fully_shard(block, mesh["dp"])
    sw.fully_shard(model, mesh["dp"])


def both(model: Any, mesh: sw.DeviceMesh) -> None:
    sw.hf.parallelize(model, mesh["tp"])
    sw.fully_shard(model, mesh["dp"])


WRAPPED: dict[str, tuple[tuple[int, int], Callable[[Any, sw.DeviceMesh], None]]] = {
    "tensor parallel": ((1, 4), tensor_parallel),
    "fully_shard": ((4, 1), fully_sharded),
    "both": ((2, 2), both),
}


def training_step(model: Any, optimizer: Any, bound: list[float]) -> Callable[..., Any]:
    def step(batch: dict[str, Any]) -> Any:
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), bound[0])
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def compare(
    make: Callable[[], tuple[Any, dict[str, Any]]], how: str, calls: int = CALLS, reads: str = "refuse"
) -> tuple[int, int]:
    """Run one model; how many calls ran as programs, and how many programs there were. Raises where bits differ.

    Args:
        make: makes the model and a batch, the same on each call.
        how: one of `WRAPPED`.
        calls: how many.
        reads: as for `captured`.
    """
    shape, wrap = WRAPPED[how]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    jobs: list[Any] = []
    bounds: list[list[float]] = []
    batch: dict[str, Any] = {}
    for _ in range(2):
        model, batch = make()
        wrap(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        bounds.append([1.0])
        jobs.append(Job(model, optimizer, training_step(model, optimizer, bounds[-1])))
    step, ran = captured(jobs[1].step, reads=reads), 0
    for call in range(calls):
        given = {name: placed(value, name, call, mesh) for name, value in batch.items()}
        outcomes = []
        for job, bound, run in zip(jobs, bounds, (jobs[0].step, step), strict=True):
            job.optimizer.param_groups[0]["lr"] = 1e-2 / (call + 1)
            job.model.train(call != EVALUATED)
            bound[0] = 0.1 if call == CLIPPED_MORE else 1.0
            torch.manual_seed(call)
            count = len(step.programs)
            result = run(dict(given))
            ran += run is step and count > 0 and len(step.programs) == count
            outcomes.append(visible(job, result))
        different = [key for key in outcomes[0] if outcomes[0][key] != outcomes[1][key]]
        assert not different, f"{how}, call {call}: captured differs from eager in {different[:6]}"
    return ran, len(step.programs)


def placed(value: Any, name: str, call: int, mesh: sw.DeviceMesh) -> Any:
    """An input of a call: other tokens on each, fewer in one, samples sharded over `dp`."""
    if not isinstance(value, torch.Tensor):
        return value
    if name in ("input_ids", "labels"):
        value = value.roll(call, 0).roll(call, 1)
    if name == "attention_mask":
        value = value.roll(call, 0) if call % 3 else torch.ones_like(value)  # without padding, now and then
    if name in ("input_ids", "labels", "attention_mask"):
        value = (value[:, :-3] if call == SHORTER else value).contiguous()
    if mesh.shape[0] == 1:
        return value
    if name == "attention_mask":  # the models read whether there is padding
        own = mesh["dp"] if mesh.shape[1] == 1 else mesh
        return sw.distribute_tensor(value, own, [sw.Replicate()] * own.ndim)
    if mesh.shape[1] == 1:
        return sw.distribute_tensor(value, mesh["dp"], [sw.Shard(0)])
    return sw.distribute_tensor(value, mesh, [sw.Shard(0), sw.Replicate()])


def carried(carrier: Carrier) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """The tiny model of a configuration, with a loss of its own where it has none."""

    def make() -> tuple[Any, dict[str, Any]]:
        made = tiny_model(carrier)
        return made.model, dict(made.batch)

    return make


def main(arguments: list[str] | None = None) -> int:
    """The command line: a line for each configuration that computes a loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=[*WRAPPED], default="tensor parallel")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = {"same": 0, "refused": 0, "failed": 0}
    for carrier in carriers():
        if options.only and carrier.name not in options.only:
            continue
        try:
            batch = tiny_model(carrier).batch
        except Exception as error:
            print(f"{carrier.name}: not made ({error})", flush=True)
            continue
        if "labels" not in batch:
            continue
        try:
            ran, programs = compare(carried(carrier), options.how)
            kind, text = "same", f"{ran} of {CALLS} calls ran as programs, {programs} programs"
        except UnsupportedError as error:
            kind, text = "refused", str(error).splitlines()[0]
        except Exception:
            kind, text = "failed", traceback.format_exc(limit=-1)
        counts[kind] += 1
        print(f"{carrier.name}: {kind}: {text}", flush=True)
    print(counts)
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
