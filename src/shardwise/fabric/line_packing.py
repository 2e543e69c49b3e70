"""Packing for an exchange that changes how one axis splits one dim, with runs in rank order.

A rank sends its unmodified local, cut at the receivers' runs, and the received buffer is the result. So the number of
operations does not depend on the number of ranks, and sizes may change with each call. Communicates nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.mesh import Coordinate
from shardwise.plan.line_change import LineChange
from shardwise.plan.step import Exchange

__all__ = ["LineParcels", "line_parcels"]


class LineParcels(NamedTuple):
    """One all-to-all with uneven splits, of runs of one dim: the counterpart of `Parcels`."""

    sent_sizes: list[int]
    got_sizes: list[int]
    dim: int
    copies: int  # how many times the local is sent: once, or to every rank
    tag: tuple[int, int]  # the position of an unused element in the sent and received buffers; -1: there is none
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def splits(self, scale: int) -> tuple[list[int], list[int]]:
        """Received and sent elements by rank, if an element is carried as `scale`."""
        return [n * scale for n in self.got_sizes], [n * scale for n in self.sent_sizes]

    def buffer(self, local: torch.Tensor) -> torch.Tensor:
        """What is sent."""
        flat = local.movedim(self.dim, 0).contiguous().view(-1) if self.dim else local.contiguous().view(-1)
        if self.copies > 1:
            flat = flat.repeat(self.copies)
        at = self.tag[0]
        if at < 0:
            return flat
        return torch.cat([flat[:at], flat.new_zeros(1), flat[at:]])

    def unpack(self, local: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The result, from the received buffer."""
        at, dim, shape = self.tag[1], self.dim, self.shape
        if at >= 0:
            buffer = torch.cat([buffer[:at], buffer[at + 1 :]])
        if dim:
            buffer = buffer.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)
        else:
            buffer = buffer.view(shape)
        if buffer.stride() == self.stride or 0 in shape:
            return buffer
        return buffer.new_empty_strided(shape, self.stride).copy_(buffer)


def line_parcels(step: Exchange, change: LineChange, coordinate: Coordinate) -> LineParcels:
    """The parcels of the rank at `coordinate`; the group numbers its ranks in the order of the axis."""
    me, dim, after = coordinate[change.axis], change.dim, step.after
    shape = list(step.before.local_shape(coordinate))
    inner = math.prod([n for at, n in enumerate(shape) if at != dim])
    sent, got = ([n * inner for n in rows] for rows in (change.sent_by(me), change.got_by(me)))
    tag = (-1, -1)
    if any(sent) != any(got):  # a call without input or result may be left out on this rank, and others would wait
        tag = (sum(sent[:me]), sum(got[:me]))
        sent[me] += 1
        got[me] += 1
    shape[dim] = change.new_run(me)[1]
    meta = after.tensor_meta
    stride = dense_strides(shape, None if meta.is_contiguous else meta.stride)
    return LineParcels(sent, got, dim, len(sent) if change.new_edges is None else 1, tag, tuple(shape), stride)
