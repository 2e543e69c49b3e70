"""Executors: the function of one signature, which runs the operator on locals and wraps the results.

The layouts are decided before; nothing is chosen here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.broadcast import keeping_broadcast
from shardwise.dispatch.operands import operand_mover, reduces
from shardwise.dispatch.owner_exchanges import exchanging_by_owner
from shardwise.dispatch.row_exchanges import exchanging_halos, exchanging_rows
from shardwise.dispatch.signature import Executor, Signature, Wrap, Wrapping, routes_between
from shardwise.dispatch.views import COPYING_VIEWS, PHYSICAL, mark_views, push_back, with_copied_views
from shardwise.fabric.base import fabric_of, fabrics
from shardwise.fabric.nondeterministic import is_nondeterministic
from shardwise.fabric.rank_tensor import parts_of
from shardwise.fabric.routes import BoundRoute
from shardwise.local import any_complex, coordinates_here, like, local_runner, seeing_conjugates, sparing_empty
from shardwise.plan.propagate import OpSchema, OutputSharding, ShardingPropagator
from shardwise.plan.step import OwnerExchange, RowExchange
from shardwise.rules.view import NOT_A_VIEW
from shardwise.schema import OpInfo
from shardwise.torch_private import is_alias_of

__all__ = ["executor", "for_any_size", "general_executor", "with_written"]

EXPAND = torch.ops.aten.expand.default
SHARING = torch.ops.aten.view.default  # of the views with per-rank arguments, the one that must share memory
# Views that share memory if the local's strides allow it, and are copied otherwise.
MAY_COPY = {SHARING, torch.ops.aten.view_as_complex.default, torch.ops.aten.view.dtype}
REFUSING_EMPTY = {"cuda"}  # devices whose kernels are not called for an empty result of a shard
Patches = Mapping[Coordinate, Mapping[str, Any]]


def executor(signature: Signature, sharding: OutputSharding) -> Executor:
    """The executor of a call in the layouts of its rule."""
    info, specs = signature.info, signature.specs
    if isinstance(sharding.exchange, RowExchange):
        return with_copied_views(signature.wrapping, info, exchanging_rows(signature, sharding, sharding.exchange))
    if sharding.exchange is not None:
        return with_copied_views(signature.wrapping, info, _by_owner(signature, sharding, sharding.exchange))
    if sharding.halo is not None:
        on_windows = sharding.halo.halo.local_op
        if any_complex(specs, sharding.outputs):
            on_windows = seeing_conjugates(on_windows)
        if _may_be_refused_when_empty(signature, sharding):
            on_windows = sparing_empty(info, on_windows)
        return with_copied_views(
            signature.wrapping, info, exchanging_halos(signature, sharding, sharding.halo, on_windows)
        )
    routes = routes_between(specs, sharding.inputs)
    local_op, runs_as = sharding.rule.local_op or PHYSICAL.get(info.op), sharding
    if info.op is EXPAND or any(spec.broadcast for spec in (*specs, *sharding.inputs)):
        sharding, local_op, runs_as = keeping_broadcast(signature, sharding, local_op or info.kernel)
    patches = _patches(runs_as, signature.mesh)
    if any_complex(specs, sharding.outputs):
        local_op = seeing_conjugates(local_op or info.op)
    lockstep = fabric_of(signature.mesh).many_ranks
    rank_by_rank = lockstep and is_nondeterministic(info.op)  # so that equal operands share a result
    if _may_be_refused_when_empty(signature, sharding):
        local_op, rank_by_rank = sparing_empty(info, local_op or info.op), lockstep
    # zeros on ranks that have nothing of a slice are not part of its base
    copies = info.is_view and (
        any(routes)
        or specs[0].is_lazy  # a write replaces its local
        or info.op in COPYING_VIEWS
        or any(set(out.partial_axes) - set(specs[0].partial_axes) for out in sharding.outputs)
    )
    if not any(routes) and not copies and not rank_by_rank and info.returns == ("Tensor",):
        simple = _simple_executor(signature, sharding.outputs[0], patches, local_op)
        if simple is not None:
            return simple
    if not any(routes) and patches is None and _takes_lists(signature):
        return with_copied_views(signature.wrapping, info, _lists(signature, sharding.outputs, local_op or info.kernel))
    if patches is None and not copies and info.returns == ("Tensor",):
        run = _moving(signature, routes, sharding.outputs, local_op or info.kernel)
        if run is not None:
            return run
    run = general_executor(signature, routes, sharding.outputs, patches=patches, local_op=local_op, copies=copies)
    return with_copied_views(signature.wrapping, info, run)


def _by_owner(signature: Signature, sharding: OutputSharding, step: OwnerExchange) -> Executor:
    """The executor of a call by an exchange by owner. A graph has no values, so there it uses the other rows."""
    run, info = exchanging_by_owner(signature, sharding, step), signature.info
    traced: list[Executor] = []

    def run_or_trace(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not is_tracing():
            return run(args, kwargs)
        if not traced:
            schema = OpSchema(info.op, signature.arguments, signature.specs)
            found = ShardingPropagator(by_owner=False).propagate(schema, sharding.call.results, signature.pinned)
            assert found is not None, "every rule has rows without an exchange by owner"
            traced.append(executor(signature, found))
        return traced[0](args, kwargs)

    return run_or_trace


def _may_be_refused_when_empty(signature: Signature, sharding: OutputSharding) -> bool:
    """Whether a kernel that was not tested with empty operands would get one on a rank of this process.

    Kernels of CUDA may refuse to start without elements, or read out of bounds. Pointwise ones are correct, and
    views run none.
    """
    info, mesh = signature.info, signature.mesh
    if mesh.device_type not in REFUSING_EMPTY or info.pointwise or info.is_view:
        return False
    fixed = [spec for spec in sharding.inputs if any(spec.dim_axes) and not spec.tensor_meta.is_symbolic]
    return any(0 in spec.local_shape(coordinate) for spec in fixed for coordinate in coordinates_here(mesh))


def _patches(sharding: OutputSharding, mesh: DeviceMesh) -> Patches | None:
    """For each rank of this process the arguments that the rule replaces."""
    localize = sharding.rule.localize
    if localize is None:
        return None
    return {
        coordinate: localize(sharding.call, sharding.inputs, sharding.outputs, coordinate)
        for coordinate in coordinates_here(mesh)
    }


# ---------------------------------------------------------------- operands in front, nothing to move, one result


def _simple_executor(
    signature: Signature, spec: DTensorSpec, patches: Patches | None, local_op: Callable[..., Any] | None
) -> Executor | None:
    """A short function for calls with leading operands and nothing to move. None for other calls."""
    info, slots, mesh, wrapping = signature.info, signature.slots, signature.mesh, signature.wrapping
    front = all(slot.item is None and slot.index == i for i, slot in enumerate(slots))
    here = coordinates_here(mesh)
    if not front or not here or not fabric_of(mesh).has_values:
        return None
    if signature.pinned not in ((), (0,)) or info.outs or (info.op in MAY_COPY and patches is None):
        return None
    op, wrap, fabric = local_op or info.kernel, wrapping.wrapper(spec), fabric_of(mesh)
    if patches is not None:
        if not fabric.one_rank:
            return None
        patch = patches[here[0]]
        return _patched(info, op, wrap, patch) if len(slots) == 1 else _localized(signature, op, wrap, patch)
    if signature.pinned:
        return _writing(wrapping, info, op, len(slots) == 1)
    op = fabric.on_each(op, len(slots))
    if op is None:
        return None
    form = _form(signature)
    return (
        _view(info, op, wrap) if form is _unary and info.is_view else with_copied_views(wrapping, info, form(op, wrap))
    )


def _form(signature: Signature) -> Callable[[Callable[..., Any], Wrap], Executor]:
    """The short function for this number of operands."""
    if len(signature.slots) == 1:
        return _unary
    form = _binary if len(signature.slots) == 2 else _several
    return functools.partial(form, signature.wrapping.tensor_class)


def for_any_size(signature: Signature, sharding: OutputSharding) -> Callable[[DTensorSpec], Executor] | None:
    """A function that makes the executor of a pointwise call from the spec of its result; None for other calls."""
    info, mesh, rule = signature.info, signature.mesh, sharding.rule
    short = all(slot.item is None and slot.index == i for i, slot in enumerate(signature.slots))
    if not short or info.is_view or info.writes or not info.pointwise or rule.localize is not None:
        return None
    fabric = fabrics[mesh.fabric]
    dtypes = [spec.tensor_meta.dtype for spec in (*signature.specs, *sharding.outputs)]
    if not fabric.has_values or any(dtype.is_complex for dtype in dtypes):
        return None
    if sharding.inputs != signature.specs or info.returns != ("Tensor",):
        return None
    if rule.local_op is None and info.op in PHYSICAL:
        return None
    wrapper, form = signature.wrapping.wrapper, _form(signature)
    op = rule.local_op or info.kernel
    if fabric.many_ranks:
        op = fabric.on_each(op, len(signature.slots))
    return None if op is None else lambda spec: form(op, wrapper(spec))


def _unary(op: Callable[..., Any], wrap: Wrap) -> Executor:
    def unary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return wrap(op(args[0]._local_tensor, *args[1:], **kwargs))

    return unary


def _view(info: OpInfo, op: Callable[..., Any], wrap: Wrap) -> Executor:
    def view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = wrap(op(args[0]._local_tensor, *args[1:], **kwargs))
        if args[0]._copied_view is not None:
            mark_views(info, args, kwargs, result)
        return result

    return view


def _binary(tensor_class: Any, op: Callable[..., Any], wrap: Wrap) -> Executor:
    def binary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        a, b, *rest = args
        if isinstance(a, tensor_class):
            a = a._local_tensor
        if isinstance(b, tensor_class):
            b = b._local_tensor
        return wrap(op(a, b, *rest, **kwargs))

    return binary


def _several(tensor_class: Any, op: Callable[..., Any], wrap: Wrap) -> Executor:
    def several(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return wrap(op(*[a._local_tensor if isinstance(a, tensor_class) else a for a in args], **kwargs))

    return several


def _writing(wrapping: Wrapping, info: OpInfo, op: Callable[..., Any], alone: bool) -> Executor:
    """A write to the first operand; `alone`: it is the only one."""
    tensor_class = wrapping.tensor_class

    def writing(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target = args[0]
        op(*[a._local_tensor if isinstance(a, tensor_class) else a for a in args], **kwargs)
        if target._copied_view is not None:
            push_back(wrapping, info, target)
        return target

    def writing_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target = args[0]
        op(target._local_tensor, *args[1:], **kwargs)
        if target._copied_view is not None:
            push_back(wrapping, info, target)
        return target

    return writing_one if alone else writing


def _patched(info: OpInfo, op: Callable[..., Any], wrap: Wrap, patch: Mapping[str, Any]) -> Executor | None:
    """One operand, and arguments that are replaced on this rank."""
    places = {info.names.index(name): value for name, value in patch.items() if name in info.names}
    others = {name: value for name, value in patch.items() if name not in info.names}  # of the local operator alone
    if 0 in places:
        return None
    if info.op is SHARING:
        return _shared_view(info, op, wrap, places[1])
    fixed = not any(name in info.unread for name in info.names[1:])  # then every other argument is in the key
    known: list[tuple[list[Any], dict[str, Any]]] = []

    def replaced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        given, named = list(args[1:]), {**kwargs, **others}
        for index, value in places.items():
            if index <= len(given):
                given[index - 1] = value
            else:
                named[info.names[index]] = value
        if fixed and not kwargs:
            known[:] = [(given, named)]
        return given, named

    def patched(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given, named = known[0] if known and not kwargs else replaced(args, kwargs)
        result = wrap(op(args[0]._local_tensor, *given, **named))
        if info.is_view and args[0]._copied_view is not None:
            mark_views(info, args, kwargs, result)
        return result

    return patched


def _localized(signature: Signature, op: Callable[..., Any], wrap: Wrap, patch: Mapping[str, Any]) -> Executor | None:
    """Several operands, and arguments of the local operator alone. None if others are replaced."""
    info, tensor_class = signature.info, signature.wrapping.tensor_class
    if info.writes or info.is_view or any(name in info.names for name in patch):
        return None

    def localized(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = [a._local_tensor if isinstance(a, tensor_class) else a for a in args]
        return wrap(op(*given, **kwargs, **patch))

    return localized


def _shared_view(info: OpInfo, copy: Callable[..., Any], wrap: Wrap, size: Sequence[int]) -> Executor:
    """`view` to this rank's size; a copied view if the local's strides do not allow one."""

    def shared_view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            result = wrap(SHARING(args[0]._local_tensor, size))
        except NOT_A_VIEW:
            result = wrap(copy(args[0]._local_tensor, size))
            mark_views(info, args, kwargs, result)
            return result
        if args[0]._copied_view is not None:
            mark_views(info, args, kwargs, result)
        return result

    return shared_view


# ---------------------------------------------------------------- lists of operands, nothing to move


def _takes_lists(signature: Signature) -> bool:
    """Whether a call takes lists, returns lists or nothing, and runs once in this process."""
    if not fabric_of(signature.mesh).one_rank or not coordinates_here(signature.mesh):
        return False
    return signature.info.returns in ((), ("List[Tensor]",)) and all(slot.index is not None for slot in signature.slots)


def _lists(signature: Signature, outputs: tuple[DTensorSpec, ...], op: Callable[..., Any]) -> Executor:
    """The same call on lists of locals, as optimizers do for all parameters at once."""
    wrapping = signature.wrapping
    tensor_class, wraps = wrapping.tensor_class, [wrapping.wrapper(spec) for spec in outputs]
    at_items = sorted({slot.index for slot in signature.slots if slot.index is not None and slot.item is not None})
    alone = [slot.index for slot in signature.slots if slot.index is not None and slot.item is None]

    def lists(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        held = list(args)
        for index in at_items:
            held[index] = [t._local_tensor if isinstance(t, tensor_class) else t for t in held[index]]
        for index in alone:
            if isinstance(held[index], tensor_class):
                held[index] = held[index]._local_tensor
        results = op(*held, **kwargs)
        return None if results is None else [wrap(r) for wrap, r in zip(wraps, results, strict=True)]

    return lists


# ---------------------------------------------------------------- operands in front, some of them moved, one result


def _moving(
    signature: Signature,
    routes: tuple[BoundRoute | None, ...],
    outputs: tuple[DTensorSpec, ...],
    op: Callable[..., Any],
) -> Executor | None:
    """A short function for leading operands of which some are moved first. None for other calls."""
    info, slots, mesh = signature.info, signature.slots, signature.mesh
    front = all(slot.item is None and slot.index == i for i, slot in enumerate(slots))
    if not front or info.is_view or info.outs or signature.pinned not in ((), (0,)) or not coordinates_here(mesh):
        return None
    if not fabric_of(mesh).one_rank or any(reduces(route) for route in routes):
        return None
    tensor_class, moves = signature.wrapping.tensor_class, [None if route is None else route.read for route in routes]
    moving = [route.route for route in routes if route is not None and route.communicates]
    wrapping = signature.wrapping
    wrap = None if signature.pinned else wrapping.wrapper(outputs[0])

    def run_moving_operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        given = list(args)
        for i, move in enumerate(moves):
            local = given[i]._local_tensor if isinstance(given[i], tensor_class) else given[i]
            given[i] = local if move is None else move(local)
        result = op(*given, **kwargs)
        if wrap is not None:
            return wrap(result)
        target = args[0]
        if getattr(target, "_copied_view", None) is not None:
            push_back(wrapping, info, target)
        return target

    return run_moving_operands


# ---------------------------------------------------------------- all others


def general_executor(
    signature: Signature,
    routes: tuple[BoundRoute | None, ...],
    outputs: tuple[DTensorSpec, ...] | None,
    *,
    patches: Patches | None = None,
    local_op: Callable[..., Any] | None = None,
    copies: bool = False,
    draws: bool = False,
) -> Executor:
    """Move the operands, run on locals, wrap; `outputs` is None if shapes are known only from the results."""
    info, slots, mesh, wrapping = signature.info, signature.slots, signature.mesh, signature.wrapping
    op, writes = info.op, bool(signature.pinned)
    move_operands, run_local = operand_mover(signature, routes), local_runner(info, slots, patches, mesh, draws)
    wraps = None if outputs is None else [wrapping.wrapper(spec) for spec in outputs]
    moving = [route.route for route in routes if route is not None and route.communicates]

    def run_general(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(op, moving)
        locals_ = move_operands(args, kwargs)
        results = run_local(local_op or op, args, kwargs, locals_)
        if writes:
            return with_written(wrapping, info, args, kwargs, results, wraps, mesh)
        if wraps is None:
            return wrapping.wrap_replicated(info, results, mesh)
        if results is None:
            return None
        if isinstance(results, tuple | list):
            fresh = iter(wraps)
            wrapped = like(results, (next(fresh)(r) if isinstance(r, torch.Tensor) else r for r in results))
        else:
            wrapped = wraps[0](results)
        if copies or (op in MAY_COPY and _was_copied(results, locals_[0])):
            mark_views(info, args, kwargs, wrapped)
        return wrapped

    return run_general


def _was_copied(result: Any, local: Any) -> bool:
    """Whether a view of a local had to be copied because its strides allow no view."""
    pairs = zip(parts_of(result), parts_of(local), strict=True)
    # not by addresses, which a compiler's tensors do not have
    return any(not is_alias_of(a, b) for a, b in pairs)  # pyright: ignore[reportAttributeAccessIssue]


def with_written(
    wrapping: Wrapping,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Any,
    wraps: Sequence[Wrap] | None,
    mesh: DeviceMesh,
) -> Any:
    """The results of an operator that writes: the arguments that it wrote to, and wrapped new results."""
    bound = info.bind(args, kwargs)
    items = results if len(info.returns) > 1 else (results,)
    fresh = iter(wraps or ())

    def new(item: Any) -> Any:
        return next(fresh)(item) if wraps else wrapping.wrap_replicated(info, item, mesh)

    given = tuple(
        bound[name] if name is not None else new(item) for name, item in zip(info.returned, items, strict=False)
    )
    return None if not given else given[0] if len(given) == 1 else given
