"""Attention with dropout block by block: masks and dropout of scores as functions of `flex_blocks`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence  # noqa: F401  (named by annotations of the base class)
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.rng.dropout_tiles import DropoutMask, MaskTile
from shardwise.rules.attention_blocks import ScoreTile
from shardwise.rules.flex_blocks import FlexFunctions, Positions

__all__ = ["DropoutFunctions"]


@dataclass(frozen=True, slots=True, eq=False)
class DropoutFunctions(FlexFunctions):
    """The functions of a call with dropout.

    Args:
        bias: the mask of the call on every rank, boolean or to be added to scores; None: there is none.
        causal: whether query `i` attends to the keys up to `i` alone.
        dropout: which scores are kept; None in a dry run.
        keep: the probability that one is kept.
        current: the parts of the mask for the tiles that are being computed.
    """

    bias: torch.Tensor | None = None
    causal: bool = False
    dropout: DropoutMask | None = None
    keep: float = 1.0
    current: dict[ScoreTile, torch.Tensor] = field(default_factory=dict)
    largest: torch.Tensor | None = field(init=False, default=None)  # the largest finite number of each row of `bias`

    def __post_init__(self) -> None:
        if self.bias is not None and self.bias.dtype is not torch.bool:
            object.__setattr__(self, "largest", self.bias.amax(-1, keepdim=True).nan_to_num_(0.0, 0.0, 0.0))

    def visible(self, samples: Any, heads: Any, queries: Any, keys: Any) -> Any:
        """Whether keys are seen, by sample, head, query and key, or with one of equal samples and heads."""
        seen = torch.ones(1, 1, dtype=torch.bool, device=queries.device).expand(len(queries), len(keys))
        if self.causal:
            seen = queries.unsqueeze(-1) >= keys
        if self.bias is None:
            return seen
        part = _part(self.bias, samples, heads, queries, keys)
        return seen & (part if part.dtype is torch.bool else part != -math.inf)

    def modified(self, products: Any, indices: Sequence[Any]) -> Any:
        """The scores to use, relative to the largest number of the mask in their row.

        A mask may hide all keys of a row by a large finite number, beside which the sum of exponentials would be lost.
        """
        if self.bias is None or self.largest is None:
            return products
        return products + _part(self.bias, *indices) - _part(self.largest, *indices)

    def of_products(self, products: Any, indices: Sequence[Any], of_scores: Any) -> tuple[Any, list[Any]]:
        """The gradient of products of queries and keys, from that of the scores that were used."""
        return of_scores, []

    def begin(self, found: Sequence[ScoreTile], positions: Positions) -> None:
        """Draw which scores of the tiles are kept."""
        self.current.clear()
        if self.dropout is None:
            return
        tiles = [MaskTile(tile.row, tile.rows, tile.first, tile.columns) for tile in found]
        samples, heads, queries = (x.tolist() for x in positions)
        parts = self.dropout.parts(samples, heads, queries, tiles)
        self.current.update(zip(found, parts, strict=True))

    def dropped(self, tile: ScoreTile, x: Any) -> Any:
        """Scores of a tile with dropout."""
        kept = self.current.get(tile)
        if kept is None:  # in a dry run
            kept = torch.ones_like(x, dtype=torch.bool)
        return x * (kept.to(x.dtype) / self.keep)


def _part(mask: torch.Tensor, *indices: Any) -> torch.Tensor:
    """The part of a mask for some samples, heads, queries and keys. Broadcast dims keep size one."""
    for dim, index in zip((-4, -3, -2, -1), indices, strict=True):
        if mask.dim() >= -dim and mask.shape[dim] > 1:
            mask = mask.index_select(dim, index)
    return mask
