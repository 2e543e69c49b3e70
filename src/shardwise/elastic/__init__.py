"""Jobs whose ranks change: states on another mesh, and data in an order that does not depend on the ranks."""

from __future__ import annotations

from shardwise.elastic.batch_order import batch_indices
from shardwise.elastic.remeshing import remesh

__all__ = ["batch_indices", "remesh"]
