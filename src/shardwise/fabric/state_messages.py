"""One rank's part in a transfer of many tensors: the messages of each bucket, packed and unpacked as bytes.

Pure functions on specs and plain tensors, shared by the fabrics. Communicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.fabric.exchange_plan import Boxes, Traffic, traffic
from shardwise.fabric.packing import Strip, strips_alone, strips_of
from shardwise.plan.state_transfer import Piece, StateTransfer, wire_dtype

__all__ = ["BucketMessages", "Message", "RankTransfer", "rank_transfer"]


class Part(NamedTuple):
    """Boxes of one tensor in a message."""

    tensor: int
    dtype: torch.dtype  # of the elements in the message
    offset: int  # bytes before them
    strips: list[Strip]

    def in_message(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements, flat."""
        size = sum(strip.size for strip in self.strips) * self.dtype.itemsize
        return buffer.narrow(0, self.offset, size).view(self.dtype)


class Message(NamedTuple):
    """Bytes sent to ranks that all receive the same, or received from another rank."""

    ranks: tuple[int, ...]  # receivers, or the sender
    parts: list[Part]
    nbytes: int

    def pack(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        """The message, of the locals of all tensors."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=locals_[self.parts[0].tensor].device)
        for part in self.parts:
            flat, local = part.in_message(buffer), locals_[part.tensor]
            for strip in part.strips:
                strip.in_buffer(flat).copy_(strip.in_block(local))
        return buffer

    def unpack(self, buffer: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Copy a received message into the new locals of all tensors."""
        for part in self.parts:
            flat, result = part.in_message(buffer), results[part.tensor]
            for strip in part.strips:
                strip.in_block(result).copy_(strip.in_buffer(flat))

    def empty(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """A buffer to receive it."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=results[self.parts[0].tensor].device)


class BucketMessages(NamedTuple):
    """A rank's messages in one bucket, sent and received, and the boxes that it keeps, of the old and new local."""

    sends: list[Message]
    receives: list[Message]
    keeps: list[tuple[int, Strip, Strip]]

    def keep(self, locals_: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Copy the boxes that stay on this rank."""
        for tensor, old, new in self.keeps:
            new.in_block(results[tensor]).copy_(old.in_block(locals_[tensor]))

    @property
    def nbytes(self) -> int:
        """Bytes that pass through this rank."""
        sent = sum(message.nbytes * len(message.ranks) for message in self.sends)
        return sent + sum(message.nbytes for message in self.receives)


class RankTransfer(NamedTuple):
    """The part of one rank in a transfer."""

    buckets: list[BucketMessages]

    @property
    def sent(self) -> int:
        """Bytes that it sends."""
        return sum(message.nbytes * len(message.ranks) for bucket in self.buckets for message in bucket.sends)

    @property
    def received(self) -> int:
        """Bytes that it receives."""
        return sum(message.nbytes for bucket in self.buckets for message in bucket.receives)

    @property
    def messages(self) -> int:
        """Messages that it sends."""
        return sum(len(message.ranks) for bucket in self.buckets for message in bucket.sends)

    @property
    def staged(self) -> int:
        """The maximum of the bytes that two successive buckets pack and receive."""
        sizes = [sum(m.nbytes for m in (*bucket.sends, *bucket.receives)) for bucket in self.buckets]
        return max([a + b for a, b in zip([0, *sizes], [*sizes, 0], strict=True)], default=0)


def rank_transfer(transfer: StateTransfer, rank: int) -> RankTransfer:
    """What a rank sends, receives and keeps; empty for a rank outside all of the meshes."""
    ranks = transfer.ranks
    if rank not in ranks:
        return RankTransfer([])
    me = ranks.index(rank)
    coordinates = {mesh: mesh.coordinates_of(ranks) for mesh in transfer.meshes}
    return RankTransfer([_bucket(transfer, bucket, ranks, me, coordinates) for bucket in transfer.buckets])


def _bucket(
    transfer: StateTransfer,
    bucket: Sequence[Piece],
    ranks: Sequence[int],
    me: int,
    coordinates: dict[DeviceMesh, np.ndarray],
) -> BucketMessages:
    moved: list[tuple[Piece, Traffic]] = []
    for piece in bucket:
        before, after = transfer.sources[piece.tensor], transfer.targets[piece.tensor]
        having, wanting = coordinates[before.mesh], coordinates[after.mesh]
        options = {"turn": piece.turn, "window": piece.window, "distances": transfer.distances}
        moved.append((piece, traffic(before, after, ranks, me, having, wanting, **options)))  # pyright: ignore[reportArgumentType]
    sends = _messages(transfer, ranks, [(piece, found.sends) for piece, found in moved])
    receives = _messages(transfer, ranks, [(piece, found.receives) for piece, found in moved])
    keeps = [
        (piece.tensor, old, new)
        for piece, found in moved
        for old, new in zip(strips_alone(found.kept_from), strips_alone(found.kept_to), strict=True)
    ]
    return BucketMessages(_joined(sends), [message for message, _ in _in_order(receives)], keeps)


Keyed = tuple[Message, bytes]  # a message, and a key that is equal for equal contents


def _in_order(messages: dict[int, Keyed]) -> list[Keyed]:
    """The messages in the order of their ranks."""
    return [messages[rank] for rank in sorted(messages)]


def _messages(transfer: StateTransfer, ranks: Sequence[int], boxes: Sequence[tuple[Piece, Boxes]]) -> dict[int, Keyed]:
    """The message to or from each other rank."""
    parts: dict[int, list[Part]] = {}
    sizes: dict[int, int] = {}
    keys: dict[int, list[bytes]] = {}
    for number, (piece, found) in enumerate(boxes):
        dtype = wire_dtype(transfer.sources[piece.tensor], transfer.targets[piece.tensor])
        for other in np.unique(found.which).tolist():
            own = found.of(other)
            offsets = np.cumsum(own.sizes) - own.sizes
            at = sizes.get(other, 0)
            parts.setdefault(other, []).append(Part(piece.tensor, dtype, at, strips_of(own, offsets)))
            sizes[other] = at + int(own.sizes.sum()) * dtype.itemsize
            keys.setdefault(other, []).append(b"%d" % number + own.ours.tobytes() + own.shape.tobytes())
    return {
        ranks[other]: (Message((ranks[other],), parts[other], sizes[other]), b"|".join(keys[other])) for other in parts
    }


def _joined(messages: dict[int, Keyed]) -> list[Message]:
    """Messages with the same contents as one, which is packed once."""
    found: dict[bytes, Message] = {}
    for message, key in _in_order(messages):
        known = found.get(key)
        found[key] = message if known is None else known._replace(ranks=(*known.ranks, *message.ranks))
    return list(found.values())
