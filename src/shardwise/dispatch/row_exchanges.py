"""Operators that change the indices of a sharded dim and keep it sharded: ranks exchange the rows that they lack.

The exchange takes the place of the operator. Along other dims the operator runs on the locals before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise import modes
from shardwise.dispatch.operands import bringing
from shardwise.dispatch.signature import Executor, Signature, routes_between
from shardwise.dispatch.views import mark_views
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_rows
from shardwise.local import any_complex, seeing_conjugates
from shardwise.plan.propagate import OutputSharding
from shardwise.plan.step import RowExchange

__all__ = ["exchanging_rows"]

OnLocal = Callable[[torch.Tensor, Any], torch.Tensor]  # of a local and the fill value


def exchanging_rows(signature: Signature, sharding: OutputSharding, exchange: RowExchange) -> Executor:
    """What runs a call by a row exchange."""
    info = signature.info
    assert sharding.rule.rows is not None
    rows = sharding.rule.rows(sharding.call, exchange.dim)
    fill_name = rows.fill
    routes = routes_between(signature.specs, sharding.inputs)
    route, exchanged = bound_rows(exchange)
    bring = bringing(signature, routes)
    moving = [r.route for r in routes if r is not None and r.communicates] + ([route] if route.collectives else [])
    wraps = [signature.wrapping.wrapper(spec) for spec in sharding.outputs]
    dtype, several = exchange.after.tensor_meta.dtype, info.returns != ("Tensor",)
    before = None if rows.first is None else _mapped(signature, rows.first)

    def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        fill = 0 if fill_name is None else info.bind(args, kwargs)[fill_name]
        locals_ = [local if local.dtype is dtype else local.to(dtype) for local in bring(args, kwargs)]
        if before is not None:
            locals_ = [before(local, fill) for local in locals_]
        results = [wrap(made) for wrap, made in zip(wraps, exchanged(locals_, fill), strict=True)]
        wrapped = results if several else results[0]
        if info.is_view:
            mark_views(info, args, kwargs, wrapped)
        return wrapped

    return run


def _mapped(signature: Signature, first: OnLocal) -> OnLocal:
    """What runs on the local of every rank here."""
    mesh, fabric = signature.mesh, fabric_of(signature.mesh)
    op = seeing_conjugates(first) if any_complex(signature.specs) else first
    return lambda local, fill: fabric.map(mesh, lambda _, part: op(part, fill), local)
