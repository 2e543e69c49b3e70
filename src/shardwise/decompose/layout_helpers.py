"""How decompositions change layouts: Partial tensors are reduced or scattered, small ones replicated.

Plain tensors are returned unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.placement import AnyShard, Partial, Replicate, Shard
from shardwise.tensor import DTensor

__all__ = [
    "HALVES", "as_laid_out", "as_result", "indices_of", "moved_to", "reduced", "replicated", "split_axes",
    "statistic_of", "widened", "without_partial",
]  # fmt: skip

HALVES = (torch.float16, torch.bfloat16)


def split_axes(x: Any, dims: Sequence[int]) -> list[int]:
    """The mesh axes that split some of these dims."""
    return _axes_on(getattr(x, "placements", ()), dims)


def _axes_on(placements: Sequence[Any], dims: Sequence[int]) -> list[int]:
    return [a for a, p in enumerate(placements) if isinstance(p, AnyShard) and p.dim in dims]


def without_partial(x: Any, dims: Sequence[int] = ()) -> Any:
    """`x` with nothing Partial: scattered along a free dim not in `dims` if that is even, else replicated."""
    placements: list[Any] = list(getattr(x, "placements", ()))
    if not x.numel():  # nothing to move
        return moved_to(x, [Replicate()] * len(placements))
    partial = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    if not partial:
        return x
    for axis in partial:
        free = (
            d for d, size in enumerate(x.shape)
            if d not in dims and size % x.device_mesh.shape[axis] == 0 and not _axes_on(placements, [d])
        )  # fmt: skip
        dim = next(free, None)
        placements[axis] = Replicate() if dim is None else Shard(dim)
    return moved_to(x, placements)


def reduced(x: Any) -> Any:
    """`x` with every Partial reduced: for small tensors that are used more than once."""
    placements = getattr(x, "placements", ())
    return moved_to(x, [Replicate() if isinstance(p, Partial) else p for p in placements])


def moved_to(x: Any, placements: Sequence[Any]) -> Any:
    """`x` with these placements, outside of autograd; plain tensors and None unchanged."""
    if not isinstance(x, DTensor) or tuple(placements) == x.placements:
        return x
    order = [entry for entry in x.spec.shard_order if sorted(entry.axes) == _axes_on(placements, [entry.dim])]
    with torch.no_grad():
        return x.redistribute(placements=placements, shard_order=order)


def widened(x: Any) -> Any:
    """`x` in the dtype that one device computes in."""
    return x.to(torch.float32) if x.dtype in HALVES else x


def as_result(value: Any, dtype: torch.dtype) -> Any:
    """The inverse of `widened`, for results."""
    return value if value.dtype is dtype else value.to(dtype)


def as_laid_out(x: Any, like: Any) -> Any:
    """`x` in the layout of another tensor of its shape."""
    return moved_to(x, like.placements) if isinstance(like, DTensor) else x


def replicated(x: Any) -> Any:
    """`x` replicated on every axis; None unchanged."""
    return moved_to(x, [Replicate()] * len(getattr(x, "placements", ())))


def statistic_of(value: Any, x: Any, dims: Sequence[int]) -> Any:
    """A statistic over `dims` of `x`, with the layout of `x` in the others."""
    if not isinstance(value, DTensor) or not isinstance(x, DTensor):
        return value
    wanted = [Replicate() if isinstance(p, AnyShard) and p.dim in dims else p for p in x.placements]
    return moved_to(value, wanted)


def indices_of(x: Any, dim: int) -> Any:
    """The indices of a dim, in the layout of that dim."""
    plain = torch.arange(x.shape[dim], device=x.device)
    if not isinstance(x, DTensor):
        return plain
    kept = [p.on_dim(0) if isinstance(p, AnyShard) and p.dim == dim else Replicate() for p in x.placements]
    replicated = DTensor.from_local(plain, x.device_mesh, [Replicate()] * len(kept), run_check=False)
    axes = x.spec.dim_axes[dim]
    return replicated.redistribute(placements=kept, shard_order=[(0, axes)] if axes else None)
