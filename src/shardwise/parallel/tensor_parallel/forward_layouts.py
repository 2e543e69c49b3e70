"""Which layouts the forward of a module computes with, derived from the rules of its operators.

The forward runs twice without values: on DTensors of a dry mesh in strict mode, and on plain tensors that have the
shapes of one rank. If nothing would communicate and both runs call the same operators with the same arguments on local
tensors, the forward may run on local tensors. The layouts of its result and of all gradients are those of the DTensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import MaskPartial, Partial, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.signature import tensor_slots
from shardwise.events import unobserved
from shardwise.fabric.dry import dry
from shardwise.modes import strict
from shardwise.parallel.tensor_parallel.closed_functions import closed_globals, is_constant, torch_functions
from shardwise.plan.propagate import OutputSharding
from shardwise.rules.embedding import look_up
from shardwise.schema import op_info
from shardwise.tensor import DTensor, dispatcher, dtensor_of, gradient_spec
from shardwise.torch_private import TorchDispatchMode, is_alias_of, tree_flatten, without_dispatch_modes

__all__ = ["ForwardLayouts", "Used", "forward_layouts"]

MAX_KEPT = 4096
# how nn.Module reads parameters: as attributes that are in no dict of the module or its class
_READS = (("__getattr__", nn.Module.__getattr__), ("__getattribute__", object.__getattribute__))
aten = torch.ops.aten
# Backward on DTensors stores broadcast dims once. These operators only change how a value is stored.
_STORAGE_ONLY = (aten.slice.Tensor, aten.expand.default)
# Operators that depend on no size and no position: for any sizes of locals they compute a part of the global result.
_OPERATORS = frozenset(
    {
        *(aten.abs, aten.add, aten.addmm, aten.alias, aten.baddbmm, aten.bmm, aten.clamp, aten.clamp_max),
        *(aten.clamp_min, aten.clone, aten.detach, aten.div, aten.embedding, aten.exp, aten.gelu, aten.log),
        *(aten.mean, aten.mm, aten.mul, aten.native_layer_norm, aten.neg, aten.permute, aten.pow),
        *(aten.reciprocal, aten.relu, aten.rsqrt, aten.sigmoid, aten.silu, aten.sqrt, aten.sub, aten.sum),
        *(aten.t, aten.tanh, aten.transpose, aten.unsqueeze, aten.var, aten._to_copy),
    }
)
# Only in forwards of torch: sizes are computed from those of the input, writes go to new tensors.
_OF_TORCH = frozenset({aten.add_, aten.div_, aten.mul_, aten.sub_, aten.view})
_SAME_AS = {aten._unsafe_view.default: aten.view.default}  # the same values, by another name


@dataclass(frozen=True)
class ForwardLayouts:
    """The layouts of one forward.

    Args:
        operands: the layouts that the operators compute with: of each parameter, and of the input last.
        gradients: the layouts of their gradients, in the same order.
        result: the layout of the result.
        looks_up: whether the operator is a look-up in a table whose rows are sharded. It needs local row numbers.
    """

    operands: tuple[DTensorSpec, ...]
    gradients: tuple[DTensorSpec, ...]
    result: DTensorSpec
    looks_up: bool = False

    def on(self, mesh: DeviceMesh) -> ForwardLayouts:
        """The same layouts on another mesh with one axis."""
        operands, gradients = ([_on(spec, mesh) for spec in specs] for specs in (self.operands, self.gradients))
        return ForwardLayouts(tuple(operands), tuple(gradients), _on(self.result, mesh), self.looks_up)


class _Refused(Exception):
    """The forward must run on DTensors."""


class Used:
    """All that a forward uses in addition to its parameters and its input.

    Copies and pickles of it count as out of date, because the definitions belong to this process.
    """

    def __init__(self) -> None:
        # constants of the module; None for names of parameters, and for names that its class defines
        self.attributes: dict[str, Any] = {}
        self.definitions: list[tuple[Mapping[str, Any], str, Any]] = []  # globals, and methods in namespaces of classes
        # functions of torch's modules, and what the class says about reading parameters
        self.owners: list[Any] = []
        self.names: list[str] = []
        self.values: list[Any] = []

    def add_globals(self, function: Any) -> bool:
        """Note the globals of a function and its functions of torch; False if it is not closed, or one is replaced."""
        found = closed_globals(function)
        if found is None:
            return False
        if not _is_torchs(function):
            self.definitions += [(function.__globals__, name, value) for name, value in found.items()]
        return self._add_values(torch_functions(function))

    def add_class(self, owner: type[nn.Module], parameters: Iterable[str]) -> bool:
        """Note how a class reads parameters; False if not as nn.Module does."""
        reads = [(owner, name, own) for name, own in _READS]
        return self._add_values([*reads, *((owner, name, None) for name in parameters)])

    def _add_values(self, expected: Sequence[tuple[Any, str, Any]]) -> bool:
        """Note attributes of modules and classes; False if one has another value than expected."""
        owners, names, values = zip(*expected, strict=True) if expected else ((), (), ())
        found = list(map(getattr, owners, names, itertools.repeat(None)))
        self.owners += owners
        self.names += names
        self.values += found
        return all(map(operator.is_, found, values))

    def add_method(self, owner: type, name: str) -> Any:
        """A closed method of a class."""
        spaces = [each.__dict__ for each in owner.__mro__]
        number = next((number for number, space in enumerate(spaces) if name in space), None)
        method = None if number is None else spaces[number][name]
        self.definitions += [(space, name, space.get(name)) for space in spaces[: (number or 0) + 1]]
        self.attributes[name] = None
        if not self.add_globals(method):
            raise _Refused(name)
        return method

    def holds(self, module: nn.Module) -> bool:
        """Whether a module of the same class has equal attributes, and all names refer to the same objects."""
        state = module.__dict__
        found = map(getattr, self.owners, self.names, itertools.repeat(None))  # layers ask this without a call
        return (
            all(map(operator.is_, found, self.values))
            and self.definitions_hold()
            and all(
                type(state.get(name)) is type(value) and state.get(name) == value
                for name, value in self.attributes.items()
            )
        )

    def definitions_hold(self) -> bool:
        """Whether globals and methods are still the same objects."""
        return all(space.get(name) is value for space, name, value in self.definitions)

    def __reduce__(self) -> Any:
        return _out_of_date, ()


def _out_of_date() -> Used:
    used = Used()
    used.definitions.append(({}, "", used))  # never equal
    return used


@dataclass(frozen=True)
class _Known:
    """The result for one forward."""

    used: Used
    layouts: ForwardLayouts | None


_known: BoundedCache[Any, _Known] = BoundedCache(MAX_KEPT)  # by class, forward and specs
_known_of_any_size: BoundedCache[Any, _Known] = BoundedCache(MAX_KEPT)  # by class, forward and layouts


def forward_layouts(
    module: nn.Module, names: Sequence[str], specs: Sequence[DTensorSpec]
) -> tuple[Used, ForwardLayouts | None]:
    """The names that the forward of a module uses, and its layouts; None if it must run on DTensors.

    Args:
        module: the module. Its forward takes one tensor.
        names: its parameters; it may read no others.
        specs: the specs of these parameters, and of the input last, on a mesh with one axis.
    """
    mesh, forward = specs[-1].mesh, type(module).forward
    last: Coordinate = (mesh.shape[0] - 1,)
    # under autocast, dtypes inside a forward differ from those of its operands, and it might take another branch
    if mesh.device_type != "meta" and torch.is_autocast_enabled(mesh.device_type) and not _is_torchs(forward):
        return Used(), None
    if dry.runs.values() or closed_globals(forward) is None:
        return Used(), None
    if any(0 in spec.local_shape(last) for spec in specs):
        return Used(), None
    there = _dry_mesh(mesh.device_type, mesh.shape[0])
    own = tuple(_on(spec, there) for spec in specs)
    key = (type(module), forward, _parameters_of(module, names), own)
    known = _known.get(key)
    if known is None or not known.used.holds(module):
        known = _known.keep(key, _of_any_size(module, forward, names, own))
    return known.used, None if known.layouts is None else known.layouts.on(mesh)


def _is_torchs(function: Any) -> bool:
    return function.__module__.startswith("torch.nn.")


def _parameters_of(module: nn.Module, names: Sequence[str]) -> Any:
    """The names of the parameters that a forward may read, and those of parameters that are None."""
    return tuple(names), tuple([name for name, parameter in module._parameters.items() if parameter is None])


def _of_any_size(
    module: nn.Module, forward: Callable[..., Any], names: Sequence[str], specs: tuple[DTensorSpec, ...]
) -> _Known:
    """The layouts for these sizes, taken from known ones for sizes that the rules cannot distinguish."""
    alike = _sizes_alike(specs)
    if alike is None:
        return _probed(module, forward, names, specs)
    key = (type(module), forward, _parameters_of(module, names), specs[-1].mesh, alike)
    known = _known_of_any_size.get(key)
    if known is None or not known.used.holds(module):
        return _known_of_any_size.keep(key, _probed(module, forward, names, specs))
    if known.layouts is None or known.layouts.looks_up:
        return known if known.layouts is None else _probed(module, forward, names, specs)
    with contextlib.suppress(Exception):  # the real call raises it
        return _Known(known.used, _resized(module, forward, names, specs, known.layouts))
    return _Known(known.used, None)


def _sizes_alike(specs: Sequence[DTensorSpec]) -> Any:
    """The layouts without sizes, if shards are even; sizes below two are kept, because they broadcast."""
    ranks = specs[-1].mesh.shape[0]
    found = []
    for spec in specs:
        if any(
            spec.shape[dim] % ranks or spec.shape[dim] < 2 * ranks for dim, axes in enumerate(spec.dim_axes) if axes
        ):
            return None
        meta = spec.tensor_meta
        found.append((spec.placements, meta.dtype, meta.is_contiguous, tuple(min(size, 2) for size in spec.shape)))
    return tuple(found)


def _resized(
    module: nn.Module,
    forward: Callable[..., Any],
    names: Sequence[str],
    specs: tuple[DTensorSpec, ...],
    known: ForwardLayouts,
) -> ForwardLayouts:
    """Known layouts for other sizes: only the global shape of the result is computed."""
    plain = [
        torch.empty_strided(s.shape, s.tensor_meta.stride, dtype=s.tensor_meta.dtype, device="meta") for s in specs
    ]
    with without_dispatch_modes(), torch.no_grad():
        result = forward(_Self(module, Used(), **dict(zip(names, plain, strict=False))), plain[-1])
    meta = TensorMeta(tuple(result.shape), result.stride(), result.dtype)
    return ForwardLayouts(
        tuple(old.with_meta(new.tensor_meta) for old, new in zip(known.operands, specs, strict=True)),
        tuple(old.with_meta(new.tensor_meta) for old, new in zip(known.gradients, specs, strict=True)),
        known.result.with_meta(meta),
    )


def _on(spec: DTensorSpec, mesh: DeviceMesh) -> DTensorSpec:
    return DTensorSpec(mesh, spec.placements, spec.tensor_meta)


@functools.cache
def _dry_mesh(device_type: str, ranks: int) -> DeviceMesh:
    return DeviceMesh(device_type, range(ranks), fabric="dry")


# ---------------------------------------------------------------- the names that a forward uses


class _Self:
    """Replaces a module in its forward: provides parameters, constants and closed methods, and records their use."""

    def __init__(self, module: nn.Module, used: Used, **given: Any) -> None:
        for name, value in (("_module", module), ("_used", used), ("_given", given)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        module, given, used = (object.__getattribute__(self, key) for key in ("_module", "_given", "_used"))
        if name in module._parameters:
            used.attributes[name] = None
            if name in module.__dict__ or (name not in given and module._parameters[name] is not None):
                raise _Refused(name)
            return given.get(name)
        if name in module.__dict__:
            value = module.__dict__[name]
            if not is_constant(value):
                raise _Refused(name)
            used.attributes[name] = value
            return value
        method = used.add_method(type(module), name)
        return types.MethodType(method, self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _Refused(name)


# ---------------------------------------------------------------- the two runs


class _Calls(TorchDispatchMode):
    """Records the operators on plain tensors, and those on DTensors that they are part of."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[tuple[Any, ...]] = []
        self.on_dtensors: list[tuple[Any, Any, Any]] = []  # of forward
        self.numbers: dict[int, int] = {}  # of tensors, by their identity
        self._alive: list[Any] = []  # so that identities stay unique
        self._backward: list[tuple[Any, ...]] | None = None

    def number(self, *tensors: Any) -> None:
        for tensor in tensors:
            self.numbers.setdefault(id(tensor), len(self.numbers))
            self._alive.append(tensor)

    def end_forward(self) -> None:
        self._backward = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            if self._backward is None:
                self.on_dtensors.append((func, args, kwargs))
            return NotImplemented
        result, (leaves, tree) = func(*args, **kwargs), tree_flatten((args, kwargs))
        calls = self.forward if self._backward is None else self._backward
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        if made or any(isinstance(leaf, torch.Tensor) for leaf in leaves):  # else it computes a dtype or a size
            calls.append((_SAME_AS.get(func, func), str(tree), *[self._described(leaf) for leaf in leaves]))
        self.number(*made)
        return result

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return (self.numbers.get(id(leaf)), tuple(leaf.shape), leaf.dtype)

    def backward(self) -> Counter[Any]:
        """The operators of backward in any order, with all arguments that are not tensors."""
        calls = [call for call in self._backward or () if call[0] not in _STORAGE_ONLY]
        return Counter((call[0], *[repr(each) for each in call[2:] if not isinstance(each, tuple)]) for call in calls)

    def are_free_of_positions(self, forward: Callable[..., Any]) -> bool:
        """Whether forward has only operators that depend on no size or position."""
        allowed = _OPERATORS | _OF_TORCH if _is_torchs(forward) else _OPERATORS
        return all(call[0].overloadpacket in allowed for call in self.forward)

    def needed_layouts(self, parameters: Sequence[Any]) -> dict[int, DTensorSpec]:
        """The layouts that operators move parameters to, by index: an addend of a Partial must be Partial."""
        found: dict[int, DTensorSpec] = {}
        for call in self.on_dtensors:
            operands = [tensor for _, tensor in tensor_slots(op_info(call[0]), *call[1:])]
            sharding = _sharding(*call)
            for operand, spec in zip(operands, () if sharding is None else sharding.inputs, strict=False):
                for index, parameter in enumerate(parameters):
                    if operand is parameter and spec is not parameter._spec:
                        found[index] = spec
        return found

    def is_row_lookup(self, tensors: Sequence[Any]) -> bool:
        """Whether all of forward is one look-up in a table with sharded rows, without any option."""
        if len(self.on_dtensors) != 1 or len(tensors) != 2:
            return False
        func, args, kwargs = self.on_dtensors[0]
        if func is not aten.embedding.default or kwargs or not tensors[0]._spec.dim_axes[0]:
            return False
        sharding = _sharding(func, args, kwargs)
        options = list(args[2:]) == [-1, False, False][: len(args) - 2]
        return options and sharding is not None and sharding.rule.local_op is look_up


def _sharding(func: Any, args: Any, kwargs: Any) -> OutputSharding | None:
    """The layouts of an operator by the propagator."""
    return dispatcher.explain(dispatcher.key(func, args, kwargs), func, args, kwargs).sharding


@contextlib.contextmanager
def _isolated(device_type: str) -> Iterator[None]:
    """Inside, modes, hooks and listeners of the program are not active."""
    with (
        torch.autocast(device_type, enabled=False),
        unobserved(),
        without_dispatch_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _probed(
    module: nn.Module, forward: Callable[..., Any], names: Sequence[str], specs: tuple[DTensorSpec, ...]
) -> _Known:
    used = Used()
    found: ForwardLayouts | None = None
    if not all((used.add_globals(forward), used.add_class(type(module), module._parameters))):
        return _Known(used, None)
    # after any error the real call runs on DTensors, and raises it with values and the user's line
    with contextlib.suppress(Exception), _isolated(specs[-1].mesh.device_type):
        found = _compared(module, forward, names, specs, used)
    return _Known(used, found)


def _compared(
    module: nn.Module,
    forward: Callable[..., Any],
    names: Sequence[str],
    specs: tuple[DTensorSpec, ...],
    used: Used,
) -> ForwardLayouts | None:
    """The layouts of a forward whose local operators are those of plain torch."""
    probe = functools.partial(_run, forward, names)
    for _ in range(2):  # the second time with parameters in the layouts that operators have moved them to
        probe(_Self(module, used), [_empty(spec) for spec in specs])  # a first call computes shapes by more operators
        on_dtensors = probe(_Self(module, used), [_empty(spec) for spec in specs])
        if on_dtensors.calls.is_row_lookup(on_dtensors.tensors):
            return on_dtensors.layouts(looks_up=True)
        on_plain = probe(_Self(module, used), [_empty_local(spec) for spec in specs])
        if _is_alike(on_dtensors, on_plain) and on_plain.calls.are_free_of_positions(forward):
            found = on_dtensors.layouts()
            return found if all(map(_is_linear, (*found.operands, *found.gradients, found.result))) else None
        needed = on_dtensors.calls.needed_layouts(on_dtensors.tensors[:-1])
        specs = tuple(needed.get(index, spec) for index, spec in enumerate(specs))
    return None


@dataclass
class _Run:
    """One run of a forward and its backward."""

    tensors: list[Any]
    calls: _Calls
    result: Any
    gradients: list[Any]  # None for tensors that have none

    def layouts(self, looks_up: bool = False) -> ForwardLayouts:
        pairs = zip(self.tensors, self.gradients, strict=True)
        gradients = tuple([tensor._spec if gradient is None else gradient._spec for tensor, gradient in pairs])
        return ForwardLayouts(tuple([t._spec for t in self.tensors]), gradients, self.result._spec, looks_up)


def _run(forward: Callable[..., Any], names: Sequence[str], self: _Self, tensors: list[Any]) -> _Run:
    """Run a forward and its backward on parameters and an input, and record their operators."""
    calls = _Calls()
    calls.number(*[_local(tensor) for tensor in tensors])
    object.__getattribute__(self, "_given").update(zip(names, tensors, strict=False))
    with calls, strict():
        result = forward(self, tensors[-1])
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        raise _Refused("result")
    if any(is_alias_of(_local(result), _local(tensor)) for tensor in tensors):
        raise _Refused("a view")
    calls.end_forward()
    gradient = _empty(gradient_spec(result._spec)).detach() if isinstance(result, DTensor) else torch.empty_like(result)
    with calls, strict():
        found = iter(torch.autograd.grad(result, [tensor for tensor in tensors if tensor.requires_grad], gradient))
    return _Run(tensors, calls, result, [next(found) if tensor.requires_grad else None for tensor in tensors])


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_alike(one: _Run, other: _Run) -> bool:
    """Whether two runs call the same operators on locals: in forward on the same values, in backward in any order."""
    first, second = one.calls, other.calls
    results = first.numbers.get(id(_local(one.result))), second.numbers.get(id(_local(other.result)))
    return (
        bool(first.forward)
        and first.forward == second.forward
        and first.backward() == second.backward()
        and results[0] == results[1] is not None
    )


def _empty_local(spec: DTensorSpec) -> torch.Tensor:
    """A local tensor without values, at coordinate zero: the same on every rank."""
    coordinate: Coordinate = (0,)
    shape, dtype = spec.local_shape(coordinate), spec.tensor_meta.dtype
    local = torch.empty_strided(shape, spec.local_stride(coordinate), dtype=dtype, device="meta")
    return local.requires_grad_(dtype.is_floating_point or dtype.is_complex)


def _empty(spec: DTensorSpec) -> DTensor:
    local = _empty_local(spec)
    found = dtensor_of(spec, local.detach())
    found.requires_grad_(local.requires_grad)
    return found


def _is_linear(spec: DTensorSpec) -> bool:
    """Whether a global tensor is a sum or concatenation of its locals: then gradients of locals are its own."""
    (placement,) = spec.placements
    return type(placement) in (Shard, Replicate, MaskPartial) or placement is Partial()
