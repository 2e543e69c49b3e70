"""The rows of each rank in the segments of a row exchange, and its cost.

Arrays over the ranks of one line of the mesh, computed once for a call.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy import ndarray  # the types of a NamedTuple's fields are resolved by this name at run time

from shardwise.core.layout import Segment
from shardwise.plan.cost import current_cost_model
from shardwise.plan.route import Route, StepCost
from shardwise.plan.step import RowExchange, Rows

__all__ = ["Places", "places_after", "places_before", "row_exchange_route"]


class Places(NamedTuple):
    """The positions of a segment on each rank, `low` up to `high`, and the first local row of these."""

    low: ndarray
    high: ndarray
    row: ndarray


def places_before(step: RowExchange, segment: Segment, coordinates: ndarray) -> Places:
    """The positions of a segment that the ranks at these coordinates hold in its operand."""
    spec = step.operands[segment.operand]
    return _places(spec, step.dim, coordinates, segment.first, segment.step, segment.length)


def places_after(step: RowExchange, segment: Segment, coordinates: ndarray) -> Places:
    """The positions of a segment that the ranks at these coordinates hold in its result."""
    spec = step.results[segment.result]
    return _places(spec, step.dim, coordinates, segment.at, segment.stride, segment.length)


def _places(spec: Rows, dim: int, coordinates: ndarray, first: int, step: int, length: int) -> Places:
    start, size = spec.starts_and_lengths(dim, coordinates)
    if step > 0:
        low, high = -((first - start) // step), -((first - start - size) // step)
    else:
        low, high = (first - start - size) // -step + 1, (first - start) // -step + 1
    low, high = np.clip(low, 0, length), np.clip(high, 0, length)
    lowest = low if step > 0 else np.maximum(high - 1, 0)
    return Places(low, np.maximum(high, low), first + lowest * step - start)


def row_exchange_route(step: RowExchange) -> Route:
    """The exchange as a route, with its cost for the rank that receives the most; no steps if nothing moves."""
    mesh = step.before.mesh
    members = mesh.coordinates[mesh.group_through(step.over, 0)]
    received = np.zeros(len(members))
    for segment in step.segments:
        have, want = (places(step, segment, members) for places in (places_before, places_after))
        kept = np.maximum(np.minimum(have.high, want.high) - np.maximum(have.low, want.low), 0)
        arriving = _held_below(have, want.high) - _held_below(have, want.low) - kept
        received += arriving * _row_bytes(step.results[segment.result], step.dim)
    most = float(received.max())
    if not most:
        return Route(step.before, step.after, (), ())
    seconds = current_cost_model().seconds(mesh, step.over, most)
    holds = sum(spec.local_bytes for spec in step.results)
    return Route(step.before, step.after, (step,), (StepCost(most, seconds, holds),))


def _held_below(have: Places, bounds: ndarray) -> ndarray:
    """The number of positions below each bound, summed over ranks: halos count several times."""
    low, high = (np.sort(ends) for ends in (have.low, have.high))

    def distance(ends: ndarray) -> ndarray:
        below = np.searchsorted(ends, bounds)
        return below * bounds - np.concatenate([[0], np.cumsum(ends)])[below]

    return distance(low) - distance(high)


def _row_bytes(spec: Rows, dim: int) -> int:
    """Bytes of one row of the largest local."""
    sizes = [size for d, size in enumerate(spec.largest_local_shape) if d != dim]
    return math.prod(sizes) * spec.tensor_meta.dtype.itemsize
