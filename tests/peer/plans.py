"""One plan for the example's transformer in both libraries, as people write it for torch: plain tensors in and out."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_parallel
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as ours
import shardwise.parallel as our_parallel
from tests.virtual.training import make_batches, make_model

PLANS = ("tp", "tp+sp", "tp+sp, loss parallel")
LIBRARIES: dict[str, tuple[Any, Any]] = {"ours": (ours, our_parallel), "torch": (theirs, their_parallel)}


def plan_of(name: str, library: Any, parallel: Any) -> dict[str, Any]:
    """The plan in the words of a library."""
    colwise, rowwise, whole = parallel.ColwiseParallel, parallel.RowwiseParallel, library.Replicate()
    if name == "tp":
        before, rows = {}, rowwise()
        outside = {"embedding": rowwise(input_layouts=whole), "head": colwise(output_layouts=whole)}
    else:
        part, sequence = library.Shard(1), parallel.SequenceParallel()
        rows = rowwise(output_layouts=part)
        before = {
            "blocks.*.*_norm": sequence,
            "norm": sequence,
            "blocks.*.attention": parallel.PrepareModuleInput(
                input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)
            ),
            "blocks.*.feed_forward": parallel.PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        }
        last = {"output_layouts": whole}
        if "loss" in name:
            last = {"output_layouts": library.Shard(-1), "use_local_output": False}
        outside = {
            "embedding": rowwise(input_layouts=whole, output_layouts=part),
            "head": colwise(input_layouts=part, **last),
        }
    inside = {
        "blocks.*.attention.[qkv]*": colwise(),
        "blocks.*.attention.out": rows,
        "blocks.*.feed_forward.gate": colwise(),
        "blocks.*.feed_forward.up": colwise(),
        "blocks.*.feed_forward.down": rows,
    }
    return {**outside, **before, **inside}


class Training:
    """Steps of the transformer in one library, or on one device (without a library)."""

    def __init__(self, plan: str, library: str | None = None, world: int = 4, foreach: bool = False) -> None:
        self.model: nn.Module = make_model(torch.float64, 0.0)
        self.loss_parallel: Callable[[], Any] = contextlib.nullcontext
        self.place: Callable[[Tensor], Any] = lambda t: t
        if library is not None:
            module, parallel = LIBRARIES[library]
            mesh = module.init_device_mesh("cpu", (world,))
            parallel.parallelize_module(self.model, mesh, plan_of(plan, module, parallel))
            if "loss" in plan:
                self.loss_parallel = parallel.loss_parallel
                self.place = lambda t: module.DTensor.from_local(t, mesh, [module.Replicate()], run_check=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=foreach)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        with self.loss_parallel():
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), self.place(targets.flatten()))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        """Of several steps, each a number."""
        found = [self.step(*batch) for batch in make_batches(steps)]
        return [(loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item() for loss in found]


def compare_losses(steps: int) -> dict[str, dict[str, list[float]]]:
    """On real processes: by plan, the losses of one device, ours and torch's."""
    return {
        plan: {"one": Training(plan).losses(steps), **{name: Training(plan, name).losses(steps) for name in LIBRARIES}}
        for plan in PLANS
    }
