"""Decompositions: operators computed from others, on DTensors, if their rules would communicate more.

Importing the package registers all of them; this is done with the rules, when the first operator runs.
"""

from shardwise.decompose import (  # noqa: F401  # read for what they declare
    encoder,
    equivalents,
    random_sampling,
    sharded_associative_scan,
    sharded_bags,
    sharded_batch_norm,
    sharded_dropout_attention,
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
