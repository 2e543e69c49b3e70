"""Rows that are weighted sums of a few rows: resampling and adaptive pooling along one dim of a window.

Indices and weights are computed from global rows, so that every rank has those of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray  # the types of fields are resolved by this name at run time

from shardwise.rules.registry import WindowPart

__all__ = ["Resampling", "Taps", "averaging", "bins", "in_memory_of"]


FEW = 16  # taps that are added one by one, in the order of torch's kernels


class Taps(NamedTuple):
    """For each row of a result, the rows of a window and their weights: `rows[:, k]` with `weights[:, k]`."""

    rows: ndarray
    weights: ndarray

    def each(self) -> Iterator[tuple[list[int], list[float]]]:
        """Tap after tap: rows and weights of each."""
        return zip(self.rows.T.tolist(), self.weights.T.tolist(), strict=True)

    def apply(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """The weighted sums along a dim."""
        if self.rows.shape[1] > FEW:
            taken = local.index_select(dim, _tensor(self.rows.ravel().tolist(), local))
            weighted = taken * _along(self.weights.ravel().tolist(), local, dim)
            return in_memory_of(weighted.unflatten(dim, self.rows.shape).sum(dim + 1), local)
        result = None
        for rows, weights in self.each():
            part = local.index_select(dim, _tensor(rows, local)) * _along(weights, local, dim)
            result = part if result is None else result + part
        assert result is not None
        return in_memory_of(result, local)

    def spread(self, local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """The gradient of `apply`: each row is added, weighted, to its rows of a window of `size` rows."""
        result = local.new_zeros([size if d == dim else n for d, n in enumerate(local.shape)])
        if self.rows.shape[1] > FEW:
            each = local.repeat_interleave(self.rows.shape[1], dim) * _along(self.weights.ravel().tolist(), local, dim)
            return result.index_add(dim, _tensor(self.rows.ravel().tolist(), local), each)
        for rows, weights in self.each():
            result = result.index_add(dim, _tensor(rows, local), local * _along(weights, local, dim))
        return result


def in_memory_of(result: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A result in the memory format of the local: channels-last if that is, as kernels return it."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(local.dim())
    if last is None or local.is_contiguous() or not local.is_contiguous(memory_format=last):
        return result
    return result.contiguous(memory_format=last)


def _tensor(rows: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows, device=like.device)


def _along(weights: list[float], like: torch.Tensor, dim: int) -> torch.Tensor:
    made = torch.tensor(weights, dtype=like.dtype, device=like.device)
    return made.view([-1 if d == dim else 1 for d in range(like.dim())])


def averaging(place: WindowPart, size: int, parts: int) -> Taps:
    """The taps that average a dim of `size` rows to `parts` rows, for the rows of `place`."""
    first, count = bins(place, size, parts)
    steps = np.arange(count.max())
    inside = steps < count[:, None]
    return Taps(np.where(inside, first[:, None] + steps, first[:, None]) - place.window, inside / count[:, None])


def bins(place: WindowPart, size: int, parts: int) -> tuple[ndarray, ndarray]:
    """First row and number of rows of each bin of adaptive pooling, for the rows of `place`."""
    at = np.arange(place.start, place.start + place.length)
    first = at * size // parts
    return first, -(-(at + 1) * size // parts) - first


# ---------------------------------------------------------------- resampling


class Resampling(NamedTuple):
    """How rows of a dim are resampled.

    Args:
        size: rows before.
        parts: rows after.
        scale: rows before for one row after.
        corners: whether the centres of the first and last rows coincide; else the ends of the dim do.
        kind: "nearest", "nearest-exact", "linear" or "cubic".
        smooths: whether each row after is an average of all the rows before that it covers (antialiasing).
        single: whether one device computes positions in single precision.
    """

    size: int
    parts: int
    scale: float
    corners: bool
    kind: str
    smooths: bool
    single: bool

    def taps(self, place: WindowPart) -> Taps:
        """The taps of the rows at a place."""
        at = np.arange(place.start, place.start + place.length)
        rows, weights = (self._smoothed if self.smooths else self._sampled)(at)
        rows = rows.clip(0, self.size - 1) - place.window
        assert ((rows >= 0) & (rows < place.rows)).all(), "a row outside of the window"
        used = (weights != 0).any(0)
        return Taps(rows[:, used], weights[:, used])

    def _rounded(self, value: ndarray) -> ndarray:
        """Kernels multiply and add in one step: the double product, rounded once."""
        return value.astype(np.float32).astype(np.float64) if self.single else value

    def _sampled(self, at: ndarray) -> tuple[ndarray, ndarray]:
        scale = float(np.float32(self.scale)) if self.single else self.scale
        if self.kind == "nearest":
            return np.floor(self._rounded(at * scale)).astype(np.int64)[:, None], np.ones((len(at), 1))
        if self.kind == "nearest-exact":
            return np.floor(self._rounded((at + 0.5) * scale)).astype(np.int64)[:, None], np.ones((len(at), 1))
        source = self._rounded(at * scale) if self.corners else self._rounded((at + 0.5) * scale - 0.5)
        if self.kind == "linear":
            source = source.clip(min=0)
        first = np.floor(source).astype(np.int64).clip(max=self.size - 1)
        part = (source - first).clip(0, 1)
        if self.kind == "linear":
            return np.stack([first, first + 1], 1), np.stack([1 - part, part], 1)
        distances = np.stack([part + 1, part, 1 - part, 2 - part], 1)
        return first[:, None] + np.arange(-1, 3), cubic(distances, -0.75)

    def _smoothed(self, at: ndarray) -> tuple[ndarray, ndarray]:
        """Each row after is an average weighted by a triangle or a spline, as wide as the rows that it covers."""
        scale, wide = self.scale, max(self.scale, 1.0)
        support = (1 if self.kind == "linear" else 2) * wide
        centre = scale * (at + 0.5)
        low = (centre - support + 0.5).astype(np.int64).clip(min=0)
        count = (centre + support + 0.5).astype(np.int64).clip(max=self.size) - low
        steps = np.arange(count.max())
        distances = np.abs((steps + low[:, None] - centre[:, None] + 0.5) / wide)
        weights = (np.maximum(1 - distances, 0) if self.kind == "linear" else cubic(distances, -0.5)) * (
            steps < count[:, None]
        )
        return low[:, None] + steps, weights / weights.sum(1, keepdims=True)


def cubic(distance: ndarray, a: float) -> ndarray:
    """Keys' spline with the parameter `a`."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
