"""The private names of torch that the library needs, each with its reason. No other module imports one.

Three modules have private names of their own, because they replace or adapt them: `interop` (torch's DTensor),
`fabric/c10d` and `fabric/thread_group` (process groups), `loading` (methods of modules and optimizers).
`tests/pure/test_torch_private.py` checks each name, and that no other module imports one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._higher_order_ops as higher_order_ops
import torch._library as _library
from torch import overrides as _overrides
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedFakeTensorException
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.utils import parametrize
from torch.optim._muon import _adjust_lr as muon_learning_rate
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _CachedTorchDispatchMode as CachedCheckpointMode
from torch.utils.checkpoint import _CachingTorchDispatchMode as CachingCheckpointMode

__all__ = [
    "CachedCheckpointMode",
    "CachingCheckpointMode",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "DispatchKeySet",
    "DispatchModeKey",
    "ExcludeDispatchKeyGuard",
    "FakeTensor",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "IncompatibleKeys",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TracingContext",
    "UnsupportedFakeTensorException",
    "UnwrappedDispatchMode",
    "assert_async",
    "autograd_sequence_number",
    "below_autograd",
    "cudnn_enabled",
    "current_autograd_node",
    "current_graph_task",
    "current_raw_stream",
    "decomposition_of",
    "dict_version",
    "disabled_torch_function",
    "dispatch_mode_count",
    "dispatch_mode_of",
    "dispatch_mode_stack",
    "dynamo_frames",
    "eager_transforms",
    "flex_attention",
    "flex_attention_backward",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "forward_ad",
    "function_mode_count",
    "function_mode_stack",
    "functorch",
    "global_backward_hooks",
    "global_forward_hooks",
    "gradient_edge",
    "guard_managers",
    "has_thread_object",
    "higher_order_ops",
    "inductor_compile",
    "input_metadata",
    "is_alias_of",
    "is_key_excluded",
    "keep_thread_object",
    "make_subclass",
    "make_wrapper_subclass",
    "mkldnn_enabled",
    "muon_learning_rate",
    "opaque_types",
    "parametrize",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_raw_dispatch_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "push_raw_dispatch_mode",
    "queue_callback",
    "replay_views",
    "saved_tensor_hooks",
    "scalar_lookups",
    "set_key_excluded",
    "suggest_memory_format",
    "temporarily_clear_interpreter_stack",
    "thread_object",
    "track_constant",
    "transforms_active",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "views_replayed",
    "without_dispatch_modes",
    "wrap_call",
]

_C: Any = torch._C  # type checkers know few of its names

# ---------------------------------------------------------------- operators


def wrap_call(overload: OpOverload, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what Python runs when it calls an operator: failures of collectives in compiled code are named.

    A kernel in Python would hold the interpreter's lock while a collective is waited for. The result of `wrap` must
    have the hash of the original, which is that of the operator.
    """
    operator: Any = overload
    operator._op = wrap(operator._op)


# ---------------------------------------------------------------- tensor subclasses
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # a DTensor is a tensor without storage
make_subclass = torch.Tensor._make_subclass  # a parameter that shares storage with a tensor
disabled_torch_function = _C._disabled_torch_function_impl  # operators go straight to __torch_dispatch__
DisableTorchFunction = _C.DisableTorchFunction  # operators of a process group of threads: not the program's
DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass  # modes see a call once
DisableTorchDispatch = _C._DisableTorchDispatch  # metadata of a wrapper changes in place, as resize_ does
is_alias_of = _C._is_alias_of  # views of locals: whether a result shares storage

# ---------------------------------------------------------------- dispatch keys and modes
DispatchKey = _C.DispatchKey  # which keys to exclude
DispatchKeySet = _C.DispatchKeySet  # the same
ExcludeDispatchKeyGuard = _C._ExcludeDispatchKeyGuard  # a composite operator without our replacement
below_autograd = _C._AutoDispatchBelowAutograd  # kernels of the target device in a dry run
is_key_excluded = _C._dispatch_tls_is_dispatch_key_excluded  # conjugate and negative bits inside an operator
set_key_excluded = _C._dispatch_tls_set_dispatch_key_excluded  # the same
DispatchModeKey = _C._TorchDispatchModeKey  # the modes of a tracer
dispatch_mode_of = _C._get_dispatch_mode  # whether one is active
dispatch_mode_count = _C._len_torch_dispatch_stack  # a cheap test for any mode
function_mode_count = _C._len_torch_function_stack  # the same for function modes
push_raw_dispatch_mode = _C._push_on_torch_dispatch_stack  # version counters: without the costs of a context
pop_raw_dispatch_mode = _C._pop_torch_dispatch_stack  # the same
push_dispatch_mode = _python_dispatch._push_mode  # a dry run removes its mode from below others
pop_dispatch_mode = _python_dispatch._pop_mode  # the same
push_function_mode = _overrides._push_mode  # the same for function modes
pop_function_mode = _overrides._pop_mode  # the same
without_dispatch_modes = _python_dispatch._disable_current_modes  # computing shapes without recording them
dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack  # modes that must not see gathering
function_mode_stack = _overrides._get_current_function_mode_stack  # modes that must not see locals

# ---------------------------------------------------------------- autograd
# `forward_ad._current_level` changes. It is read where it is needed: a function would cost a frame.
# So does `parametrize._cache_enabled`: whether computed parameters are kept.
current_autograd_node = _C._current_autograd_node  # the line of a gradient; the layout of its forward
current_graph_task = _C._current_graph_task_id  # which backward runs; -1 outside


def input_metadata(node: Any) -> Any:
    """Shape, dtype and device of each gradient that an autograd node takes."""
    return node._input_metadata


autograd_sequence_number = torch.autograd._get_sequence_nr  # pairs operators of forward and backward
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # runs at the end of a backward
saved_tensor_hooks = _C._autograd  # whether hooks for saved tensors are in place
keep_thread_object = _C._stash_obj_in_tls  # modes reach the threads of a backward
thread_object = _C._get_obj_in_tls  # the same
has_thread_object = _C._is_key_in_tls  # the same

# ---------------------------------------------------------------- modules
global_forward_hooks = _module._global_forward_hooks  # hooks for all modules, which expect DTensors
global_backward_hooks = _module._global_backward_hooks  # the same

# ---------------------------------------------------------------- torch.func and compilers
functorch = _C._functorch  # the wrappers that transformed functions are given
transforms_active = _C._are_functorch_transforms_active  # whether one runs
views_replayed = _C._is_view_replay_enabled  # gradients of writes to views repeat the views: no storage offsets
replay_views = _C._set_view_replay_enabled  # the same
eager_transforms: Any = _eager_transforms  # `torch.func.grad` and `vjp`: the names of their levels are replaced there
mkldnn_enabled = _C._get_mkldnn_enabled  # settings of a captured call, at a tenth of the time of the public names
cudnn_enabled = _C._get_cudnn_enabled  # the same
dict_version = _C._dynamo.guards.dict_version  # a number that changes with the contents of a dict
# `higher_order_ops` is the package that users import `associative_scan` from; the name there is replaced
opaque_types: Any = getattr(_library, "opaque_object", None)  # classes whose values are constants in a graph

# ---------------------------------------------------------------- operators
assert_async = torch._assert_async  # indices are checked without synchronizing
foreach_copy_ = torch._foreach_copy_  # many small copies as one kernel
foreach_add_, foreach_mul_ = torch._foreach_add_, torch._foreach_mul_  # an optimizer's step on all parameters at once
foreach_lerp, foreach_lerp_ = torch._foreach_lerp, torch._foreach_lerp_


class UnwrappedDispatchMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` torch does not wrap: the wrapper imports the compiler, a second.

    For modes that never run while Dynamo traces; `never_traced` keeps it from their code after graph breaks.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def current_raw_stream(device: int) -> int:
    """The CUDA stream in use, as the driver's handle. Builds without CUDA lack the function."""
    return _C._cuda_getCurrentRawStream(device)


def dynamo_frames() -> Any:
    """Dynamo's frame evaluation, which marks functions that are never compiled. AttributeError where torch moved it."""
    return _C._dynamo.eval_frame


def track_constant(tensor: torch.Tensor, tracer: Any) -> None:
    """Make a tensor a constant of the graph that make_fx records: of tensors of a subclass it does not by itself."""
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    track_tensor_tree(tensor, torch.fx.Proxy(tracer.create_arg(tensor), tracer), constant=None, tracer=tracer)


def guard_managers() -> tuple[Any, Any]:
    """The trees of guards that Dynamo checks in C++, and the kind of their ordinary nodes. Dynamo is imported."""
    from torch._dynamo.guards import GuardManagerType

    return _C._dynamo.guards.RootGuardManager, GuardManagerType.GUARD_MANAGER


def scalar_lookups() -> Any:
    """A mode in which `table[i]` with a tensor `i` is an operator, as `flex_attention` promises its functions."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def decomposition_of(op: OpOverload) -> Any:
    """The decomposition that torch has for an operator, if it has one. The first call takes half a second."""
    import torch._decomp

    return torch._decomp.decomposition_table.get(op)


def gradient_edge(tensor: torch.Tensor) -> Any:
    """The node of autograd that adds to the gradient of a leaf."""
    from torch.autograd.graph import get_gradient_edge

    return get_gradient_edge(tensor).node


def inductor_compile() -> Any:
    """The function of inductor that compiles a graph of local operators. Importing inductor takes seconds."""
    import torch._inductor

    return torch._inductor.compile
