"""DTensor in parts: the class and its moves (`dtensor`), above files that know specs and locals alone."""

from shardwise.tensor.dtensor import (
    DTensor,
    PendingDTensor,
    cache_info,
    dispatcher,
    dtensor_of,
    forget_operators,
    redistributed,
)
from shardwise.tensor.gradients import gradient_spec
from shardwise.tensor.watching import Watcher, entered, record, unrecorded, watch

__all__ = [
    "DTensor",
    "PendingDTensor",
    "Watcher",
    "cache_info",
    "dispatcher",
    "dtensor_of",
    "entered",
    "forget_operators",
    "gradient_spec",
    "record",
    "redistributed",
    "unrecorded",
    "watch",
]
