"""Random operators: every rank gets its own part of what one device would have drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise import modes
from shardwise.core.spec import TensorMeta
from shardwise.dispatch.signature import Executor, Signature, routes_between
from shardwise.errors import LayoutError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.plan.propagate import replicated_spec

__all__ = ["drawing"]


def drawing(signature: Signature, metas: tuple[TensorMeta, ...]) -> Executor:
    """A random operator: every rank draws the whole tensor, as one device would, and keeps its own part."""
    info, slots, specs, mesh, wrapping = (
        signature.info, signature.slots, signature.specs, signature.mesh, signature.wrapping,
    )  # fmt: skip
    if specs[0].partial_axes and _draws_alone(info.op) and not info.op._schema.name.endswith("_like"):
        raise LayoutError(
            f"{info.op} cannot draw into {specs[0]}: random numbers do not add up to random numbers",
            hint="redistribute it to Replicate() or Shard() first",
        )
    wholes = [replicated_spec(mesh, meta) for meta in metas]
    routes = routes_between(specs, signature.with_whole_operands())
    moving = [] if _draws_alone(info.op) else [r.route for r in routes if r is not None and r.communicates]
    keeps = [
        bound_route(spec, specs[0].with_meta(spec.tensor_meta))
        if spec.shape == specs[0].shape and not specs[0].partial_axes and not specs[0].is_replicated
        else None
        for spec in wholes
    ]
    wraps = [
        wrapping.wrapper(whole if keep is None else keep.route.target)
        for whole, keep in zip(wholes, keeps, strict=True)
    ]

    def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, spec, route in zip(slots, specs, routes, strict=True):
            local = wrapping.local_of(slot.get(args, kwargs), mesh)
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


def _draws_alone(op: OpOverload) -> bool:
    """Whether a random operator looks only at the shape of its operands, not at their values."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_functional")
    alone = {"uniform", "normal", "exponential", "log_normal", "cauchy", "geometric", "random"}
    if name == "bernoulli":
        return op._overloadname == "p"
    return (name in alone and op._overloadname in ("default", "from", "to", "")) or name.endswith("_like")
