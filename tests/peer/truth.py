"""Whether torch.distributed.tensor is right about a call: all ranks at once, with real values, against one device.

Uses torch's own simulation of ranks (LocalTensorMode) over the fake process group. Knows nothing of what is
communicated.
"""

import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor as theirs
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.utils._pytree import tree_flatten

import shardwise as ours
from tests.virtual.conformance import Sample
from tests.virtual.parity import distribute, gradients_of


def why_wrong(sample: Sample, mesh: Any, layout: Sequence[Sequence[Any]]) -> str:
    """What torch gets wrong in a call; nothing where it is right, or its simulation cannot tell.

    Args:
        sample: the call.
        mesh: torch's mesh, on the fake process group.
        layout: the placements of each tensor, ours.
    """
    wanted = sample.wanted
    if wanted is None or wanted.drawn or any(_nested(placements) for placements in layout):
        return ""
    plain = [t.detach().clone() for t in sample.tensors]
    changed = [i for i, written in enumerate(wanted.changed) if written]
    if changed:
        sample.call(plain)
    shares = [_shares(t, mesh.shape, placements) for t, placements in zip(sample.tensors, layout, strict=True)]
    try:
        with LocalTensorMode(mesh.size()):
            given = [
                _simulated(share, tensor, mesh, placements)
                for share, tensor, placements in zip(shares, sample.tensors, layout, strict=True)
            ]
            result = sample.call(given)
            grads = gradients_of(sample.process(result), given) if wanted.grads is not None else None
            found = {
                "result": (result, wanted.result),
                "gradient": (grads, wanted.grads),
                "argument that is written to": ([given[i] for i in changed], [plain[i] for i in changed]),
            }
            return next((what for what, (mine, one) in found.items() if not _same(mine, one)), "")
    except Exception as error:
        return "ranks go different ways" if _diverged(error) else ""


def _nested(placements: Sequence[Any]) -> bool:
    """Whether several axes shard one dim: the simulation then takes one rank's sizes for those of all."""
    dims = [p.dim for p in placements if isinstance(p, ours.Shard)]
    return len(dims) > len(set(dims))


def _diverged(error: Exception) -> bool:
    """Whether ranks gave different numbers; other errors may be of the simulation itself."""
    return traceback.extract_tb(error.__traceback__)[-1].name == "_combine_any_rank_results"


def _shares(tensor: torch.Tensor, shape: Sequence[int], placements: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Each rank's local; of a sum an addend, which does not show whether the sum is zero."""
    with ours.virtual():
        mesh = ours.init_device_mesh("cpu", tuple(shape))
        made = distribute(tensor.detach().clone(), mesh, placements)
    shares = list(made.to_local().tensors)
    for axis in (axis for axis, placement in enumerate(made.placements) if placement.is_partial()):
        for rank, at in enumerate(mesh.coordinates.tolist()):
            if at[axis] < 2:
                shares[rank] = shares[rank] + (3 if at[axis] else -3)
    return dict(enumerate(shares))


def _simulated(shares: dict[int, torch.Tensor], tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    translated = [their_placement(p) for p in placements]
    made = theirs.DTensor.from_local(
        LocalTensor(shares), mesh, translated, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made.requires_grad_(tensor.requires_grad)


def their_placement(placement: Any) -> Any:
    """torch's name for one of ours."""
    if isinstance(placement, ours.Shard):
        return theirs.Shard(placement.dim)
    return theirs.Partial() if isinstance(placement, ours.Partial) else theirs.Replicate()


def _same(mine: Any, one: Any) -> bool:
    """Whether every rank has the values of one device, up to rounding."""
    if one is None:
        return True
    pairs = zip(tree_flatten(mine)[0], tree_flatten(one)[0], strict=True)
    return all(_close(rank, b) for a, b in pairs for rank in _of_ranks(a))


def _of_ranks(value: Any) -> list[Any]:
    """A value as each rank has it."""
    if isinstance(value, theirs.DTensor):
        value = value.detach().full_tensor()
    return list(value._local_tensors.values()) if isinstance(value, LocalTensor) else [value]


def _close(mine: Any, one: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return mine == one or mine != mine
    if mine is None:
        return not one.any()
    if mine.shape != one.shape or mine.dtype != one.dtype:
        return False
    finite = one.abs()[one.isfinite()] if one.is_floating_point() else one.new_zeros(0)
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(mine, one, rtol=1e-2, atol=1e-3 * scale, equal_nan=True)
