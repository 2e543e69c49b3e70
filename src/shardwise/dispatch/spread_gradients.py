"""Gradients that stop being constant along a dim: they get the layout of the tensor whose gradient they become.

A gradient that is constant along a dim is stored once (`broadcast`), and is replicated. An operator whose result is no
longer constant, or autograd at a leaf, would give it the size of the global tensor on every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.broadcast import broadcast_in_views
from shardwise.dispatch.origins import origin_of
from shardwise.dispatch.signature import Executor, Signature
from shardwise.dispatch.views import DETACH
from shardwise.fabric.base import fabric_of
from shardwise.fabric.block_copies import local_step
from shardwise.fabric.routes import bound_route
from shardwise.rules.interpolation_names import INTERPOLATIONS
from shardwise.rules.registry import RULES
from shardwise.rules.view import viewed_freely
from shardwise.torch_private import current_autograd_node

__all__ = ["INTO_LEAVES", "SPREADING", "into_leaf", "spread_as_origin", "spread_regrouped"]

aten = torch.ops.aten


# ---------------------------------------------------------------- operators that end a constant


def _along_one(signature: Signature) -> list[int]:
    return [signature.arguments["dim"] % max(signature.specs[0].ndim, 1)]


def _along_planes(signature: Signature) -> list[int]:
    ndim = signature.specs[0].ndim
    return [ndim - 2, ndim - 1]


def _along_pixels(signature: Signature) -> list[int]:
    return [signature.specs[0].ndim - 3, *_along_planes(signature)]


def _along_images(signature: Signature) -> list[int]:
    return list(range(2, signature.specs[0].ndim))


def _along_pads(signature: Signature) -> list[int]:
    pad, last = signature.arguments["pad"], signature.specs[0].ndim - 1
    return [last - i // 2 for i, count in enumerate(pad) if count]


def _along_all(signature: Signature) -> list[int]:
    return list(range(signature.specs[0].ndim))


# Operators whose result is not constant along some dims although the operands are, and these dims.
SPREADING: dict[Any, Callable[[Signature], list[int]]] = {
    aten.cumsum.default: _along_one,
    aten.cat.default: _along_one,
    aten.slice_scatter.default: _along_one,
    aten.select_scatter.default: _along_one,
    aten.index_put.default: _along_all,
    aten.index_fill.int_Scalar: _along_all,
    aten.index_fill.int_Tensor: _along_all,
    aten.scatter.value: _along_all,
    aten.unfold_backward.default: lambda signature: [signature.arguments["dim"]],
    aten.tril.default: _along_planes,
    aten.triu.default: _along_planes,
    aten.pixel_shuffle.default: _along_pixels,
    aten.pixel_unshuffle.default: _along_pixels,
    aten.constant_pad_nd.default: _along_pads,
    aten.channel_shuffle.default: lambda signature: [1],
    **{getattr(aten, f"{name}_backward").default: _along_images for name in INTERPOLATIONS},
}
JOINED = {aten.cat.default, aten.slice_scatter.default}  # for these all operands get the layout, else the first one
SMALL = 4  # a tensor is small if the local part of the other is this many times larger


@functools.cache
def _gathering_nodes() -> frozenset[str]:
    """Autograd nodes that gather a dim, by their rules."""
    return frozenset(rule.gathering_node for rule in RULES.values() if rule.gathering_node)


def _laid_out_as(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout of another tensor on its first dims; further dims are not sharded."""
    axes = (*spec.dim_axes, *((),) * (len(meta.shape) - spec.ndim))
    return DTensorSpec.from_dim_axes(spec.mesh, spec.placements, meta, axes)


def spread_as_origin(signature: Signature, run: Executor) -> Executor:
    """`run`, with the gradient of a sharded tensor sharded like that tensor, instead of computed from constants.

    The gradient of `x.cumsum(0).mean()` is the scan of a constant, that of `x.chunk(2)` concatenates two. On every rank
    it would have the global size of the dim. Small ones are left so, because then nothing is moved.
    """
    info, specs, wrapping = signature.info, signature.specs, signature.wrapping
    if not any(spec.broadcast for spec in specs):
        return run
    spec, dims = specs[0], SPREADING[info.op](signature)
    laid_out = len(specs) if info.op in JOINED else 1
    if any(not s.is_replicated or s.tensor_meta.is_symbolic for s in specs):
        return run
    if any(s.ndim != spec.ndim for s in specs[:laid_out]) or not any(dim in spec.broadcast for dim in dims):
        return run
    once = set(spec.broadcast).intersection(*(s.broadcast for s in specs[1:laid_out])).difference(dims)

    def run_or_spread(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = origin_of(wrapping.tensor_class)
        if origin is None or origin.mesh is not spec.mesh or origin.ndim > spec.ndim or origin.is_strided:
            return run(args, kwargs)
        if type(current_autograd_node()).__name__ in _gathering_nodes():
            return run(args, kwargs)
        stored = math.prod([size for dim, size in enumerate(origin.shape) if dim not in once])
        is_split = any(origin.dim_axes[dim] for dim in dims if dim < origin.ndim)
        if not is_split or SMALL * stored <= math.prod(origin.largest_local_shape):
            return run(args, kwargs)
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, given in list(zip(signature.slots, specs, strict=True))[:laid_out]:
            goal = _laid_out_as(origin.reduced(), given.tensor_meta)
            local = bound_route(given, goal).run(slot.get(args, kwargs)._local_tensor)
            slot.put(new_args, new_kwargs, wrapping.wrapper(goal)(local))
        return info.op(*new_args, **new_kwargs)

    return run_or_spread


def spread_regrouped(signature: Signature, run: Executor) -> Executor:
    """`run`, a view of a gradient that merges a broadcast dim with others: each rank copies only the part it needs.

    The gradient of attention is constant along the batch but not along the heads; the view merges both. The copy is
    sharded like the tensor whose gradient it becomes.
    """
    info, spec, wrapping = signature.info, signature.specs[0], signature.wrapping
    if not spec.broadcast or not spec.is_replicated or spec.tensor_meta.is_symbolic or 0 in spec.shape:
        return run
    if broadcast_in_views(signature, spec) is not None:
        return run

    def run_or_spread_view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = origin_of(wrapping.tensor_class)
        if (
            origin is None
            or origin.mesh is not spec.mesh
            or origin.is_strided
            or math.prod(origin.shape) != math.prod(spec.shape)
        ):
            return run(args, kwargs)
        goal = viewed_freely(origin.reduced(), spec.tensor_meta)
        if goal is None or not any(goal.dim_axes):
            return run(args, kwargs)
        kept = [dim for dim in spec.broadcast if not goal.dim_axes[dim]]
        goal = DTensorSpec.from_dim_axes(goal.mesh, goal.placements, spec.tensor_meta, goal.dim_axes, kept)
        local = bound_route(spec, goal).run(args[0]._local_tensor)
        return info.op(wrapping.wrapper(goal)(local), *args[1:], **kwargs)

    return run_or_spread_view


# ---------------------------------------------------------------- gradients on their way into `.grad`


INTO_LEAVES = {DETACH, aten.new_empty_strided.default}
WRITES_TO_VIEWS = "CopySlices"  # autograd's node of a tensor after a write to one of its views


def into_leaf(signature: Signature, run: Executor) -> Executor:
    """`run`, with a gradient that autograd stores in the `.grad` of a leaf in the layout of the leaf.

    Only if that needs no communication: a sum over ranks stays `Partial`, so that several backward passes are reduced
    once. Autograd detaches a gradient without other references; otherwise it makes an empty tensor and copies. It does
    the same for the gradient of a tensor after a write to one of its views: that gradient gets the layout of the
    tensor.
    """
    tensor_class, spec = signature.wrapping.tensor_class, signature.specs[0]
    if not spec.broadcast:
        return run
    known: dict[DTensorSpec, Executor] = {}  # by the layout of the leaf

    def run_or_lay_out(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        node: Any = current_autograd_node()
        leaf: Any = getattr(node, "variable", None)
        if isinstance(leaf, tensor_class):
            target = leaf._spec
        elif type(node).__name__ == WRITES_TO_VIEWS:
            target = origin_of(tensor_class)
        else:  # not one of these cases
            target = None
        if target is None:
            return run(args, kwargs)
        found = known.get(target)
        if found is None:
            here = target.mesh is spec.mesh and target.shape == spec.shape
            found = known[target] = (_as_leaf(signature, target) if here else None) or run
        return found(args, kwargs)

    return run_or_lay_out


def _as_leaf(signature: Signature, leaf: DTensorSpec) -> Executor | None:
    """Detach a gradient, or make an empty one, in the layout of a leaf; None if that would communicate."""
    spec, mesh = signature.specs[0], leaf.mesh
    target = leaf.reduced().materialized().with_dtype(spec.tensor_meta.dtype)
    route = bound_route(spec, target)
    if route.communicates:
        return None
    wrap, fabric = signature.wrapping.wrapper(target), fabric_of(mesh)
    here = fabric.coordinates(mesh)
    is_alone = len(here) == 1 and fabric_of(mesh).one_rank
    if signature.info.op is DETACH:
        steps = route.route.steps
        move = (local_step(steps[0], here[0]) if is_alone and len(steps) == 1 else None) or route.run
        return lambda args, kwargs: wrap(move(args[0]._local_tensor))
    blocks = {at: (target.local_shape(at), target.local_stride(at)) for at in here}
    if is_alone:
        ((shape, stride),) = blocks.values()
        return lambda args, kwargs: wrap(args[0]._local_tensor.new_empty_strided(shape, stride))

    def empty(at: Any, part: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(*blocks[at], dtype=part.dtype, device=part.device)

    return lambda args, kwargs: wrap(fabric.map(mesh, empty, args[0]._local_tensor))
