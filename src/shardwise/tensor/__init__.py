"""DTensor in parts: the class (`dtensor`) between files that know specs and locals alone, and files that import it."""

from shardwise.tensor.autograd import FromLocal, Redistribute, ToLocal
from shardwise.tensor.copies import deep_copied, pickled
from shardwise.tensor.dtensor import (
    Beside,
    DTensor,
    cache_info,
    complete,
    dispatcher,
    dtensor_of,
    forget_operators,
    redistributed,
)
from shardwise.tensor.gradients import gradient_spec
from shardwise.tensor.late import CopiedDTensor, PendingDTensor, pending
from shardwise.tensor.tangents import accept_plain_tangents
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

complete(
    Beside(
        differentiable_from_local=FromLocal.apply,
        differentiable_to_local=ToLocal.apply,
        differentiable_redistribute=Redistribute.apply,
        pending=pending,
        copied_class=CopiedDTensor,
        pickled=pickled,
        deep_copied=deep_copied,
        accept_plain_tangents=accept_plain_tangents,
    )
)
