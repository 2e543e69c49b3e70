"""DTensors that lie alike, laid out otherwise by one collective."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.placement import Placement
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.flat_buffer import SideBySide
from shardwise.tensor import DTensor, dtensor_of

__all__ = ["redistributed_together"]


def redistributed_together(tensors: Sequence[DTensor], placements: Sequence[Placement]) -> list[DTensor]:
    """Tensors of one mesh, layout and dtype, sharded neither now nor afterwards, with these placements; contiguous."""
    buffer = SideBySide.of([tensor._spec for tensor in tensors])
    joined = dtensor_of(buffer.spec, buffer.joined(tensor._local_tensor for tensor in tensors))
    parts = buffer.parts(joined.redistribute(placements=placements)._local_tensor)
    return [
        dtensor_of(DTensorSpec(joined.device_mesh, placements, TensorMeta(shape, dtype=joined.dtype)), part)
        for shape, part in zip(buffer.shapes, parts, strict=True)
    ]
