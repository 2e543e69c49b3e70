"""Every module with decompositions, imported so that they are in the registry."""

from __future__ import annotations

from shardwise.decompose import (  # noqa: F401  # read for what they declare
    encoder,
    equivalents,
    random_sampling,
    sharded_bags,
    sharded_batch_norm,
    sharded_extremes,
    sharded_halves,
    sharded_images,
    sharded_indexing,
    sharded_losses,
    sharded_masks,
    sharded_norms,
    sharded_scans,
    sharded_search,
    sharded_softmax,
    sharded_statistics,
    tensor_lists,
)
