"""What a captured function changes or returns is as after an eager call, whatever kind of object it is."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.virtual.captured_comparison import bits

CALLS = 8
Wrap = Callable[[Callable[..., Any]], Any]


def on_mesh(tensor: torch.Tensor, placement: Any = None) -> Any:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return sw.distribute_tensor(tensor, mesh, [placement or sw.Replicate()])


def batch(call: int) -> Any:
    return on_mesh(torch.arange(8.0).reshape(2, 4) + call)


def weight(value: float = 1.0) -> Any:
    return nn.Parameter(on_mesh(torch.full((4,), value), sw.Shard(0)))


def plainly(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plainly, value)]
    if isinstance(value, dict):
        return [(plainly(key), plainly(item)) for key, item in value.items()]
    return bits(value)


CASES: dict[str, Callable[[Wrap], list[Any]]] = {}  # what is seen of the calls of a function, captured or not


def case(run: Callable[[Wrap], list[Any]]) -> Callable[[Wrap], list[Any]]:
    CASES[run.__name__] = run
    return run


def seen(step: Any, state: Callable[[], Any] = lambda: None, calls: int = CALLS) -> list[Any]:
    found: list[Any] = []
    for call in range(calls):
        result = step(batch(call))
        found.append(plainly([result, state()]))
    return found


# ---------------------------------------------------------------- changes of objects


class Slotted:
    __slots__ = ("flag",)

    def __init__(self) -> None:
        self.flag = False


class Held:
    factor = 2.0

    def __init__(self) -> None:
        self.flag = False


class Other(Held):
    factor = 3.0


@case
def attribute_in_slots(wrap: Wrap) -> list[Any]:
    held = Slotted()

    def function(x: Any) -> Any:
        held.flag = not held.flag
        return x * (2.0 if held.flag else 3.0)

    return seen(wrap(function), lambda: held.flag)


@case
def attribute_in_slots_of_an_argument(wrap: Wrap) -> list[Any]:
    def function(x: Any, held: Any) -> None:
        held.flag = x * 2

    step, found = wrap(function), []
    for call in range(CALLS):
        held = Slotted()
        step(batch(call), held)
        found.append(plainly(held.flag))
    return found


@case
def attribute_of_a_parameter(wrap: Wrap) -> list[Any]:
    held = weight()
    held.flag = False

    def function(x: Any) -> Any:
        held.flag = not held.flag
        return x * (2.0 if held.flag else 3.0)

    return seen(wrap(function), lambda: held.flag)


@case
def new_attribute_of_a_parameter(wrap: Wrap) -> list[Any]:
    held = weight()

    def function(x: Any) -> Any:
        held.main = x * 2
        return x * 3

    return seen(wrap(function), lambda: held.main)


@case
def new_attribute_of_an_argument(wrap: Wrap) -> list[Any]:
    def function(x: Any) -> Any:
        x.tag = 5
        return x * 3

    step, found = wrap(function), []
    for call in range(CALLS):
        x = batch(call)
        step(x)
        found.append(x.tag)
    return found


@case
def class_of_an_object(wrap: Wrap) -> list[Any]:
    held = Held()

    def function(x: Any) -> Any:
        held.__class__ = Other if held.__class__ is Held else Held
        return x * held.factor

    return seen(wrap(function), lambda: type(held).__name__)


@case
def attributes_all_at_once(wrap: Wrap) -> list[Any]:
    held = Held()

    def function(x: Any) -> Any:
        held.__dict__ = {"flag": not held.flag}
        return x * (2.0 if held.flag else 3.0)

    return seen(wrap(function), lambda: held.flag)


@case
def defaults_of_a_function(wrap: Wrap) -> list[Any]:
    def scaled(x: Any, by: float = 2.0) -> Any:
        return x * by

    def function(x: Any) -> Any:
        scaled.__defaults__ = (5.0 - scaled.__defaults__[0],)  # pyright: ignore[reportOptionalSubscript]
        return scaled(x)

    return seen(wrap(function), lambda: scaled.__defaults__)


@case
def gradient_mode(wrap: Wrap) -> list[Any]:
    def function(x: Any) -> Any:
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return x * 2

    return seen(wrap(function), torch.is_grad_enabled)


@case
def default_dtype(wrap: Wrap) -> list[Any]:
    def function(x: Any) -> Any:
        other = {torch.float32: torch.float64, torch.float64: torch.float32}
        torch.set_default_dtype(other[torch.get_default_dtype()])
        return x.float() * 2

    return seen(wrap(function), torch.get_default_dtype)


# ---------------------------------------------------------------- results


@case
def list_of_the_arguments_is_returned(wrap: Wrap) -> list[Any]:
    def function(items: list[Any]) -> Any:
        items.append(items[0] * 2)
        return items, {"again": items}

    step, found = wrap(function), []
    for call in range(CALLS):
        items = [batch(call)]
        first, second = step(items)
        found.append((first is items, second["again"] is items, plainly(items)))
    return found


@case
def one_list_in_two_places(wrap: Wrap) -> list[Any]:
    def function(x: Any) -> Any:
        items = [x * 2]
        return items, {"again": items}

    step, found = wrap(function), []
    for call in range(CALLS):
        first, second = step(batch(call))
        found.append((first is second["again"], plainly(first)))
    return found


@case
def gradients_with_inputs_alone(wrap: Wrap) -> list[Any]:
    left, right = weight(), weight(2.0)

    def function(x: Any) -> Any:
        left.grad = None
        loss = (left * x).sum() * (right * right).sum().detach()
        loss.backward(inputs=[left])
        between = left * x
        (gradient,) = torch.autograd.grad(between.square().sum(), between)
        return loss, gradient

    return seen(wrap(function), lambda: left.grad)


# ---------------------------------------------------------------- what is read


class Descriptor:
    def __init__(self) -> None:
        self.number = 1.0

    def __get__(self, instance: Any, owner: Any = None) -> float:
        return self.number


class Described:
    number = Descriptor()

    def scaled(self, x: Any, by: list[float]) -> Any:
        return x * by[0]

    factors = [2.0]  # noqa: RUF012  # changed by a test
    twice = functools.partialmethod(scaled, by=factors)


@case
def descriptor_in_python(wrap: Wrap) -> list[Any]:
    held, descriptor = Described(), vars(Described)["number"]
    descriptor.number = 1.0

    def function(x: Any) -> Any:
        assert Descriptor is not None  # its class is reached
        return x * held.number

    step = wrap(function)
    found = seen(step)
    descriptor.number = 5.0
    return found + seen(step)


@case
def arguments_of_a_partial_method(wrap: Wrap) -> list[Any]:
    held, factors = Described(), vars(Described)["twice"].keywords["by"]
    factors[0] = 2.0
    step = wrap(lambda x: held.twice(x))
    found = seen(step)
    factors[0] = 5.0
    return found + seen(step)


@case
def cache_that_was_filled_before(wrap: Wrap) -> list[Any]:
    box = [1.0]

    @functools.lru_cache
    def number() -> float:
        return box[0]

    step, found = wrap(lambda x: x * number()), []
    for each in (1.0, 5.0):
        box[0] = each
        number.cache_clear()
        number()
        found += seen(step)
    return found


class Settings:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


@case
def results_of_cached_functions(wrap: Wrap) -> list[Any]:
    settings = functools.cache(lambda: Settings())
    tables = functools.lru_cache(lambda name: [Settings(len(name))])
    step = wrap(lambda x: x * settings().scale + tables("ab")[0].scale * tables("a")[0].scale)
    found = seen(step)
    settings().scale = 5.0
    found += seen(step)
    for name in ("a", "ab", "a", "abc"):  # the order of last use is another one
        tables(name)[0].scale += 2.0
        found += seen(step, calls=3)
    settings.cache_clear()
    found += seen(step, calls=4)
    settings.cache_clear()
    settings().scale = 9.0
    return found + seen(step)


@case
def tensors_that_a_cached_function_keeps(wrap: Wrap) -> list[Any]:
    table = functools.lru_cache(lambda size: torch.full((size,), 2.0))
    step = wrap(lambda x: x.full_tensor() * table(4))
    found = seen(step)
    table(4).fill_(5.0)
    found += seen(step)
    table.cache_clear()
    return found + seen(step)


@case
def entries_of_a_full_cache(wrap: Wrap) -> list[Any]:
    box = [1.0]

    @functools.lru_cache(maxsize=1)
    def number(name: str) -> float:
        return box[0] * len(name)

    step = wrap(lambda x: x * number("a"))
    found = seen(step)
    box[0] = 5.0
    found += seen(step)  # the result from before
    number("ab")
    number("a")  # in the same entry, under the same name
    found += seen(step)
    box[0] = 1.0
    return found + seen(step)


@case
def gradients_by_a_generator(wrap: Wrap) -> list[Any]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def function(x: Any) -> Any:
        loss = layer(x.full_tensor()).square().sum()
        return *torch.autograd.grad(loss, layer.parameters()), loss.detach()

    return seen(wrap(function))


@case
def ranges_and_slices(wrap: Wrap) -> list[Any]:
    step = wrap(lambda x, numbers, part: x[:, part] * numbers.stop)
    found: list[Any] = []
    for numbers in (range(0, 3, 2), range(0, 4, 2)):  # which are equal
        for part in (slice(0, 2), slice(1, 4)):
            found += [plainly(step(batch(call), numbers, part)) for call in range(4)]
    return found


@case
def parametrizations_that_are_kept(wrap: Wrap) -> list[Any]:
    torch.manual_seed(0)
    layer: Any = parametrizations.weight_norm(nn.Linear(4, 4))
    step = wrap(lambda x: (layer(x.full_tensor()) + layer(x.full_tensor())).detach())
    found = seen(step, calls=4)
    with parametrize.cached():
        for call in range(4):
            found.append(plainly(step(batch(call))))
            with torch.no_grad():
                layer.parametrizations.weight.original1.mul_(2.0)
    return found


@case
def forward_derivatives(wrap: Wrap) -> list[Any]:
    step = wrap(lambda x: x * x)
    found = seen(step, calls=4)
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(step(forward_ad.make_dual(batch(1), batch(2))))
        return [*found, plainly([value, tangent])]


@case
def layer_that_is_made_by_its_first_call(wrap: Wrap) -> list[Any]:
    torch.manual_seed(0)
    layer = nn.LazyLinear(4)
    return seen(wrap(lambda x: layer(x.full_tensor()).detach()))


# ---------------------------------------------------------------- copies, methods, threads


class Stepping(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.weight = weight()
        self.step = wrap(self._step)

    def _step(self, x: Any) -> Any:
        return x * self.weight.detach()


@case
def copy_of_a_module_with_a_captured_method(wrap: Wrap) -> list[Any]:
    module = Stepping(wrap)
    found = seen(module.step)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.mul_(3.0)
    return found + seen(other.step) + seen(module.step)


@case
def method_of_a_class(wrap: Wrap) -> list[Any]:
    class Scaling:
        step = wrap(lambda self, x: x * self.by)

        def __init__(self, by: float) -> None:
            self.by = by

    first, second = Scaling(2.0), Scaling(5.0)
    return [*seen(first.step), *seen(second.step), *seen(first.step)]


@case
def threads_at_once(wrap: Wrap) -> list[Any]:
    factor = weight(3.0)
    step = wrap(lambda x: (x * factor.detach()).relu())
    batches = {(thread, call): batch(thread + call) for thread in range(4) for call in range(6)}
    found: dict[Any, Any] = {}

    def run(thread: int) -> None:
        for call in range(6):
            found[thread, call] = plainly(step(batches[thread, call]))

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(key) for key in batches]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_after_eager_calls(name: str) -> None:
    outcomes = []
    for wrap in (lambda function: function, captured):
        try:
            outcomes.append(CASES[name](wrap))
        finally:
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
    for call, (eager, found) in enumerate(zip(*outcomes, strict=True)):
        assert found == eager, call


def module_function(x: Any) -> Any:
    return x * 2


def test_a_pickled_captured_function_has_no_programs() -> None:
    step = captured(module_function, max_programs=3)
    for call in range(4):
        step(batch(call))
    other = pickle.loads(pickle.dumps(step))
    assert len(step.programs) == 1
    assert len(other.programs) == 0
    assert other.programs.limit == 3
    assert seen(other) == seen(module_function)


# ---------------------------------------------------------------- optimizers


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hyperparameter_makes_states_later(name: str) -> None:
    """Programs write to the states that are there; with other ones they are recorded anew."""
    outcomes = []
    for wrap in (lambda function: function, captured):
        parameter = weight()
        optimizer = OPTIMIZERS[name]([parameter])

        def train(x: Any, parameter: Any = parameter, optimizer: Any = optimizer) -> None:
            (parameter * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step, found = wrap(train), []
        for call in range(3 * CALLS):
            optimizer.param_groups[0][name] = 0.5 if CALLS <= call < 2 * CALLS else 0
            try:
                step(batch(call))
            except KeyError as error:  # AdamW has no such state
                found.append(str(error))
            found.append(plainly([parameter, parameter.grad, dict(optimizer.state[parameter])]))
        outcomes.append(found)
    assert outcomes[1] == outcomes[0]


READS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda optimizer: optimizer.state_dict()["param_groups"][0]["lr"],
    "getattr": lambda optimizer: getattr(optimizer, "param_groups")[0]["lr"],  # noqa: B009
    "vars": lambda optimizer: vars(optimizer)["param_groups"][0]["lr"],
    "defaults": lambda optimizer: optimizer.defaults["lr"],
}


@pytest.mark.parametrize("name", READS)
def test_a_learning_rate_that_the_function_reads(name: str) -> None:
    parameter, read = weight(), READS[name]
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def train(x: Any) -> Any:
        (parameter * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return x * read(optimizer)

    step = captured(train)
    for rate in (0.5, 0.25):
        optimizer.defaults["lr"] = optimizer.param_groups[0]["lr"] = rate
        for call in range(4):
            assert bits(step(batch(call))) == bits(batch(call) * rate)
    assert len(step.programs) == 2


# ---------------------------------------------------------------- refusals


def test_a_result_that_retains_its_gradient_is_refused() -> None:
    factor = weight()

    def function(x: Any) -> Any:
        factor.grad = None
        hidden = factor * x
        hidden.retain_grad()
        hidden.sum().backward()
        return hidden

    step = captured(function)
    step(batch(0))
    with pytest.raises(UnsupportedError, match="retains its gradient"):
        step(batch(1))


def test_a_graph_that_backward_went_through_in_part_is_refused() -> None:
    left, right = weight(), weight(2.0)

    def function(x: Any) -> Any:
        factor = (right * right).sum()
        return *torch.autograd.grad((left * x).sum() * factor, left), factor

    step = captured(function)
    step(batch(0))
    with pytest.raises(UnsupportedError, match="graph of autograd"):
        step(batch(1))


def test_variables_of_the_caller_are_refused() -> None:
    import inspect

    step = captured(lambda x: x * inspect.currentframe().f_back.f_lineno)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(UnsupportedError, match="_getframe"):
        step(batch(0))


def test_sparse_gradients_are_refused_and_nothing_is_changed() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def train(indices: torch.Tensor) -> None:
        table(indices).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = captured(train)
    step(torch.tensor([1, 2]))
    before = table.weight.detach().clone()
    with pytest.raises(UnsupportedError, match="sparse_coo"):
        step(torch.tensor([1, 2]))
    assert torch.equal(table.weight, before)
    assert table.weight.grad is None


@pytest.mark.parametrize("kind", ["slots", "tensor"])
def test_a_refused_call_puts_attributes_back(kind: str) -> None:
    held: Any = Slotted() if kind == "slots" else weight()
    held.flag = 0

    def function(x: Any) -> Any:
        held.flag += 1
        return x.sum().item()

    step = captured(function)
    for _ in range(3):
        with pytest.raises(UnsupportedError):
            step(batch(0))
        assert held.flag == 0
