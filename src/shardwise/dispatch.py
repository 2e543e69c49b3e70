"""OpDispatcher: one dictionary look-up, run, wrap.

A call's key is the operator, the specs of its DTensors and the values of the other arguments that a rule reads. A miss
asks the propagator and builds an executor made for exactly that signature; a hit runs it. Knows the tensor class
only as what it unwraps and wraps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch._ops import OpOverload

from shardwise import modes
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError, MeshError, PlainTensorError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.dry import dry
from shardwise.fabric.routes import BoundRoute, bound_route, cached_routes
from shardwise.fabric.virtual import RankTensor, virtual
from shardwise.local import any_complex, coordinates_here, like, local_runner, seeing_conjugates
from shardwise.plan.propagate import (
    OpSchema,
    OutputSharding,
    ShardingPropagator,
    meta_tensor,
    replicated,
    replicated_spec,
)
from shardwise.rules.registry import DECOMPOSITIONS, RULES
from shardwise.schema import OpInfo, Slot, functional_of, op_info, tensor_slots

__all__ = ["CacheInfo", "OpDispatcher", "OpInfo"]

MAX_ENTRIES = 16384
VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Inside __torch_dispatch__ torch does not see the conjugate and negative bits of a tensor: locals never carry them.
PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
# Views whose local is made anew even where nothing is moved.
COPYING_VIEWS = {*PHYSICAL, torch.ops.aten.as_strided.default}
Executor = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
Coordinate = tuple[int, ...]


# ---------------------------------------------------------------- plain tensors among DTensors

PLAIN, USERS = "plain", "a user's plain tensor"  # marks in a key


def _plain_key(tensor: torch.Tensor, made_inside: bool) -> tuple[Any, ...]:
    """The key of a plain tensor. Small ones, and those that an operator made on its way, are the same on every rank."""
    same = made_inside or tensor.numel() == 1 or modes.replicates_implicitly() or modes.made_by_torch(tensor)
    return (PLAIN if same else USERS, TensorMeta.of(tensor))


@no_type_check  # a run-time type checker would hold the tensor, too
def _nobody_else_holds(tensor: torch.Tensor, ours: int) -> bool:
    """Whether a tensor has just come out of a composite operator in C++: then only this call holds its Python object.

    A user's tensor is held by a variable, a container or the interpreter's stack as well. `ours` is how many references
    the caller has: the argument list, its own variable, this parameter. Three more are the call's own.
    """
    if sys.getrefcount(tensor) > ours + 3:
        return False
    base = tensor._base
    return base is None or sys.getrefcount(base) <= 3  # the variable, the argument, and the view itself


def _without_shapes(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with only what a pointwise result's dtype depends on."""
    return tuple((part.tensor_meta.dtype, part.ndim == 0) if part.__class__ is DTensorSpec else part for part in key)


def _flat(key: Any) -> Iterator[Any]:
    for part in key:
        if part.__class__ is tuple:
            yield from _flat(part)
        else:
            yield part


# ---------------------------------------------------------------- the dispatcher


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How many signatures are kept, how many may be, and how often a new one had to be worked out."""

    entries: int
    limit: int
    misses: int
    routes: int


class OpDispatcher:
    """Carries out operators on a tensor class that has `_local_tensor` and `_spec`.

    Args:
        tensor_class: the class to unwrap and wrap.
    """

    def __init__(self, tensor_class: type[torch.Tensor]) -> None:
        self.tensor_class: Any = tensor_class
        self.cache: dict[tuple[Any, ...], Executor] = {}
        self.misses = 0
        self._dtypes: dict[tuple[Any, ...], torch.dtype] = {}  # of pointwise results, by signature without shapes

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `func`; the entry for every call that the tensor class's own short cut does not take."""
        key = self.key(func, args, kwargs)
        run = self.cache.get(key)
        if run is None:
            run = self.miss(key, func, args, kwargs)
        return run(args, kwargs)

    def miss(
        self, key: tuple[Any, ...], func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Executor:
        """Work out the executor of a new signature and keep it."""
        run = self.resolve(key, func, args, kwargs)
        self.misses += 1
        if len(self.cache) >= MAX_ENTRIES:  # the oldest quarter goes: dicts keep the order of insertion
            for old in list(self.cache)[: MAX_ENTRIES // 4]:
                self.cache.pop(old, None)
        self.cache[key] = run
        return run

    def key(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The signature of a call: specs of DTensors; type and value of the rest, type alone of what no rule reads."""
        info = op_info(func)
        parts: list[Any] = [id(func)]  # OpOverload hashes in Python, and operators live for ever
        names = info.names
        for i in range(len(args)):  # not enumerate, which would hold the argument too
            arg = args[i]
            if arg.__class__ is self.tensor_class:
                parts.append(arg._spec)
            elif isinstance(arg, torch.Tensor):
                parts.append(_plain_key(arg, _nobody_else_holds(arg, 3)))
            else:
                name = names[i]
                value = info.classes[name](arg) if name in info.classes else arg
                parts.append(self._key_part(value, name in info.unread))
        for name in kwargs:
            parts.append(name)
            value = info.classes[name](kwargs[name]) if name in info.classes else kwargs[name]
            parts.append(self._key_part(value, name in info.unread))
        return tuple(parts)

    def _key_part(self, value: Any, unread: bool) -> Any:
        kind = value.__class__
        if kind is self.tensor_class:
            return value._spec
        if kind is list or kind is tuple:
            if value and value[0].__class__ is int:  # sizes and dims: of one type by the schema
                return tuple(value)
            return tuple(
                _plain_key(item, _nobody_else_holds(item, 3))
                if isinstance(item, torch.Tensor) and item.__class__ is not self.tensor_class
                else self._key_part(item, unread)
                for item in value
            )
        if isinstance(value, torch.Tensor):
            return _plain_key(value, False)
        # 1 == 1.0 == True to a dictionary, but not to an operator
        return kind if unread else (kind, value)

    # ---------------------------------------------------------------- a new signature

    def resolve(
        self, key: tuple[Any, ...], func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Executor:
        """The executor of a call's signature."""
        info = OpInfo.of(func)
        found: list[tuple[Slot, Any]] = list(tensor_slots(info, args, kwargs))
        mesh = self._common_mesh(info, [tensor for _, tensor in found])
        slots = tuple(slot for slot, _ in found)
        self._check_plain(info, found, key)
        specs = tuple(
            tensor._spec if isinstance(tensor, self.tensor_class) else replicated_spec(mesh, TensorMeta.of(tensor))
            for _, tensor in found
        )
        self._check_device(info, kwargs, mesh)
        functional = functional_of(func) if info.writes and None not in info.returned else None
        into_plain = any(slot.name in info.writes and not isinstance(t, self.tensor_class) for slot, t in found)
        if (info.outs or (into_plain and func not in DECOMPOSITIONS)) and functional is not None:
            return self._watched(info, self._through_functional(info, functional, slots, mesh))
        schema = OpSchema(func, self._with_specs(info, args, kwargs, dict(zip(slots, specs, strict=True))), specs)
        metas = self._known_metas(info, key, specs) or self._result_metas(info, slots, specs, args, kwargs)
        self._learn_dtypes(info, key, metas)
        pinned = tuple(i for i, slot in enumerate(slots) if slot.name in info.writes)
        sharding = ShardingPropagator().propagate(schema, metas, pinned) if metas is not None else None
        if torch.Tag.nondeterministic_seeded in func.tags and func not in RULES:
            sharding = None  # a rule of its own speaks only where nothing is drawn; torch's tags do not
        draws = torch.Tag.nondeterministic_seeded in func.tags and sharding is None
        if torch.Tag.inplace_view in func.tags and functional is not None:
            return self._watched(info, self._reshaping_in_place(info, functional))
        if info.writes:
            compute = DECOMPOSITIONS.get(func)
            if compute is not None and (sharding is None or _communicates(specs, sharding.inputs)):

                def at_once() -> Executor:
                    if sharding is None:
                        return self._through_copies(info, slots, specs, pinned)
                    return self._executor(info, slots, specs, sharding, pinned)

                return self._watched(info, self._decomposed(info, compute, mesh, at_once))
            if sharding is None and functional is not None:
                return self._watched(info, self._through_functional(info, functional, slots, mesh))
            if sharding is None:
                return self._watched(info, self._through_copies(info, slots, specs, pinned))
            return self._executor(info, slots, specs, sharding, pinned)
        if draws and metas is not None and not func._can_decompose():
            return self._drawing(info, slots, specs, metas)
        compute = DECOMPOSITIONS.get(func)
        if sharding is not None and (compute is None or not _communicates(specs, sharding.inputs)):
            return self._executor(info, slots, specs, sharding)
        compute = compute or _torch_decomposition(func)

        def directly() -> Executor:
            if sharding is None:
                return self._without_rule(info, slots, specs, metas)
            return self._executor(info, slots, specs, sharding)

        return self._watched(info, directly() if compute is None else self._decomposed(info, compute, mesh, directly))

    def _common_mesh(self, info: OpInfo, tensors: Sequence[Any]) -> DeviceMesh:
        meshes = {tensor._spec.mesh: None for tensor in tensors if isinstance(tensor, self.tensor_class)}
        if len(meshes) != 1:
            raise MeshError(
                f"{info.op}: the operands lie on different meshes: {', '.join(map(str, meshes))}",
                hint="bring them to one mesh first, with redistribute(mesh, placements)",
            )
        return next(iter(meshes))

    def _check_device(self, info: OpInfo, kwargs: Mapping[str, Any], mesh: DeviceMesh) -> None:
        """A DTensor lies on the devices of its mesh, and its results do."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in (mesh.device_type, "meta"):
            raise UnsupportedError(
                f"{info.op} was asked for the device {device}, but the operands lie on {mesh}",
                hint="a DTensor stays on the devices of its mesh; take full_tensor() or to_local() elsewhere",
            )

    def _check_plain(self, info: OpInfo, found: Sequence[tuple[Slot, Any]], key: tuple[Any, ...]) -> None:
        """Refuse a plain tensor among DTensors that only the user could place."""
        if not any(part is USERS for part in _flat(key)):
            return
        for slot, tensor in found:
            if not isinstance(tensor, self.tensor_class) and tensor.numel() != 1:
                raise PlainTensorError(
                    f"{info.op}: argument {slot.name!r} is a plain torch.Tensor of shape {tuple(tensor.shape)} among "
                    "DTensors, and only you know how it is meant to lie on the mesh",
                    hint="distribute_tensor(tensor, mesh, placements) if every rank holds the whole of it, "
                    "DTensor.from_local(tensor, mesh, placements) if each rank holds a part",
                )

    def _with_specs(
        self, info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any], specs: Mapping[Slot, DTensorSpec]
    ) -> dict[str, Any]:
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, spec in specs.items():
            slot.put(new_args, new_kwargs, spec)
        return info.bind(tuple(new_args), new_kwargs)

    def _known_metas(
        self, info: OpInfo, key: tuple[Any, ...], specs: Sequence[DTensorSpec]
    ) -> tuple[TensorMeta, ...] | None:
        """What a pointwise operator gives on contiguous operands of a new shape, if its dtype is known from another."""
        if torch.Tag.pointwise not in info.op.tags or info.returns != ("Tensor",) or info.writes:
            return None
        dtype = self._dtypes.get(_without_shapes(key))
        if dtype is None or any(spec.tensor_meta.stride != dense_strides(spec.shape) for spec in specs):
            return None
        shape: list[int] = []
        for spec in specs:
            own = spec.shape
            shape[:0] = own[: len(own) - len(shape)] if len(own) > len(shape) else ()
            for dim in range(1, len(own) + 1):
                if own[-dim] != 1:
                    if shape[-dim] not in (1, own[-dim]):
                        return None  # do not broadcast: let the operator say so
                    shape[-dim] = own[-dim]
        return (TensorMeta(shape, None, dtype),)

    def _learn_dtypes(self, info: OpInfo, key: tuple[Any, ...], metas: tuple[TensorMeta, ...] | None) -> None:
        if (
            torch.Tag.pointwise in info.op.tags
            and metas is not None
            and len(metas) == 1
            and len(self._dtypes) < MAX_ENTRIES
        ):
            self._dtypes.setdefault(_without_shapes(key), metas[0].dtype)

    def _result_metas(
        self,
        info: OpInfo,
        slots: Sequence[Slot],
        specs: Sequence[DTensorSpec],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[TensorMeta, ...] | None:
        """What the operator gives on one device, from meta tensors; None where that depends on the values."""
        if not VALUE_DEPENDENT.isdisjoint(info.op.tags):
            return None
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, spec in zip(slots, specs, strict=True):
            slot.put(new_args, new_kwargs, meta_tensor(spec.tensor_meta))
        if "device" in new_kwargs:
            new_kwargs["device"] = torch.device("meta")
        try:
            results = info.op(*new_args, **new_kwargs)
        except NotImplementedError:
            return None if info.returns else ()
        tensors = results if isinstance(results, tuple | list) else () if results is None else (results,)
        if tensors and not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return None
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise _sparse_result(info)
        return tuple(TensorMeta.of(tensor) for tensor in tensors)

    # ---------------------------------------------------------------- executors

    def _executor(
        self,
        info: OpInfo,
        slots: tuple[Slot, ...],
        specs: tuple[DTensorSpec, ...],
        sharding: OutputSharding,
        pinned: tuple[int, ...] = (),
    ) -> Executor:
        mesh = specs[0].mesh
        routes = _routes(specs, sharding.inputs)
        patches = self._patches(info, sharding, mesh)
        local_op = sharding.rule.local_op or PHYSICAL.get(info.op)
        if any_complex(specs, sharding.outputs):
            local_op = seeing_conjugates(local_op or info.op)
        # zeros on the ranks that hold nothing of a slice are no part of its base
        copies = any(set(out.partial_axes) - set(specs[0].partial_axes) for out in sharding.outputs)
        if (
            not any(routes)
            and info.returns == ("Tensor",)
            and not (info.is_view and (copies or info.op in COPYING_VIEWS))
        ):
            simple = self._simple_executor(info, slots, sharding.outputs[0], mesh, patches, local_op, pinned)
            if simple is not None:
                return simple
        run = self._general_executor(info, slots, routes, patches, sharding.outputs, mesh, pinned, local_op, copies)
        return self._watched(info, run)

    def _simple_executor(
        self,
        info: OpInfo,
        slots: tuple[Slot, ...],
        spec: DTensorSpec,
        mesh: DeviceMesh,
        patches: Mapping[Coordinate, Mapping[str, Any]] | None,
        local_op: Callable[..., Any] | None,
        pinned: tuple[int, ...],
    ) -> Executor | None:
        """The short ones: one or two operands at the front, nothing to move, one result."""
        front = all(slot.item is None and slot.index == i for i, slot in enumerate(slots))
        if not front or len(slots) > 2 or mesh.fabric == dry.name or pinned not in ((), (0,)) or info.outs:
            return None
        here = coordinates_here(mesh)
        if patches is not None and (len(slots) != 1 or mesh.fabric == virtual.name or not here):
            return None
        if not here:
            return None
        op, wrap, tensor_class = local_op or info.op, self.wrapper(spec), self.tensor_class
        if patches is not None:
            return self._patched_executor(info, op, wrap, patches[here[0]])

        def view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            result = wrap(op(args[0]._local_tensor, *args[1:], **kwargs))
            if args[0]._copied_view is not None:
                mark_views(info, args, kwargs, result)
            return result

        def unary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            return wrap(op(args[0]._local_tensor, *args[1:], **kwargs))

        def binary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            a, b, *rest = args
            if a.__class__ is tensor_class:
                a = a._local_tensor
            if b.__class__ is tensor_class:
                b = b._local_tensor
            return wrap(op(a, b, *rest, **kwargs))

        def write(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            target = args[0]
            op(*[a._local_tensor if a.__class__ is tensor_class else a for a in args], **kwargs)
            if target._copied_view is not None:
                self._push_back(info, target)
            return target

        def unary_lockstep(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            rest = args[1:]
            return wrap(RankTensor([op(a, *rest, **kwargs) for a in args[0]._local_tensor.tensors]))

        def binary_lockstep(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            a, b, *rest = args
            a, b = getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)
            if a.__class__ is RankTensor and b.__class__ is RankTensor:
                return wrap(RankTensor([op(x, y, *rest, **kwargs) for x, y in zip(a.tensors, b.tensors, strict=True)]))
            return wrap(op(a, b, *rest, **kwargs))

        if pinned:
            return write
        if mesh.fabric == virtual.name:
            run = unary_lockstep if len(slots) == 1 else binary_lockstep
            return self._watched(info, run)
        if len(slots) == 1:
            return view if info.is_view else unary
        return self._watched(info, binary)

    def _patched_executor(
        self,
        info: OpInfo,
        op: Callable[..., Any],
        wrap: Callable[[torch.Tensor], torch.Tensor],
        patch: Mapping[str, Any],
    ) -> Executor | None:
        """One operand, and arguments that are replaced on this rank."""
        places = {info.names.index(name): value for name, value in patch.items() if name in info.names}
        if len(places) != len(patch):
            return None

        if 0 in places:
            return None
        fixed = not any(name in info.unread for name in info.names[1:])  # then every other argument is in the key
        known: list[list[Any]] = []

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if known and not kwargs:
                result = wrap(op(args[0]._local_tensor, *known[0]))
            else:
                given = list(args[1:])
                named = dict(kwargs)
                for index, value in places.items():
                    if index <= len(given):
                        given[index - 1] = value
                    else:
                        named[info.names[index]] = value
                result = wrap(op(args[0]._local_tensor, *given, **named))
                if fixed and not named:
                    known[:] = [given]
            if info.is_view and args[0]._copied_view is not None:
                mark_views(info, args, kwargs, result)
            return result

        return run

    def _watched(self, info: OpInfo, run: Executor) -> Executor:
        """Views of copied views are marked, and writes to such are carried over to their bases."""
        return views_marked(run, info) if info.is_view else self._writes_pushed_back(run, info) if info.writes else run

    def _general_executor(
        self,
        info: OpInfo,
        slots: tuple[Slot, ...],
        routes: tuple[BoundRoute | None, ...],
        patches: Mapping[Coordinate, Mapping[str, Any]] | None,
        outputs: tuple[DTensorSpec, ...] | None,
        mesh: DeviceMesh,
        pinned: tuple[int, ...] = (),
        local_op: Callable[..., Any] | None = None,
        copies: bool = False,
        draws: bool = False,
    ) -> Executor:
        op = info.op
        run_local = local_runner(info, slots, patches, mesh, draws)
        wraps = None if outputs is None else [self.wrapper(spec) for spec in outputs]
        moving = [route.route for route in routes if route is not None and route.communicates]
        lost = info.is_view and (bool(any(routes)) or copies or op in COPYING_VIEWS)

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if moving:
                modes.check_strict(op, moving)
            locals_ = []
            for slot, route in zip(slots, routes, strict=True):
                tensor = slot.get(args, kwargs)
                local = self._local_of(tensor, mesh)
                locals_.append(local if route is None else route.run(local))
            results = run_local(local_op or op, args, kwargs, locals_)
            if pinned:
                return self._with_written(info, args, kwargs, results, wraps, mesh)
            if wraps is None:
                return self._wrap_replicated(info, results, mesh)
            if results is None:
                return None
            if isinstance(results, tuple | list):
                fresh = iter(wraps)
                wrapped = like(results, (next(fresh)(r) if isinstance(r, torch.Tensor) else r for r in results))
            else:
                wrapped = wraps[0](results)
            if lost:
                mark_views(info, args, kwargs, wrapped)
            return wrapped

        return run

    def _with_written(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: Any,
        wraps: Sequence[Callable[[torch.Tensor], torch.Tensor]] | None,
        mesh: DeviceMesh,
    ) -> Any:
        """The results of an operator that writes: the very arguments that it wrote to, and the new ones wrapped."""
        bound = info.bind(args, kwargs)
        items = results if len(info.returns) > 1 else (results,)
        fresh = iter(wraps or ())
        given = tuple(
            bound[name] if name is not None else next(fresh)(item) if wraps else self._wrap_replicated(info, item, mesh)
            for name, item in zip(info.returned, items, strict=False)
        )
        return None if not given else given[0] if len(given) == 1 else given

    def _local_of(self, tensor: Any, mesh: DeviceMesh) -> torch.Tensor:
        """The local of a DTensor; a plain tensor is every rank's."""
        if isinstance(tensor, self.tensor_class):
            return tensor._local_tensor
        return fabric_of(mesh).build(mesh, lambda coordinate: tensor)

    def _patches(
        self, info: OpInfo, sharding: OutputSharding, mesh: DeviceMesh
    ) -> dict[Coordinate, Mapping[str, Any]] | None:
        """For each rank here the arguments that the rule replaces."""
        localize = sharding.rule.localize
        if localize is None:
            return None
        return {
            coordinate: localize(sharding.call, sharding.inputs, sharding.outputs, coordinate)
            for coordinate in coordinates_here(mesh)
        }

    def _drawing(
        self, info: OpInfo, slots: tuple[Slot, ...], specs: tuple[DTensorSpec, ...], metas: tuple[TensorMeta, ...]
    ) -> Executor:
        """A random operator: every rank draws the whole tensor, as one device would, and keeps its own part."""
        mesh = specs[0].mesh
        if specs[0].partial_axes and _draws_alone(info.op) and not info.op._schema.name.endswith("_like"):
            raise LayoutError(
                f"{info.op} cannot draw into {specs[0]}: random numbers do not add up to random numbers",
                hint="redistribute it to Replicate() or Shard() first",
            )
        wholes = [replicated_spec(mesh, meta) for meta in metas]
        routes = _routes(specs, [replicated(spec) for spec in specs])
        moving = [] if _draws_alone(info.op) else [r.route for r in routes if r is not None and r.communicates]
        keeps = [
            bound_route(spec, specs[0].with_meta(spec.tensor_meta))
            if spec.shape == specs[0].shape and not specs[0].partial_axes and not specs[0].is_replicated
            else None
            for spec in wholes
        ]
        wraps = [
            self.wrapper(whole if keep is None else keep.route.target)
            for whole, keep in zip(wholes, keeps, strict=True)
        ]

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if moving:
                modes.check_strict(info.op, moving)
            new_args, new_kwargs = list(args), dict(kwargs)
            for slot, spec, route in zip(slots, specs, routes, strict=True):
                local = self._local_of(slot.get(args, kwargs), mesh)
                if _draws_alone(info.op):
                    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
                else:
                    whole = fabric_of(mesh).parts(mesh, local if route is None else route.run(local))[0][1]
                slot.put(new_args, new_kwargs, whole)
            results = info.op(*new_args, **new_kwargs)
            tools = iter(zip(keeps, wraps, strict=True))

            def mine(result: Any) -> Any:
                if not isinstance(result, torch.Tensor):
                    return result
                keep, wrap = next(tools)
                local = fabric_of(mesh).build(mesh, lambda coordinate: result.clone())
                return wrap(local if keep is None else keep.run(local))

            return tuple(map(mine, results)) if isinstance(results, tuple) else mine(results)

        return run

    def _decomposed(
        self, info: OpInfo, compute: Callable[..., Any], mesh: DeviceMesh, directly: Callable[[], Executor]
    ) -> Executor:
        """Computed from other operators; plain tensors that come out were made on the way, alike on every rank.

        A decomposition that comes back to its own operator gets it `directly`.
        """

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if modes.is_decomposing(info.op):
                return directly()(args, kwargs)
            with modes.decomposing(info.op):
                results = self._wrap_plain(compute(*args, **kwargs), mesh)
            if info.is_view:
                mark_views(info, args, kwargs, results)
            return results

        return run

    def _wrap_plain(self, results: Any, mesh: DeviceMesh) -> Any:
        if isinstance(results, tuple | list):
            return like(results, (self._wrap_plain(result, mesh) for result in results))
        if isinstance(results, torch.Tensor) and not isinstance(results, self.tensor_class):
            local = fabric_of(mesh).build(mesh, lambda coordinate: results.clone())
            return self.wrapper(replicated_spec(mesh, TensorMeta.of(results)))(local)
        return results

    def _without_rule(
        self,
        info: OpInfo,
        slots: tuple[Slot, ...],
        specs: tuple[DTensorSpec, ...],
        metas: tuple[TensorMeta, ...] | None,
    ) -> Executor:
        """Every operand is made whole and the operator run on every rank."""
        mesh = specs[0].mesh
        routes = _routes(specs, [replicated(spec) for spec in specs])
        outputs = None if metas is None else tuple(replicated_spec(mesh, meta) for meta in metas)
        draws = torch.Tag.nondeterministic_seeded in info.op.tags
        local_op = seeing_conjugates(info.op) if any_complex(specs, outputs or ()) else None
        run = self._general_executor(info, slots, routes, None, outputs, mesh, local_op=local_op, draws=draws)
        moving = [route.route for route in routes if route is not None and route.communicates]
        if not moving or not any("Tensor" in kind for kind in info.returns):  # item() asks for the value itself
            return run

        def run_and_warn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            result = run(args, kwargs)
            modes.warn_replicated(info.op, specs, moving)
            return result

        return run_and_warn

    # ---------------------------------------------------------------- operators that write

    def _reshaping_in_place(self, info: OpInfo, functional: OpOverload) -> Executor:
        """`t_`, `squeeze_`, ...: the tensor itself becomes the view."""

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            # a stand-in for what the tensor was: it may itself be a view that was copied
            before = self.wrapper(args[0]._spec)(args[0]._local_tensor)
            before._copied_view = args[0]._copied_view  # pyright: ignore[reportAttributeAccessIssue]
            view = functional(before, *args[1:], **kwargs)
            with torch._C._DisableTorchDispatch():  # the wrapper's own sizes and strides
                info.op(*args, **kwargs)
            args[0]._local_tensor, args[0]._spec = view._local_tensor, view._spec
            args[0]._copied_view = view._copied_view
            return args[0]

        return run

    def _through_copies(
        self, info: OpInfo, slots: tuple[Slot, ...], specs: tuple[DTensorSpec, ...], pinned: tuple[int, ...]
    ) -> Executor:
        """Write to whole copies on every rank, then bring them back to where the tensors lie."""
        mesh = specs[0].mesh
        wholes = [replicated(spec) for spec in specs]
        draws = torch.Tag.nondeterministic_seeded in info.op.tags
        local_op = seeing_conjugates(info.op) if any_complex(specs, ()) else None
        stay = (None,) * len(slots)
        run = self._general_executor(info, slots, stay, None, None, mesh, pinned, local_op, draws=draws)
        wraps = [self.wrapper(spec) for spec in wholes]

        def run_on_copies(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            new_args, new_kwargs = list(args), dict(kwargs)
            given, copies = [], []
            for slot, spec, whole, wrap in zip(slots, specs, wholes, wraps, strict=True):
                tensor = slot.get(args, kwargs)
                local = self._local_of(tensor, mesh)
                copy = wrap(local if spec is whole else bound_route(spec, whole).run(local))
                slot.put(new_args, new_kwargs, copy)
                given.append(tensor)
                copies.append(copy)
            results = run(tuple(new_args), new_kwargs)
            for i in pinned:
                if specs[i] is not wholes[i]:
                    self.write(info, given[i], copies[i])
            back = {id(copy): tensor for copy, tensor in zip(copies, given, strict=True)}
            if isinstance(results, tuple):
                return tuple(back.get(id(result), result) for result in results)
            return back.get(id(results), results)

        return run_on_copies

    def _through_functional(self, info: OpInfo, op: OpOverload, slots: tuple[Slot, ...], mesh: DeviceMesh) -> Executor:
        """Compute a new tensor and copy it into the one that is written to, in that one's layout."""
        written = [slot for slot in slots if slot.name in info.writes]

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            given = [slot.get(args, kwargs) for slot in written]
            # all by name: the two forms of an operator need not have the same defaults
            kept = {name: value for name, value in info.bind(args, kwargs).items() if name not in info.outs}
            results = op(**kept)
            for target, result in zip(given, results if isinstance(results, tuple) else (results,), strict=True):
                self.write(info, target, result)
            return self._with_written(info, args, kwargs, (None,) * len(info.returns), None, mesh)

        return run

    def _writes_pushed_back(self, run: Executor, info: OpInfo) -> Executor:
        """A write to a view that had to be copied is carried over to the tensor it is a view of."""

        def run_and_push(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            result = run(args, kwargs)
            for name in info.writes:
                index = info.names.index(name)
                written = args[index] if index < len(args) else kwargs.get(name)
                for tensor in written if isinstance(written, list | tuple) else (written,):
                    if getattr(tensor, "_copied_view", None) is not None:
                        self._push_back(info, tensor)
            return result

        return run_and_push

    def _push_back(self, info: OpInfo, view: Any) -> None:
        """Repeat the view on a whole copy of its base, write there, and bring the copy back to where the base lies."""
        made: CopiedView | None = view._copied_view
        while made is not None:
            base = made.args[0]
            copy = self._whole_local(base)
            if copy is base._local_tensor:
                copy = copy.clone()
            if made.op in PHYSICAL:
                copy.copy_(PHYSICAL[made.op](self._whole_local(view)))
            else:
                again = made.op(copy, *made.args[1:], **made.kwargs)  # on plain tensors: shares memory with the copy
                (again if made.item is None else again[made.item]).copy_(self._whole_local(view))
            self.write(info, base, self.wrapper(replicated(base._spec))(copy))
            view, made = base, base._copied_view

    def _whole_local(self, tensor: Any) -> torch.Tensor:
        whole = replicated(tensor._spec)
        return (
            tensor._local_tensor
            if whole is tensor._spec
            else bound_route(tensor._spec, whole).run(tensor._local_tensor)
        )

    def write(self, info: OpInfo, target: Any, value: Any) -> None:
        """Copy a DTensor's value into another, keeping the other's layout; into a plain tensor, the whole of it."""
        if not isinstance(target, self.tensor_class):
            target.copy_(fabric_of(value._spec.mesh).parts(value._spec.mesh, self._whole_local(value))[0][1])
            return
        have, want = value._spec, target._spec
        if have.shape != want.shape:
            raise LayoutError(
                f"{info.op} gives {have.tensor_meta}, which cannot be written into {want}",
                hint="give it a tensor of the result's shape",
            )
        local = value._local_tensor
        goal = want.with_meta(have.tensor_meta)
        if goal is not have:
            if goal.partial_axes:  # through the whole: nothing but R becomes Partial
                local = bound_route(have, replicated(have)).run(local)
                have = replicated(have)
            local = bound_route(have, goal).run(local)
        target._local_tensor.copy_(local)

    # ---------------------------------------------------------------- wrapping

    def wrapper(self, spec: DTensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that makes a DTensor of a local with this spec."""
        make = torch.Tensor._make_wrapper_subclass
        tensor_class, shape, stride = self.tensor_class, spec.tensor_meta.shape, spec.tensor_meta.stride
        dtype, strided = spec.tensor_meta.dtype, torch.strided

        def wrap(local: torch.Tensor) -> torch.Tensor:
            result = make(tensor_class, shape, stride, None, None, dtype, strided, local.device)  # pyright: ignore[reportCallIssue, reportArgumentType]
            result._local_tensor = local  # pyright: ignore[reportAttributeAccessIssue]
            result._spec = spec  # pyright: ignore[reportAttributeAccessIssue]
            return result

        return wrap

    def _wrap_replicated(self, info: OpInfo, results: Any, mesh: DeviceMesh) -> Any:
        """Results of an operator that ran on whole tensors everywhere, whose shapes are known only now."""
        if isinstance(results, tuple | list):
            return like(results, (self._wrap_replicated(info, result, mesh) for result in results))
        if not isinstance(results, torch.Tensor):
            return results
        one = results.tensors[0] if isinstance(results, RankTensor) else results
        if one.layout is not torch.strided:
            raise _sparse_result(info)
        return self.wrapper(replicated_spec(mesh, TensorMeta.of(results)))(results)

    def forget(self) -> None:
        """Drop every executor and what was read from schemas and rules."""
        self.cache.clear()
        op_info.cache_clear()

    def info(self) -> CacheInfo:
        """How full the cache is."""
        return CacheInfo(len(self.cache), MAX_ENTRIES, self.misses, cached_routes())


@dataclass(frozen=True, slots=True)
class CopiedView:
    """How a view came about that shares no memory with its base: the operator, its arguments, which of its results."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None


def mark_views(info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any], views: Any) -> None:
    """Mark views that had to be copied, so that a write to them is not lost."""
    if isinstance(views, tuple | list):
        for item, view in enumerate(views):
            view._copied_view = CopiedView(info.op, args, kwargs, item)
    else:
        views._copied_view = CopiedView(info.op, args, kwargs, None)


def views_marked(run: Executor, info: OpInfo) -> Executor:
    """A view of a copied view is one too."""

    def run_and_mark(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        views = run(args, kwargs)
        if args and args[0]._copied_view is not None:
            mark_views(info, args, kwargs, views)
        return views

    return run_and_mark


def _draws_alone(op: OpOverload) -> bool:
    """Whether a random operator looks only at the shape of its operands, not at their values."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_functional")
    alone = {"uniform", "normal", "exponential", "log_normal", "cauchy", "geometric", "random"}
    if name == "bernoulli":
        return op._overloadname == "p"
    return (name in alone and op._overloadname in ("default", "from", "to", "")) or name.endswith("_like")


def _sparse_result(info: OpInfo) -> UnsupportedError:
    return UnsupportedError(
        f"{info.op} gives a sparse tensor, and a DTensor is dense",
        hint="use to_local() or full_tensor() and make that sparse",
    )


def _communicates(have: Sequence[DTensorSpec], want: Sequence[DTensorSpec]) -> bool:
    return any(route is not None and route.communicates for route in _routes(have, want))


@functools.cache
def _torch_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """What torch itself offers for an operator without a rule."""
    if op._can_decompose():
        return op.decompose
    if OpInfo.of(op).is_view:  # these go by storage offsets, which a wrapper has none of
        return None
    import torch._decomp  # half a second, needed by few programs

    return torch._decomp.decomposition_table.get(op)


def _routes(have: Sequence[DTensorSpec], want: Sequence[DTensorSpec]) -> tuple[BoundRoute | None, ...]:
    return tuple(None if a is b else bound_route(a, b) for a, b in zip(have, want, strict=True))
