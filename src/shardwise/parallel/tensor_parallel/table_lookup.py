"""A look-up on local tensors in a table whose rows are sharded, by the functions of the operator's rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.rules.embedding import local_rows, missing_rows

__all__ = ["rows_here"]


def rows_here(table: DTensorSpec, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the row of the local table, and whether the row is missing there."""
    fabric, rows = fabric_of(table.mesh), table.shape[0]

    def missing(coordinate: Sequence[int], local: torch.Tensor) -> torch.Tensor:
        return missing_rows(local, table.global_offset(coordinate)[0], table.local_shape(coordinate)[0], rows)

    def row(coordinate: Sequence[int], local: torch.Tensor, is_missing: torch.Tensor) -> torch.Tensor:
        return local_rows(local, is_missing, table.global_offset(coordinate)[0])

    elsewhere = fabric.map(table.mesh, missing, tokens)
    return fabric.map(table.mesh, row, tokens, elsewhere), elsewhere
