"""Attention block by block: the kernels on one block of queries and one of keys, and how their results are merged.

Functions on plain tensors. Softmax statistics and sums of gradients are kept in float32, or float64 for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

__all__ = [
    "BackwardBlocks",
    "BlockKernel",
    "ForwardBlocks",
    "Kernel",
    "ScoreTile",
    "band_tiles",
    "far_tiles",
    "joined",
    "tiles",
]

SEQUENCE = 2  # the dim of queries, keys and values
MASKS = ("attn_mask", "attn_bias")  # names of the mask argument


LOST = 8  # scores up to half of this are lost beside a number as large as this divided by the epsilon of its dtype


class BlockOutput(NamedTuple):
    """The output of a block, and the logarithm of the sum of its exponentials: `lse + rest`; without a rest, `lse`."""

    out: torch.Tensor
    lse: torch.Tensor
    rest: torch.Tensor | None


class ScoreTile(NamedTuple):
    """A rectangle of a block of scores; a causal one is square, and only the part up to the diagonal counts.

    `first` is the position of its first column among all keys.
    """

    row: int
    rows: int
    column: int
    columns: int
    causal: bool
    first: int = 0

    def within(self, row: int, column: int, first: int) -> ScoreTile:
        """The same tile in a larger block, in which its own begins at `row` and `column`, with the key `first`."""
        return self._replace(row=self.row + row, column=self.column + column, first=self.column + first)

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of this tile in a tensor of queries."""
        return x if self.rows == x.shape[SEQUENCE] else x.narrow(SEQUENCE, self.row, self.rows)

    def of_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of this tile in a tensor of keys."""
        return x if self.columns == x.shape[SEQUENCE] else x.narrow(SEQUENCE, self.column, self.columns)


def tiles(rows: int, columns: int, offset: int | None) -> list[ScoreTile]:
    """The rectangles of a block of scores that count, so that kernels get only full rectangles and causal squares.

    Args:
        rows: the number of queries.
        columns: the number of keys.
        offset: row `i` attends to the columns up to `i + offset`; None: to all.

    Example:
        >>> [tuple(tile) for tile in tiles(3, 3, 0)]
        [(0, 3, 0, 3, True, 0)]
        >>> [tuple(tile) for tile in tiles(2, 4, 1)]
        [(0, 2, 0, 1, False, 0), (0, 2, 1, 2, True, 0)]
        >>> tiles(2, 4, -2)
        []
    """
    if not rows or not columns:
        return []
    if offset is None or offset >= columns - 1:
        return [ScoreTile(0, rows, 0, columns, False)]
    first, seen = max(0, -offset), max(0, offset)
    left = rows - first
    if left <= 0:
        return []
    size = min(left, columns - seen)
    found = [ScoreTile(first, left, 0, seen, False)] if seen else []
    found.append(ScoreTile(first, size, seen, size, True))
    if left > size:
        found.append(ScoreTile(first + size, left - size, seen, size, False))
    return found


def joined(tiles: Sequence[ScoreTile], masked: bool) -> list[ScoreTile]:
    """Merge adjacent rectangles along rows and columns. Masked ones are merged only if their keys are consecutive.

    Example:
        >>> left, right = ScoreTile(0, 4, 0, 2, False, 0), ScoreTile(0, 4, 2, 2, False, 6)
        >>> len(joined([left, right], masked=False)), len(joined([left, right], masked=True))
        (1, 2)
    """
    found: list[ScoreTile] = []
    for tile in tiles:
        for at, other in enumerate(found):
            if tile.causal or other.causal:
                continue
            if other[2:4] == tile[2:4] and other.row + other.rows == tile.row:
                found[at] = other._replace(rows=other.rows + tile.rows)
                break
            follows = not masked or other.first + other.columns == tile.first
            if other[:2] == tile[:2] and other.column + other.columns == tile.column and follows:
                found[at] = other._replace(columns=other.columns + tile.columns)
                break
        else:
            found.append(tile)
    return found


def wide_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype of statistics and sums."""
    return torch.float64 if query.dtype is torch.float64 else torch.float32


@runtime_checkable
class Kernel(Protocol):
    """Computes blocks: its results accumulate blocks of keys for one block of queries."""

    @property
    def by_position(self) -> bool:
        """Whether it reads the positions of queries, and the functions of `flex_attention`."""
        ...

    def forward(self, arguments: Mapping[str, Any], /) -> ForwardBlocks:
        """Begin the output of a block of queries."""
        ...

    def backward(self, arguments: Mapping[str, Any], /) -> BackwardBlocks:
        """Begin the gradients of a block of queries."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BlockKernel:
    """A fused kernel on one block.

    Args:
        attend: (query, key, value, mask, causal, scale) to all results of the operator, the first two of them the
            output and the logarithm of the sum of exponentials.
        differentiate: (grad_out, query, key, value, out, logsumexp, mask, causal, arguments) to the three gradients,
            where `out` and `logsumexp` are those over all keys, and `arguments` those of the operator's call.
    """

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    by_position: bool = False

    def forward(self, arguments: Mapping[str, Any]) -> ForwardBlocks:
        """Begin the output of a block of queries."""
        return FusedForward(self, arguments)

    def backward(self, arguments: Mapping[str, Any]) -> BackwardBlocks:
        """Begin the gradients of a block of queries."""
        return FusedBackward(self, arguments)


def mask_of(arguments: Mapping[str, Any]) -> Any:
    """The mask of a call; None: there is none."""
    return next((arguments[name] for name in MASKS if arguments.get(name) is not None), None)


def part_of(mask: torch.Tensor | None, tile: ScoreTile) -> torch.Tensor | None:
    """The part of a mask that belongs to a tile. One row or column broadcasts to all."""
    if mask is None:
        return None
    if mask.shape[-1] > 1:
        mask = mask.narrow(-1, tile.first, tile.columns)
    return mask.narrow(-2, tile.row, tile.rows) if mask.dim() > 1 and mask.shape[-2] > 1 else mask


def band_tiles(start: int, rows: int, first: int, keys: int, band: tuple[int, int]) -> list[ScoreTile]:
    """The rectangles of a band of scores.

    Args:
        start: the position of the first query.
        rows: the number of queries.
        first: the position of the first local key; it may be negative, for padding.
        keys: the number of all keys.
        band: the number of keys before and after its own position that a query sees.
    """
    left, right = band
    size = max(left + right, 128)
    found = []
    for row in range(0, rows, size):
        count = min(size, rows - row)
        low, high = max(start + row - left, 0), min(start + row + count + right, keys)
        if low < high:
            found.append(ScoreTile(row, count, low - first, high - low, False, low))
    return found


def far_tiles(
    start: int, rows: int, far: Sequence[tuple[int, int]], keys: int, band: tuple[int, int]
) -> list[ScoreTile]:
    """The rectangles of scores with far keys that are outside of those of `band_tiles`.

    Args:
        start: the position of the first query.
        rows: the number of queries.
        far: runs of keys as (first key, number of keys). The local keys are these runs, concatenated.
        keys: the number of all keys.
        band: that of `band_tiles`.

    Example:
        >>> [tuple(tile) for tile in far_tiles(256, 256, [(0, 2), (200, 4)], 512, (100, 28))]
        [(0, 256, 0, 2, False, 0), (128, 128, 2, 4, False, 200)]
    """
    found = []
    for near in band_tiles(start, rows, 0, keys, band):
        low, high = near.first, near.first + near.columns
        at = 0
        for first, count in far:
            pieces = (first, min(first + count, low)), (max(first, high), first + count)
            found += [
                ScoreTile(near.row, near.rows, at + begin - first, end - begin, False, begin)
                for begin, end in pieces
                if begin < end
            ]
            at += count
    return joined(found, masked=True)


class ForwardBlocks:
    """The output of one block of queries over the blocks of keys seen so far."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments, self.query, self.mask = arguments, arguments["query"], mask_of(arguments)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None  # without `rest`
        self.rest: torch.Tensor | None = None  # to be added to `lse`, which may be too large to hold it
        self.others: tuple[Any, ...] = ()  # further results of kernels

    def add(self, key: torch.Tensor, value: torch.Tensor, found: list[ScoreTile]) -> None:
        """Add a block of keys."""
        for tile in found:
            self._merge(tile, *self.block_output(tile, tile.of_columns(key), tile.of_columns(value)))

    def block_output(self, tile: ScoreTile, key: torch.Tensor, value: torch.Tensor) -> BlockOutput:
        """The output of a tile."""
        raise NotImplementedError

    def _merge(self, tile: ScoreTile, out: torch.Tensor, lse: torch.Tensor, rest: torch.Tensor | None) -> None:
        if self.out is None or self.lse is None:
            if tile.rows == self.query.shape[SEQUENCE]:
                self.out, self.lse, self.rest = out.to(lse.dtype), lse, rest
                return
            self.out = out.new_zeros((*self.query.shape[:3], out.shape[-1]), dtype=lse.dtype)
            self.lse = lse.new_full(self.query.shape[:3], -math.inf)
            self.rest = None if rest is None else torch.zeros_like(self.lse)
        so_far, sums = tile.of_rows(self.out), tile.of_rows(self.lse)
        rests = None if self.rest is None else tile.of_rows(self.rest)
        difference = lse - sums if rest is None or rests is None else lse - sums + (rest - rests)
        weight = difference.sigmoid_().masked_fill_(lse == -math.inf, 0.0)
        so_far.lerp_(out.to(lse.dtype), weight.unsqueeze(-1))
        if rest is None or rests is None:
            sums.copy_(torch.logaddexp(sums, lse))
            return
        largest = torch.maximum(sums, lse)
        shift = largest.masked_fill(largest == -math.inf, 0.0)
        added = torch.logaddexp(sums - shift + rests, lse - shift + rest)
        rests.copy_(added.masked_fill_(largest == -math.inf, 0.0))
        sums.copy_(largest)

    def results(self, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the logarithm of the sum of exponentials; rows that attend to nothing are zero in both."""
        wide = wide_dtype(self.query)
        if self.out is None or self.lse is None:
            shape = self.query.shape[:3]
            return self.query.new_zeros((*shape, value_size)), self.query.new_zeros(shape, dtype=wide)
        lse = self.logsumexp()
        return self.out.to(self.query.dtype), lse if self.mask is None else lse.masked_fill(lse == -math.inf, 0.0)

    def logsumexp(self) -> torch.Tensor:
        """The logarithm of the sum of exponentials of the blocks seen so far."""
        assert self.lse is not None, "no block was added"
        return self.lse if self.rest is None else self.lse + self.rest


class FusedForward(ForwardBlocks):
    """`ForwardBlocks` by a fused kernel."""

    def __init__(self, kernel: BlockKernel, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.kernel = kernel

    def block_output(self, tile: ScoreTile, key: torch.Tensor, value: torch.Tensor) -> BlockOutput:
        """The output of a tile."""
        mask, query = part_of(self.mask, tile), tile.of_rows(self.query)
        out, lse, *others = self.kernel.attend(query, key, value, mask, tile.causal, self.arguments["scale"])
        self.others = tuple(others)
        lse = lse.to(wide_dtype(query))  # torch 2.11 traces the statistics of float64 as float32
        return BlockOutput(out, lse, None) if mask is None else _of_masked_rows(mask, tile, out, lse)


def _of_masked_rows(mask: torch.Tensor, tile: ScoreTile, out: torch.Tensor, lse: torch.Tensor) -> BlockOutput:
    """The output of a kernel that added a mask.

    Rows that attend to no key of a block get minus infinity as statistics; kernels return other values. A mask may
    also hide all keys of a row by a large finite number, such as the least one of its dtype. Then the scores are lost
    beside it, all hidden keys count alike, and the number of keys is lost in the logarithm of the sum.
    """
    largest = mask.amax(-1)
    dead = largest == -math.inf
    lost = largest.to(lse.dtype).abs() > LOST / torch.finfo(lse.dtype).eps
    alike = (mask == largest.unsqueeze(-1)).sum(-1) * (tile.columns if mask.shape[-1] == 1 else 1)
    rest = torch.where(lost & ~dead, alike.to(lse.dtype).log(), torch.zeros_like(lse))
    return BlockOutput(out.masked_fill(dead.unsqueeze(-1), 0.0), lse.masked_fill(dead, -math.inf), rest)


class BackwardBlocks:
    """The gradients of one block of queries, and of the blocks of keys added to it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.grad_out = arguments["grad_out_" if "grad_out_" in arguments else "grad_out"]
        self.query, self.out, self.lse = (arguments[name] for name in ("query", "out", "logsumexp"))
        self.mask = mask_of(arguments)
        wide = wide_dtype(self.query)
        self.grad_query = self.query.new_zeros(self.query.shape, dtype=wide)
        self.learned: list[torch.Tensor] = []  # gradients of tensors that functions of scores capture

    def block_gradients(
        self, tile: ScoreTile, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The contribution of a tile to the gradients of its queries, keys and values."""
        raise NotImplementedError

    def add(self, key: torch.Tensor, value: torch.Tensor, found: list[ScoreTile]) -> tuple[torch.Tensor, torch.Tensor]:
        """The contribution to the gradients of a block of keys and values; those of queries are accumulated."""
        grads: list[torch.Tensor] | None = None
        for tile in found:
            key_, value_ = tile.of_columns(key), tile.of_columns(value)
            grad_query, *of_keys = self.block_gradients(tile, key_, value_)
            tile.of_rows(self.grad_query).add_(grad_query)
            if grads is None and tile.columns == key.shape[SEQUENCE]:
                grads = of_keys
                continue
            if grads is None:
                wide = self.grad_query.dtype
                grads = [torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)]
            for total, grad in zip(grads, of_keys, strict=True):
                tile.of_columns(total).add_(grad)
        if grads is None:
            return torch.zeros_like(key), torch.zeros_like(value)
        return grads[0].to(key.dtype), grads[1].to(value.dtype)


class FusedBackward(BackwardBlocks):
    """`BackwardBlocks` by a fused kernel."""

    def __init__(self, kernel: BlockKernel, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.kernel = kernel

    def block_gradients(
        self, tile: ScoreTile, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The contribution of a tile to the gradients of its queries, keys and values."""
        grad_out, query, out, lse = (tile.of_rows(x) for x in (self.grad_out, self.query, self.out, self.lse))
        mask = part_of(self.mask, tile)
        return self.kernel.differentiate(grad_out, query, key, value, out, lse, mask, tile.causal, self.arguments)
