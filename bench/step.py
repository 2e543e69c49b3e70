"""A training step of 4 transformer blocks under tensor and sequence parallelism: forward, backward, AdamW.

CPU time on one rank of a fake world of 8, whose collectives cost nothing: what is measured is the work around them.
Beside ours: plain modules of a rank's sizes; tensor parallelism written by hand on torch's functional collectives;
torch's DTensor by the same plan, with plain tensors inside attention and feed-forward, as plans for torch are written.
Ours also with DTensors throughout, which torch's has no attention for on CPUs. Asked of the same plan: at most 0.45 of
torch's, at most the hand-written one.

    python -m bench step
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_parallel
from torch import Tensor, nn

import shardwise as ours
from bench.figures import figure
from bench.peers import start
from examples.llama import Block, Llama

WORLD, BLOCKS, DIM, HEADS, HIDDEN = 8, 4, 64, 8, 192
BATCH, LENGTH = 2, 32
ROUNDS = 60
THROUGHOUT = "shardwise, DTensors throughout"
COLUMNS, ROWS = ("query", "key", "value", "gate", "up"), ("out", "down")


class Blocks(nn.Module):
    """The blocks of the example, without what stands before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM, HEADS, HEADS, HIDDEN, 0.0) for _ in range(BLOCKS))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


# ---------------------------------------------------------------- by hand, as Megatron does it


class GatherSequence(torch.autograd.Function):
    """The whole sequence of which each rank has a part; gradients are added up and parted again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _waited(collectives.all_gather_single(x, 1, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _waited(collectives.reduce_scatter_single(grad, "sum", 1, ctx.group)), None


class ScatterSequence(torch.autograd.Function):
    """The sum over ranks, of which each keeps its part of the sequence; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _waited(collectives.reduce_scatter_single(x, "sum", 1, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _waited(collectives.all_gather_single(grad, 1, ctx.group)), None


def _waited(tensor: Tensor) -> Tensor:
    return collectives.wait_tensor(tensor)


class HandWritten(nn.Module):
    """Blocks of a rank's own weights, with collectives around attention and feed-forward."""

    def __init__(self, local: nn.Module, group: Any) -> None:
        super().__init__()
        self.local, self.group = local, group

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        gather, scatter, group = GatherSequence.apply, ScatterSequence.apply, self.group
        for block in self.local.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + scatter(block.attention(gather(block.attention_norm(x), group), cos, sin), group)
            x = x + scatter(block.feed_forward(gather(block.feed_forward_norm(x), group)), group)
        return x

    def reduce_norms(self) -> None:
        """The gradients of norms, each rank's from its part of the sequence, added up in one collective."""
        gradients = [p.grad for name, p in self.named_parameters() if "norm" in name and p.grad is not None]
        total = _waited(collectives.all_reduce(torch.cat(gradients), "sum", self.group))
        torch._foreach_copy_(gradients, list(total.split([g.numel() for g in gradients])))


def local_part(model: Blocks) -> Blocks:
    """The same blocks with the weights that one rank has of them."""
    local = copy.deepcopy(model)
    for name, layer in local.named_modules():
        kind = name.rpartition(".")[2]
        if kind in COLUMNS + ROWS:
            weight: Any = layer.weight
            layer.register_parameter("weight", nn.Parameter(weight.detach().chunk(WORLD, int(kind in ROWS))[0].clone()))
    return local


# ---------------------------------------------------------------- by a plan


def parallelized(model: Blocks, library: Any, parallel: Any, mesh: Any, throughout: bool) -> Blocks:
    """The blocks under the same plan in either library."""
    shard, whole = library.Shard(1), library.Replicate()
    columns = parallel.ColwiseParallel(use_local_output=not throughout)
    rows = parallel.RowwiseParallel(output_layouts=shard, use_local_output=not throughout)
    prepare = parallel.PrepareModuleInput
    plan = {
        "blocks.*.*_norm": parallel.SequenceParallel(),
        "blocks.*.attention": prepare(input_layouts=(shard, None, None), desired_input_layouts=(whole, None, None)),
        "blocks.*.feed_forward": prepare(input_layouts=(shard,), desired_input_layouts=(whole,)),
        "blocks.*.attention.[qkv]*": columns,
        "blocks.*.attention.out": rows,
        "blocks.*.feed_forward.gate": columns,
        "blocks.*.feed_forward.up": columns,
        "blocks.*.feed_forward.down": rows,
    }
    return parallel.parallelize_module(copy.deepcopy(model), mesh, plan)


# ---------------------------------------------------------------- a step


@dataclass
class Side:
    """One way to do a step."""

    model: nn.Module
    inputs: tuple[Any, ...]
    gradient: Any
    after: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def compute(self) -> None:
        """Forward and backward."""
        torch.autograd.backward(self.model(*self.inputs), self.gradient)
        self.after()

    def update(self) -> None:
        """The optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def sides() -> dict[str, Side]:
    """All of them, from one set of weights."""
    torch.manual_seed(0)
    model = Blocks()
    tables = Llama(8, DIM, 1, HEADS, HEADS, 8, longest=LENGTH)
    cos, sin = tables.cos, tables.sin
    part, everything = torch.randn(BATCH, LENGTH // WORLD, DIM), torch.randn(BATCH, LENGTH, DIM)
    their_mesh, mesh = theirs.init_device_mesh("cpu", (WORLD,)), ours.init_device_mesh("cpu", (WORLD,))
    by_hand = HandWritten(local_part(model), dist.group.WORLD)
    made = {
        "plain": Side(local_part(model), (everything, cos, sin), torch.ones_like(everything)),
        "hand-written": Side(by_hand, (part, cos, sin), torch.ones_like(part), by_hand.reduce_norms),
    }
    for name, library, parallel, on in (
        ("torch", theirs, their_parallel, their_mesh),
        ("shardwise", ours, ours.parallel, mesh),
    ):
        spread = parallelized(model, library, parallel, on, throughout=False)
        made[name] = Side(spread, (part, cos, sin), torch.ones_like(part))
    shard, whole = [ours.Shard(1)], [ours.Replicate()]
    inputs = [ours.DTensor.from_local(t, mesh, on) for t, on in ((part, shard), (cos, whole), (sin, whole))]
    spread = parallelized(model, ours, ours.parallel, mesh, throughout=True)
    made[THROUGHOUT] = Side(spread, tuple(inputs), ours.DTensor.from_local(torch.ones_like(part), mesh, shard))
    return made


def first_step(side: Side) -> float:
    """Milliseconds of the very first one."""
    begin = time.perf_counter()
    side.compute()
    side.update()
    return (time.perf_counter() - begin) * 1e3


def timed(call: Callable[[], None]) -> float:
    """Milliseconds of CPU."""
    begin = time.process_time_ns()
    call()
    return (time.process_time_ns() - begin) / 1e6


def measure(made: dict[str, Side], rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of compute and update, the sides in turn in each round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    names = list(made)
    gc.collect()
    gc.disable()
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            side = made[name]
            times[name].append((timed(side.compute), timed(side.update)))
        if index % 10 == 9:
            gc.collect()
    gc.enable()
    return {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in times.items()}  # pyright: ignore[reportReturnType]


def main() -> None:
    """Print milliseconds and ratios."""
    start(WORLD)
    torch.set_flush_denormal(True)  # the fake group leaves in its outputs whatever was there
    made = sides()
    first = {name: first_step(side) for name, side in made.items()}
    for _ in range(3):
        measure(made, 1)
    found = measure(made, ROUNDS)
    print(f"milliseconds of CPU, median of {ROUNDS} steps in turn")
    print(f"  {'':32}{'fwd+bwd':>9}{'AdamW':>9}{'step':>9}{'first':>9}")
    for name, (compute, update) in found.items():
        print(f"  {name:32}{compute:9.2f}{update:9.2f}{compute + update:9.2f}{first[name]:9.1f}")
    totals = {name: sum(pair) for name, pair in found.items()}
    for name, peer, asked in (
        ("shardwise", "torch", 0.45),
        ("shardwise", "hand-written", 1.0),
        (THROUGHOUT, "torch", 0.45),
        (THROUGHOUT, "hand-written", 1.0),
    ):
        ratio = totals[name] / totals[peer]
        print(f"  {name}: {figure(f'a training step, {name}, to {peer}', ratio, asked)}")
