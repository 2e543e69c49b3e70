"""torch.func: the tensors that wrap others inside a transformed function, and their visible layout.

Inside `grad`, `jvp` and `vmap` a function gets wrappers of the class torch.Tensor, one for each level of transforms
around a value. The dims that `vmap` maps over are not visible on a wrapper: a mesh axis that shards one of them is
visible as Replicate. This module handles specs, not DTensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.placement import AnyShard, Placement, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.tracing import is_dynamo_compiling
from shardwise.errors import UnsupportedError
from shardwise.torch_private import functorch, temporarily_clear_interpreter_stack, transforms_active

__all__ = [
    "alive",
    "innermost",
    "inside_transform",
    "is_wrapped",
    "outside_transforms",
    "refuse_functionalize",
    "transforming",
    "visible_dims",
    "visible_spec",
    "with_batch_dim",
    "without_derivatives",
]

is_wrapped = functorch.is_functorch_wrapped_tensor
transforming = transforms_active


def alive(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the levels of transforms that have ended."""
    while is_wrapped(tensor) and (inner := functorch.unwrap_if_dead(tensor)) is not tensor:
        tensor = inner
    return tensor


def innermost(tensor: Any) -> Any:
    """The tensor below all wrappers of transforms; the tensor itself if nothing is transformed.

    Example:
        >>> seen = []
        >>> y = torch.func.grad(lambda x: (seen.append(type(innermost(x))), x.sum())[1])(
        ...     torch.nn.Parameter(torch.ones(2))
        ... )
        >>> seen
        [<class 'torch.nn.parameter.Parameter'>]
    """
    if is_dynamo_compiling():  # it does not show wrapped tensors
        return tensor
    while isinstance(tensor, torch.Tensor) and is_wrapped(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def visible_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dims of the innermost tensor that are visible on a wrapper: all except those that vmap maps over."""
    batched: list[int] = []
    while is_wrapped(tensor):
        if (dim := functorch.maybe_get_bdim(tensor)) >= 0:
            batched.append(dim)
        tensor = functorch.get_unwrapped(tensor)
    dims = list(range(tensor.dim()))
    for dim in reversed(batched):  # from the inside
        del dims[dim]
    return tuple(dims)


def visible_spec(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """The visible layout of a tensor with only these dims: Replicate on axes that shard another dim.

    Example:
        >>> from shardwise.core.mesh import DeviceMesh
        >>> from shardwise.core.placement import Shard
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> visible_spec(DTensorSpec(mesh, [Shard(0), Shard(2)], TensorMeta((8, 4, 6))), (1, 2))
        f32[4,6] dp:R tp:S1
    """
    if len(dims) == spec.ndim:
        return spec
    meta = spec.tensor_meta
    place = {dim: position for position, dim in enumerate(dims)}
    placements = tuple(
        Replicate() if isinstance(p, AnyShard) and p.dim not in place else _on_dim(p, place) for p in spec.placements
    )
    seen = TensorMeta([meta.shape[d] for d in dims], [meta.stride[d] for d in dims], meta.dtype)
    return DTensorSpec.from_dim_axes(spec.mesh, placements, seen, [spec.dim_axes[dim] for dim in dims])


def with_batch_dim(spec: DTensorSpec, dim: int, meta: TensorMeta, like: DTensorSpec | None = None) -> DTensorSpec:
    """The layout with one more dim, sharded over those axes that shard it in `like` and are replicated in `spec`.

    Example:
        >>> from shardwise.core.mesh import DeviceMesh
        >>> from shardwise.core.placement import Shard
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mapped = DTensorSpec(mesh, [Shard(0), Shard(2)], TensorMeta((8, 4, 6)))
        >>> one = DTensorSpec(mesh, [Replicate(), Shard(1)], TensorMeta((4, 6)))
        >>> with_batch_dim(one, 0, mapped.tensor_meta, mapped)
        f32[8,4,6] dp:S0 tp:S2
    """
    place = {old: old + (old >= dim) for old in range(spec.ndim)}
    placements = [_on_dim(p, place) for p in spec.placements]
    kept: tuple[int, ...] = ()
    if like is not None and like.mesh is spec.mesh:
        kept = tuple(axis for axis in like.dim_axes[dim] if isinstance(spec.placements[axis], Replicate))
        for axis in kept:
            placements[axis] = like.placements[axis]
    dim_axes = [*spec.dim_axes[:dim], kept, *spec.dim_axes[dim:]]
    return DTensorSpec.from_dim_axes(spec.mesh, tuple(placements), meta, dim_axes)


def _on_dim(placement: Placement, place: dict[int, int]) -> Placement:
    """The placement of a tensor whose dims have moved."""
    return placement.on_dim(place[placement.dim]) if isinstance(placement, AnyShard) else placement


def without_derivatives(tensor: torch.Tensor) -> torch.Tensor:
    """The innermost tensor, if no level maps it or differentiates with respect to it; else the tensor itself.

    Inside `grad`, tensors that a function makes are wrapped too.
    """
    if any(level.key() == functorch.TransformType.Jvp for level in functorch.get_interpreter_stack() or ()):
        return tensor
    inner = tensor
    while is_wrapped(inner):
        if functorch.is_batchedtensor(inner) or inner.requires_grad:
            return tensor
        inner = functorch.get_unwrapped(inner)
    return inner


@contextlib.contextmanager
def outside_transforms(what: str, *, draws: bool = False) -> Iterator[None]:
    """A context to make constants inside a transformed function: transforms do not see its operators.

    Args:
        what: the name of the function, for errors.
        draws: whether it draws random numbers, which vmap must know.
    """
    if not transforming():
        yield
        return
    refuse_functionalize(what)
    if draws and _drawn_otherwise():
        raise UnsupportedError(
            f"{what} inside torch.func.vmap draws one tensor for all samples",
            hint="call vmap(..., randomness='same'), or draw outside and pass the tensor as an argument",
        )
    with temporarily_clear_interpreter_stack():
        yield


def _drawn_otherwise() -> bool:
    """Whether an enclosing vmap wants different random numbers for each sample, or refuses random numbers."""
    kinds, wanted = functorch.TransformType, functorch.RandomnessType.Same
    return any(
        level.key() == kinds.Vmap and functorch.CVmapInterpreterPtr(level).randomness() != wanted
        for level in functorch.get_interpreter_stack() or ()
    )


def refuse_functionalize(what: str) -> None:
    """Raise inside torch.func.functionalize, which does not support our functions."""
    if any(level.key() == functorch.TransformType.Functionalize for level in functorch.get_interpreter_stack() or ()):
        raise inside_transform(what)


def inside_transform(what: str) -> UnsupportedError:
    """The error for making a DTensor inside a transformed function."""
    return UnsupportedError(
        f"{what} inside a function that torch.func transforms",
        hint="make the DTensor outside, and give it to the function as an argument",
    )
