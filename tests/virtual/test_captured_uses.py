"""What users do around a captured step: its calls and everything they leave have the bits of eager ones."""

from __future__ import annotations

import array
import copy
import datetime
import decimal
import itertools
import logging
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from os import getenv
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.virtual.captured_data_parallel import bits

WIDTH = 8
Wrap = Callable[[Callable[..., Any]], Any]


class Model(nn.Module):
    """Two layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return self.second(self.dropout(self.first(x).relu()))


class Job:
    """A model with its optimizer; `wrap` makes a step captured, or leaves it."""

    def __init__(self, wrap: Wrap, plan: str = "tp") -> None:
        torch.manual_seed(0)
        self.mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.wrap = wrap
        self.model: Any = Model()
        if plan == "tp":
            parallelize_module(self.model, self.mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        else:
            sw.fully_shard(self.model, self.mesh)
        self.plan = plan
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.calls = 0
        self.found: list[Any] = []

    def batch(self) -> Any:
        self.calls += 1
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.calls))
        return sw.distribute_tensor(x, self.mesh, [sw.Shard(0)]) if self.plan == "fsdp" else x

    def step(self, model: Any = None, optimizer: Any = None, **options: Any) -> Any:
        """The usual step, captured or not."""
        model, optimizer = model or self.model, optimizer or self.optimizer

        def train(x: Any) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(**options)
            return loss.detach()

        return self.wrap(train)

    def run(self, step: Any, times: int = 4) -> None:
        """Calls of a step; what each leaves is noted."""
        for _ in range(times):
            torch.manual_seed(self.calls)
            self.note(step(self.batch()))

    def note(self, *values: Any) -> None:
        found = [bits(value) for value in values]
        for name, p in self.model.named_parameters():
            state = self.optimizer.state.get(p, {})
            found.append((name, bits(p), bits(p.grad), {key: bits(value) for key, value in state.items()}))
        found += [(name, bits(buffer)) for name, buffer in self.model.named_buffers()]
        self.found.append((found, torch.get_rng_state().tolist()[:32]))


CASES: dict[str, Callable[[Job], None]] = {}


def case(run: Callable[[Job], None]) -> Callable[[Job], None]:
    CASES[run.__name__] = run
    return run


@case
def inside_another(job: Job) -> None:
    inner = job.wrap(lambda x: job.model(x).square().mean())

    def outer(x: Any) -> Any:
        loss = inner(x)
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        return loss.detach()

    job.run(job.wrap(outer))


@case
def raising_between_calls(job: Job) -> None:
    wanted = [0]

    def train(x: Any) -> Any:
        loss = job.model(x).square().mean()
        loss.backward()
        if wanted[0] == 1:
            raise ValueError("after backward")
        job.optimizer.step()
        if wanted[0] == 2:
            raise KeyboardInterrupt
        job.optimizer.zero_grad()
        return loss.detach()

    step = job.wrap(train)
    for kind in (0, 0, 0, 1, 0, 0, 2, 0, 0, 2, 1, 0):
        wanted[0] = kind
        torch.manual_seed(job.calls)
        try:
            job.note(step(job.batch()))
        except (ValueError, KeyboardInterrupt):
            job.note()


@case
def in_two_threads_in_turn(job: Job) -> None:
    step = job.step()
    for _ in range(4):
        thread = threading.Thread(target=job.run, args=(step, 1))
        thread.start()
        thread.join()
        job.run(step, 1)


@case
def copied_model(job: Job) -> None:
    step = job.step()
    job.run(step)
    twin = copy.deepcopy(job.model)
    job.run(step)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.02)
    other = job.step(twin, optimizer)
    job.run(other)  # which leaves the first model as it is
    job.run(step)
    job.note(*twin.parameters())


@case
def parameters_replaced(job: Job) -> None:
    step = job.step()
    job.run(step)
    for layer in (job.model.first, job.model.second):
        layer.bias = nn.Parameter(layer.bias.detach() * 2)
    job.run(step)
    job.optimizer.param_groups[0]["params"] = list(job.model.parameters())
    job.run(step)


@case
def states_loaded(job: Job) -> None:
    step = job.step()
    job.run(step)
    saved = copy.deepcopy(job.optimizer.state_dict()), copy.deepcopy(job.model.state_dict())
    job.run(step)
    job.optimizer.load_state_dict(saved[0])
    job.model.load_state_dict(saved[1])
    job.run(step)
    job.model.load_state_dict(saved[1], assign=True)
    job.run(step)


@case
def gradients_kept_as_zeros(job: Job) -> None:
    job.run(job.step(set_to_none=False))


@case
def gradients_cleared_outside_both_ways(job: Job) -> None:
    def train(x: Any) -> Any:
        loss = job.model(x).square().mean()
        loss.backward()
        job.optimizer.step()
        return loss.detach()

    step = job.wrap(train)
    for to_none in (True, True, False, True, False, False, True, True):
        job.run(step, 1)
        job.optimizer.zero_grad(set_to_none=to_none)


@case
def gradients_read_and_written_between_calls(job: Job) -> None:
    def train(x: Any) -> Any:
        job.model(x).square().mean().backward()

    step = job.wrap(train)
    for _ in range(8):
        job.run(step, 1)
        held = [p.grad for p in job.model.parameters()]
        job.note(*held)
        held[0].mul_(0.5)
        job.model.second.weight.grad = held[2].clone() if job.calls % 2 else None


@case
def schedule(job: Job) -> None:
    step = job.step()
    rates = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, 0.1, total_steps=20)
    for _ in range(6):
        job.run(step, 1)
        rates.step()


@case
def averaged_weights(job: Job) -> None:
    average = torch.optim.swa_utils.AveragedModel(job.model, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new)
    step = job.step()
    for _ in range(6):
        job.run(step, 1)
        average.update_parameters(job.model)
        job.note(*average.module.parameters())


@case
def settings_around(job: Job) -> None:
    step = job.step()
    infer = job.wrap(lambda x: job.model(x))
    for _ in range(3):
        job.run(step, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            job.run(step, 1)
        with torch.no_grad():
            job.run(infer, 1)
        with torch.inference_mode():
            job.run(infer, 1)
        try:
            torch.use_deterministic_algorithms(True)
            job.run(step, 1)
        finally:
            torch.use_deterministic_algorithms(False)


@case
def precise_part_under_autocast(job: Job) -> None:
    """Operators of a program are not cast once more by the autocast around its call."""

    def train(x: Any) -> Any:
        h = job.model(x)
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ h.float().transpose(0, 1)
        loss = h.softmax(-1).square().mean()
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        return loss.detach()

    step = job.wrap(train)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            job.run(step, 3)
        job.run(step, 2)


@case
def default_dtype(job: Job) -> None:
    def train(x: Any) -> Any:
        return (job.model(x) * torch.full((), 0.1)).square().mean().detach() + torch.tensor(0.1)

    step = job.wrap(train)
    for kind in (torch.float32, torch.float32, torch.float32, torch.float64, torch.float64, torch.float32):
        x = job.batch()
        torch.manual_seed(job.calls)
        torch.set_default_dtype(kind)
        try:
            job.note(step(x))
        finally:
            torch.set_default_dtype(torch.float32)


@case
def hooks_added_and_removed(job: Job) -> None:
    step = job.step()
    for _ in range(2):
        job.run(step, 3)
        handles = [
            job.model.first.register_forward_hook(lambda module, args, out: 2 * out),
            job.model.second.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,)),  # pyright: ignore[reportArgumentType]
            job.model.second.bias.register_hook(lambda grad: grad * 3),
        ]
        job.run(step, 3)
        for handle in handles:
            handle.remove()


@case
def modes_of_modules(job: Job) -> None:
    step = job.step()
    for training in (True, True, True, False, False, True, False):
        job.model.train(training)
        job.run(step, 1)


@case
def frozen_parameters(job: Job) -> None:
    step = job.step()
    for names in ((), (), (), ("first.weight",), ("first.weight",), ("first.weight", "second.bias"), ()):
        for name, p in job.model.named_parameters():
            p.requires_grad_(name not in names)
        job.run(step, 1)


@case
def new_group_of_parameters(job: Job) -> None:
    scale = nn.Parameter(torch.ones(()))
    job.model.scale = scale

    def train(x: Any) -> Any:
        loss = (job.model(x) * job.model.scale).square().mean()
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        return loss.detach()

    step = job.wrap(train)
    job.run(step)
    job.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    job.run(step)
    job.optimizer.param_groups[1]["params"].append(scale)
    job.run(step)


def both(name: str, plan: str) -> tuple[list[Any], list[Any]]:
    found = []
    for wrap in (lambda function: function, captured):
        job = Job(wrap, plan)
        CASES[name](job)
        found.append(job.found)
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["tp", "fsdp"])
@pytest.mark.parametrize("name", CASES)
def test_uses_leave_the_bits_of_eager(name: str, plan: str) -> None:
    eager, found = both(name, plan)
    assert len(found) == len(eager)
    for at, (left, right) in enumerate(zip(eager, found, strict=True)):
        assert right == left, f"call {at} differs"


def test_scaled_losses_are_refused_with_the_line() -> None:
    """A GradScaler reads on the host whether there are infinities."""
    job = Job(captured)
    scaler = torch.amp.GradScaler("cpu")

    def train(x: Any) -> Any:
        loss = job.model(x).square().mean()
        scaler.scale(loss).backward()  # pyright: ignore[reportAttributeAccessIssue]
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        return loss.detach()

    step = captured(train)
    before = [bits(p) for p in job.model.parameters()]
    for _ in range(3):
        with pytest.raises(UnsupportedError):
            step(job.batch())
        assert [bits(p) for p in job.model.parameters()] == before
        assert all(p.grad is None for p in job.model.parameters())


def _to_dtype(model: torch.nn.Module) -> None:
    model.to(torch.float64)


def _swapped(model: Any) -> None:
    other = torch.nn.Parameter(model.second.bias.detach().double())
    torch.utils.swap_tensors(model.second.bias, other)
    model.double()


def _emptied(model: torch.nn.Module) -> None:
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(kept)
    model.double()


@pytest.mark.parametrize("change", [torch.nn.Module.double, _to_dtype, _swapped, _emptied])
def test_parameters_are_exchanged_while_programs_are_kept(change: Callable[[Any], Any]) -> None:
    """Torch exchanges the parameters of a module only while nothing refers to them weakly."""
    jobs = [Job(captured) for _ in range(2)]
    functions: list[Any] = [lambda x, job=job: _trained(job, x) for job in jobs]
    functions[1] = captured(functions[1])
    torch.manual_seed(3)
    batches = [jobs[0].batch() for _ in range(12)]
    for call, batch in enumerate(batches):
        if call in (4, 8):
            for job in jobs:
                (change if call == 4 else torch.nn.Module.float)(job.model)
                job.optimizer.state.clear()
        eager, found = (_seeded(function, batch) for function in functions)
        assert bits(found) == bits(eager)
        assert found.dtype is (torch.float64 if 4 <= call < 8 else torch.float32)
        for a, b in zip(jobs[0].model.parameters(), jobs[1].model.parameters(), strict=True):
            assert bits(a) == bits(b)
    assert len(functions[1].programs) >= 2


def _trained(job: Any, x: Any) -> Any:
    loss = job.model(x.to(job.model.second.bias.dtype)).square().mean()
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    return loss.detach()


def _seeded(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(5)
    return function(*args)


# ---------------------------------------------------------------- values of Python in unusual places


__factor = 1.0


class _Attributes(frozenset):
    factor: float


class _Factor(property):
    factor: float


class _Holder:
    scaled = _Factor(lambda holder: 1.0)
    __factor__ = 1.0
    _abc_factor = 1.0


def _namespace() -> None:
    """It never runs: a function that holds a setting."""


def _of_environment(name: str, default: str) -> float:
    return float(getenv(name, default))


_PROBLEM = ValueError(1.0)
_ITEMS = _Attributes()
# What code reads, and how that is changed.
PLACES: dict[str, tuple[Callable[[], float], Callable[[float], Any]]] = {
    "a global name of two underscores": (
        lambda: globals_named(), lambda value: globals().__setitem__("__factor", value)
    ),
    "an attribute of a function that never runs": (
        lambda: _namespace.factor, lambda value: setattr(_namespace, "factor", value)  # pyright: ignore[reportFunctionMemberAccess]
    ),
    "an attribute added to a function that runs": (
        lambda: getattr(_of_environment, "factor", _of_environment("SHARDWISE_NOT_SET", "1")),
        lambda value: value > 1 and setattr(_of_environment, "factor", value),
    ),
    "an attribute of a class of torch": (
        lambda: torch.nn.Linear.factor, lambda value: setattr(torch.nn.Linear, "factor", value)
    ),
    "an attribute of a class of torch, by an object": (
        lambda: _MODULE.factor, lambda value: setattr(torch.nn.Module, "factor", value)
    ),
    "an attribute of a class with underscores": (
        lambda: _Holder.__factor__, lambda value: setattr(_Holder, "__factor__", value)
    ),
    "an attribute of a class as abc names them": (
        lambda: _Holder._abc_factor, lambda value: setattr(_Holder, "_abc_factor", value)
    ),
    "an attribute of a property": (
        lambda: vars(_Holder)["scaled"].factor, lambda value: setattr(vars(_Holder)["scaled"], "factor", value)
    ),
    "an attribute of a set": (lambda: _ITEMS.factor, lambda value: setattr(_ITEMS, "factor", value)),
    "the arguments of an exception": (lambda: _PROBLEM.args[0], lambda value: setattr(_PROBLEM, "args", (value,))),
    "the environment by a name of its own": (
        lambda: _of_environment("SHARDWISE_FACTOR", "1"),
        lambda value: os.environ.__setitem__("SHARDWISE_FACTOR", str(value)),
    ),
    "the environment in bytes": (
        lambda: float(os.environb[b"SHARDWISE_FACTOR"]),
        lambda value: os.environ.__setitem__("SHARDWISE_FACTOR", str(value)),
    ),
}  # fmt: skip
_MODULE = torch.nn.Identity()


def globals_named() -> float:
    return __factor


@pytest.mark.parametrize("place", PLACES)
def test_values_in_unusual_places(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_FACTOR", "1.0")
    for kind in (torch.nn.Linear, torch.nn.Module):
        monkeypatch.setattr(kind, "factor", 1.0, raising=False)
    read, change = PLACES[place]
    x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    step = captured(lambda x: x * read())
    for call in range(12):
        value = 1.0 + call // 4
        change(value)
        assert step(x).full_tensor().tolist() == [value] * 4
    assert len(step.programs) == 3
    _of_environment.__dict__.clear()


@pytest.mark.parametrize(
    "kind",
    [
        lambda value: type("Numbers", (np.ndarray,), {})((1,), buffer=np.array([value])),
        lambda value: type("Days", (datetime.timedelta,), {})(days=value),
        lambda value: type("Money", (decimal.Decimal,), {})(value),
        lambda value: type("Values", (array.array,), {})("d", [value]),
        lambda value: type("Bytes", (bytearray,), {})([int(value)]),
        lambda value: type("Count", (itertools.count,), {})(value),
    ],
)
def test_objects_with_a_state_in_c_are_refused(kind: Callable[[float], Any]) -> None:
    """Where a class is derived from one in C, the objects have attributes, and more than these."""
    x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    step = captured(lambda x, value: x * len(repr(value)))
    step(x, kind(1.0))
    with pytest.raises(UnsupportedError, match="of a class derived from"):
        step(x, kind(1.0))


def test_objects_that_a_step_only_holds() -> None:
    holder = types.SimpleNamespace(random=random.Random(1), output=sys.stdout, log=logging.getLogger("a"), factor=2.0)
    step = captured(lambda x: x * holder.factor)
    x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    assert [step(x).sum().item() for _ in range(3)] == [8.0] * 3
    assert len(step.programs) == 1


@pytest.mark.parametrize("name", ["benchmark", "deterministic", "allow_tf32"])
def test_settings_of_backends_that_are_read_are_refused(name: str) -> None:
    x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    step = captured(lambda x: x * getattr(torch.backends.cudnn, name))
    with pytest.raises(UnsupportedError, match="cudnn"):
        [step(x) for _ in range(2)]
