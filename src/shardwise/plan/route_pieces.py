"""Routes in pieces: while one piece of a tensor crosses between hosts, others move inside them.

Steps inside a host and across hosts use different links. A route over both, run on the full tensor, leaves one of them
idle at any time; in pieces, step `s` of piece `p` runs beside step `s - 1` of piece `p + 1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.core.placement import Partial, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.plan.cost import HostLinks, Link
from shardwise.plan.step import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step

__all__ = ["Pieces", "piece_of", "pieces_of"]

COUNTS = (2, 4, 8)
CUT = (AllGather, AllReduce, AllToAll, ReduceScatter, Slice)  # steps that treat all elements alike


class Pieces(NamedTuple):
    """How a route is cut: the tensor dim, and the number of equal pieces."""

    dim: int
    number: int


def pieces_of(
    source: DTensorSpec, target: DTensorSpec, steps: Sequence[Step], times: Sequence[float], hosts: HostLinks
) -> tuple[Pieces, list[float]] | None:
    """The number of pieces with which a route over hosts is fastest, and its times; None if one piece is.

    A step on the busiest link takes its time for all pieces. A step on another link adds the time of one piece; the
    rest overlaps.

    Args:
        source: the layout before.
        target: the layout after.
        steps: the steps between them.
        times: the seconds of each step on the full tensor.
        hosts: the links.
    """
    if any(type(step) not in CUT or not _can_be_cut(step.before) or not _can_be_cut(step.after) for step in steps):
        return None
    links = [hosts.link(step.before.mesh, step.axes) if step.collective is not None else None for step in steps]
    if len({link for link in links if link is not None}) < 2:
        return None
    best, fastest = None, list(times)
    for count in COUNTS:
        dim = _dim(source, target, count)
        if dim is None:
            break
        found = _times_in_pieces(times, links, count, hosts)
        if sum(found) < sum(fastest):
            best, fastest = Pieces(dim, count), found
    return None if best is None else (best, fastest)


def _times_in_pieces(times: Sequence[float], links: Sequence[Link | None], count: int, hosts: HostLinks) -> list[float]:
    """The seconds that each step adds to the route in pieces."""
    each = [
        0.0 if link is None else link.alpha + max(0.0, time - link.alpha) / count
        for time, link in zip(times, links, strict=True)
    ]
    inside = [link is hosts.inside for link in links]
    sums = [sum(time for time, here in zip(each, inside, strict=True) if here is where) for where in (False, True)]
    busiest = sums[1] > sums[0]
    return [time * count if here is busiest else time for time, here in zip(each, inside, strict=True)]


def _can_be_cut(spec: DTensorSpec) -> bool:
    """Whether every piece has the layout of the tensor."""
    meta = spec.tensor_meta
    if meta.is_symbolic or 0 in meta.shape or not meta.is_contiguous or spec.broadcast or spec.is_strided:
        return False
    return all(type(placement) in (Replicate, Shard, Partial) for placement in spec.placements)


def _dim(source: DTensorSpec, target: DTensorSpec, count: int) -> int | None:
    """A dim that neither end shards, and whose pieces every step can shard evenly."""
    for dim, size in enumerate(source.shape):
        if not source.dim_axes[dim] and not target.dim_axes[dim] and size % (count * source.mesh.size()) == 0:
            return dim
    return None


def piece_of(spec: DTensorSpec, pieces: Pieces) -> DTensorSpec:
    """The same layout of one piece of the tensor.

    Example:
        >>> from shardwise.core.mesh import DeviceMesh
        >>> from shardwise.core.placement import Shard
        >>> spec = DTensorSpec(DeviceMesh("cpu", [0, 1]), [Shard(0)], TensorMeta((8, 4)))
        >>> print(piece_of(spec, Pieces(1, 2)))
        f32[8,2] S0
    """
    meta = spec.tensor_meta
    shape = tuple([size // pieces.number if dim == pieces.dim else size for dim, size in enumerate(meta.shape)])
    return DTensorSpec.from_dim_axes(spec.mesh, spec.placements, TensorMeta(shape, dtype=meta.dtype), spec.dim_axes)
