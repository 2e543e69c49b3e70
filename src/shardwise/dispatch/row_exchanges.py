"""Operators that change the indices of a sharded dim and keep it sharded: ranks exchange the rows that they lack.

The exchange replaces the operator. Along other dims the operator runs on the locals before it. An operator whose
windows slide over a sharded dim runs on locals with halos.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.operands import operand_mover
from shardwise.dispatch.signature import Executor, Signature, routes_between
from shardwise.dispatch.views import mark_views
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_rows
from shardwise.local import any_complex, coordinates_here, like, local_runner, seeing_conjugates
from shardwise.plan.halo import HaloExchange
from shardwise.plan.propagate import OutputSharding
from shardwise.plan.step import RowExchange
from shardwise.schema import OpInfo

__all__ = ["exchanging_halos", "exchanging_rows"]

OnLocal = Callable[[torch.Tensor, Any], torch.Tensor]  # of a local and the fill value


def exchanging_rows(signature: Signature, sharding: OutputSharding, exchange: RowExchange) -> Executor:
    """The executor of a call by a row exchange."""
    info = signature.info
    assert sharding.rule.rows is not None
    rows = sharding.rule.rows(sharding.call, exchange.dim)
    fill_name = rows.fill
    routes = routes_between(signature.specs, sharding.inputs)
    route, exchanged = bound_rows(exchange)
    move_operands = operand_mover(signature, routes)
    moving = [r.route for r in routes if r is not None and r.communicates] + ([route] if route.collectives else [])
    wraps = [signature.wrapping.wrapper(spec) for spec in sharding.outputs]
    dtype, several = exchange.after.tensor_meta.dtype, info.returns != ("Tensor",)
    before = None if rows.first is None else _mapped(signature, rows.first)
    taken = {segment.operand for segment in rows.segments}  # others are read for their sizes

    def exchange_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        fill = 0 if fill_name is None else info.bind(args, kwargs)[fill_name]
        locals_ = [local if local.dtype is dtype else local.to(dtype) for local in move_operands(args, kwargs)]
        if before is not None:
            locals_ = [before(local, fill) if i in taken else local for i, local in enumerate(locals_)]
        results = [wrap(made) for wrap, made in zip(wraps, exchanged(locals_, fill), strict=True)]
        wrapped = results if several else results[0]
        if info.is_view:
            mark_views(info, args, kwargs, wrapped)
        return wrapped

    return exchange_rows


def exchanging_halos(
    signature: Signature, sharding: OutputSharding, exchange: HaloExchange, local_op: Callable[..., Any]
) -> Executor:
    """The executor of a call whose windows slide over sharded dims: halos, the operator on locals, sums of windows."""
    info, mesh, halo = signature.info, signature.mesh, exchange.halo
    routes = routes_between(signature.specs, sharding.inputs)
    move_operands, fabric = operand_mover(signature, routes), fabric_of(mesh)
    before, after = ([[bound_rows(step) for step in steps] for steps in s] for s in (exchange.before, exchange.after))
    exchanges = [route for steps in (*before, *after) for route, _ in steps if route.collectives]
    moving = [r.route for r in routes if r is not None and r.communicates] + exchanges
    wraps = [signature.wrapping.wrapper(spec) for spec in sharding.outputs]
    run_local = local_runner(info, signature.slots, _patches(sharding, exchange, mesh), mesh, draws=False)
    on_rows = _sparing_no_rows(info, local_op, sharding.outputs)

    def finished(i: int, made: torch.Tensor, own: Sequence[torch.Tensor]) -> Any:
        for _, step in after[i]:
            (made,) = step([made], 0)
        if i in halo.last:
            made = fabric.map(mesh, lambda _, *locals_: halo.last[i](*locals_), made, *own)
        return wraps[i](made)

    def exchange_halos(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        own = move_operands(args, kwargs)
        locals_ = list(own)
        for i, steps in enumerate(before):
            for _, step in steps:
                (locals_[i],) = step([locals_[i]], halo.fill)
        results = run_local(on_rows, args, kwargs, locals_)
        if not isinstance(results, tuple | list):
            made = finished(0, results, own)
            if info.is_view:
                mark_views(info, args, kwargs, made)
            return made
        at = itertools.count()
        return like(results, (finished(next(at), r, own) if isinstance(r, torch.Tensor) else r for r in results))

    return exchange_halos


def _patches(sharding: OutputSharding, exchange: HaloExchange, mesh: DeviceMesh) -> dict[Coordinate, dict[str, Any]]:
    """For each rank here: the arguments that the rule replaces, whether it has rows, and its empty result."""
    localize, mask = sharding.rule.localize, sharding.call.get("output_mask")
    found: dict[Coordinate, dict[str, Any]] = {}
    for coordinate in coordinates_here(mesh):
        given = {} if localize is None else localize(sharding.call, sharding.inputs, sharding.outputs, coordinate)
        places, nothing = exchange.places(coordinate), None
        if not all(place.length for place in places.values()):
            made = (spec.local_shape(coordinate) for spec in exchange.made(sharding.outputs))
            nothing = [next(made) if asked else None for asked in mask or [True] * len(sharding.outputs)]
        found[coordinate] = {**given, "places": places, "nothing": nothing}
    return found


def _sparing_no_rows(info: OpInfo, local_op: Callable[..., Any], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """`local_op` on all arguments in order. A rank without rows does not call it, and returns zeros."""
    dtypes = [spec.tensor_meta.dtype for spec in outputs]

    def skip_empty_windows(
        *args: Any, places: Any, nothing: Sequence[tuple[int, ...] | None] | None, **kwargs: Any
    ) -> Any:
        if nothing is None:
            bound = info.bind(args, kwargs)
            return local_op(*[bound[name] for name in info.names], places=places)
        left = iter(dtypes)
        made = [None if shape is None else args[0].new_zeros(shape, dtype=next(left)) for shape in nothing]
        return tuple(made) if len(made) > 1 else made[0]

    return skip_empty_windows


def _mapped(signature: Signature, first: OnLocal) -> OnLocal:
    """The function that runs on the local of every rank here."""
    mesh, fabric, op = signature.mesh, fabric_of(signature.mesh), signature.info.op
    fn = seeing_conjugates(first) if any_complex(signature.specs) else first
    return lambda local, fill: fabric.map_operator(mesh, op, lambda part: fn(part, fill), local)
