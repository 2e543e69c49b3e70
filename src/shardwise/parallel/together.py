"""DTensors that lie alike, laid out otherwise by one collective: their locals stand side by side in one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.placement import Placement
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.tensor import DTensor, dtensor_of

__all__ = ["redistributed_together"]


def redistributed_together(tensors: Sequence[DTensor], placements: Sequence[Placement]) -> list[DTensor]:
    """Tensors of one mesh, layout and dtype, sharded neither now nor afterwards, with these placements."""
    first = tensors[0]._spec
    flat = TensorMeta((sum(tensor.numel() for tensor in tensors),), dtype=first.tensor_meta.dtype)
    joined = dtensor_of(
        DTensorSpec(first.mesh, first.placements, flat),
        torch.cat([tensor._local_tensor.reshape(-1) for tensor in tensors]),
    )
    moved = joined.redistribute(placements=placements)._local_tensor
    pieces = moved.split([tensor.numel() for tensor in tensors])
    return [
        dtensor_of(DTensorSpec(first.mesh, placements, tensor._spec.tensor_meta), piece.view(tensor.shape))
        for tensor, piece in zip(tensors, pieces, strict=True)
    ]
