"""Look-up in a table of which each rank has some rows: which of them an index means here, and zeros for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.torch_private import assert_async

__all__ = ["is_plain_table", "rows_here", "zero_elsewhere"]


def is_plain_table(module: nn.Module, table: DTensorSpec) -> bool:
    """Whether a look-up reads rows and does nothing else, and every rank has some."""
    assert isinstance(module, nn.Embedding)
    special = module.padding_idx is not None or module.max_norm is not None
    ranks = table.mesh.shape[0]
    everywhere = (ranks - 1) * -(-table.shape[0] // ranks) < table.shape[0]
    return everywhere and not (special or module.scale_grad_by_freq or module.sparse)


def rows_here(table: DTensorSpec, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the row of the local table, any where it is not here; and where that is."""
    fabric, rows = fabric_of(table.mesh), table.shape[0]

    def missing(coordinate: Sequence[int], local: torch.Tensor) -> torch.Tensor:
        assert_async(((local >= 0) & (local < rows)).all(), f"an index is not in the table of {rows} rows")
        begin, held = table.global_offset(coordinate)[0], table.local_shape(coordinate)[0]
        return (local < begin) | (local >= begin + held)

    def row(coordinate: Sequence[int], local: torch.Tensor, is_missing: torch.Tensor) -> torch.Tensor:
        return (local - table.global_offset(coordinate)[0]).masked_fill_(is_missing, 0)

    elsewhere = fabric.map(table.mesh, missing, tokens)
    return fabric.map(table.mesh, row, tokens, elsewhere), elsewhere


def zero_elsewhere(found: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
    """Zeros for the rows that other ranks have; they get no gradient here."""
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)
