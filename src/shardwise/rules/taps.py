"""Rows that are weighted sums of a few rows: resampling and adaptive pooling along one dim of a window.

Plain tensors and integers. Indices and weights are worked out from global rows, so that every rank has those of one
device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwise.rules.registry import Place

__all__ = ["Taps", "averaging"]


class Taps(NamedTuple):
    """For each row of a result the rows of a window that it is made of: `rows[:, k]` with `weights[:, k]`."""

    rows: torch.Tensor
    weights: torch.Tensor

    def on(self, like: torch.Tensor) -> Taps:
        """The same on the device of a local, with weights of its dtype."""
        return Taps(self.rows.to(like.device), self.weights.to(like.device, like.dtype))

    def apply(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """The weighted sums along a dim."""
        taps, shape = self.on(local), [-1 if d == dim else 1 for d in range(local.dim())]
        result = None
        for rows, weights in zip(taps.rows.unbind(1), taps.weights.unbind(1), strict=True):
            part = local.index_select(dim, rows).mul_(weights.view(shape))
            result = part if result is None else result.add_(part)
        assert result is not None
        return result

    def spread(self, local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """The gradient of `apply`: each row is added to the `size` rows of the window that it was made of."""
        taps, shape = self.on(local), [-1 if d == dim else 1 for d in range(local.dim())]
        result = local.new_zeros([size if d == dim else n for d, n in enumerate(local.shape)])
        for rows, weights in zip(taps.rows.unbind(1), taps.weights.unbind(1), strict=True):
            result.index_add_(dim, rows, local * weights.view(shape))
        return result


def averaging(place: Place, size: int, parts: int) -> Taps:
    """The taps of a dim of `size` that is averaged to `parts` rows, of which some are at a place."""
    first, count = bins(place, size, parts)
    steps = torch.arange(int(count.max()))
    inside = steps < count[:, None]
    rows = torch.where(inside, first[:, None] + steps, first[:, None]) - place.window
    return Taps(rows, inside.double() / count[:, None])


def bins(place: Place, size: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First row and number of rows of the parts at a place that adaptive pooling makes of a dim."""
    at = torch.arange(place.start, place.start + place.length)
    first = at * size // parts
    return first, -(-(at + 1) * size // parts) - first
