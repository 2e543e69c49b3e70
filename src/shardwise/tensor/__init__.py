"""DTensor in parts: the class (`dtensor`), its autograd functions, states and compile protocol, above `laid_out`."""

from shardwise.tensor import func_methods as _func_methods  # noqa: F401  # installs itself when there is a mesh
from shardwise.tensor.dtensor import (
    AnyDTensor,
    DTensor,
    PendingDTensor,
    as_dtensor,
    as_local,
    cache_info,
    dispatcher,
    dtensor_of,
    forget_operators,
    intercepted,
    is_dtensor,
    moved,
    redistributed,
)
from shardwise.tensor.gradient_layouts import gradient_spec, transposed_spec
from shardwise.tensor.ranks import apply_function, is_forward_or_transformed, wants_derivatives

__all__ = [
    "AnyDTensor",
    "DTensor",
    "PendingDTensor",
    "apply_function",
    "as_dtensor",
    "as_local",
    "cache_info",
    "dispatcher",
    "dtensor_of",
    "forget_operators",
    "gradient_spec",
    "intercepted",
    "is_dtensor",
    "is_forward_or_transformed",
    "moved",
    "redistributed",
    "transposed_spec",
    "wants_derivatives",
]
