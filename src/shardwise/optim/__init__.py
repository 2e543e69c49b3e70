"""Optimizers that work on full matrices: `Muon`, and `by_matrix` to write others."""

from shardwise.optim.matrix_owners import by_matrix
from shardwise.optim.muon import Muon

__all__ = ["Muon", "by_matrix"]
