"""DTensor: one global tensor over a mesh of devices. Its operators are run by the dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypeIs

from shardwise import modes
from shardwise.compilers import (
    declare_to_compiler,
    is_node,
    never_traced,
    refuse_dry,
    single_node,
)
from shardwise.core.cache import BoundedCache
from shardwise.core.html import spec_html
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate
from shardwise.core.spec import ByRank, DTensorSpec, TensorMeta, checked_placements
from shardwise.core.tangents import made_from_plain, plain_tangent
from shardwise.core.tracing import is_dynamo_compiling, is_tracing
from shardwise.dispatch import CacheInfo, OpDispatcher
from shardwise.dispatch.plain_operands import replicated_operand
from shardwise.dispatch.signature import GradientHooks
from shardwise.errors import CheckpointError, PlainTensorError, UnsupportedError
from shardwise.events import Interception, tensor_entered, user_line
from shardwise.fabric.base import fabric_of, fabrics, nothing_of
from shardwise.fabric.rank_tensor import check_replicas, parts_of
from shardwise.fabric.world import as_mesh
from shardwise.tensor import laid_out, moves, plain_refusals
from shardwise.tensor.autograd_functions import (
    FromLocal,
    Redistribute,
    ToLocal,
    as_dtensor,
    as_local,
    moved,
    writable_local,
)
from shardwise.tensor.compile_protocol import CompileProtocol, plain_tangent_of
from shardwise.tensor.composites import replace_composites
from shardwise.tensor.from_local import not_a_tensor, resolved, spec_given
from shardwise.tensor.gradient_layouts import (
    gradient_spec,
    gradient_spec_as,
    gradient_spec_of_local,
)
from shardwise.tensor.laid_out import classes, wrapper_of
from shardwise.tensor.moves import moved_to
from shardwise.tensor.ranks import apply_function, first_rank, on_every_rank, wants_derivatives
from shardwise.tensor.tensor_states import CopiedState, PendingState
from shardwise.tensor.versions import counted_data, with_version_of
from shardwise.torch_private import (
    disabled_torch_function,
    dispatch_mode_count,
    make_wrapper_subclass,
)
from shardwise.transforms import (
    alive,
    innermost,
    refuse_functionalize,
    transforming,
)

__all__ = [
    "REPLACED",
    "AnyDTensor",
    "DTensor",
    "PendingDTensor",
    "as_dtensor",
    "as_local",
    "cache_info",
    "dispatcher",
    "dtensor_of",
    "forget_operators",
    "intercepted",
    "is_dtensor",
    "moved",
    "redistributed",
]


class DTensor(CompileProtocol):
    """A global tensor over a mesh of devices: sharded, replicated or Partial. It behaves like one tensor.

    Made by `distribute_tensor`, `DTensor.from_local` and the factories (`zeros`, ...), not by calling the class.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = sw.distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [sw.Shard(0), sw.Replicate()])
        >>> x.spec, x.redistribute(placements=[sw.Shard(1), sw.Shard(0)]).spec
        (f32[8,4] dp:S0 tp:R, f32[8,4] dp:S1 tp:S0)
        >>> torch.equal(x.full_tensor(), torch.arange(32.0).reshape(8, 4))
        True
    """

    __slots__ = ()

    @staticmethod
    def __new__(cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
        meta = spec.tensor_meta
        self = make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=local_tensor.device,
            requires_grad=requires_grad,
        )
        self._local_tensor = local_tensor
        self._spec = spec
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = disabled_torch_function  # pyright: ignore[reportAssignmentType]  # but see refusing

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if dispatch_mode_count() and is_node(DTensor, args, kwargs or _NO_KWARGS):
            return func(*args, **(kwargs or _NO_KWARGS))  # to the tracer
        if not kwargs:
            kwargs = _NO_KWARGS
            # the most frequent signatures, without building the key argument by argument
            if len(args) == 2 and args[0].__class__ is DTensor:
                kind = args[1].__class__
                if kind is DTensor:
                    run = _cache.get((id(func), args[0]._spec, args[1]._spec))
                    if run is not None:
                        return run(args, kwargs)
                elif kind is float or kind is int:  # by type alone: no such key exists if a rule reads it
                    run = _cache.get((id(func), args[0]._spec, kind))
                    if run is not None:
                        return run(args, kwargs)
                elif kind is list and args[1] and args[1][0].__class__ is int:  # sizes, dims
                    try:
                        run = _cache.get((id(func), args[0]._spec, tuple(args[1])))
                    except TypeError:  # a symbolic size has no hash
                        run = None
                    if run is not None:
                        return run(args, kwargs)
            elif len(args) == 3 and args[0].__class__ is DTensor:
                kind = args[2].__class__
                if args[1].__class__ is DTensor:
                    if kind is DTensor:  # `addmm`, `where`, `_grouped_mm`
                        run = _cache.get((id(func), args[0]._spec, args[1]._spec, args[2]._spec))
                        if run is not None:
                            return run(args, kwargs)
                    elif kind is float:  # `lerp_` of an optimizer
                        run = _cache.get((id(func), args[0]._spec, args[1]._spec, float))
                        if run is not None:
                            return run(args, kwargs)
                elif args[1].__class__ is int and (kind is bool or kind is int):  # a dim, and a flag or another dim
                    run = _cache.get((id(func), args[0]._spec, (int, args[1]), (kind, args[2])))
                    if run is not None:
                        return run(args, kwargs)
            elif len(args) == 1 and args[0].__class__ is DTensor:
                run = _cache.get((id(func), args[0]._spec))
                if run is not None:
                    return run(args, kwargs)
        elif len(args) == 3 and len(kwargs) == 1 and kwargs.get("value").__class__ is float:
            a, b, c = args  # `addcmul_` and `addcdiv_` of an optimizer
            if a.__class__ is b.__class__ is c.__class__ is DTensor:
                run = _cache.get((id(func), a._spec, b._spec, c._spec, "value", float))
                if run is not None:
                    return run(args, kwargs)
        return dispatcher.dispatch(func, args, kwargs)

    # ---------------------------------------------------------------- properties

    @property
    def device_mesh(self) -> DeviceMesh:
        """Its mesh."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Its placement on each axis of the mesh."""
        return self._spec.placements

    @property
    def spec(self) -> DTensorSpec:
        """Mesh, placements, shard order and metadata in one; prints as `f32[8,32] dp:S0 tp:R`."""
        return self._spec

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        if self._copied_view is None or not self._copied_view.is_stale:
            return f"DTensor({self._spec}, local={self._local_tensor!r}{grad})"
        # printing may be done by one rank alone, so that it must not communicate
        return f"DTensor({self._spec}, local={self._held!r} before its base was written to{grad})"

    def __format__(self, format_spec: str) -> str:
        """A single number is formatted as a number, after its reduction if it is Partial; anything else as `repr`."""
        return format(self.item(), format_spec) if self.dim() == 0 and format_spec else super().__format__(format_spec)

    def _repr_html_(self) -> str:
        """The display in a notebook. Like `repr`, it never communicates."""
        return spec_html(self._spec, repr(self))

    @property
    def data(self) -> DTensor:
        """The same tensor, without gradients."""
        data = _DATA.__get__(self)
        return counted_data(self, data._held, data) if data.__class__ is DTensor else data

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, DTensor):
            raise PlainTensorError(
                f"the data of {self._spec} cannot be a plain torch.Tensor of shape {tuple(new.shape)}",
                hint="distribute_tensor(tensor, mesh, placements) first",
            )
        spec = self._spec
        if new.shape == spec.shape and new._spec.mesh is spec.mesh and not spec.partial_axes:  # it keeps its layout
            with torch.no_grad():
                new = redistributed(new, spec.materialized())
        _DATA.__set__(self, new)
        self._mark_copied(None)
        vars(self).pop("_flight", None)
        self._reduction, self._memory, self._local_tensor, self._spec = None, None, new._local_tensor, new._spec

    # ---------------------------------------------------------------- to and from locals

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Any] | None = None,
        shard_order: Sequence[Any] | None = None,
    ) -> AnyDTensor:
        """The DTensor of which each rank holds `local_tensor`. Moves nothing.

        Args:
            local_tensor: this rank's part. On a virtual mesh a `RankTensor`, or a plain tensor that every rank holds.
            device_mesh: the mesh.
            placements: the layout of the locals; replicated by default.
            run_check: compare shapes, dtype and placements over the ranks first; a disagreement is an error on all.
            shape: the global shape; needed if shards are uneven, otherwise computed from the local one.
            stride: the global strides, with `shape`.
            grad_placements: the layout of the gradient of the locals, if it is not implied by the placements.
            shard_order: which axis splits a dim first, if it is not the order of the mesh.

        Example:
            >>> import shardwise as sw
            >>> mesh = sw.init_device_mesh("cpu", (4,))
            >>> DTensor.from_local(torch.ones(2, 3), mesh, [sw.Shard(0)]).shape
            torch.Size([8, 3])
        """
        if is_dynamo_compiling():
            declare_to_compiler()
            return _from_local_in_graph(
                local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements, shard_order
            )
        if not isinstance(local_tensor, torch.Tensor):
            raise not_a_tensor("DTensor.from_local", local_tensor)
        if torch.is_inference_mode_enabled() and not local_tensor.is_inference():  # as for views: one counter
            with torch.inference_mode(False), torch.no_grad():
                return DTensor.from_local(
                    local_tensor, device_mesh, placements, run_check=run_check, shape=shape, stride=stride,
                    grad_placements=grad_placements, shard_order=shard_order,
                )  # fmt: skip
        mesh = device_mesh if device_mesh.__class__ is DeviceMesh else as_mesh(device_mesh)
        if transforming():
            refuse_functionalize("from_local")
        local_tensor = given = alive(local_tensor)
        if local_tensor.is_complex():  # locals never carry the conjugate bit: dispatch does not see it
            local_tensor = resolved(local_tensor)
        fabric = fabric_of(mesh)
        if fabric.many_ranks and not fabric.is_local(innermost(local_tensor)):
            local_tensor = on_every_rank(local_tensor, mesh.grid_size)
        spec = spec_given(local_tensor, mesh, placements, run_check, shape, stride, shard_order)
        if fabric.is_outside(mesh):
            local_tensor = nothing_of(spec).requires_grad_(local_tensor.requires_grad)
        if wants_derivatives(local_tensor):
            made = apply_function(FromLocal, local_tensor, spec, gradient_spec_as(spec, grad_placements))
        else:
            made = with_version_of(given, dtensor_of(spec, local_tensor))
        if tensor_entered:
            tensor_entered.notify(innermost(made))
        return made

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """This rank's part, as autograd sees it.

        Args:
            grad_placements: the layout of the gradient of the local, if it is not implied by the placements;
                for instance `Partial()` if replicas are used differently on the ranks.

        Example:
            >>> import shardwise as sw
            >>> sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).to_local().shape
            torch.Size([2])
        """
        spec = self._spec
        if spec.flattened[1].__class__ is ByRank and is_tracing():
            raise UnsupportedError(
                f"to_local() of {spec} in a compiled program: the shards of the virtual ranks differ in shape, and the "
                "compiler needs one shape of a local",
                hint="compute on the DTensor, redistribute it to a layout that divides evenly, or call to_local() "
                "outside the compiled program; on process groups it compiles as it is",
            )
        if wants_derivatives(self):
            given = grad_placements is not None
            gradient = gradient_spec_as(spec, grad_placements) if given else gradient_spec_of_local(spec)
            return apply_function(ToLocal, self, spec, gradient)
        if torch.is_inference_mode_enabled() and not self.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return self.to_local(grad_placements=grad_placements)
        local = writable_local(self)
        return local if is_tracing() or transforming() else with_version_of(self, local.detach())

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        max_bytes: int | None = None,
        shard_order: Sequence[Any] | None = None,
    ) -> AnyDTensor:
        """The same tensor in another layout, by the cheapest route.

        Args:
            device_mesh: the target mesh; its own by default.
            placements: the target layout; replicated by default.
            async_op: return at once; the wait happens at first use.
            forward_dtype: convert to this dtype first; it is moved and returned in it.
            backward_dtype: convert the gradient to this dtype before it is moved back.
            max_bytes: no state of the route may hold more than this on a rank.
            shard_order: which axis splits a dim first, if it is not the order of the mesh.

        Example:
            >>> import shardwise as sw
            >>> mesh = sw.init_device_mesh("cpu", (4,))
            >>> x = sw.distribute_tensor(torch.arange(8), mesh, [sw.Shard(0)])
            >>> x.redistribute(placements=[sw.Replicate()]).spec
            i64[8] R
        """
        spec = self._spec
        mesh = spec.mesh if device_mesh is None else as_mesh(device_mesh)
        if placements is None:
            placements = (Replicate(),) * mesh.ndim
        elif placements.__class__ is not list and placements.__class__ is not tuple:
            placements = checked_placements(placements, mesh, spec.ndim)
        meta = spec.tensor_meta
        if forward_dtype is not None and forward_dtype is not meta.dtype:
            meta = TensorMeta(meta.shape, meta.stride, forward_dtype)
        key = (mesh, tuple(placements), meta) if shard_order is None else None
        target = _targets.get(key) if key is not None else None
        if target is None:
            target = DTensorSpec(mesh, placements, meta, shard_order)
            if key is not None and not meta.is_symbolic:
                (_targets.keep_recent if target.is_ragged else _targets.keep)(key, target)
        if target is spec and backward_dtype is None:
            return self
        if wants_derivatives(self):
            return apply_function(Redistribute, self, spec, target, async_op, backward_dtype, max_bytes)
        return moved_to(self, target, async_op, max_bytes)

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The full tensor on every rank, in new memory. On a virtual mesh, which has all ranks, one tensor.

        Args:
            grad_placements: as in `to_local`.

        Example:
            >>> import shardwise as sw
            >>> sw.ones(3, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).full_tensor()
            tensor([1., 1., 1.])
        """
        mesh = self._spec.mesh
        gathered = self if self._spec.is_replicated else self.redistribute(placements=(Replicate(),) * mesh.ndim)
        local = gathered.to_local(grad_placements=grad_placements)
        if fabrics[mesh.fabric].many_ranks and mesh.size() == mesh.grid_size:
            check_replicas(innermost(local))
            return first_rank(local)
        return local.clone() if gathered is self else local  # never the memory of this tensor, on any fabric

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Like `torch.Tensor.backward`. A plain gradient is assumed replicated, like plain operands."""
        if gradient is not None and not isinstance(gradient, DTensor):
            if modes.plain_policy() == "refuse" and gradient.numel() != 1:
                raise PlainTensorError(
                    f"backward at {user_line()}: the gradient is a plain torch.Tensor of shape "
                    f"{tuple(gradient.shape)}, and plain tensors are refused here",
                    hint="distribute_tensor(gradient, mesh, placements) first",
                )
            gradient = replicated_operand(DTensor, gradient, self._spec.mesh, "backward", "gradient")
        elif gradient is None and self.__class__ is DTensor and not intercepted["__torch_dispatch__"].is_active:
            gradient = _gradient_of_loss(self)
        super().backward(gradient, *args, **kwargs)

    def squeeze_(self, *dims: Any) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `torch.Tensor.squeeze_`, and so for the methods below; see `_reshape`."""
        return _reshape(self, torch.Tensor.squeeze_, torch.Tensor.squeeze, *dims)

    def unsqueeze_(self, dim: int) -> DTensor:
        return _reshape(self, torch.Tensor.unsqueeze_, torch.Tensor.unsqueeze, dim)

    def t_(self) -> DTensor:
        return _reshape(self, torch.Tensor.t_, torch.Tensor.t)

    def transpose_(self, dim0: int, dim1: int) -> DTensor:
        return _reshape(self, torch.Tensor.transpose_, torch.Tensor.transpose, dim0, dim1)

    swapaxes_ = swapdims_ = transpose_  # pyright: ignore[reportAssignmentType]

    def tolist(self) -> Any:
        """The full tensor as nested lists of numbers, on every rank."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The full tensor as an array of numpy, on every rank."""
        return self.full_tensor().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.full_tensor().__dlpack__(**options)

    @property
    def __cuda_array_interface__(self) -> Any:
        if self.device.type != "cuda":
            raise AttributeError("__cuda_array_interface__ is there on CUDA alone", name="__cuda_array_interface__")
        raise _without_memory("__cuda_array_interface__")

    def storage(self) -> Any:
        """Refused: a DTensor has no memory of its own. For the same reason `data_ptr()` is 0."""
        raise _without_memory("storage()")

    def _typed_storage(self) -> Any:
        raise _without_memory("storage()")

    def share_memory_(self) -> DTensor:
        """Refused: a DTensor has no memory of its own."""
        raise UnsupportedError("a DTensor cannot be put into shared memory", hint="to_local().share_memory_()")

    def is_shared(self) -> bool:
        """Whether its memory is shared with other processes; never."""
        return False

    def pin_memory(self, device: Any = None) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same tensor with page-locked locals."""
        return self if self.is_pinned() else dtensor_of(self._spec, self._local_tensor.pin_memory())

    def is_pinned(self, device: Any = None) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether its locals are page-locked."""
        return all(part.is_pinned() for part in parts_of(self._local_tensor))

    def apply_(self, function: Callable[..., Any]) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refused: torch reads the memory of the tensor itself, and that of a DTensor is its locals'."""
        raise UnsupportedError(
            "apply_ does not work on a DTensor", hint="use torch's operators, or to_local().apply_(f)"
        )

    # ---------------------------------------------------------------- copies

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        here = fabric_of(self._spec.mesh).held_by()
        if here is not None and not self._spec.is_replicated:
            warnings.warn(
                f"the pickle of {self._spec} has only the local tensor of rank {here}: every rank must save and load "
                "a file of its own; shardwise.checkpoint.save makes one checkpoint of all, and get_model_state_dict of "
                "shardwise.checkpoint.state_dict plain tensors, with full_state_dict=True",
                stacklevel=2,
            )
        return _rebuild, (self._local_tensor, self._spec, self.requires_grad, self._kept_attributes(), here)

    def _kept_attributes(self) -> dict[str, Any]:
        """Attributes that users and nn.Parameter have set; derived ones are not pickled."""
        return {name: value for name, value in self.__dict__.items() if name not in REMEMBERED}

    def __copy__(self) -> DTensor:
        made: Any = self.data.requires_grad_(self.requires_grad)
        for name, value in self._kept_attributes().items():
            setattr(made, name, value)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise RuntimeError("only DTensors made by the user (graph leaves) can be deep-copied; detach() it first")
        with torch.no_grad():
            copied = DTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # whose copies have none in torch either
            copied.grad = self.grad.__deepcopy__(memo)
        for name, value in self._kept_attributes().items():
            setattr(copied, name, value)
        return copied


if TYPE_CHECKING:
    AnyDTensor = DTensor

    def dtensor_of(spec: DTensorSpec, local: torch.Tensor) -> DTensor: ...
    def is_dtensor(value: Any) -> TypeIs[DTensor]: ...
    def redistributed(tensor: DTensor, target: DTensorSpec) -> DTensor: ...
else:  # inside a function that torch.func transforms, wrappers of DTensors have this class
    AnyDTensor = torch.Tensor
    dtensor_of, is_dtensor, redistributed = laid_out.dtensor_of, laid_out.is_dtensor, moves.redistributed


def _gradient_of_loss(loss: DTensor) -> DTensor | None:
    """The initial gradient of `backward`: `ones_like`, without dispatch. None if torch should make it."""
    spec = loss._spec
    is_number = spec.tensor_meta.dtype.is_floating_point and not spec.is_lazy and loss.numel() == 1
    if not is_number or not fabrics[spec.mesh.fabric].one_rank or not loss.requires_grad or dispatch_mode_count():
        return None
    return dtensor_of(gradient_spec(spec), torch.ones_like(loss._local_tensor))


@torch.utils.hooks.unserializable_hook
def _plain_gradient(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a plain tensor: that of a replicated DTensor, as a plain tensor."""
    if not isinstance(grad, DTensor):
        return grad
    if fabric_of(grad._spec.mesh).is_outside(grad._spec.mesh):  # this rank has no part in it
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    return grad.full_tensor()


@torch.utils.hooks.unserializable_hook
def _rank_gradient(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a `RankTensor`: that of a replicated DTensor, on each rank."""
    return grad.redistribute().to_local() if isinstance(grad, DTensor) else grad


_DATA: Any = torch.Tensor.data
_NO_KWARGS: Mapping[str, Any] = {}
dispatcher = OpDispatcher(DTensor, wrapper_of, GradientHooks(_plain_gradient, _rank_gradient))
_cache = dispatcher.cache
plain_refusals.refusable(DTensor)
replace_composites(DTensor)

# Observers may intercept these: operators, and the methods that redistribute explicitly.
intercepted = {
    name: Interception(DTensor, name)
    for name in ("__torch_dispatch__", "redistribute", "full_tensor", "to_local", "from_local")
}
REPLACED = "_shardwise_replaced"  # on a parameter that was replaced in its module: by which function
REMEMBERED = ("_copied_view", "_reduction", "_flight", "_memory", REPLACED)  # attributes that copies do not get
MAX_SPECS = 4096
_targets: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # of calls of `redistribute`


def cache_info() -> CacheInfo:
    """The numbers of cached signatures and routes, and the numbers of misses.

    Example:
        >>> cache_info().entries <= cache_info().limit
        True
    """
    return dispatcher.info()


def forget_operators() -> None:
    """Drop the signatures of operators, because a rule has changed."""
    dispatcher.forget()


def _without_memory(what: str) -> CheckpointError:
    """The error for access to the memory of a DTensor, usually to write or send its values."""
    return CheckpointError(
        f"{what}: a DTensor has no memory of its own, its values are in its locals",
        hint="take full_tensor() or to_local(); to write a model use shardwise.checkpoint.save or export_safetensors, "
        "for one of transformers sw.hf.save_pretrained (in its Trainer: sw.hf.TrainerMixin), "
        "or write the plain tensors that get_model_state_dict of shardwise.checkpoint.state_dict gives",
    )


def _rebuild(
    local: torch.Tensor,
    spec: DTensorSpec,
    requires_grad: bool,
    attributes: Mapping[str, Any],
    held_by: int | None = None,
) -> DTensor:
    """Called by pickle. `held_by` is the rank of the local, if each process has its own."""
    if held_by is not None:
        _check_holder(spec, held_by)
    made = DTensor(local, spec, requires_grad=requires_grad)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _check_holder(spec: DTensorSpec, held_by: int) -> None:
    """Refuse a local that was pickled by another rank than this one, where that rank holds something else."""
    mesh, here = spec.mesh, fabric_of(spec.mesh).held_by()
    if here is None or here == held_by:  # a process without a rank may read any local
        return
    blocks = [None if at is None else spec.block(at) for at in map(mesh.coordinate_of, (held_by, here))]
    if blocks[0] != blocks[1] or spec.partial_axes:
        raise CheckpointError(
            f"the file or message holds the part of {spec} that rank {held_by} has, and this is rank {here}",
            hint="let every rank save and load a file of its own, or use shardwise.checkpoint.save and load, or save "
            "the result of get_model_state_dict of shardwise.checkpoint.state_dict with full_state_dict=True",
        )


@single_node
def _from_local_in_graph(
    local: torch.Tensor,
    mesh: Any,
    placements: Sequence[Any] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Any] | None,
    shard_order: Sequence[Any] | None,
) -> DTensor:
    refuse_dry(as_mesh(mesh))
    if run_check:
        raise UnsupportedError(
            "from_local(run_check=True) compares values over the ranks, which a compiled program cannot",
            hint="leave run_check out, or call from_local outside of compiled code",
        )
    return DTensor.from_local(
        local, mesh, placements, shape=shape, stride=stride, grad_placements=grad_placements, shard_order=shard_order
    )


def _reshape(tensor: DTensor, in_place: Callable[..., Any], functional: Callable[..., Any], *dims: Any) -> DTensor:
    """Give a tensor another shape in place.

    For a view, autograd writes to the base through the function that made the view, which would not know of the new
    shape. So a view becomes, as the same object, a view of itself.
    """
    if is_dynamo_compiling() or not tensor._is_view() or not torch.is_grad_enabled():
        return in_place(tensor, *dims)
    try:
        base: Any = tensor._base
        again: Any = tensor._view_func_unsafe(base)  # another object: the new view refers to its base
        torch.utils.swap_tensors(tensor, functional(again, *dims))
    except RuntimeError as error:
        raise UnsupportedError(
            f"{in_place.__name__} of a view of {tensor._spec} that something else refers to: {error}",
            hint=f"write y = y.{functional.__name__}(...), which makes a view of it",
        ) from None
    return tensor


class PendingDTensor(PendingState, DTensor):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A DTensor whose last collective is in flight."""

    __slots__ = ()


class CopiedDTensor(CopiedState, DTensor):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    """A view that shares no memory with its base."""

    __slots__ = ()


# the state of a DTensor is not part of the type that users see
CopiedDTensor.__name__ = CopiedDTensor.__qualname__ = PendingDTensor.__name__ = PendingDTensor.__qualname__ = "DTensor"
classes.ordinary, classes.pending, classes.copied = DTensor, PendingDTensor, CopiedDTensor


made_from_plain(DTensor, plain_tangent_of)
never_traced(
    _gradient_of_loss,
    DTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    PendingDTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    DTensor.to_local,
    DTensor.redistribute,
    DTensor.full_tensor,
    DTensor.__tensor_unflatten__,
    DTensor.__metadata_guard__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    DTensor.__coerce_same_metadata_as_tangent__,
    plain_tangent,
)
