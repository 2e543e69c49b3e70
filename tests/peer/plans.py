"""One plan for the example's transformer in both libraries, as people write it for torch: plain tensors in and out."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as their_fully_shard

import shardwise as sw
from examples.llama import Llama
from tests.plans import OURS, Library, own_rows, spread_plain, styles_of
from tests.virtual.training import Sort, make_batches, make_model

LOSS_PARALLEL = "tp+sp, loss parallel"
HYBRID = "fsdp, replicated"
MESHES = {
    "tp": ((4,), ("tp",)),
    "tp+sp": ((4,), ("tp",)),
    LOSS_PARALLEL: ((4,), ("tp",)),
    "fsdp": ((4,), ("dp",)),
    HYBRID: ((2, 2), ("replicas", "dp")),
    "fsdp-tp": ((2, 2), ("dp", "tp")),
}
PLANS = tuple(MESHES)
THEIRS = Library(theirs, their_parallel, their_fully_shard, None)
LIBRARIES: dict[str, Library] = {"ours": OURS, "torch": THEIRS}


def wide_model() -> Llama:
    """Of sizes at which bytes count. Where starting a collective costs more, replicas are added up in the same one."""
    torch.manual_seed(1)
    return Llama(512, dim=64, blocks=2, heads=8, kv_heads=4, hidden=192, longest=16).double()


class Training:
    """Steps of the transformer in one library, or on one device (without a library)."""

    def __init__(self, plan: str, library: str | None = None, *, foreach: bool = False, **options: Any) -> None:
        self.model: nn.Module = wide_model() if plan == HYBRID else make_model(Sort(blocks=2))
        self.loss_parallel: Callable[[], Any] = contextlib.nullcontext
        self.place: Callable[[Tensor], Tensor] = lambda t: t
        self.place_targets: Callable[[Tensor], Any] = self.place
        if library is not None:
            self._spread(plan, LIBRARIES[library], options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=foreach)

    def _spread(self, plan: str, library: Library, options: dict[str, Any]) -> None:
        shape, names = MESHES[plan]
        mesh = library.tensors.init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.place = self.place_targets = own_rows(sw.init_device_mesh("cpu", shape, mesh_dim_names=names))
        if plan == LOSS_PARALLEL:
            library.parallel.parallelize_module(self.model, mesh, styles_of(plan, library))
            self.loss_parallel = library.parallel.loss_parallel
            whole = [library.tensors.Replicate()]
            self.place_targets = lambda t: library.tensors.DTensor.from_local(t, mesh, whole, run_check=False)
        else:
            spread_plain(plan.partition(",")[0], self.model, mesh, library, **options)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        with self.loss_parallel():
            loss = F.cross_entropy(self.model(self.place(tokens)).flatten(0, 1), self.place_targets(targets).flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        """Of several steps, each a number: the mean over the ranks."""
        found = [self.step(*batch) for batch in make_batches(steps)]
        values = torch.stack([loss.full_tensor() if hasattr(loss, "full_tensor") else loss for loss in found])
        dist.all_reduce(values)
        return (values / dist.get_world_size()).tolist()


def compare_losses(steps: int) -> dict[str, dict[str, list[float]]]:
    """On real processes: by plan, the losses of one device, ours and torch's."""
    return {plan: {str(name): Training(plan, name).losses(steps) for name in (None, *LIBRARIES)} for plan in PLANS}
