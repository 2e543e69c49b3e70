"""Captured functions: the bits of eager on every call, whatever changes between calls; refusals change nothing."""

import copy
import gc
import linecache
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.capture.captured_function import is_within_noise
from shardwise.errors import UnsupportedError
from tests.transformer import Transformer, batch, loss_of, tensor_parallel
from tests.virtual import captured_steps

FACTOR = 2.0


def mesh_of(*shape: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.spec == b.spec and torch.equal(a.full_tensor(), b.full_tensor())  # pyright: ignore[reportAttributeAccessIssue]


def test_varied_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert captured_steps.main(["--programs", "2", "--seed", "1", "--calls", "7"]) == 0
    shown = capsys.readouterr().out
    assert "0 failed" in shown
    assert " 0 calls ran as programs" not in shown


def test_a_program_runs_from_the_third_call() -> None:
    mesh = mesh_of(4)
    weight = sw.randn(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])
    calls = []

    def function(x: Any) -> Any:
        calls.append  # noqa: B018  # a list that is read is guarded, too
        return (x @ weight).relu().sum(0)

    step = captured(function)
    x = sw.randn(4, 8, device_mesh=mesh, placements=[sw.Shard(1)])
    found = [step(x) for _ in range(4)]
    assert all(same(each, function(x)) for each in found)
    assert len(step.programs) == 1
    assert "mm(" in step.source()
    assert "test_captured.py" in step.source()
    calls.append(1)
    assert same(step(x), found[0])
    assert len(step.programs) == 2


def test_python_values_are_guarded() -> None:
    global FACTOR
    mesh = mesh_of(2)
    scale, options = 1.0, {"shift": 1.0}

    def function(x: Any, power: float = 2.0, *, extra: float = 0.0) -> Any:
        return x.pow(power) * (FACTOR * scale) + options["shift"] + extra

    step = captured(function)
    x = sw.rand(4, device_mesh=mesh, placements=[sw.Shard(0)])

    def check(**given: Any) -> None:
        for _ in range(3):
            assert same(step(x, **given), function(x, **given))

    check()
    scale = 3.0
    check()
    FACTOR = 5.0
    check()
    options["shift"] = -1.0
    check()
    check(power=3.0)
    check(extra=0.5)
    function.__defaults__ = (1.5,)
    check()
    assert len(step.programs) == 7
    FACTOR = 2.0


def test_what_the_fast_guard_compares() -> None:
    """Changes that leave dicts, objects or functions in place, and some that leave their contents."""
    mesh = mesh_of(2)

    class Options:
        def __init__(self) -> None:
            self.factor = 2.0
            self.unused = 0

        def scaled(self, x: Any, by: float = 1.0) -> Any:
            return x * (self.factor * by)

    class Others(Options):
        def scaled(self, x: Any, by: float = 1.0) -> Any:
            return x * 100.0

    options, weights, names = Options(), [1.0, 2.0], {"a"}
    globals().pop("abs", None)
    weight = nn.Parameter(sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]))

    def function() -> Any:
        factor = abs(weights[0]) + weights[1] + len(names)
        return (options.scaled(weight.detach()) * factor, weight.requires_grad, weight.grad is None)

    step = captured(function)

    def check() -> None:
        for _ in range(3):
            found, wanted = step(), function()
            assert same(found[0], wanted[0])
            assert found[1:] == wanted[1:]

    check()
    before = len(step.programs)
    options.unused, options.unused = 1, 0  # other contents and back: the same program
    check()
    assert len(step.programs) == before
    assert step._binding is not None
    for change in (
        lambda: setattr(options, "__dict__", {"factor": 7.0, "unused": 0}),
        lambda: setattr(options, "__class__", Others),
        lambda: setattr(options, "__class__", Options),
        lambda: setattr(Options.scaled, "__defaults__", (3.0,)),
        lambda: setattr(Options, "scaled", Others.scaled),
        lambda: (weights.clear(), weights.extend([5.0, 6.0])),
        lambda: names.add("b"),
        lambda: globals().update(abs=lambda value: 10 * value),
        lambda: weight.requires_grad_(False),
        lambda: setattr(weight, "grad", torch.zeros_like(weight)),
        lambda: setattr(weight, "data", weight.detach() * 2),
    ):
        change()
        check()
    globals().pop("abs")


def test_settings_of_torch_are_guarded() -> None:
    mesh = mesh_of(2)
    weight = nn.Parameter(sw.randn(8, 8, device_mesh=mesh, placements=[sw.Shard(0)]))
    step = captured(lambda x: F.linear(x, weight).sum().detach())
    x = sw.randn(4, 8, device_mesh=mesh)
    plain = [step(x) for _ in range(3)][-1]
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low, eager = step(x), F.linear(x, weight).sum().detach()
        assert same(low, eager)
        assert low.dtype is eager.dtype
    assert same(step(x), plain)
    with torch.no_grad():
        assert same(step(x), plain)
    assert len(step.programs) == 3


def test_a_transformer() -> None:
    mesh = mesh_of(2, 2)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Transformer(1, dropout=0.2)
        tensor_parallel(model, mesh["tp"])
        models.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(tokens: Any, targets: Any) -> Any:
            loss = loss_of(model(tokens), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    eager, step = make(*models[0]), captured(make(*models[1]))
    for call in range(5):
        tokens, targets = batch(call)
        losses = []
        for run, (_, optimizer) in zip((eager, step), models, strict=True):
            optimizer.param_groups[0]["lr"] = 0.01 / (call + 1)
            torch.manual_seed(call)
            losses.append(run(tokens, targets))
        assert torch.equal(_whole(losses[0]), _whole(losses[1]))
        for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
            assert torch.equal(_whole(one), _whole(other))
    assert len(step.programs) == 1


def _whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor


class _Refusals:
    """A step that does something that cannot be captured after it has changed everything."""

    def __init__(self, last: Callable[[Any], Any]) -> None:
        mesh = mesh_of(2)
        torch.manual_seed(0)
        self.weight = nn.Parameter(sw.randn(4, 4, device_mesh=mesh, placements=[sw.Shard(0)]))
        self.buffer = sw.zeros(4, device_mesh=mesh)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.x = sw.randn(2, 4, device_mesh=mesh)
        self.last = last
        self.notes: list[Any] = []

    def step(self, x: Any) -> Any:
        loss = F.dropout(x @ self.weight).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.buffer.add_(1)
        self.notes.append(1)
        return self.last(loss)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item": (lambda loss: loss.item(), "value of a tensor is read"),
    "branch": (lambda loss: loss if loss > 0 else -loss, "value of a tensor is read"),
    "format": (lambda loss: f"{loss:.2f}", "value of a tensor is read"),
    "list": (lambda loss: loss.full_tensor().tolist(), "tolist"),
    "numpy": (lambda loss: loss.full_tensor().detach().numpy(), "numpy"),
    "mask": (lambda loss: loss.full_tensor().reshape(1)[loss.full_tensor().reshape(1) > 0], "depend on the values"),
    "print": (lambda loss: print("loss"), "print"),
    "time": (lambda loss: time.time(), "time"),
    "random": (lambda loss: random.random(), "random"),
    "seed": (lambda loss: torch.manual_seed(0), "random generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_change_nothing(name: str) -> None:
    last, message = REFUSED[name]
    job = _Refusals(last)
    step = captured(job.step)
    before = job.weight.full_tensor().clone(), torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=message) as raised:
        step(job.x)
    assert "test_captured.py" in str(raised.value)
    assert not job.notes
    assert torch.equal(job.buffer.full_tensor(), torch.zeros(4))
    assert torch.equal(job.weight.full_tensor(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert job.weight.grad is None


def test_a_live_graph_is_refused() -> None:
    mesh = mesh_of(2)
    weight = nn.Parameter(sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]))
    step = captured(lambda: weight.square().sum())
    step()
    with pytest.raises(UnsupportedError, match="graph of autograd"):
        [step() for _ in range(2)]


def test_unknown_objects_are_refused() -> None:
    mesh = mesh_of(2)
    numbers = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    x = sw.ones(4, device_mesh=mesh)
    step = captured(lambda: x * next(numbers))
    step()
    with pytest.raises(UnsupportedError, match="list_iterator"):
        step()


def test_tensors_from_elsewhere_are_refused() -> None:
    mesh = mesh_of(2)

    class Hidden:
        __slots__ = ("_get",)

    hidden = torch.ones(4)
    box = [lambda: hidden]
    x = sw.ones(4, device_mesh=mesh)
    step = captured(lambda: x + box[0]())
    assert all(same(step(), x + 1) for _ in range(4))  # what functions hold is reached
    hidden = torch.full((4,), 5.0)
    assert same(step(), x + 5)
    assert same(step(), x + 5)


def test_an_update_of_saved_tensors_is_noticed() -> None:
    mesh = mesh_of(2)
    weight = nn.Parameter(sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]))

    @torch.no_grad()
    def update() -> None:
        weight.mul_(2)

    step = captured(update)
    for _ in range(3):
        step()
    loss = (weight * weight).sum()
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_spent_graph_cannot_be_used_again() -> None:
    mesh = mesh_of(2)
    weight = nn.Parameter(sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]))

    def backward() -> Any:
        loss = weight.square().sum()
        loss.backward()
        return loss

    step = captured(backward)
    loss = [step() for _ in range(4)][-1]
    assert loss.requires_grad
    assert len(step.programs) == 1
    assert torch.equal(weight.grad.full_tensor(), torch.full((4,), 8.0))  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_programs_are_bounded() -> None:
    mesh = mesh_of(2)
    step = captured(lambda x: x * 2, max_programs=4)
    for size in range(2, 14):
        x = sw.ones(size, device_mesh=mesh)
        assert same(step(x), x * 2)
    assert len(step.programs) <= 4


def test_the_text_of_a_program_goes_with_it() -> None:
    """Texts are where tracebacks look for lines, which nobody else clears: 18 KiB a program."""

    def texts() -> set[str]:
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<captured ")}

    before = texts()
    mesh = sw.init_device_mesh("cpu", (2,))
    step = captured(lambda x, times: (x * times).sum(), max_programs=2)
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    for times in range(6):
        for _ in range(3):
            step(x, times)
    kept = texts() - before
    assert 0 < len(kept) <= 2 * 2  # what runs, and the program before passes
    assert all(linecache.getline(name, 1).startswith("def ") for name in kept)
    del step
    assert texts() <= before


def test_copies_of_a_model_have_programs_of_their_own() -> None:
    mesh = mesh_of(2)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(sw.distribute_tensor(model.weight.detach(), mesh, [sw.Shard(0)]))
    model.bias = nn.Parameter(sw.distribute_tensor(model.bias.detach(), mesh, [sw.Replicate()]))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.mul_(2)
    step = captured(lambda m, x: m(x).detach())
    x = sw.ones(2, 4, device_mesh=mesh)
    for each in (model, other, model, other, model):
        assert same(step(each, x), each(x).detach())


@pytest.mark.parametrize("clears", ["never", "before"])
def test_gradients_of_plain_parameters(clears: str) -> None:
    mesh = mesh_of(2)

    def job() -> tuple[Any, Any, Any, Callable[..., Any]]:
        split = nn.Parameter(sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]))
        plain, unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        unused.grad = torch.ones(4)
        optimizer = torch.optim.SGD([split, plain, unused], lr=0.1)

        def step(x: torch.Tensor) -> None:
            if clears == "before":
                optimizer.zero_grad()
            ((split * x).sum() + (plain * x).square().sum()).backward()
            optimizer.step()

        return split, plain, unused, step

    eager, other = job(), job()
    run = captured(other[3])
    for call in range(5):
        x = torch.full((4,), 1.0 + call)
        for each in (eager, other):
            each[2].grad = torch.ones(4)
        eager[3](x)
        run(x)
        for ours, theirs in zip(other[1:3], eager[1:3], strict=True):
            assert torch.equal(ours, theirs), call
            assert (ours.grad is None) == (theirs.grad is None), call
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), call
    assert run.programs


def test_runs_of_a_program_that_differ_from_each_other_may_differ_from_the_function_as_much() -> None:
    """Kernels without a fixed order have other last bits in each run; there is none on CPUs to capture."""
    wanted = torch.linspace(-1, 1, 64)
    noisy, again = wanted + 1e-5, wanted - 1e-5
    assert is_within_noise(noisy, again, wanted)
    assert not is_within_noise(again, again.clone(), wanted)  # the program is the same each time, and another
    assert not is_within_noise(noisy, again, wanted + 1e-3)
    assert not is_within_noise(noisy, again, torch.where(wanted > 0.9, torch.nan, wanted))
    assert not is_within_noise(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))


NOTHING = object()


def test_a_sentinel_is_compared_by_identity() -> None:
    given = {"value": NOTHING}
    step = captured(lambda x: x + 1 if given["value"] is NOTHING else x + 2)
    x = torch.zeros(2)
    assert [float(step(x)[0]) for _ in range(3)] == [1, 1, 1]
    given["value"] = object()
    assert [float(step(x)[0]) for _ in range(3)] == [2, 2, 2]
