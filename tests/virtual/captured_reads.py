"""Small functions that read something of Python, torch or the machine, and a change of it between calls.

Each case returns a function of a DTensor and a change; `compare` calls the function as it is and captured, and says
whether all calls gave the same, or were refused by name.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import datetime
import enum
import functools
import io
import itertools
import operator
import os
import pickle
import random
import sys
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.virtual import captured_steps as other_module

CALLS, CHANGED_FROM = 6, 4
Case = tuple[Callable[..., Any], Callable[[int], Any]]
SAME: dict[str, Callable[[], Case]] = {}  # all calls give what the function gives
REFUSED: dict[str, Callable[[], Case]] = {}  # the change cannot be detected, so it is refused
NUMBER = 1.0


def same(case: Callable[[], Case]) -> Callable[[], Case]:
    SAME[case.__name__] = case
    return case


def refused(case: Callable[[], Case]) -> Callable[[], Case]:
    REFUSED[case.__name__] = case
    return case


@contextlib.contextmanager
def kept_as_it_was() -> Iterator[None]:
    """Puts back what cases change besides objects of their own."""
    global NUMBER
    relu, linear, forward = F.relu, F.linear, nn.Linear.forward
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        NUMBER, other_module.SCALE = 1.0, 1.0
        F.relu, F.linear, nn.Linear.forward = relu, linear, forward
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
        torch.backends.mha.set_fastpath_enabled(fastpath)
        torch.backends.opt_einsum.enabled = True  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        os.environ.pop("CAPTURED_NUMBER", None)
        if hasattr(torch, "captured_number"):
            del torch.captured_number  # pyright: ignore[reportAttributeAccessIssue]


def outcomes(case: Callable[[], Case], wrap: Callable[[Any], Any]) -> list[Any]:
    """What each call gives: values, or the error."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with kept_as_it_was():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        function, change = case()
        function = wrap(function)
        found: list[Any] = []
        for call in range(CALLS):
            if call >= CHANGED_FROM:
                change(call)
            torch.manual_seed(call)
            x = sw.distribute_tensor(torch.arange(8.0).reshape(2, 4) + call, mesh, [sw.Replicate()])
            try:
                found.append(_values(function(x)))
            except UnsupportedError as error:
                found.append(error)
        return found


def _values(result: Any) -> Any:
    if isinstance(result, sw.DTensor):
        result = result.full_tensor()
    if isinstance(result, torch.Tensor):
        return tuple(result.shape), result.dtype, result.detach().double().flatten().tolist()
    if isinstance(result, tuple | list):
        return [_values(item) for item in result]
    return result


def on_mesh(tensor: torch.Tensor, placement: Any = None) -> Any:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return sw.distribute_tensor(tensor, mesh, [placement or sw.Replicate()])


# ---------------------------------------------------------------- classes, objects, containers


class Base:
    number = 1.0


class Options(Base):
    """Without a method."""


class Counted:
    count = 0

    @classmethod
    def following(cls) -> int:
        cls.count += 1
        return cls.count


class Meta(type):
    number = 1.0


class OfMeta(metaclass=Meta):
    pass


class Kind(enum.Enum):
    A = 1


class Held:
    def __init__(self) -> None:
        self.number = 1.0


class Private:
    __slots__ = ("__number",)

    def __init__(self) -> None:
        self.__number = 1.0

    def get(self) -> float:
        return self.__number

    def put(self, number: float) -> None:
        self.__number = number


@dataclasses.dataclass(slots=True)
class Slotted:
    number: float = 1.0


class ListOf(list[Any]):
    number = 1.0


class TupleOf(tuple[Any, ...]):
    number = 1.0


class Double(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * Double.factor


def _setting(owner: Any, name: str = "number") -> Callable[[int], None]:
    return lambda call: setattr(owner, name, float(call))


@same
def attribute_of_a_class() -> Case:
    Options.number = 1.0
    return lambda x: x * Options.number, _setting(Options)


@same
def attribute_of_a_base_class() -> Case:
    Base.number = 1.0
    if "number" in vars(Options):
        del Options.number
    return lambda x: x * Options().number, _setting(Base)


@same
def attribute_of_a_class_by_an_instance() -> Case:
    options = Options()
    Options.number = 1.0
    return lambda x: x * options.number, _setting(Options)


@same
def attribute_of_a_metaclass() -> Case:
    Meta.number = 1.0
    return lambda x: x * OfMeta.number, _setting(Meta)


@same
def attribute_of_a_class_with_class_methods() -> Case:
    Double.factor = 2.0
    weight = nn.Parameter(on_mesh(torch.ones(4), sw.Shard(0)))

    def function(x: Any) -> Any:
        weight.grad = None
        Double.apply(weight * x.sum()).sum().backward()  # pyright: ignore[reportFunctionMemberAccess]
        assert weight.grad is not None
        return weight.grad.clone()

    return function, _setting(Double, "factor")


@same
def counter_of_a_class() -> Case:
    Counted.count = 0
    return lambda x: x * Counted.following(), lambda call: None


@same
def attribute_of_an_enum() -> Case:
    Kind.A.number = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    return lambda x: x * Kind.A.number, _setting(Kind.A)  # pyright: ignore[reportAttributeAccessIssue]


@same
def slots() -> Case:
    held = Slotted()
    return lambda x: x * held.number, _setting(held)


@same
def private_slots() -> Case:
    held = Private()
    return lambda x: x * held.get(), lambda call: held.put(float(call))


@same
def items_of_a_set() -> Case:
    held = Held()
    items = {held}
    return lambda x: functools.reduce(lambda y, item: y * item.number, items, x), _setting(held)


@same
def items_of_a_frozen_set() -> Case:
    held = Held()
    items = frozenset({held})
    return lambda x: [x * item.number for item in items], _setting(held)


@same
def equal_items_of_a_set() -> Case:
    items: set[Any] = {1}

    def change(call: int) -> None:
        items.clear()
        items.add(1.0)

    return lambda x: (x * 2, [type(item).__name__ for item in items]), change


@same
def attribute_of_a_list() -> Case:
    items = ListOf([1])
    return lambda x: x * items.number, _setting(items)


@same
def attribute_of_a_tuple() -> Case:
    items = TupleOf([1])
    items.number = 1.0
    return lambda x: x * items.number, _setting(items)


@same
def order_of_an_ordered_dict() -> Case:
    table = collections.OrderedDict(a=2.0, b=3.0)
    return (
        lambda x: functools.reduce(lambda y, item: y * item + 1, table.values(), x),
        lambda call: table.move_to_end("a" if call % 2 == 0 else "b"),
    )


@same
def weak_references() -> Case:
    held = Held()
    weak, table = weakref.ref(held), weakref.WeakValueDictionary({"a": held})
    return lambda x: x * weak().number * table["a"].number, lambda call, held=held: setattr(held, "number", 1.0 * call)  # pyright: ignore[reportOptionalMemberAccess]


@same
def bound_method_of_a_dict() -> Case:
    table = {"a": 1.0}
    get = table.get
    return lambda x: x * get("a"), lambda call: table.update(a=float(call))


@same
def bound_method_of_a_list() -> Case:
    items = [1.0]
    get = items.__getitem__
    return lambda x: x * get(0), lambda call: items.__setitem__(0, float(call))


@same
def attribute_of_a_function() -> Case:
    def function(x: Any) -> Any:
        return x * function.number  # pyright: ignore[reportFunctionMemberAccess]

    function.number = 1.0  # pyright: ignore[reportFunctionMemberAccess]
    return function, _setting(function)


@same
def derived_numbers() -> Case:
    class Real(float):
        pass

    class Text(str):
        __slots__ = ("note",)

    box = [(Real(1.0), Text("a"), np.float32(1.5))]
    return (
        lambda x: x * (box[0][0] + len(box[0][1]) + float(box[0][2])),
        lambda call: box.__setitem__(0, (Real(call), Text("a" * call), np.float32(call / 2))),
    )


@same
def mark() -> Case:
    missing, table = object(), {"a": 1.0}
    return lambda x: x * (2.0 if table.get("b", missing) is missing else 3.0), lambda call: table.update(b=float(call))


@same
def thread_local() -> Case:
    held = threading.local()
    held.number = 1.0
    return lambda x: x * held.number, _setting(held)


_VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("number", default=1.0)
_UNREACHED = {id(_VARIABLE): _VARIABLE}.values()


@same
def context_variable() -> Case:
    _VARIABLE.set(1.0)

    def change(call: int) -> None:
        _VARIABLE.set(float(call))

    return lambda x: x * _VARIABLE.get(), change


@same
def context_variable_without_a_value() -> Case:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("none")
    return lambda x: x * (variable.get(None) or 5.0), lambda call: variable.set(None if call == CHANGED_FROM else 2.0)


@same
def object_in_a_context_variable() -> Case:
    held = Held()
    variable = contextvars.ContextVar("held", default=held)
    return lambda x: x * variable.get().number, _setting(held)


@same
def context_variable_that_is_set_inside() -> Case:
    _VARIABLE.set(1.0)

    def inner(x: Any) -> Any:
        return x * _VARIABLE.get()

    def function(x: Any) -> Any:
        token = _VARIABLE.set(_VARIABLE.get() + 1.0)
        try:
            return inner(x)
        finally:
            _VARIABLE.reset(token)

    return function, lambda call: _VARIABLE.set(float(call))  # pyright: ignore[reportReturnType]


@same
def counter_in_a_context_variable() -> Case:
    _VARIABLE.set(1.0)

    def function(x: Any) -> Any:
        _VARIABLE.set(_VARIABLE.get() + 1.0)
        return x * _VARIABLE.get()

    return function, lambda call: None


@same
def generator_of_random_numbers() -> Case:
    generator = torch.Generator().manual_seed(1)
    return lambda x: x * torch.rand((), generator=generator), lambda call: generator.manual_seed(call)


@same
def another_generator_of_random_numbers() -> Case:
    held: Any = Held()
    held.generator = torch.Generator().manual_seed(1)

    def change(call: int) -> None:
        held.generator = torch.Generator().manual_seed(call)

    return lambda x: x * torch.rand((), generator=held.generator), change


@same
def cached_function() -> Case:
    box = [1.0]

    @functools.lru_cache
    def number() -> float:
        return box[0]

    def change(call: int) -> None:
        box[0] = float(call)
        number.cache_clear()

    return lambda x: x * number(), change


@same
def attribute_of_a_partial() -> Case:
    held: Any = functools.partial(torch.add, alpha=1.0)
    held.number = 1.0
    return lambda x: held(x, x) * held.number, _setting(held)


@same
def factory_of_a_default_dict() -> Case:
    table: Any = collections.defaultdict(float)

    def function(x: Any) -> Any:
        table.clear()
        return x * (table["a"] + 2.0)

    def change(call: int) -> None:
        table.default_factory = float if call % 2 else int
        table.clear()

    return lambda x: (function(x), type(table["a"]).__name__), change


@functools.singledispatch
def _by_type(options: Any, x: Any) -> Any:
    return x * 2


@same
def registry_of_a_single_dispatch() -> Case:
    _by_type.register(Held, lambda options, x: x * 3)
    held = Held()

    def change(call: int) -> None:
        _by_type.register(Held, lambda options, x: x * call)

    return lambda x: _by_type(held, x), change


@same
def function_that_layers_of_torch_call() -> Case:
    layer, linear = nn.Linear(4, 4), F.linear

    def change(call: int) -> None:
        F.linear = (lambda *args: 2 * linear(*args)) if call == CHANGED_FROM else linear  # pyright: ignore[reportAttributeAccessIssue]

    return lambda x: layer(x.full_tensor()).detach(), change


@same
def precision_of_attention() -> Case:
    torch.manual_seed(0)
    q = torch.randn(1, 1, 64, 8).bfloat16()

    def function(x: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q) * x.sum().full_tensor()

    return function, lambda call: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(call == CHANGED_FROM)


# ---------------------------------------------------------------- modules and the machine


def _set_other(call: int) -> None:
    other_module.SCALE = float(call)


@same
def module_imported_inside() -> Case:
    def function(x: Any) -> Any:
        from tests.virtual import captured_steps

        return x * captured_steps.SCALE

    return function, _set_other


@same
def name_imported_inside() -> Case:
    def function(x: Any) -> Any:
        from tests.virtual.captured_steps import SCALE

        return x * SCALE

    return function, _set_other


@same
def module_in_an_attribute() -> Case:
    held: Any = Held()
    held.module = other_module
    return lambda x: x * held.module.SCALE, _set_other


@same
def module_by_a_computed_name() -> Case:
    names = ["SCALE"]
    return lambda x: x * getattr(other_module, names[0]), _set_other


@same
def attribute_of_torch() -> Case:
    torch.captured_number = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    return lambda x: x * torch.captured_number, _setting(torch, "captured_number")  # pyright: ignore[reportAttributeAccessIssue]


@same
def replaced_function_of_torch() -> Case:
    def change(call: int) -> None:
        F.relu = (lambda x: x * 2) if call == CHANGED_FROM else torch.relu  # pyright: ignore[reportAttributeAccessIssue]

    return lambda x: F.relu(x - 3), change


@same
def environment() -> Case:
    os.environ["CAPTURED_NUMBER"] = "1"
    return (
        lambda x: x * float(os.environ["CAPTURED_NUMBER"]) * float(os.getenv("CAPTURED_NUMBER", "")),
        lambda call: os.environ.update(CAPTURED_NUMBER=str(call)),
    )


def setting_of_einsum() -> Case:
    a, b, c = torch.randn(4, 40), torch.randn(40, 3), torch.randn(3, 50)

    def change(call: int) -> None:
        torch.backends.opt_einsum.enabled = call != CHANGED_FROM  # pyright: ignore[reportAttributeAccessIssue]

    return lambda x: torch.einsum("ij,jk,kl->il", a, b, c), change


if not torch.backends.opt_einsum.is_available():  # pyright: ignore[reportAttributeAccessIssue]
    same(setting_of_einsum)  # with that package einsum calls functions that are not reached, and is refused


@same
def fast_path_of_attention() -> Case:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()

    def function(x: Any) -> Any:
        with torch.no_grad():
            return layer(x.full_tensor()[None])

    return function, lambda call: torch.backends.mha.set_fastpath_enabled(call != CHANGED_FROM)


@same
def memory_shared_by_tensors() -> Case:
    first, second = torch.ones(4), torch.ones(4)
    second.data = first.data

    def change(call: int) -> None:
        second.data = torch.full((4,), float(call))

    return lambda x: first * 3 + second.data * 2, change


def refuse_reads(name: str, read: Callable[[torch.Tensor], Any], value: Any = 1.0) -> None:
    """A case that reads the value of a tensor, which is filled with others later."""

    def case() -> Case:
        tensor = torch.full((), value)
        return lambda x: x * read(tensor), lambda call: tensor.fill_(call)

    REFUSED[name] = case


refuse_reads("a list of tensors", lambda t: torch.tensor([t, t, t, t]).sum())
refuse_reads("as_tensor of a list", lambda t: torch.as_tensor([t, 1.0]).sum())
refuse_reads("a tensor of a type", lambda t: torch.FloatTensor([t]).sum())
refuse_reads("an index by tensors in a list", lambda t: torch.arange(9)[None][:, [t, t]].sum(), 1)
refuse_reads("an index", lambda t: torch.arange(9)[t], 1)
refuse_reads("sizes", lambda t: torch.arange(9)[:t].sum(), 1)
refuse_reads("split", lambda t: torch.tensor_split(torch.arange(9), t[None], 0)[0].sum(), 1)
refuse_reads("item", lambda t: t.item())
refuse_reads("range", lambda t: len(range(t)), 1)  # pyright: ignore[reportArgumentType]
refuse_reads("text", lambda t: len(f"{t + 0}"))
refuse_reads("numpy", lambda t: float(np.asarray(t)))
refuse_reads("dlpack", lambda t: float(np.from_dlpack(t[None])[0]))
refuse_reads("pickle", lambda t: pickle.loads(pickle.dumps(t)))
refuse_reads("the version", lambda t: t._version)
refuse_reads("the address", lambda t: t.data_ptr() % 64)
refuse_reads("a factor", lambda t: torch.add(torch.ones(()), torch.ones(()), alpha=t))  # pyright: ignore[reportArgumentType, reportCallIssue]


def refuse_call(name: str, call: Callable[[], Any]) -> None:
    """A case that calls something whose result changes by itself."""
    REFUSED[name] = lambda: (lambda x: x * call(), lambda _: None)


_GENERATOR, _NUMPY_GENERATOR, _COUNT = random.Random(0), np.random.default_rng(0), itertools.count()
for _name in ("rand", "standard_normal", "exponential", "random_sample", "poisson"):
    refuse_call(f"numpy.random.{_name}", lambda name=_name: float(getattr(np.random, name)()))
refuse_call("random.random", lambda: random.random())
refuse_call("random.Random", lambda: _GENERATOR.uniform(0, 1))
refuse_call("numpy generator", lambda: float(_NUMPY_GENERATOR.normal()))
refuse_call("a counter in C", lambda: next(_COUNT))
refuse_call("uuid", lambda: uuid.uuid4().int % 1000)
refuse_call("time", lambda: time.time())
refuse_call("strftime", lambda: float(time.strftime("%S")) + time.thread_time())
refuse_call("datetime", lambda: datetime.datetime.now().timestamp())
refuse_call("a file", lambda: len(Path(__file__).read_text()))
refuse_call("size of a file", lambda: os.path.getsize(__file__))
refuse_call("globals", lambda: globals()["NUMBER"])
refuse_call("eval", lambda: eval("NUMBER"))
refuse_call("sys.modules", lambda: sys.modules[__name__].NUMBER)
refuse_call("the first seed", lambda: torch.initial_seed() % 100)
refuse_call("threads", lambda: torch.get_num_threads())
refuse_call("an iterator", functools.partial(next, itertools.cycle([1.0, 2.0])))
refuse_call("itemgetter", functools.partial(operator.itemgetter(0), [1.0]))
refuse_call("a proxy", functools.partial(types.MappingProxyType({"a": 1.0}).get, "a"))
refuse_call("another context", lambda: contextvars.copy_context().run(_VARIABLE.get))
refuse_call("a view of context variables", lambda: next(iter(_UNREACHED)).get())
refuse_call("the thread", lambda: float(len(threading.current_thread().name)))
refuse_call("the number of the thread", lambda: threading.get_ident() % 7)
refuse_call("bytes in memory", lambda: io.BytesIO(b"1").read()[0])


@refused
def refusal_that_is_caught() -> Case:
    def function(x: Any) -> Any:
        try:
            return x * x.sum().item()
        except Exception:
            return x * 3

    return function, lambda call: None


@refused
def hook_of_a_node() -> Case:
    weight = nn.Parameter(torch.ones(4))
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda grads: (grads[0] * NUMBER,))
    held = Held()
    held.node = node  # pyright: ignore[reportAttributeAccessIssue]  # which keeps it alive

    def function(x: Any, held: Any = None) -> Any:
        weight.grad = None
        (weight * x.full_tensor()).sum().backward()
        return weight.grad

    function.keep = weakref.WeakKeyDictionary()  # pyright: ignore[reportFunctionMemberAccess]
    return function, lambda call, held=held: None


def compare(name: str) -> tuple[list[Any], list[Any]]:
    """What the calls give, as they are and captured."""
    case = SAME.get(name) or REFUSED[name]
    return outcomes(case, lambda function: function), outcomes(case, captured)
