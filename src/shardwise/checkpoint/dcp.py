"""torch.distributed.checkpoint on our DTensors: the three methods of its protocol.

A local is one chunk to it, or several where it is strided; on virtual ranks all of them are in this process. Its
classes are loaded when it first asks.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpoint.boxes import Box, boxes_of, whole
from shardwise.errors import CheckpointError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = ["chunk_list", "tensor_shard", "write_items"]


def _chunks(tensor: DTensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor in this process, copies included, each with the memory that holds it."""
    spec = tensor.spec
    if spec.partial_axes:
        raise CheckpointError(
            f"a checkpoint cannot hold {spec}: its value is not yet reduced",
            hint="redistribute it to Replicate() or Shard() first",
        )
    parts = fabric_of(spec.mesh).parts(spec.mesh, tensor._local_tensor)
    if 0 in spec.shape:  # it has no elements, but its name must be known
        return [(whole(spec.shape), torch.empty(spec.shape, dtype=tensor.dtype))] if parts else []
    return [
        (box, local.detach()[within]) for coordinate, local in parts for box, within in boxes_of(spec.block(coordinate))
    ]


def write_items(self: DTensor, fqn: str, tensor: Any) -> list[Any]:
    """What this process would write of the tensor: each box once."""
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

    items: dict[Box, Any] = {}
    for i, (box, local) in enumerate(_chunks(self)):
        offset, sizes = torch.Size(box.offset), torch.Size(box.sizes)
        data = planner.TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=sizes),
            properties=TensorProperties.create_from_tensor(local),
            size=self.size(),
        )
        item = planner.WriteItem(MetadataIndex(fqn, offset, i), planner.WriteItemType.SHARD, tensor_data=data)
        items.setdefault(box, item)
    return list(items.values())


def chunk_list(self: DTensor) -> list[Any]:
    """Where in the global tensor the parts in this process lie; every copy is one, so that each is filled."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes)) for box, _ in _chunks(self)]


def tensor_shard(self: DTensor, index: Any) -> torch.Tensor:
    """The memory of one part: that of this number, or else the first at the offset."""
    chunks = _chunks(self)
    offset = None if index.offset is None else tuple(index.offset)
    if index.index is not None and index.index < len(chunks):
        box, local = chunks[index.index]
        if offset in (None, box.offset):
            return local
    for box, local in chunks:
        if offset in (None, box.offset):
            return local
    raise CheckpointError(f"{index.fqn}: no part of {self.spec} in this process begins at {offset}")
