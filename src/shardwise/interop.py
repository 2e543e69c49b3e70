"""To and from torch.distributed.tensor: `from_torch` and `to_torch`, sharing the local tensor.

The only module that uses torch's DTensor; it is imported on first use. Forward conversions communicate nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard, StridedShard, as_placement, norm_order
from shardwise.core.spec import DTensorSpec, ShardOrderEntry, TensorMeta, default_shard_order
from shardwise.dispatch.views import materialize
from shardwise.errors import LayoutError, PlainTensorError
from shardwise.fabric.world import as_mesh, to_torch_mesh
from shardwise.tensor import DTensor, apply_function, dtensor_of, gradient_spec, moved, wants_derivatives

__all__ = ["from_torch", "to_torch"]


def from_torch(tensor: torch.Tensor) -> DTensor:
    """Convert a `torch.distributed.tensor.DTensor` to a DTensor over the same local tensor. Moves and copies nothing.

    Its mesh is adopted with its process groups. A `_StridedShard` by which torch encodes the order of axes of a dim
    becomes the shard order. Gradients go back as torch's DTensor, in the layout of `tensor` (Partial as Replicate).

    Args:
        tensor: a DTensor of torch.

    Example:
        >>> from_torch(torch.ones(2))
        Traceback (most recent call last):
        ...
        shardwise.errors.PlainTensorError: from_torch needs a torch.distributed.tensor.DTensor, got a Tensor
          hint: for a plain tensor use distribute_tensor(...) or DTensor.from_local(...)
    """
    theirs: Any = tensor
    if not isinstance(theirs, _torch_tensor().DTensor):
        raise PlainTensorError(
            f"from_torch needs a torch.distributed.tensor.DTensor, got a {type(tensor).__name__}",
            hint="for a plain tensor use distribute_tensor(...) or DTensor.from_local(...)",
        )
    spec = _our_spec(theirs)
    if wants_derivatives(theirs):
        return apply_function(_FromTorch, theirs, spec, theirs.device_mesh)
    return dtensor_of(spec, _local_of(theirs))


def to_torch(tensor: DTensor) -> torch.Tensor:
    """Convert a DTensor to a `torch.distributed.tensor.DTensor` over the same local tensor. Moves and copies nothing.

    Needs a mesh of processes. A shard order that is not that of the mesh becomes torch's `_StridedShard`, a
    `MaskPartial` its `Partial("sum")`. Gradients come back as our DTensor, in the layout of `tensor` (Partial as
    Replicate).

    Args:
        tensor: a DTensor on a mesh of processes.

    Example:
        >>> import shardwise as sw
        >>> to_torch(sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,))))
        Traceback (most recent call last):
        ...
        shardwise.errors.MeshError: DeviceMesh(cpu 2, virtual) has no torch counterpart: it is of the virtual fabric
          hint: torch meshes need a process group: start the program with torchrun
    """
    if not isinstance(tensor, DTensor):
        raise PlainTensorError(
            f"to_torch needs a shardwise.DTensor, got a {type(tensor).__name__}",
            hint="for a plain tensor use torch.distributed.tensor.distribute_tensor(...)",
        )
    mesh = to_torch_mesh(tensor._spec.mesh)
    if tensor._spec.is_lazy:  # torch may write to the result
        materialize(tensor)
    return _to_their_mesh(tensor, mesh)


# ---------------------------------------------------------------- gradients


class _FromTorch(torch.autograd.Function):
    """A DTensor of torch's as ours. The value is the same, and so gradients and tangents only change their class."""

    @staticmethod
    def forward(theirs: torch.Tensor, spec: DTensorSpec, mesh: Any) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dtensor_of(spec, _local_of(theirs).detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.spec, ctx.mesh = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        return _to_their_mesh(moved(grad, gradient_spec(ctx.spec)), ctx.mesh), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return from_torch(tangent)


class _ToTorch(torch.autograd.Function):
    """A DTensor of ours as one of torch's."""

    @staticmethod
    def forward(tensor: DTensor, spec: DTensorSpec, mesh: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _their_tensor(tensor._local_tensor.detach(), spec, mesh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.spec, ctx.mesh = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        return moved(from_torch(grad), gradient_spec(ctx.spec)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: DTensor, *_: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_their_mesh(tangent, ctx.mesh)


def _to_their_mesh(tensor: DTensor, mesh: Any) -> torch.Tensor:
    if wants_derivatives(tensor):
        return apply_function(_ToTorch, tensor, tensor._spec, mesh)
    return _their_tensor(tensor._local_tensor, tensor._spec, mesh)


# ---------------------------------------------------------------- torch's side

_HOW = "use_strided_shard_as_shard_order"  # whether strided shards of torch's spec encode an order of axes


def _torch_tensor() -> Any:
    import torch.distributed.tensor as theirs

    return theirs


def _local_of(theirs: Any) -> torch.Tensor:
    local = theirs._local_tensor
    # collectives that torch left in flight must have finished
    return local.wait() if hasattr(local, "wait") else local


def _their_tensor(local: torch.Tensor, spec: DTensorSpec, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as TheirSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TheirMeta

    meta = spec.tensor_meta
    options: dict[str, Any] = {"tensor_meta": TheirMeta(meta.shape, meta.stride, meta.dtype)}
    if any(isinstance(p, StridedShard) for p in spec.placements) and _HOW in TheirSpec.__dataclass_fields__:
        options[_HOW] = False  # our strided shards encode no shard order
    theirs = TheirSpec(mesh, _their_placements(spec), **options)
    return _torch_tensor().DTensor(local, theirs, requires_grad=False)


# ---------------------------------------------------------------- layouts from torch


def _our_spec(tensor: Any) -> DTensorSpec:
    theirs = tensor._spec
    mesh = as_mesh(theirs.mesh)
    shape, stride = theirs.tensor_meta.shape, theirs.tensor_meta.stride
    local = tensor._local_tensor.stride()
    if 0 in stride and 0 not in local and len(local) == len(shape):
        stride = dense_strides(shape, like=local)  # it was expanded, and then redistributed
    meta = TensorMeta(shape, stride, theirs.tensor_meta.dtype)
    placements = tuple(as_placement(p) for p in theirs.placements)
    if getattr(theirs, _HOW, True):
        return _ordered(mesh, placements, meta)
    given = getattr(theirs, "shard_order", None)
    order = None if given is None else [(entry.tensor_dim, entry.mesh_dims) for entry in given]
    return DTensorSpec(mesh, placements, meta, order)


def _ordered(mesh: DeviceMesh, placements: Sequence[Placement], meta: TensorMeta) -> DTensorSpec:
    """The spec with strided shards that encode an order of axes replaced by that order."""
    strided = DTensorSpec(mesh, placements, meta)
    order = [entry for entry in map(strided_order, itertools.repeat(strided), range(strided.ndim)) if entry is not None]
    if not order:
        return strided
    reordered = {entry.dim for entry in order}
    plain = [Shard(p.dim) if isinstance(p, StridedShard) and p.dim in reordered else p for p in strided.placements]
    spec = DTensorSpec(mesh, plain, meta, order)
    if not same_blocks(spec, strided):
        raise LayoutError(
            f"torch's placements {list(strided.placements)} of {meta} over {mesh} are ambiguous: its "
            "distribute_tensor and its redistribute split this uneven dim differently",
            hint="redistribute the torch tensor to Shard() and Replicate() first, or use sizes that divide evenly",
        )
    return spec


def strided_order(spec: DTensorSpec, dim: int) -> ShardOrderEntry | None:
    """The order of axes that the strided shards of a dim encode, None if they encode none.

    An axis is strided by the sizes of those axes that come after it in the mesh but split the dim before it.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], fabric="virtual")
        >>> strided_order(DTensorSpec(mesh, [StridedShard(0, 2), Shard(0)], TensorMeta((8,))), 0)
        ShardOrderEntry(dim=0, axes=(1, 0))
    """
    order: list[int] = []
    if not any(spec.rows(axis) for axis in spec.dim_axes[dim]):
        return None
    for axis in sorted(spec.dim_axes[dim], reverse=True):
        before = itertools.accumulate((spec.mesh.shape[a] for a in order), initial=1, func=lambda n, size: n * size)
        place = next((i for i, count in enumerate(before) if count == (spec.rows(axis) or 1)), None)
        if place is None:
            return None
        order.insert(place, axis)
    return ShardOrderEntry(dim, tuple(order))


# ---------------------------------------------------------------- layouts to torch


def _their_placements(spec: DTensorSpec) -> tuple[Any, ...]:
    if spec.shard_order == default_shard_order(spec.placements):
        return tuple(map(_their_placement, spec.placements))
    strided = _without_order(spec)
    if strided is None or not same_blocks(spec, strided):
        raise LayoutError(
            f"torch cannot express {spec} over {spec.mesh}: it encodes an order of axes as strided shards, which are "
            "ambiguous " + ("beside other strided shards" if strided is None else "if sizes do not divide evenly"),
            hint="redistribute to a layout with the default shard order first",
        )
    return tuple(map(_their_placement, strided.placements))


@lru_cache(maxsize=1024)
def _without_order(spec: DTensorSpec) -> DTensorSpec | None:
    """The spec in the order of the mesh whose strided shards encode the order of `spec`."""
    placements = list(spec.placements)
    for dim, axes in spec.shard_order:
        for at, axis in enumerate(axes):
            if not isinstance(placements[axis], Shard):
                return None
            rows = math.prod(spec.mesh.shape[a] for a in axes[:at] if a > axis)
            placements[axis] = Shard(dim) if rows == 1 else StridedShard(dim, rows)
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta)


def _their_placement(placement: Placement) -> Any:
    theirs = _torch_tensor()
    match placement:
        case Shard(dim=dim):
            return theirs.Shard(dim)
        case Replicate():
            return theirs.Replicate()
        case Partial(reduce_op=op) if norm_order(op) is None:  # a mask-partial is a sum
            return theirs.Partial(op)
        case StridedShard(dim=dim, split_factor=rows):
            from torch.distributed.tensor.placement_types import _StridedShard

            return _StridedShard(dim, split_factor=rows)
        case _:
            raise LayoutError(f"torch has no placement like {placement!r}", hint="redistribute the tensor first")


@lru_cache(maxsize=1024)
def same_blocks(a: DTensorSpec, b: DTensorSpec) -> bool:
    """Whether every rank has the same indices of every dim in two layouts on one mesh.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], fabric="virtual")
        >>> spec = DTensorSpec(mesh, [Shard(0), Shard(0)], TensorMeta((8,)))
        >>> same_blocks(spec, DTensorSpec(mesh, [Shard(0), Shard(0)], TensorMeta((8,)), [(0, (1, 0))]))
        False
    """
    for dim, (ours, others) in enumerate(zip(a.dim_axes, b.dim_axes, strict=True)):
        axes = sorted({*ours, *others})
        for chosen in itertools.product(*(range(a.mesh.shape[axis]) for axis in axes)):
            coordinate = [0] * a.mesh.ndim
            for axis, index in zip(axes, chosen, strict=True):
                coordinate[axis] = index
            mine, other = a.block(coordinate), b.block(coordinate)
            if mine.shape[dim] != other.shape[dim] or (mine.shape[dim] and mine.runs[dim] != other.runs[dim]):
                return False
    return True


# Methods that users expect on the class. It is below this layer and cannot import it.
DTensor.from_torch = staticmethod(from_torch)  # pyright: ignore[reportAttributeAccessIssue]
DTensor.to_torch = to_torch  # pyright: ignore[reportAttributeAccessIssue]
