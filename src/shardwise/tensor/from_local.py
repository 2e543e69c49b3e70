"""The spec that `from_local` gives to a local: computed, checked, and agreed on by the ranks.

Uses specs and locals, not DTensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, Owned, Ragged, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta, checked_placements
from shardwise.errors import AgreementError, LayoutError, ShardwiseError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.rank_sizes import of_rank
from shardwise.fabric.rank_tensor import map_parts, parts_of
from shardwise.transforms import innermost, inside_transform, is_wrapped, transforming, visible_dims

__all__ = ["not_a_tensor", "resolved", "spec_given"]

MAX_SPECS = 4096
_specs: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)


def not_a_tensor(who: str, given: object) -> LayoutError:
    """The error for a list or an array in place of a tensor."""
    return LayoutError(f"{who} takes a torch.Tensor, not {type(given).__name__}", hint="as in torch.as_tensor(...)")


def spec_given(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    shard_order: Sequence[Any] | None,
) -> DTensorSpec:
    """The spec of the tensor with such a local on each rank; with `run_check`, ranks compare it."""
    if run_check:
        if is_wrapped(local):
            raise inside_transform("from_local(run_check=True)")
        return _agreed_spec(local, mesh, placements, shape, stride, shard_order)
    key = (mesh, None if placements is None else tuple(placements), local.shape, local.stride(), local.dtype)
    by_local_alone = shape is None and stride is None and shard_order is None
    try:
        spec = _specs.get(key) if by_local_alone else None
    except TypeError:  # symbolic sizes have no hash
        spec = None
    if spec is None:
        spec = _spec_from_local(local, mesh, placements, shape, stride, shard_order)
        if by_local_alone and not fabric_of(mesh).many_ranks and not spec.tensor_meta.is_symbolic:
            (_specs.keep_recent if spec.is_ragged else _specs.keep)(key, spec)
    return spec


def _spec_from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    shard_order: Sequence[Any] | None,
) -> DTensorSpec:
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    kept = checked_placements(placements, mesh, local.dim() if shape is None else len(shape))
    if shape is None:
        if stride is not None:
            raise LayoutError("from_local: stride= without shape=", hint="pass the global shape as shape= as well")
        sizes = [of_rank(size, 0) for size in local.shape]
        for axis, placement in enumerate(kept):
            if isinstance(placement, Ragged):
                sizes[placement.dim] = sum(placement.sizes)
            elif isinstance(placement, Owned):
                raise LayoutError(
                    f"from_local: {placement!r} does not give ranks that hold nothing the size of dim {placement.dim}",
                    hint="give the global shape with shape=(...)",
                )
            elif isinstance(placement, AnyShard):
                sizes[placement.dim] *= mesh.shape[axis]
        shape = sizes
    if stride is None:
        known = [of_rank(step, 0) for step in local.stride()] if local.dim() == len(shape) else None
        stride = dense_strides(shape, like=known)
    spec = DTensorSpec(mesh, kept, TensorMeta(shape, stride, local.dtype), shard_order)
    _check_local(local, spec)
    return spec


def _check_local(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Each part here must have the shape that the spec gives its rank."""
    dims = visible_dims(local) if transforming() else range(local.dim())
    for coordinate, tensor in fabric_of(spec.mesh).parts(spec.mesh, innermost(local)):
        wanted, shape = spec.local_shape(coordinate), tuple(tensor.shape[dim] for dim in dims)
        if shape != wanted:
            raise LayoutError(
                f"from_local: the rank at {coordinate} of {spec.mesh} gave a local of shape {shape}, but "
                f"{spec} puts {wanted} there",
                hint="give the global shape with shape=(...) where shards are uneven",
            )


def _agreed_spec(local: torch.Tensor, mesh: DeviceMesh, *description: Any) -> DTensorSpec:
    """The spec that every rank means: same shape, dtype and placements, and equal values where it is replicated.

    A rank with wrong arguments sends its error to the others, so that all of them raise and none waits.
    """
    spec, error = None, None
    try:
        spec = _spec_from_local(local, mesh, *description)
        facts = (repr(spec), tuple(spec.tensor_meta.stride), _fingerprints(local, spec))
    except ShardwiseError as own:
        error, facts = own, (f"error: {own}", (), [])
    said = fabric_of(mesh).agree(mesh, facts, local)
    if error is not None:
        raise error
    if len({fact[:2] for fact in said}) > 1:
        lines = "\n".join(f"    rank {rank}: {fact[0]}" for rank, fact in enumerate(said))
        raise AgreementError(
            f"from_local: the ranks of {mesh} do not mean the same tensor:\n{lines}",
            hint="give every rank the same global shape= and placements, and a local that fits them",
        )
    blocks: dict[Any, Any] = {}
    for _, _, prints in said:
        for block, fingerprint in prints:
            if blocks.setdefault(block, fingerprint) != fingerprint:
                raise AgreementError(
                    f"from_local: ranks of {mesh} hold different values of the block at {block} of {spec}",
                    hint="replicas must be equal: broadcast one of them, or distribute_tensor from one rank",
                )
    assert spec is not None
    return spec


def _fingerprints(local: torch.Tensor, spec: DTensorSpec) -> list[tuple[Any, str]]:
    """For each rank here which block it holds, and a digest of the bytes."""
    own = [axis for axis, placement in enumerate(spec.placements) if not isinstance(placement, Replicate)]
    return [
        (
            tuple(coordinate[axis] for axis in own),
            hashlib.sha1(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for coordinate, tensor in fabric_of(spec.mesh).parts(spec.mesh, local)
    ]


def resolved(local: torch.Tensor) -> torch.Tensor:
    """The local without the conjugate and negative bits."""
    if any(part.is_conj() or part.is_neg() for part in parts_of(local)):
        return map_parts(lambda part: part.resolve_conj().resolve_neg(), local)
    return local
