"""one_program and TrainerMixin: Accelerate and the Trainer of transformers under torchrun, on a parallel model.

Both treat processes as replicas, each with its own model and batch. Here all processes run one program on one global
model: the same batches, no DistributedDataParallel, and global losses.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.operations.load_checkpoint import load
from shardwise.checkpoint.operations.save_checkpoint import save
from shardwise.errors import UnsupportedError
from shardwise.fabric.world import is_main
from shardwise.hf.pretrained_models import fill_from_files, save_pretrained
from shardwise.tensor import is_dtensor

__all__ = ["TrainerMixin", "one_program"]

Accelerator = TypeVar("Accelerator")
# Settings of Accelerate's own parallelism.
OWN_PARALLELISM = ("parallelism_config", "deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
SAMPLING = ("random", "sequential", "group_by_length")  # the same order in every process
STATES = "shardwise_states"  # beside the model in a checkpoint of the Trainer


def one_program(accelerator: Accelerator) -> Accelerator:
    """Let an `Accelerator` treat all processes as one program, for a model of `parallelize` or `fully_shard`.

    `prepare` then wraps no model in DistributedDataParallel, and loaders give every process the same global batches:
    `per_device` sizes are those of the global batch. `gather`, `reduce` and `pad_across_processes` return a plain
    tensor unchanged, and the global tensor of a DTensor; so does `gather_for_metrics`, which cuts the last batch as
    Accelerate does. `backward`, `clip_grad_norm_`, `autocast`, `print` and `is_main_process` are unchanged.

    Args:
        accelerator: an `accelerate.Accelerator`, before `prepare`.

    Returns:
        The same object.

    Example:
        >>> accelerator = one_program(accelerate.Accelerator())  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """
    given: Any = accelerator
    if any(getattr(given.state, name, None) is not None for name in OWN_PARALLELISM):
        raise UnsupportedError(
            "the Accelerator has its own parallelism_config, DeepSpeed or FSDP",
            hint="leave these out and use sw.hf.parallelize, shard_batch and sw.fully_shard instead",
        )
    given.__class__ = _one_program_class(type(given))
    return accelerator


@functools.cache
def _one_program_class(base: Any) -> Any:
    def as_global(self: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        return _global(tensor)

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        # Accelerate cuts the last batch to the remaining samples. The Trainer relies on it: it repeats the loss of each
        # batch by the size of a full one.
        state = self.gradient_state
        found = _global(input_data)
        return _first_rows(found, state.remainder) if state.end_of_dataloader and state.remainder > 0 else found

    def prepare_model(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        # With evaluation_mode only autocast and compilation are prepared.
        return base.prepare_model(self, model, device_placement=False, evaluation_mode=True)

    def prepare_scheduler(self: Any, scheduler: Any) -> Any:
        prepared = base.prepare_scheduler(self, scheduler)
        prepared.split_batches = True  # one step at a time, for any number of processes
        return prepared

    return type(
        f"OneProgram{base.__name__}",
        (base,),
        {
            "num_processes": property(lambda self: 1),
            "process_index": property(lambda self: 0),
            "multi_device": property(lambda self: False),
            "prepare_model": prepare_model,
            "prepare_scheduler": prepare_scheduler,
            "gather": as_global,
            "gather_for_metrics": gather_for_metrics,
            "reduce": as_global,
            "pad_across_processes": as_global,
        },
    )


def _global(value: Any) -> Any:
    """Values, with the global tensors of DTensors."""
    return _each_tensor(lambda tensor: tensor.full_tensor() if is_dtensor(tensor) else tensor, value)


def _first_rows(value: Any, count: int) -> Any:
    """The first rows of each tensor; of a list without tensors its first elements."""
    seen: list[torch.Tensor] = []

    def first(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor[:count] if tensor.ndim else tensor

    found = _each_tensor(first, value)
    return value[:count] if not seen and isinstance(value, list | tuple) else found


def _each_tensor(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)({name: _each_tensor(function, each) for name, each in value.items()})
    if isinstance(value, list | tuple):
        found = [_each_tensor(function, each) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


class TrainerMixin:
    """For a Trainer on a parallel model, also under torchrun: `class Trainer(TrainerMixin, transformers.Trainer)`.

    Losses, norms of gradients, schedules, logs and evaluations are those of one device. The global batch has
    `per_device_train_batch_size` samples; `sw.hf.shard_batch` shards it over an axis. Checkpoints have the model as
    `save_pretrained` of transformers writes it, and the optimizer as `sw.checkpoint.save` does: training may resume on
    another mesh.

    Example:
        >>> class Trainer(TrainerMixin, transformers.Trainer): ...  # doctest: +SKIP
        >>> Trainer(model=model, args=settings, train_dataset=data).train()  # doctest: +SKIP
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    gather_function: Any
    _train_batch_size: int

    def create_accelerator_and_postprocess(self) -> None:
        """The Accelerator, as one program."""
        sampling = getattr(self.args, "train_sampling_strategy", SAMPLING[0])
        if sampling not in SAMPLING:
            raise UnsupportedError(
                f"train_sampling_strategy={sampling!r} gives processes different batches; TrainerMixin needs the same",
                hint=f"use one of {', '.join(SAMPLING)}",
            )
        self.args.average_tokens_across_devices = False  # the count of tokens is global
        super().create_accelerator_and_postprocess()  # pyright: ignore[reportAttributeAccessIssue]
        self.gather_function = one_program(self.accelerator).gather_for_metrics

    def get_total_train_batch_size(self, args: Any) -> int:
        """The samples of a step: batches are global."""
        return self._train_batch_size * args.gradient_accumulation_steps

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """The loss, as a plain tensor."""
        return _plain_loss(
            super().compute_loss(model, inputs, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        )

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Loss, logits and labels, as plain tensors."""
        return _global(super().prediction_step(*args, **options))  # pyright: ignore[reportAttributeAccessIssue]

    def _nested_gather(self, tensors: Any, *args: Any) -> Any:
        return _global(tensors)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Nothing: plain parameters beside a plan have the same values and gradients on every rank."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, each rank its slices, and the processing class and settings."""
        folder = self.args.output_dir if output_dir is None else output_dir
        if is_main():  # a resumed run writes its later checkpoints again, as with plain transformers
            for old in Path(folder).glob("model*.safetensors*"):
                old.unlink()
        save_pretrained(self.model, folder)
        if is_main():
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self._states(), os.path.join(output_dir, STATES), overwrite=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and os.path.isdir(os.path.join(checkpoint, STATES)):
            load(self._states(), os.path.join(checkpoint, STATES))

    def _states(self) -> dict[str, Any]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # inside the one of Accelerate
        return {"optimizer": optimizer, "scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        fill_from_files(self.model if model is None else model, resume_from_checkpoint)


def _plain_loss(found: Any) -> Any:
    if isinstance(found, tuple):
        return (_plain_loss(found[0]), *found[1:])
    return found.full_tensor() if is_dtensor(found) else found
