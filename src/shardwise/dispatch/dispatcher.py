"""OpDispatcher: looks up the executor of a call's signature; a miss decides how the call is executed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.compilers import COMPILER, release_importing_frames
from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Ragged
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import named, unrecorded
from shardwise.dispatch.broadcast import FILLED, REGROUPING, filled_once
from shardwise.dispatch.cross_mesh import on_one_mesh
from shardwise.dispatch.decision import Decision, decided
from shardwise.dispatch.executors import executor, for_any_size
from shardwise.dispatch.fallbacks import LIKE, decomposed, made_elsewhere, on_replicated_operands, torch_decomposition
from shardwise.dispatch.operands import reduced_first, reduced_in_place
from shardwise.dispatch.origins import (
    JOINING,
    PUTTING_BACK,
    TABLE_BACKWARD,
    TAKING,
    noting_base,
    noting_experts,
    noting_origin,
    noting_split_dims,
    putting_back,
    sent_to_owners,
    with_constants_stored_once,
)
from shardwise.dispatch.outside_mesh import holding_nothing
from shardwise.dispatch.plain_operands import note_locals, with_plain_operands
from shardwise.dispatch.ragged_calls import RaggedCalls, is_ragged
from shardwise.dispatch.random_ops import agree_once, filling, random_executor
from shardwise.dispatch.result_meta import ResultMetas
from shardwise.dispatch.ring_attention import attending
from shardwise.dispatch.signature import (
    Executor,
    GradientHooks,
    Key,
    Signature,
    Wrap,
    Wrapping,
    fixed_sizes,
    is_symbolic,
    key_of,
    routes_between,
    tensor_slots,
)
from shardwise.dispatch.size_generic import KnownCalls
from shardwise.dispatch.spread_gradients import (
    INTO_LEAVES,
    SPREADING,
    into_leaf,
    spread_as_origin,
    spread_regrouped,
)
from shardwise.dispatch.views import DETACH, copied_view, counted_as_base, is_norm, with_copied_views
from shardwise.dispatch.writes import (
    replacing_locals,
    reshaping_in_place,
    sharing_memory,
    through_copies,
    through_functional,
)
from shardwise.errors import UnsupportedError
from shardwise.events import decision_made
from shardwise.fabric.base import fabrics, found_errors, on_found, on_new_world, raise_found
from shardwise.fabric.routes import cached_routes
from shardwise.plan.cost import on_new_model
from shardwise.plan.decomposing import worth_decomposing
from shardwise.plan.propagate import OpSchema, OutputSharding, ShardingPropagator, replicated_spec
from shardwise.rng.random_fill import fills
from shardwise.rules.registry import DECOMPOSITIONS, REDUCTIONS, RULES
from shardwise.schema import OpInfo, forget_infos, functional_of, infos, op_info
from shardwise.torch_private import OpOverload

__all__ = ["CacheInfo", "OpDispatcher"]

MAX_ENTRIES = 16384
COLLECTIVES = ("c10d", "_c10d_functional")  # the namespaces of operators of process groups


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The number of cached signatures, its limit, and the number of misses."""

    entries: int
    limit: int
    misses: int
    routes: int


def _spread_and_noted(signature: Signature, run: Executor) -> Executor:
    """Both wrappers, for an operator that is also the gradient of another."""
    return noting_origin(signature, spread_as_origin(signature, run))


def _spread_and_noted_view(signature: Signature, run: Executor) -> Executor:
    return noting_split_dims(signature, spread_regrouped(signature, run))


# Wrappers of an operator's executor: for layouts that its gradient needs, or that autograd leaves undetermined.
AROUND = (
    dict.fromkeys(SPREADING, spread_as_origin)
    | dict.fromkeys(INTO_LEAVES, into_leaf)
    | dict.fromkeys(TAKING, noting_origin)
    | dict.fromkeys(SPREADING.keys() & TAKING, _spread_and_noted)
    | dict.fromkeys(REGROUPING, _spread_and_noted_view)
)
# Operators of backward whose layout is chosen at each call.
LAID_OUT_BY = dict.fromkeys(PUTTING_BACK, putting_back) | {TABLE_BACKWARD: sent_to_owners}


class OpDispatcher:
    """Runs operators on a tensor class that has `_local_tensor` and `_spec`.

    Args:
        tensor_class: the class to unwrap and wrap.
        wrapper: for a spec, the function that wraps a local as a tensor of the class.
        gradient_hooks: for gradients of operands that are not of the class.
    """

    def __init__(
        self, tensor_class: type[torch.Tensor], wrapper: Callable[[DTensorSpec], Wrap], gradient_hooks: GradientHooks
    ) -> None:
        self.wrapping = Wrapping(tensor_class, wrapper, gradient_hooks)
        self.cache: BoundedCache[Key, Executor] = BoundedCache(MAX_ENTRIES)
        self.misses = 0
        self._metas = ResultMetas()
        self._known_calls = KnownCalls()
        self._ragged_calls = RaggedCalls()
        on_new_world.append(self.forget)  # executors depend on the ranks of this process
        on_found.append(self.cache.clear)  # a warm call would not raise the error that was found
        on_new_model.append(self.forget)  # and on the cost model, which chooses the operand to move

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `func`: the entry of every call that does not take the tensor class's fast path."""
        key = key_of(self.wrapping.tensor_class, func, args, kwargs)
        try:
            run = self.cache.get(key)
        except TypeError:  # a symbolic size among the arguments has no hash
            run = None
        if run is not None:
            return run(args, kwargs)
        was_loaded = COMPILER in sys.modules
        try:
            return self.miss(key, func, args, kwargs)(args, kwargs)
        finally:
            if not was_loaded and COMPILER in sys.modules:
                release_importing_frames()

    def miss(self, key: Key, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executor:
        """Resolve the executor of a new signature and cache it."""
        if found_errors:
            raise_found()
        if is_symbolic(key):
            return self._resolve_symbolic(named(key), func, args, kwargs)
        ragged = Ragged.in_use and is_ragged(key)
        run = None if ragged else self._known_calls.find(key)
        if run is None:
            try:
                run = self.resolve(key, func, args, kwargs)
            except (RuntimeError, ValueError) as error:
                note_locals(error, self.wrapping.tensor_class, tensor_slots(op_info(func), args, kwargs))
                raise
        self.misses += 1
        return (self.cache.keep_recent if ragged else self.cache.keep)(key, run)

    def key(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
        """The signature of a call."""
        return key_of(self.wrapping.tensor_class, func, args, kwargs)

    def explain(self, key: Key, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Decision:
        """How a call is run, warm or not."""
        with decision_made.collected() as heard:
            run = self.resolve(key, func, args, kwargs)
        if key not in self.cache:
            self.misses += 1
            (self.cache.keep_recent if is_ragged(key) else self.cache.keep)(key, run)
        return heard[-1]

    def _resolve_symbolic(
        self, key: Key, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Executor:
        """The executor of a call with symbolic sizes; not cached. A rule that needs numbers gets them."""
        try:
            with unrecorded():  # of the computed sizes, only those passed to operators belong to the graph
                return self.resolve(key, func, args, kwargs)
        except TypeError as error:
            if "SymInt" not in str(error):
                raise
        return fixed_sizes(self.wrapping, func)

    def resolve(self, key: Key, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executor:
        """The executor of a call's signature."""
        if func.namespace in COLLECTIVES:
            raise UnsupportedError(
                f"{func} is a collective of a process group, and was called with a DTensor",
                hint="redistribute(...) and full_tensor() move a DTensor; to_local() gives a tensor for collectives",
            )
        info = infos.get(id(func)) or op_info(func)
        if func is torch.ops.aten.set_.source_Tensor:
            decided("shared memory")
            return sharing_memory(self.wrapping, func)
        found = tensor_slots(info, args, kwargs)
        tensor_class = self.wrapping.tensor_class
        laid_out = [tensor._spec.mesh for _, tensor in found if isinstance(tensor, tensor_class)]
        mesh = laid_out[0]
        if any(other is not mesh for other in laid_out):
            decided("mesh by mesh")
            return on_one_mesh(self.wrapping, info, found)
        if "device" in kwargs and _is_elsewhere(kwargs["device"], mesh):
            if info.op not in LIKE:
                raise _other_device(info, kwargs["device"], mesh)
            decided("on another device")
            return made_elsewhere(self.wrapping, info)
        signature = Signature.of(info, found, args, kwargs, mesh, self.wrapping)
        if fabrics[mesh.fabric].is_outside(mesh) and torch.Tag.inplace_view not in func.tags:
            run = self._resolve_outside(signature, key, args, kwargs)
            return run if len(laid_out) == len(found) else with_plain_operands(run, info, found, mesh, self.wrapping)
        if info.draws:
            agree_once(mesh)
        if info.writes:
            into_plain = any(slot.name in info.writes and not isinstance(t, tensor_class) for slot, t in found)
            run = noting_base(signature, self._resolve_write(signature, key, args, kwargs, into_plain))
        else:
            run = self._resolve_new(signature, key, args, kwargs)
            if info.op in AROUND:
                run = AROUND[info.op](signature, run)
            elif info.rule is not None and info.rule.by_groups:
                run = noting_experts(signature, run)
            run = counted_as_base(run) if info.is_view else run
        if len(laid_out) == len(found):
            return run
        run = with_plain_operands(run, info, found, mesh, self.wrapping)
        slots = [slot for slot, _ in found]
        return with_constants_stored_once(tensor_class, info, slots, run) if info.op in JOINING else run

    def _resolve_new(
        self, signature: Signature, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Executor:
        """An operator that returns new tensors or views."""
        info = signature.info
        if info.is_view and is_norm(signature.specs[0]):  # a write reduces it, and must reach its views
            decided("reduced first", signature)
            copied = copied_view(info, reduced_first(info, self.wrapping, signature.slots[:1]))
            return reduced_in_place(info, copied) if info.op is DETACH else copied
        metas, sharding = self._results(signature, key, args, kwargs)
        compute = DECOMPOSITIONS.get(info.op)
        drawn = metas if info.draws and sharding is None and not info.op._can_decompose() else None
        if drawn is not None and compute is None:
            decided("random", signature)
            return random_executor(signature, drawn)
        if sharding is not None and metas is not None and sharding.rule.algorithms:
            run = attending(signature, sharding, metas, args, kwargs)
            if run is not None:
                return run
        if sharding is not None and (compute is None or not _worth_decomposing(signature, sharding)):
            if decision_made:
                decided("rule", signature, sharding)
            laid_out_by = putting_back if sharding.rule.by_groups else LAID_OUT_BY.get(info.op)
            if laid_out_by is not None:
                return laid_out_by(signature, sharding, lambda laid_out: executor(signature, laid_out))
            run = self._laid_out(signature, key, sharding)
            return filled_once(signature, sharding.outputs[0], run) if info.op in FILLED else run

        @functools.cache  # a decomposition that does not apply to a call returns it each time
        def directly() -> Executor:
            if sharding is not None:
                return executor(signature, sharding)
            if drawn is not None:
                return random_executor(signature, drawn)
            return with_copied_views(self.wrapping, info, on_replicated_operands(signature, metas))

        if compute is None and all(0 not in spec.shape for spec in signature.specs):  # torch's divide by sizes
            compute = torch_decomposition(info.op)
        decided("decomposed" if compute is not None else "replicated operands", signature, sharding)
        return directly() if compute is None else decomposed(signature, compute, directly, metas)

    def _results(
        self, signature: Signature, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any], as_known: bool = True
    ) -> tuple[tuple[TensorMeta, ...] | None, OutputSharding | None]:
        """The results of a call and the layouts of its rule, if it applies; `as_known`: as for similar calls."""
        if as_known and Ragged.in_use and is_ragged(key):
            return self._ragged_calls.find(
                signature, key, lambda other: self._results(other, key, args, kwargs, as_known=False)
            )
        metas, op = self._metas.find(signature, key, args, kwargs), signature.info.op
        # for random operators only their own rule counts, where nothing is drawn; torch's tags do not
        if metas is None or (signature.info.draws and op not in RULES):
            return metas, None
        schema = OpSchema(op, signature.arguments, signature.specs, signature.info.rule)
        return metas, ShardingPropagator().propagate(schema, metas, signature.pinned)

    def _resolve_outside(
        self, signature: Signature, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Executor:
        """An operator on a rank that is not in the mesh of its operands."""
        decided("outside the mesh", signature)
        metas, sharding = self._results(signature, key, args, kwargs)
        outputs = None if metas is None else [replicated_spec(signature.mesh, meta) for meta in metas]
        return holding_nothing(signature, outputs if sharding is None else sharding.outputs, args, kwargs)

    def _laid_out(self, signature: Signature, key: Key, sharding: OutputSharding) -> Executor:
        """A call that runs in the layouts of its rule, as will calls that differ only in their sizes."""
        make = for_any_size(signature, sharding)
        if (
            make is not None
            and not sharding.outputs[0].tensor_meta.is_symbolic
            and not (Ragged.in_use and is_ragged(key))
        ):
            self._known_calls.keep(key, sharding.outputs[0], make)
            if not any(spec.broadcast for spec in signature.specs):
                return make(sharding.outputs[0])
        return executor(signature, sharding)

    def _resolve_write(
        self, signature: Signature, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any], into_plain: bool
    ) -> Executor:
        """An operator that writes to some of its arguments."""
        info = signature.info
        if any(signature.specs[i].is_lazy for i in signature.pinned):
            decided("by a new tensor", signature)
            return with_copied_views(self.wrapping, info, replacing_locals(signature))
        if fills(info.op) and not into_plain:
            decided("random", signature)
            return with_copied_views(self.wrapping, info, filling(signature))
        functional = functional_of(info.op) if None not in info.returned else None
        compute = DECOMPOSITIONS.get(info.op)
        if functional is not None:
            if info.outs or (into_plain and compute is None):
                decided("by a new tensor", signature)
                return with_copied_views(self.wrapping, info, through_functional(signature, functional))
            if torch.Tag.inplace_view in info.op.tags:
                decided("view in place", signature)
                return with_copied_views(self.wrapping, info, reshaping_in_place(signature, functional))
        _metas, sharding = self._results(signature, key, args, kwargs)
        if compute is not None and (sharding is None or _worth_decomposing(signature, sharding)):

            @functools.cache
            def directly() -> Executor:
                return through_copies(signature) if sharding is None else executor(signature, sharding)

            decided("decomposed", signature, sharding)
            return with_copied_views(self.wrapping, info, decomposed(signature, compute, directly))
        if sharding is not None:
            if decision_made:
                decided("rule", signature, sharding)
            return executor(signature, sharding)
        decided("by copies" if functional is None else "by a new tensor", signature)
        run = through_copies(signature) if functional is None else through_functional(signature, functional)
        return with_copied_views(self.wrapping, info, run)

    def forget(self) -> None:
        """Drop every executor, and the facts read from schemas and rules."""
        self.cache.clear()
        self._known_calls.forget()
        self._ragged_calls.forget()
        forget_infos()

    def info(self) -> CacheInfo:
        """The state of the cache."""
        return CacheInfo(len(self.cache), self.cache.limit, self.misses, cached_routes())


def _is_elsewhere(device: Any, mesh: DeviceMesh) -> bool:
    """Whether a call names a device of another type than the mesh."""
    return device is not None and torch.device(device).type not in (mesh.device_type, "meta")


def _other_device(info: OpInfo, device: Any, mesh: DeviceMesh) -> UnsupportedError:
    return UnsupportedError(
        f"{info.op} was called with the device {device}, but the operands are on {mesh}",
        hint="a DTensor stays on the devices of its mesh; take full_tensor() or to_local() elsewhere",
    )


def _worth_decomposing(signature: Signature, sharding: OutputSharding) -> bool:
    """Whether a rule would move operands and take longer than a decomposition."""
    if sharding.rule.layouts is not None:
        return False
    bound = routes_between(signature.specs, sharding.inputs)
    routes = [route.route for route in bound if route is not None]
    return worth_decomposing(sharding, signature.specs, routes, REDUCTIONS.get(signature.info.op))
