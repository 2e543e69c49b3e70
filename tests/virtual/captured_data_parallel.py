"""Training steps of modules under `fully_shard` and `replicate`, captured and eager, on any fabric.

Two copies of one model run the same calls; after each call parameters, gradients, states and results must have the
same bits. The cases are what such a step may do. Run all: `python -m tests.virtual.captured_data_parallel`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.capture import captured
from shardwise.fabric.rank_tensor import parts_of
from shardwise.parallel import MixedPrecisionPolicy
from tests.transformer import LENGTH, VOCABULARY, Transformer, loss_of, shard_all, tensor_parallel

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CALLS = 5


class Checkpointed(Transformer):
    """Recomputes its blocks in backward."""

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        blocks: Any = self.blocks
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=block.dropout.p > 0)
        return self.head(self.norm(x))


class Job:
    """A model with its optimizer and step."""

    def __init__(self, model: Any, optimizer: Any, step: Callable[..., Any]) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step


def line(mesh: sw.DeviceMesh) -> sw.DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh["dp"]


def made(
    wrap: Callable[[Any, sw.DeviceMesh], Any], mesh: sw.DeviceMesh, kind: type = Transformer, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = kind(1, **options)
    wrap(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(tokens: Any, targets: Any) -> Any:
        loss = loss_of(model(tokens), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return step


def keeping_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Gradients add up over calls."""

    def step(tokens: Any, targets: Any) -> Any:
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def accumulating_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(tokens: Any, targets: Any) -> Any:
        with model.no_sync():
            loss_of(model(tokens), targets).backward()
            loss_of(model(tokens.flip(0)), targets).backward()
        loss = loss_of(model(tokens), targets.flip(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def micro_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """One microbatch; whether gradients are reduced is set outside."""

    def step(tokens: Any, targets: Any) -> Any:
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    return step


def forward_only(model: Any, optimizer: Any) -> Callable[..., Any]:
    @torch.no_grad()
    def step(tokens: Any, targets: Any) -> Any:
        return loss_of(model(tokens), targets)

    return step


def sharded(**options: Any) -> Callable[[Any, sw.DeviceMesh], Any]:
    return lambda model, mesh: shard_all(model, line(mesh), **options)


def hybrid(model: Any, mesh: sw.DeviceMesh) -> Any:
    return shard_all(model, mesh)


def with_tensor_parallelism(model: Any, mesh: sw.DeviceMesh) -> Any:
    tensor_parallel(model, mesh["tp"])
    return shard_all(model, mesh["dp"])


def replicated(**options: Any) -> Callable[[Any, sw.DeviceMesh], Any]:
    return lambda model, mesh: sw.replicate(model, line(mesh), **options)


def kept_gathered(model: Any, mesh: sw.DeviceMesh) -> Any:
    shard_all(model, line(mesh), reshard_after_forward=False)
    model.set_reshard_after_backward(False)


def frozen(model: Any, mesh: sw.DeviceMesh) -> Any:
    model.embedding.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)
    shard_all(model, line(mesh))


def hooked(model: Any, mesh: sw.DeviceMesh) -> Any:
    shard_all(model, line(mesh))
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 0.5)
    model.head.register_forward_hook(lambda module, args, out: out * 2)


# name: how the model is wrapped, its step, its class, options of the class
CASES: dict[str, tuple[Any, Callable[..., Any], type, dict[str, Any]]] = {
    "sharded": (sharded(), plain_step, Transformer, {}),
    "dropout": (sharded(), plain_step, Transformer, {"dropout": 0.3}),
    "tied": (sharded(), plain_step, Transformer, {"tied": True}),
    "hybrid": (hybrid, plain_step, Transformer, {}),
    "tensor parallel": (with_tensor_parallelism, plain_step, Transformer, {}),
    "bfloat16": (sharded(mp_policy=HALF), plain_step, Transformer, {}),
    "kept gathered": (kept_gathered, plain_step, Transformer, {}),
    "frozen": (frozen, plain_step, Transformer, {}),
    "hooked": (hooked, plain_step, Transformer, {}),
    "keeping gradients": (sharded(), keeping_step, Transformer, {}),
    "accumulating": (sharded(), accumulating_step, Transformer, {}),
    "microbatches": (sharded(), micro_step, Transformer, {}),
    "microbatches kept gathered": (kept_gathered, micro_step, Transformer, {}),
    "microbatches of replicas": (hybrid, micro_step, Transformer, {}),
    "microbatches replicated": (replicated(), micro_step, Transformer, {}),
    "checkpointed": (sharded(), plain_step, Checkpointed, {}),
    "checkpointed dropout": (sharded(), plain_step, Checkpointed, {"dropout": 0.3}),
    "forward": (sharded(), forward_only, Transformer, {}),
    "replicated": (replicated(bucket_cap_mb=0.001), plain_step, Transformer, {}),
    "replicated bfloat16": (replicated(mp_policy=HALF), accumulating_step, Transformer, {}),
}
PLANE = ("hybrid", "tensor parallel", "microbatches of replicas")  # cases that need two axes


def bits(tensor: Any) -> Any:
    """What a user can see of a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local = tensor._local_tensor if isinstance(tensor, sw.DTensor) else tensor
    spec = str(tensor.spec) if isinstance(tensor, sw.DTensor) else ""
    values = [part.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for part in parts_of(local)]
    return spec, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, values


def visible(job: Job, result: Any) -> dict[str, Any]:
    """All that a step leaves, by name."""
    results = result if isinstance(result, Sequence) else (result,)
    found = {f"result {at}": bits(each) for at, each in enumerate(results)}
    for name, parameter in job.model.named_parameters():
        found |= {name: bits(parameter), f"{name}.grad": bits(parameter.grad)}
        for key, value in job.optimizer.state.get(parameter, {}).items():
            found[f"{name}: {key}"] = bits(value)
    found["random"] = torch.get_rng_state().tolist()[:64]
    return found


def before_call(name: str, job: Job, call: int) -> None:
    """What changes between calls."""
    job.optimizer.param_groups[0]["lr"] = 1e-2 / (call + 1)
    if name.startswith("microbatches"):
        if call % 2 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
        if name == "microbatches of replicas":
            job.model.set_requires_all_reduce(call % 2 == 1)
        else:
            job.model.set_requires_gradient_sync(call % 2 == 1)
    elif name == "frozen":
        job.model.blocks[0].down.requires_grad_(call < 3)
    elif name == "sharded":
        job.model.train(call != 3)


def compare(
    name: str, mesh: sw.DeviceMesh, place: Callable[[torch.Tensor], Any], calls: int = CALLS, seed: int = 0
) -> tuple[int, int]:
    """Run one case; how many calls ran as programs, and how many programs there were. Raises where bits differ."""
    wrap, make_step, kind, options = CASES[name]
    jobs = []
    for _ in range(2):
        model, optimizer = made(wrap, mesh, kind, **options)
        jobs.append(Job(model, optimizer, make_step(model, optimizer)))
    step, ran = captured(jobs[1].step), 0
    for call in range(calls):
        generator = torch.Generator().manual_seed(100 * seed + call)
        numbers = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
        given = [place(numbers[:, :-1].contiguous()), place(numbers[:, 1:].contiguous())]
        outcomes = []
        for job, run in zip(jobs, (jobs[0].step, step), strict=True):
            before_call(name, job, call)
            torch.manual_seed(call)
            count = len(step.programs)
            result = run(*given)
            ran += run is step and count > 0 and len(step.programs) == count
            outcomes.append(visible(job, result))
        different = [key for key in outcomes[0] if outcomes[0][key] != outcomes[1][key]]
        assert not different, f"{name}, call {call}: captured differs from eager in {different[:6]}"
    eager = copy.deepcopy(jobs[1].model)  # modules are as between eager steps: they can be copied, and used
    assert [bits(p) for p in eager.parameters()] == [bits(p) for p in jobs[1].model.parameters()]
    return ran, len(step.programs)


def compare_virtual(name: str, *, of_ranks: bool, calls: int = CALLS) -> tuple[int, int]:
    """One case on virtual ranks, with one batch for all of them or one for each."""
    shape = (2, 2) if name in PLANE else (2,)
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    split: list[sw.Placement] = [sw.Shard(0)] * mesh.ndim
    if name == "tensor parallel":
        split[1] = sw.Replicate()

    def place(batch: torch.Tensor) -> Any:
        placed = sw.distribute_tensor(batch, mesh, split)
        return placed.to_local() if of_ranks else placed

    return compare(name, mesh, place, calls)


def main() -> int:
    """Every case, both kinds of batches."""
    torch.set_num_threads(1)
    for name in CASES:
        for of_ranks in (False,) if name == "tensor parallel" else (False, True):
            ran, programs = compare_virtual(name, of_ranks=of_ranks)
            kind = "batches of ranks" if of_ranks else "a global batch"
            print(f"{name}, {kind}: {ran} of {CALLS} calls ran as programs, {programs} programs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
