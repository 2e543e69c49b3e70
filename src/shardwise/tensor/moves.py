"""Moving a DTensor to another layout, without derivatives."""

from __future__ import annotations

from typing import Any

import torch

from shardwise import modes
from shardwise.compilers import refuse_named
from shardwise.core.spec import DTensorSpec, known_dense
from shardwise.core.tracing import is_tracing
from shardwise.events import tensor_moved
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.local import in_order_of, laid_out_like
from shardwise.tensor.laid_out import dtensor_of
from shardwise.tensor.tensor_states import pending
from shardwise.torch_private import dispatch_mode_count

__all__ = ["cast", "moved_to", "redistributed"]


def moved_to(tensor: Any, target: DTensorSpec, async_op: bool, max_bytes: int | None) -> Any:
    """`tensor` redistributed to `target`, converted to its dtype first. Without gradients."""
    source = tensor._spec
    if source.tensor_meta is not target.tensor_meta:
        tensor = cast(tensor, target.tensor_meta.dtype)
        source = tensor._spec
        target = target.with_meta(source.tensor_meta)
    if source is target:
        return tensor
    bound = bound_route(source, target, max_bytes)
    if bound.communicates:
        modes.check_decomposing(bound.route)
    if dispatch_mode_count() and is_tracing():
        refuse_named(tensor, source)
    meta = source.tensor_meta
    meta = meta.dense() if meta.is_symbolic else known_dense(meta)
    if meta is not target.tensor_meta:  # a view with gaps or overlaps: the result is a tensor of its own
        made = dtensor_of(target.with_meta(meta), laid_out_like(bound.run(tensor._local_tensor), meta.stride))
    elif (
        async_op
        and bound.communicates
        and fabric_of(source.mesh).asynchronous
        and not tensor_moved
        and not is_tracing()
    ):
        return pending(tensor._local_tensor, bound, target)
    else:
        local = bound.run(tensor._local_tensor)
        made = dtensor_of(target, in_order_of(local, meta.stride) if bound.reorder else local)
    if tensor_moved:
        tensor_moved.notify(tensor, made)
    return made


def cast(tensor: Any, dtype: torch.dtype) -> Any:
    """`tensor.to(dtype)`, which is a DTensor."""
    return tensor.to(dtype)


def redistributed(tensor: Any, target: DTensorSpec) -> Any:
    """`tensor` in the layout `target`, whatever its own; its dtype is kept."""
    if tensor._spec.tensor_meta is not target.tensor_meta:
        target = target.with_meta(tensor._spec.tensor_meta)
    return moved_to(tensor, target, False, None)
