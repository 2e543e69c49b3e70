"""Every pair and triple of kinds of parallelism, with everything that people train with: against one device.

    python -m tests.virtual.compositions [--only fsdp-tp-cp ...] [--options captured ...] [--write FILE]

A cell is a small transformer on virtual ranks, two along each axis, trained for three steps in float64 (in float32 with
experts: torch's grouped product has no other). It is right
where losses and parameters are those of one device, refused where an error of the library says so, and wrong
otherwise. A dropout of a pipeline is compared with one device that runs microbatches and stages in order, with the
seeds of the pipeline; a resume takes other numbers of ranks, and of stages. Combinations are generated: nothing here is
chosen by hand but what an option means.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import (
    ColwiseParallel,
    ExpertParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    parallelize_module,
)
from shardwise.pipelines.pipeline_run import draw_seed
from tests.pipelines import whole
from tests.torch_version import TORCH

VOCABULARY, WIDTH, HIDDEN, HEADS, EXPERTS, LENGTH, BATCH, STEPS = 12, 8, 16, 2, 3, 8, 8, 3
# The order of the axes of a mesh; each has two ranks.
AXES = ("pp", "dp", "cp", "ep", "tp")
# Options that an axis refuses with an error, and what it says.
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("pp", "captured"): ("a step of a pipeline sends messages between ranks",),
}
# How parameters are kept over the axes of the batch.
DATA = ("fsdp", "ddp", "plan")
OPTIONS = ("plain", "checkpointing", "compiled", "captured", "bfloat16", "dropout", "accumulation", "resume")


# ---------------------------------------------------------------- the model


class Experts(nn.Module):
    """Feed-forward networks of which each token takes two. With a capacity experts have equally many rows."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        rows, back = sw.moe.dispatch(tokens, ids, EXPERTS, axis="ep", capacity=self.capacity)
        if self.capacity is not None:  # torch compiles grouped products of bfloat16 alone
            made = torch.bmm(F.silu(torch.bmm(rows.unflatten(0, (EXPERTS, -1)), self.up)), self.down)
            return back(made.flatten(0, 1), weights).unflatten(0, x.shape[:2])
        hidden = F.silu(F.grouped_mm(rows, self.up, offs=back.offs))
        return back(F.grouped_mm(hidden, self.down, offs=back.offs), weights).unflatten(0, x.shape[:2])


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, experts: bool, capacity: int | None, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.feed_forward = Experts(capacity) if experts else FeedForward()
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (each(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


def make_model(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        Block(
            "ep" in case.axes, case.capacity, 0.2 if case.option == "dropout" else 0.0, case.option == "checkpointing"
        )
        for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)).to(case.dtype)


def loss_of(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


# ---------------------------------------------------------------- the cells


@dataclasses.dataclass(frozen=True)
class Case:
    """A combination: how parameters are kept over the axes of the batch, the axes, and what it is trained with."""

    data: str
    axes: tuple[str, ...]
    option: str = "plain"

    @property
    def name(self) -> str:
        return "-".join([self.data, *self.axes])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if "ep" in self.axes else torch.float64

    @property
    def capacity(self) -> int | None:
        """Of experts, where sizes must not depend on values: enough for all tokens, so that none is dropped."""
        return BATCH * LENGTH if self.option in ("compiled", "captured") else None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different tokens."""
        return tuple(axis for axis in self.axes if axis in ("dp", "cp", "ep"))

    def mesh(self, start: int = 2) -> sw.DeviceMesh:
        return sw.init_device_mesh("cpu", (start, *[2] * (len(self.axes) - 1)), mesh_dim_names=self.axes)


def combinations(most: int = 3) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every set of axes; without axes of the batch there is one way to keep parameters."""
    for count in range(1, most + 1):
        for axes in itertools.combinations(AXES, count):
            shared = {"dp", "cp", "ep"} & set(axes)
            for data in DATA if shared else ("plan",):
                yield data, axes


def precision(case: Case) -> Any:
    """The context of a forward: `fully_shard` has a policy of its own, for parameters that it owns."""
    owned = case.data == "fsdp" and case.batch_axes != ("ep",)
    return torch.autocast("cpu", torch.bfloat16, enabled=case.option == "bfloat16" and not owned)


def placements_on(mesh: sw.DeviceMesh) -> list[Any]:
    """The layout of a batch of tokens: rows over dp and ep, the sequence over cp."""
    layout = {"dp": sw.Shard(0), "ep": sw.Shard(0), "cp": sw.Shard(1)}
    return [layout.get(name, sw.Replicate()) for name in mesh.mesh_dim_names or ()]


def place(value: Tensor, mesh: sw.DeviceMesh) -> sw.DTensor:
    return sw.distribute_tensor(value, mesh, placements_on(mesh), src_data_rank=None)


def data_mesh(mesh: sw.DeviceMesh, case: Case, without: str = "") -> sw.DeviceMesh | None:
    """The axes of the batch as one."""
    names = tuple(axis for axis in case.batch_axes if axis != without)
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[names].flatten(name="_".join(names))


def spread(model: nn.Module, mesh: sw.DeviceMesh, case: Case) -> nn.Module:
    """Lay out a model, or a stage of one."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    tp = mesh["tp"] if "tp" in case.axes else None
    for block in blocks:
        if "ep" in case.axes:
            inner = {} if tp is None else {"tp_mesh": tp, "tp_dims": {"up": 2, "down": 1}}
            parallelize_module(block, mesh["ep"], {"feed_forward": ExpertParallel(**inner)})
        if tp is not None:
            columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
            plan = {"[qkv]": columns, "out": rows}
            plan |= {} if "ep" in case.axes else {"feed_forward.up": columns, "feed_forward.down": rows}
            parallelize_module(block, tp, plan)
    data = data_mesh(mesh, case)
    if case.data == "plan" or data is None:
        sw.distribute_module(model, mesh)
    elif case.data == "ddp":
        experts = experts_of(blocks)
        sw.distribute_module(nn.ParameterList(experts), mesh)
        sw.replicate(model, data, ignored_params=experts)
    else:
        shard(model, blocks, mesh, case, data)
    if case.option == "compiled":
        for block in blocks:
            block.compile(backend="aot_eager")
    return model


def shard(model: nn.Module, blocks: Sequence[nn.Module], mesh: sw.DeviceMesh, case: Case, data: sw.DeviceMesh) -> None:
    policy = MixedPrecisionPolicy()
    if case.option == "bfloat16" and case.batch_axes != ("ep",):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    others = data_mesh(mesh, case, without="ep")
    alone = experts_of(blocks) if others is None else []  # sharded over ep already
    for block in blocks:
        if "ep" in case.axes and others is not None:
            sw.fully_shard(block.feed_forward, others, mp_policy=policy)  # pyright: ignore[reportArgumentType]
        sw.fully_shard(block, data, mp_policy=policy, ignored_params=alone)
    sw.fully_shard(model, data, mp_policy=policy, ignored_params=alone)


def experts_of(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that are sharded over ep."""
    found = [module for block in blocks for module in block.modules() if isinstance(module, Experts)]
    return [parameter for experts in found for parameter in (experts.up, experts.down)]


def number(loss: Any) -> float:
    return float(loss.detach().full_tensor() if isinstance(loss, sw.DTensor) else loss.detach())


Place = Callable[[Tensor], Any]
Trained = tuple[list[float], dict[str, Tensor]]  # losses, and parameters afterwards


def train(model: nn.Module, optimizer: Any, put: Place, case: Case, steps: Sequence[int]) -> list[float]:
    """The losses of some steps."""

    def one_step(inputs: Any, targets: Any) -> Any:
        if case.option == "accumulation":
            losses = [loss_of(model(i), t) / 2 for i, t in zip(inputs, targets, strict=True)]
            for loss in losses:
                loss.backward()
            total = losses[0].detach() + losses[1].detach()
        else:
            with precision(case):
                total = loss_of(model(inputs), targets)
            total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total

    run = sw.captured(one_step) if case.option == "captured" else one_step
    found = []
    for step in steps:
        torch.manual_seed(100 + step)
        inputs, targets = batch(step)
        if case.option == "accumulation":
            halves = [tuple(put(half) for half in value.chunk(2)) for value in (inputs, targets)]
            found.append(number(run(*halves)))
        else:
            found.append(number(run(put(inputs), put(targets))))
    return found


def optimizer_of(parameters: Any, case: Case) -> torch.optim.Optimizer:
    """One with a state; AdamW would blow up the rounding of float32 where gradients are close to zero."""
    if case.dtype is torch.float32:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def one_device(case: Case) -> Trained:
    model = make_model(case)
    plain = dataclasses.replace(case, option=_as_plain(case))
    run = train_in_order if case.option == "dropout" and "pp" in case.axes else train
    losses = run(model, optimizer_of(model.parameters(), case), lambda x: x, plain, range(STEPS))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def train_in_order(model: Any, optimizer: Any, put: Place, case: Case, steps: Sequence[int]) -> list[float]:
    """Training on one device, microbatch after microbatch, each stage with the random numbers that a pipeline draws."""
    found = []
    for step in steps:
        torch.manual_seed(100 + step)
        seed = int(torch.randint(2**62, ()))
        losses = []
        for microbatch, (x, targets) in enumerate(zip(*(value.chunk(2) for value in batch(step)), strict=True)):
            for stage, part in enumerate((model[:2], model[2:])):
                torch.manual_seed(draw_seed(seed, stage, microbatch))
                x = part(x)
            losses.append(loss_of(x, targets) / 2)
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(number(sum(losses)))
    return found


def _as_plain(case: Case) -> str:
    """What the option is on one device: those that only say how to run change nothing there."""
    return case.option if case.option in ("accumulation", "dropout", "checkpointing") else "plain"


def together(case: Case) -> Trained:
    """The same on a mesh."""
    if "pp" in case.axes:
        return in_stages(case)
    mesh = case.mesh()
    model = spread(make_model(case), mesh, case)
    optimizer = optimizer_of(model.parameters(), case)
    if case.option != "resume":
        losses = train(model, optimizer, lambda x: place(x, mesh), case, range(STEPS))
    else:
        losses = train(model, optimizer, lambda x: place(x, mesh), case, range(2))
        other = case.mesh(start=4)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            sw.checkpoint.save({"model": model, "optimizer": optimizer}, path)
            model = spread(make_model(case), other, case)
            optimizer = optimizer_of(model.parameters(), case)
            sw.checkpoint.load({"model": model, "optimizer": optimizer}, path)
        losses += train(model, optimizer, lambda x: place(x, other), case, range(2, STEPS))
    return losses, {name: whole(value) for name, value in model.named_parameters()}


def in_stages(case: Case) -> Trained:
    pipe = pipeline_of(case, case.mesh(), ["2"])
    optimizer = optimizer_of(pipe.parameters(), case)
    if case.option != "resume":
        losses = train_stages(pipe, optimizer, case, range(STEPS))
    else:
        losses = train_stages(pipe, optimizer, case, range(2))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            sw.checkpoint.save(state_of(pipe, optimizer), path)
            pipe = pipeline_of(case, case.mesh(start=4), ["1", "2", "3"])
            optimizer = optimizer_of(pipe.parameters(), case)
            sw.checkpoint.load(state_of(pipe, optimizer), path)
        losses += train_stages(pipe, optimizer, case, range(2, STEPS))
    return losses, {name: whole(value) for name, value in pipe.named_parameters()}


def state_of(pipe: sw.Pipeline, optimizer: Any) -> dict[str, Any]:
    return {"model": pipe, "optimizer": sw.checkpoint.NamedOptimizer(pipe.module, optimizer)}


def pipeline_of(case: Case, mesh: sw.DeviceMesh, split: list[str]) -> sw.Pipeline:
    rest = dataclasses.replace(case, axes=tuple(axis for axis in case.axes if axis != "pp"))

    def lay_out(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
        spread(stage, mesh, rest)

    return sw.pipeline(make_model(case), mesh["pp"], split=split, microbatches=2, parallelize=lay_out)


def train_stages(pipe: sw.Pipeline, optimizer: Any, case: Case, steps: Sequence[int]) -> list[float]:
    """The losses of some steps of a pipeline; of an accumulation, in one step for each half of the batch."""
    halves = 2 if case.option == "accumulation" else 1
    losses = []
    for step in steps:
        torch.manual_seed(100 + step)
        total = 0.0
        run = sw.captured(pipe.step) if case.option == "captured" else pipe.step
        for inputs, targets in zip(*(value.chunk(halves) for value in batch(step)), strict=True):
            ends = place(inputs, pipe.meshes[0]), place(targets, pipe.meshes[-1])
            with precision(case):
                loss = run(*ends, lambda logits, wanted: loss_of(logits, wanted) / halves)
            total += 0.0 if loss is None else number(loss)  # None on processes that have other stages
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def hides_errors(case: Case) -> bool:
    """Whether torch's compiler gives an error of its own in place of one that traced code raises, as in 2.11."""
    return case.option == "compiled" and TORCH < (2, 12)


def check(case: Case) -> str:
    """Right, or why it is refused; any error where it is wrong."""
    if case.option == "compiled":
        torch.compiler.reset()  # cells share code, of which a process compiles a few versions alone
    losses, parameters = one_device(case)
    refusal = [text for axis in case.axes for text in REFUSED.get((axis, case.option), ())]
    try:
        got, ours = together(case)
    except Exception as error:
        if not any(text in str(error) for text in refusal) and not (refusal and hides_errors(case)):
            raise
        return f"refused: {refusal[0]}"
    assert not refusal, "it is no longer refused"
    assert ours.keys() == parameters.keys()
    compare(case, (got, ours), (losses, parameters))
    return "right"


def compare(case: Case, got: Trained, want: Trained) -> None:
    """Compare losses, and the parameters that are here."""
    tolerance = 5e-2 if case.option == "bfloat16" else 1e-5 if case.dtype is torch.float32 else 1e-9
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=0, atol=tolerance)
    for name, value in got[1].items():
        torch.testing.assert_close(
            value, want[1][name], rtol=0, atol=10 * tolerance, check_dtype=False, msg=lambda m, n=name: f"{n}: {m}"
        )


def cases(only: Sequence[str] = (), options: Sequence[str] = OPTIONS) -> list[Case]:
    found = [Case(data, axes, option) for data, axes in combinations() for option in options]
    return [case for case in found if not only or case.name in only]


def outcome(case: Case) -> tuple[str, str]:
    """The result of a cell, and a traceback where it is wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return check(case), ""
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return f"wrong: {type(error).__name__}: {first}", traceback.format_exc()


def table(results: dict[Case, str]) -> str:
    """The matrix as a page."""
    marks = {"right": "yes", "refused": "refused", "wrong": "WRONG", "not run": "?"}
    lines = [
        "# Kinds of parallelism together\n",
        "Every set of one to three axes of `pp` (pipeline), `dp` (batch), `cp` (sequence), `ep` (experts) and `tp`",
        "(heads and features), two virtual ranks along each. `fsdp`: `fully_shard` over all axes of the batch as one,",
        "`ddp`: `replicate` over them, `plan`: replicated DTensors. A cell is a small transformer, trained for three",
        "steps: `yes` where losses and parameters are those of one device. Made by",
        "`python -m tests.virtual.compositions --write docs/compositions.md`; the tests run a cell of each row.\n",
        f"| | {' | '.join(OPTIONS)} |",
        f"|---|{'---|' * len(OPTIONS)}",
    ]
    for data, axes in combinations():
        row = [results.get(Case(data, axes, option), "not run") for option in OPTIONS]
        lines.append(f"| {data}: {' x '.join(axes)} | {' | '.join(marks[cell.partition(':')[0]] for cell in row)} |")
    lines.append(
        "\nWith `ep`, compiled and captured cells give experts a capacity that drops nothing: without one their sizes "
        "depend on values, and both are refused."
    )
    if REFUSED:
        lines += ["\nRefused, with an error that gives the reason:\n"]
        lines += [f"- `{axis}`, {option}: {texts[0]}." for (axis, option), texts in REFUSED.items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.compositions", description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--options", nargs="+", default=OPTIONS, choices=OPTIONS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trace", action="store_true", help="tracebacks of what is wrong")
    parser.add_argument("--write", type=Path, help="write the table here")
    chosen = parser.parse_args(argv)
    results: dict[Case, str] = {}
    found = cases(chosen.only, chosen.options)
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        for case, (result, trace) in zip(found, pool.imap(outcome, found), strict=True):
            results[case] = result
            if result != "right" and not result.startswith("refused"):
                print(f"{case.name} {case.option}: {result}", flush=True)
            if chosen.trace and trace:
                print(trace, flush=True)
    kinds = [result.partition(":")[0] for result in results.values()]
    print({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})
    if chosen.write:
        chosen.write.write_text(table(results))
    return int("wrong" in kinds)


if __name__ == "__main__":
    sys.exit(main())
