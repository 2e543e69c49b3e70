"""The protocol of torch.distributed.checkpoint for our DTensors: its three methods.

A local tensor is one chunk, or several if it is strided. With virtual ranks this process has the chunks of all ranks.
torch's classes are imported on first use.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpoint.partition.boxes import Box, boxes_of, full_box
from shardwise.errors import CheckpointError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = ["chunk_list", "tensor_shard", "write_items"]


def _chunks(tensor: DTensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor in this process, replicas included, each with its memory."""
    spec = tensor.spec
    if spec.partial_axes:
        raise CheckpointError(
            f"a checkpoint cannot store {spec}: its value is not yet reduced",
            hint="redistribute it to Replicate() or Shard() first",
        )
    parts = fabric_of(spec.mesh).parts(spec.mesh, tensor._local_tensor)
    if 0 in spec.shape:  # no elements, but the checkpoint must have its name
        return [(full_box(spec.shape), torch.empty(spec.shape, dtype=tensor.dtype))] if parts else []
    return [
        (box, local.detach()[within]) for coordinate, local in parts for box, within in boxes_of(spec.block(coordinate))
    ]


def write_items(self: DTensor, fqn: str, tensor: Any) -> list[Any]:
    """The boxes of the tensor in this process, each once, as write items."""
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
    """The boxes of the tensor in this process; replicas are repeated, so that each is filled."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if self._copied_view is not None:
        raise CheckpointError(
            f"{self.spec} is a view that shares no memory with its base, which would not be filled",
            hint="load the base, or a clone() of the view",
        )
    return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes)) for box, _ in _chunks(self)]


def tensor_shard(self: DTensor, index: Any) -> torch.Tensor:
    """The memory of one chunk: by its number, or else the first chunk at the offset."""
    chunks = _chunks(self)
    offset = None if index.offset is None else tuple(index.offset)
    if index.index is not None and index.index < len(chunks):
        box, local = chunks[index.index]
        if offset in (None, box.offset):
            return local
    for box, local in chunks:
        if offset in (None, box.offset):
            return local
    raise CheckpointError(f"{index.fqn}: no chunk of {self.spec} in this process starts at {offset}")
