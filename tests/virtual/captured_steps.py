"""Random training steps, captured and eager, over calls between which everything that a step can read may change.

Two copies of one model run the same calls; after each call all that a user can see must have the same bits. Run many:
`python -m tests.virtual.captured_steps --programs 2000 --seed 0 --jobs 8 --seconds 600`. A seed decides everything.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from shardwise.parallel import (
    ColwiseParallel,
    FSDPModule,
    MixedPrecisionPolicy,
    ReplicateModule,
    RowwiseParallel,
    parallelize_module,
)
from tests.virtual.captured_comparison import bits, refusal, run_seeds

CALLS = 11
CHANGED = (4, 6, 7, 9)  # the calls before which something changes
WIDTH = 12
MESHES = ((2,), (2,), (2,), (3,), (3,), (1,), (4,), (2, 2), (5,), (2, 3))  # small ones more often: time goes by ranks
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "by hand": lambda p: ByHand(p, 0.01),
}
SCALE = 1.0  # a global that steps read
SHIFT: contextvars.ContextVar[float] = contextvars.ContextVar("shift", default=0.0)
# Functions of hidden values [rows, width] that keep the shape. A program has some of them, one after another.
BODY: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda h: h.softmax(-1),
    "log_softmax over rows": lambda h: F.log_softmax(h, 0),
    "cumsum": lambda h: h.cumsum(0),
    "where": lambda h: torch.where(h > 0, h, 0.5 * h),
    "clamp": lambda h: h.clamp(-1.0, 1.0),
    "split": lambda h: torch.cat([part * (at + 1.0) for at, part in enumerate(h.chunk(3, -1))], -1),
    "halves": lambda h: torch.cat(h.split([4, 8], -1)[::-1], -1),
    "centred": lambda h: h - h.mean(0, keepdim=True),
    "scaled": lambda h: h / (h.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt(),
    "gram": lambda h: (h @ h.transpose(0, 1)) @ h,
    "heads": lambda h: (
        F.scaled_dot_product_attention(*[h.view(h.shape[0], 3, 4).transpose(0, 1)] * 3).transpose(0, 1).reshape(h.shape)
    ),
    "einsum": lambda h: torch.einsum("ij,ik->jk", h, h).mean(0) + h,
    "largest": lambda h: h * h.argmax(-1, keepdim=True).to(h.dtype),
    "one of them": lambda h: h + F.one_hot(h.argmax(-1), h.shape[-1]).to(h.dtype),
    "rolled": lambda h: h.roll(1, -1) + h,
    "flipped": lambda h: h.flip(0) * 2,
    "sorted": lambda h: h.sort(-1).values,
    "in place": lambda h: h.clone().mul_(0.5).add_(1.0),
    "written": lambda h: _written(h),
    "noise": lambda h: h + 0.1 * torch.rand_like(h),
    "dropped": lambda h: F.dropout(h, 0.2),
    "padded": lambda h: F.pad(h, (1, 1))[:, 1:-1] * 1.5,
    "norm": lambda h: h / (1 + h.norm()),
    "pieces": lambda h: torch.stack(h.unbind(-1), -1),
    "outer": lambda h: (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(-1),
}


def _written(h: Any) -> Any:
    held = torch.zeros_like(h)
    held[:, 2:7] = h[:, 2:7]
    return held + h


class ByHand(torch.optim.Optimizer):
    """An optimizer of the user's, which is recorded operator by operator."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class Fixed:
    """Read as a class; it has no method."""

    shift = 0.0


@dataclasses.dataclass
class Config:
    """Read as an object."""

    bias: float = 0.0


def shifted(x: Any) -> Any:
    """Reads an attribute of its own, an environment variable and the order of a dict."""
    for factor in ORDERED.values():
        x = x * factor + shifted.by  # pyright: ignore[reportFunctionMemberAccess]
    return x * float(os.environ.get("CAPTURED_STEPS", "1"))


shifted.by = 0.0  # pyright: ignore[reportFunctionMemberAccess]
ORDERED = collections.OrderedDict(a=1.0, b=1.0)


class Settings:
    """Python values that a step reads."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.power = 2
        self.clip: float | None = 1.0
        self.factor = torch.ones(())
        self.names = ["a", "b"]
        self.config = Config()
        self.chosen = {1.0}
        self.weight = np.float32(1.0)
        self.microbatches = 1
        self.to_none = True
        self.fails = 0  # where the step raises
        self.clips_values = False
        self.body: list[str] = []
        self.generator = torch.Generator().manual_seed(3)
        self.noise = 0.0
        self.average: list[torch.Tensor] = []  # of the weights, over calls
        self.norms: dict[str, float] = {"kind": 2.0}


class Model(torch.nn.Module):
    """Linear layers with whatever a seed asks for."""

    table: torch.Tensor

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=draw.random() < 0.7)
        self.second = torch.nn.Linear(2 * WIDTH, WIDTH, bias=draw.random() < 0.7)
        self.norm = draw.choice([torch.nn.LayerNorm(WIDTH), torch.nn.RMSNorm(WIDTH), torch.nn.Identity()])
        self.statistics = torch.nn.BatchNorm1d(WIDTH) if draw.random() < 0.3 else None
        self.dropout = torch.nn.Dropout(draw.choice([0.0, 0.3]))
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        if draw.random() < 0.2:
            self.last.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("table", torch.randn(WIDTH))
        self.slope = 0.1
        self.calls = 0
        self.counts = draw.random() < 0.1
        self.keeps = draw.random() < 0.3
        self.recomputes = draw.random() < 0.3
        self.kept: Any = None
        self.body: list[Any] = []
        self.seen = 0.0
        if draw.random() < 0.3:
            self.register_buffer("running", torch.zeros(WIDTH))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        h = checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)
        if self.statistics is not None:
            h = self.statistics(h)
        if self.keeps:
            self.kept = h.detach().clone()
        for each in self.body:
            h = each(h)
        running: Any = getattr(self, "running", None)
        if running is not None and self.training:
            self.steps.add_(1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            with torch.no_grad():
                running.lerp_(h.detach().to(running.dtype).mean(0), 0.1)
        return self.last(h) + self.table

    def inner(self, x: torch.Tensor) -> Any:
        h = self.second(F.leaky_relu(self.first(x), self.slope))
        return self.norm(self.dropout(h))


class Job:
    """One copy of a model with its optimizer, settings and step."""

    def __init__(self, seed: int, mesh: Any) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.mesh = mesh
        self.model = Model(draw)
        tp = mesh if mesh.ndim == 1 else mesh["tp"]
        self.plan = draw.choice(["tp", "tp", "replicated", "rows", "fully_shard", "replicate"])
        if self.plan == "tp":
            parallelize_module(self.model, tp, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        elif self.plan in ("fully_shard", "replicate"):
            self.make_data_parallel(draw)
        else:
            layout = [sw.Replicate() if self.plan == "replicated" else sw.Shard(0)] * mesh.ndim
            for module in self.model.modules():
                for name, p in list(module.named_parameters(recurse=False)):
                    own = layout if p.dim() > 1 else [sw.Replicate()] * mesh.ndim
                    setattr(module, name, torch.nn.Parameter(sw.distribute_tensor(p.detach(), mesh, own)))
                for name, b in list(module.named_buffers(recurse=False)):
                    if b.dim() and isinstance(module, Model):
                        module.register_buffer(name, sw.distribute_tensor(b, mesh, [sw.Replicate()] * mesh.ndim))
        self.optimizer: Any = OPTIMIZERS[draw.choice(list(OPTIMIZERS))](self.model.parameters())
        self.settings = Settings()
        self.model.body = [BODY[draw.choice(list(BODY))] for _ in range(draw.choice([0, 0, 1, 1, 2, 3]))]
        self.schedule: Any = None
        self.gives = draw.choice(["DTensor", "plain"]) if self.plan == "tp" else "DTensor"
        self.splits = 0  # the dim that the batch is split along, where it is
        self.hooks: list[Any] = []
        self.step = self.make_step(draw)

    def make_data_parallel(self, draw: random.Random) -> None:
        model, mesh = self.model, self.mesh
        whole = [sw.Replicate()] * mesh.ndim
        model.table = sw.distribute_tensor(model.table, mesh, whole)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if draw.random() < 0.2 else None
        if self.plan == "replicate":
            sw.replicate(model, mesh, bucket_cap_mb=0.001, mp_policy=policy)
            return
        keeps = draw.choice([None, True, False])
        for layer in (model.first, model.second):
            sw.fully_shard(layer, mesh, reshard_after_forward=keeps, mp_policy=policy)
        sw.fully_shard(model, mesh, mp_policy=policy)

    def make_step(self, draw: random.Random) -> Callable[..., Any]:
        model, optimizer, settings = self.model, self.optimizer, self.settings
        clears = draw.choice(["before", "after", "never"])
        weight = 0.5
        cast = draw.random() < 0.2

        averages = draw.random() < 0.15
        if averages:
            settings.average = [p.detach().clone() for p in model.parameters()]

        def clip(parameters: Any) -> Any:
            if settings.clips_values:
                return torch.nn.utils.clip_grad_value_(parameters, settings.clip)
            return torch.nn.utils.clip_grad_norm_(parameters, settings.clip, norm_type=settings.norms["kind"])

        def step(x: torch.Tensor, y: torch.Tensor, extra: float = 1.0) -> Any:
            if clears == "before":
                optimizer.zero_grad(set_to_none=settings.to_none)
            for _ in range(settings.microbatches - 1):  # gradients add up
                model(x).square().mean().backward()
            if cast:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = model(x).float()
            else:
                out = model(x)
            loss = (out - y).abs().pow(settings.power).mean() * (SCALE * settings.scale * weight * extra)
            loss = loss * settings.factor * float(settings.weight) + sum(settings.chosen)
            loss = shifted(loss) + Fixed.shift + settings.config.bias
            loss = loss + SHIFT.get()
            if settings.noise:
                loss = loss + settings.noise * torch.rand((), generator=settings.generator)
            if settings.fails == 1:
                raise ValueError("before backward")
            loss.backward()
            if settings.fails == 2:
                raise ValueError("after backward")
            norm = None
            if settings.clip is not None and settings.names[0] == "a":
                norm = clip(model.parameters())
            optimizer.step()
            with torch.no_grad():
                for kept, p in zip(settings.average, model.parameters(), strict=False):
                    kept.lerp_(p.detach().to(kept.dtype), 0.1)
            if settings.fails == 3:
                raise ValueError("after the step")
            if clears == "after":
                optimizer.zero_grad(set_to_none=settings.to_none)
            return {"loss": loss, "norm": norm, "out": out.detach(), "names": tuple(settings.names)}

        def set_weight(value: float) -> None:
            nonlocal weight
            weight = value

        def set_cast(value: bool) -> None:
            nonlocal cast
            cast = value

        self.set_weight, self.set_cast = set_weight, set_cast
        return step

    def data(self, draw: random.Random, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(draw.randrange(1 << 30))
        x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        if self.plan == "tp" and self.gives == "plain":
            return x, y
        whole = [sw.Replicate()] * self.mesh.ndim
        split = [sw.Shard(self.splits), *whole[1:]] if self.plan != "tp" else whole
        if self.plan in ("fully_shard", "replicate"):
            split = [sw.Shard(0)] * self.mesh.ndim
        mesh = self.mesh if self.plan != "tp" or self.mesh.ndim == 1 else self.mesh["tp"]
        return tuple(sw.distribute_tensor(t, mesh, split[: mesh.ndim]) for t in (x, y))  # pyright: ignore[reportReturnType]


def _change(job: Job, what: str, number: float) -> None:
    """Change something that the step reads."""
    global SCALE
    model, settings = job.model, job.settings
    optimizer: Any = job.optimizer
    group = optimizer.param_groups[0]
    match what:
        case "lr":
            group["lr"] = 0.001 + number / 50
        case "hyperparameter":
            names = [n for n in ("weight_decay", "eps", "momentum", "alpha") if isinstance(group.get(n), float)]
            if names:
                group[names[int(number * len(names))]] = 0.01 + number / 10
            if "betas" in group:
                group["betas"] = (0.8 + number / 10, 0.99)
        case "scale":
            settings.scale = 0.5 + number
        case "weight":
            job.set_weight(0.5 + number)
        case "global":
            SCALE = 1.0 + number
        case "power":
            settings.power = 1 + int(2 * number)
        case "clip":
            settings.clip = None if number < 0.3 else number
        case "names":
            settings.names[0] = "a" if number < 0.5 else "c"
        case "slope":
            model.slope = number
        case "p":
            model.dropout.p = number / 2
        case "mode":
            model.train(number < 0.5)
        case "frozen":
            model.first.weight.requires_grad_(number < 0.5)
        case "epsilon":
            if isinstance(model.norm, torch.nn.LayerNorm | torch.nn.RMSNorm):
                model.norm.eps = 1e-4 * number
        case "momentum":
            if model.statistics is not None:
                model.statistics.momentum = number
        case "hook":
            if job.hooks:
                job.hooks.pop().remove()
            else:
                factor = 1.0 + number
                job.hooks.append(model.last.register_forward_hook(lambda module, args, out: factor * out))  # pyright: ignore[reportOperatorIssue]
        case "tensor hook":
            job.hooks.append(model.second.weight.register_hook(lambda grad: grad * 0.5))
        case "hook after accumulation":
            job.hooks.append(model.last.weight.register_post_accumulate_grad_hook(_double))
        case "backward hook":
            job.hooks.append(model.last.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,)))  # pyright: ignore[reportArgumentType]
        case "layout":
            job.splits = 1 - job.splits
        case "layout of a buffer":
            if isinstance(model.table, sw.DTensor) and job.plan not in ("fully_shard", "replicate"):
                kept = [sw.Replicate()] * (job.mesh.ndim - 1)
                model.table = model.table.redistribute(
                    placements=[sw.Shard(0) if number < 0.5 else sw.Replicate(), *kept]
                )
        case "dtype":
            model.table = model.table.to(torch.float64 if number < 0.5 else torch.bfloat16)
        case "cast":
            job.set_cast(number < 0.5)
        case "recomputes":
            model.recomputes = not model.recomputes
        case "factor":
            settings.factor.fill_(number)
        case "synchronizes":
            if isinstance(model, FSDPModule | ReplicateModule):
                model.set_requires_gradient_sync(number < 0.5)
        case "no gradients":
            for p in model.parameters():
                p.grad = None
        case "values":
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9 + number / 10)
        case "data":
            weight = model.second.weight
            weight.data = weight.detach().mul(0.5)
        case "replaced":
            model.table = model.table * 2
        case "module":
            model.norm = torch.nn.Identity()
        case "class":
            Fixed.shift = number
        case "dataclass":
            settings.config.bias = number
        case "other dataclass":
            settings.config = Config(number)
        case "attribute of a function":
            shifted.by = number  # pyright: ignore[reportFunctionMemberAccess]
        case "environment":
            os.environ["CAPTURED_STEPS"] = repr(1.0 + number)
        case "order":
            ORDERED.update(a=1.0 + number, b=2.0)
            ORDERED.move_to_end("a" if number < 0.5 else "b")
        case "set":
            settings.chosen.clear()
            settings.chosen.add(number)
        case "numpy number":
            settings.weight = np.float32(number)
        case "microbatches":
            settings.microbatches = 1 + int(3 * number)
        case "set to none":
            settings.to_none = number < 0.5
        case "forward":
            Model.inner = _other_inner if Model.inner is _inner else _inner
        case "new group":
            if len(optimizer.param_groups) == 1 and not optimizer.state:
                moved = group["params"].pop()
                optimizer.add_param_group({**group, "params": [moved], "lr": 0.02})
        case "loaded":
            model.load_state_dict({name: value.detach() * 0.5 for name, value in model.state_dict().items()})
        case "layer":
            if job.plan == "tp":
                model.last = torch.nn.Linear(WIDTH, WIDTH)
                with torch.no_grad():
                    model.last.weight.fill_(number)
                    model.last.bias.fill_(number)
        case "state":
            optimizer.load_state_dict(optimizer.state_dict())
        case "other state":
            state = optimizer.state_dict()
            for each in state["state"].values():
                for name, value in each.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        each[name] = value * 0.5
            optimizer.load_state_dict(state)
        case "no state":
            optimizer.state.clear()
        case "fails":
            settings.fails = 1 + int(3 * number)
        case "clips values":
            settings.clips_values = not settings.clips_values
        case "kind of norm":
            settings.norms["kind"] = 1.0 if number < 0.5 else float("inf")
        case "noise":
            settings.noise = number
        case "seed":
            settings.generator.manual_seed(int(1000 * number))
        case "generator":
            settings.generator = torch.Generator().manual_seed(int(1000 * number))
        case "context variable":
            SHIFT.set(number)
        case "body":
            names = list(BODY)
            model.body = [*model.body[1:], BODY[names[int(number * len(names))]]]
        case "schedule":
            job.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        case "hook before":
            factor = 1.0 + number
            job.hooks.append(
                model.first.register_forward_pre_hook(lambda module, args: tuple(factor * arg for arg in args))
            )
        case "hook with names":
            job.hooks.append(
                model.second.register_forward_hook(
                    lambda module, args, names, out: out + len(names) + number,  # pyright: ignore[reportOperatorIssue]
                    with_kwargs=True,
                )
            )
        case "hook of the optimizer":
            job.hooks.append(optimizer.register_step_pre_hook(_halve))
        case "hooks removed":
            while job.hooks:
                job.hooks.pop().remove()
        case "deterministic":
            torch.use_deterministic_algorithms(number < 0.5, warn_only=True)
        case "default dtype":
            torch.set_default_dtype(torch.float64 if number < 0.5 else torch.float32)
        case "precision":
            torch.set_float32_matmul_precision("medium" if number < 0.5 else "highest")
        case "double":
            if job.plan not in ("fully_shard", "replicate"):
                model.double() if number < 0.5 else model.float()
        case "moved gradients":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.clone()
        case "gradients in place":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
        case "new parameter":
            if job.plan in ("replicated", "rows"):
                model.last.bias = torch.nn.Parameter(model.last.bias.detach() * number)
        case "buffers":
            with torch.no_grad():
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        buffer.mul_(number)
        case "half of the model":
            for p in (*model.second.parameters(), *model.last.parameters()):
                p.requires_grad_(number < 0.5)
        case "attribute":
            model.extra = number  # pyright: ignore[reportArgumentType]
        case _:
            raise AssertionError(what)


_inner = Model.inner


def _other_inner(self: Model, x: torch.Tensor) -> Any:
    return 0.5 * _inner(self, x)


def _double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def _halve(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


CHANGES = (
    "other state", "no state", "fails", "fails", "clips values", "kind of norm", "noise", "seed", "generator",
    "context variable", "body", "body", "schedule", "hook before", "hook with names", "hook of the optimizer",
    "hooks removed", "deterministic", "default dtype", "precision", "double", "moved gradients", "gradients in place",
    "new parameter", "buffers", "half of the model", "attribute",
    "lr", "lr", "lr", "hyperparameter", "scale", "weight", "global", "power", "clip", "names", "slope", "p", "mode",
    "frozen", "epsilon", "momentum", "hook", "tensor hook", "hook after accumulation", "backward hook", "layout",
    "layout of a buffer", "dtype", "cast", "recomputes", "factor", "synchronizes",
    "no gradients", "values", "data", "replaced", "module",
    "state", "class", "dataclass", "other dataclass", "attribute of a function", "environment", "order", "set",
    "numpy number", "microbatches", "set to none", "forward", "new group", "loaded", "layer",
)  # fmt: skip


@contextlib.contextmanager
def _around(kind: str) -> Iterator[None]:
    """What a call runs inside of."""
    match kind:
        case "no_grad":
            with torch.no_grad():
                yield
        case "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                yield
        case "enable_grad":
            with torch.enable_grad():
                yield
        case _:
            yield


def _in_thread(run: Callable[[], Any]) -> Any:
    """Run a function in another thread, with the values of context variables here."""
    found: list[Any] = []
    context = contextvars.copy_context()

    def target() -> None:
        try:
            found.append((context.run(run), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


def _visible(job: Job, result: Any) -> dict[str, Any]:
    found: dict[str, Any] = {f"result {name}": bits(value) for name, value in (result or {}).items()}
    model, optimizer = job.model, job.optimizer
    for name, p in model.named_parameters():
        found[name] = bits(p)
        found[f"{name}.grad"] = bits(p.grad)
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name}: {key}"] = bits(value)
    for name, b in model.named_buffers():
        found[name] = bits(b)
    found |= {f"average {at}": bits(value) for at, value in enumerate(job.settings.average)}
    found["generator"] = job.settings.generator.get_state().tolist()[:64]
    found |= {"calls": model.calls, "kept": bits(model.kept), "random": torch.get_rng_state().tolist()[:64]}
    return found


def compare(seed: int, mesh: Any = None, calls: int = CALLS) -> tuple[int, int]:
    """Run one seed; how many calls ran as programs, and how many programs there were. Raises where bits differ."""
    global SCALE
    SCALE = 1.0
    draw = random.Random(seed)
    if mesh is None:
        shape = draw.choice(MESHES)
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    Fixed.shift, Model.inner, shifted.by = 0.0, _inner, 0.0  # pyright: ignore[reportFunctionMemberAccess]
    os.environ.pop("CAPTURED_STEPS", None)
    ORDERED.clear()
    ORDERED.update(a=1.0, b=1.0)
    SHIFT.set(0.0)
    precision = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once, so that only one of both would see it
        try:
            return _compare(seed, mesh, calls, draw)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision(precision)


def _compare(seed: int, mesh: Any, calls: int, draw: random.Random) -> tuple[int, int]:
    global SCALE
    jobs = [Job(seed, mesh), Job(seed, mesh)]
    step = captured(jobs[1].step)
    rows, ran, extra = 8, 0, {}
    for call in range(calls):
        if call in CHANGED:
            for _ in range(draw.choice([1, 1, 2])):
                what, number = draw.choice(CHANGES), draw.random()
                was, inner = SCALE, Model.inner
                for job in jobs:
                    SCALE, Model.inner = was, inner
                    _change(job, what, number)
        if call in CHANGED and draw.random() < 0.2:
            rows = draw.choice([4, 8, 12])
            extra = draw.choice([{}, {}, {}, {"extra": 2.0}])
        with _float32():
            x, y = jobs[0].data(draw, rows)
        start = draw.randrange(1 << 30)
        around = draw.choice(AROUND) if call >= CHANGED[0] else ""
        outcomes, errors, was = [], [], _visible(jobs[1], None)
        for job, run in zip(jobs, (jobs[0].step, step), strict=True):
            torch.manual_seed(start)
            before = len(step.programs)
            result, error = _call(run, around, x, y, extra)
            if job is jobs[1]:
                ran += len(step.programs) == before and bool(before) and error is None
            outcomes.append(_visible(job, result))
            errors.append(error)
            job.settings.fails = 0
            if job.schedule is not None:
                job.schedule.step()
        if isinstance(errors[1], UnsupportedError) and errors[0] is None:
            now = _visible(jobs[1], None)
            changed = [name for name in now if name != "random" and now[name] != was[name]]
            if changed:
                raise AssertionError(f"seed {seed}, call {call}: refused ({errors[1]}), and {changed[:6]} changed")
            raise refusal(errors[1])
        if type(errors[0]) is not type(errors[1]):
            raise AssertionError(f"seed {seed}, call {call}: eager raised {errors[0]!r}, captured {errors[1]!r}")
        different = [name for name in outcomes[0] if outcomes[0][name] != outcomes[1].get(name)]
        different += [name for name in outcomes[1] if name not in outcomes[0]]
        if different:
            raise AssertionError(f"seed {seed}, call {call}: captured differs from eager in {different[:6]}")
    return ran, len(step.programs)


AROUND = (*[""] * 12, "no_grad", "autocast", "enable_grad", "thread", "thread")


def _call(run: Callable[..., Any], around: str, x: Any, y: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
    """The result of a call, or the error: where nothing requires a gradient, say, both must raise."""
    try:
        with _around(around):
            if around == "thread":
                return _in_thread(lambda: run(x, y, **extra)), None
            return run(x, y, **extra), None
    except (RuntimeError, ValueError) as raised:
        return None, raised


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """The same data whatever the default dtype is."""
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(was)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    return run_seeds(compare, CALLS, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
