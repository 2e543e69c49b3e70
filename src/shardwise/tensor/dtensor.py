"""DTensor: one global tensor that lies over a mesh; from_local, to_local, redistribute, and their gradients.

Operators are the dispatcher's business.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import TypeIs

from shardwise import modes
from shardwise.compilers import (
    decided_by,
    mixes_strides,
    never_traced,
    refuse_dry,
    refuse_named,
    taken_whole,
    tell_compiler,
)
from shardwise.core.cache import BoundedCache
from shardwise.core.html import spec_html
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh, rebuild_mesh
from shardwise.core.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.core.spec import ByRank, DTensorSpec, TensorMeta, known_dense
from shardwise.core.symbolic import has_symbols, hinted, introduce_sizes, is_tracing, specialized
from shardwise.core.tangents import accept_plain_tangents, made_from_plain, plain_tangent
from shardwise.dispatch import CacheInfo, OpDispatcher
from shardwise.dispatch.plain_operands import replicated_operand
from shardwise.dispatch.views import OUTSIDE, materialize
from shardwise.errors import CheckpointError, PlainTensorError, UnsupportedError
from shardwise.fabric.base import fabric_of, nothing_of
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.fabric.shared_writes import is_traced
from shardwise.fabric.traced_collectives import recording
from shardwise.fabric.virtual import RankTensor, check_replicas, parts_of
from shardwise.fabric.world import as_mesh
from shardwise.local import in_order_of, laid_out_like, stored_zeros
from shardwise.plan.propagate import replicated_spec
from shardwise.tensor import hooks, plain_refusals
from shardwise.tensor.composites import replace_composites
from shardwise.tensor.from_local import resolved, spec_given
from shardwise.tensor.gradient_layouts import (
    addends_spec,
    gradient_spec,
    gradient_spec_as,
    gradient_spec_of_local,
    needs_parts,
    refuse_parts,
    share_of_gradient,
    tangent_spec,
    transposed_spec,
)
from shardwise.tensor.input_aliasing import first_sharing
from shardwise.tensor.ranks import apply_function, first_rank, on_every_rank, wants_derivatives
from shardwise.tensor.versions import with_version_of
from shardwise.torch_private import (
    FakeTensor,
    disabled_torch_function,
    dispatch_mode_count,
    make_wrapper_subclass,
    tree_leaves,
)
from shardwise.transforms import (
    alive,
    innermost,
    is_wrapped,
    refuse_functionalize,
    transforming,
    visible_dims,
    visible_spec,
    with_batch_dim,
)

__all__ = [
    "AnyDTensor",
    "DTensor",
    "PendingDTensor",
    "as_dtensor",
    "as_local",
    "cache_info",
    "dispatcher",
    "dtensor_of",
    "forget_operators",
    "is_dtensor",
    "moved",
    "redistributed",
]


class UnderModes(tuple[Any, ...]):
    """The context of a flattened DTensor while other modes than the default are in force. Equal to it without them."""

    modes: tuple[Any, ...]
    by_rank: bool

    def __new__(cls, context: tuple[Any, ...], in_force: tuple[Any, ...], by_rank: bool) -> UnderModes:
        self = super().__new__(cls, context)
        self.modes, self.by_rank = in_force, by_rank
        return self

    def __deepcopy__(self, memo: Any) -> UnderModes:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return UnderModes, (tuple(self), self.modes, self.by_rank)


def _guarded(context: tuple[Any, ...]) -> tuple[Any, ...]:
    """What compiled code was made for besides a layout: the modes, and how the tensor is taken apart."""
    if isinstance(context, UnderModes):
        return context.modes, context.by_rank
    return None, context.__class__ is ByRank


class DTensor(torch.Tensor):
    """A tensor that lies sharded, replicated or partial over a mesh of devices and behaves like one tensor.

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

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: DTensorSpec
    _laid_out_over_ranks = True  # so that operators on it and locals of virtual ranks come here
    _copied_view: Any = None  # how it came about, where it is a view that shares no memory with its base
    _settled: Any = None  # what it came to, where it is Partial and has been reduced

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
        if not kwargs:
            kwargs = _NO_KWARGS
            # the most frequent signatures, without building the key argument by argument
            if len(args) == 2 and args[0].__class__ is DTensor:
                kind = args[1].__class__
                if kind is DTensor:
                    run = _cache.get((id(func), args[0]._spec, args[1]._spec))
                    if run is not None:
                        return run(args, kwargs)
                elif kind is float or kind is int:  # by type alone: where a rule reads the number, there is no such key
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
                    if kind is float:  # `lerp_` of an optimizer
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

    @property
    def _held(self) -> torch.Tensor:
        """The local as it is, even where it is a copied view whose base may have been written to since."""
        return _LOCAL.__get__(self)

    def _mark_copied(self, made: Any) -> None:
        """Remember how it came about: it is a view that shares no memory with its base, or with None no longer one."""
        self._copied_view = made
        self.__class__ = DTensor if made is None else CopiedDTensor  # pyright: ignore[reportAttributeAccessIssue]

    # ---------------------------------------------------------------- what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How it lies along each axis of the mesh."""
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
        """A single number is formatted as one, and so reduced where it waits for that; all else as `repr`."""
        return format(self.item(), format_spec) if self.dim() == 0 and format_spec else super().__format__(format_spec)

    def _repr_html_(self) -> str:
        """What a notebook shows. Like `repr`, it never communicates."""
        return spec_html(self._spec, repr(self))

    @property
    def data(self) -> DTensor:
        """The same tensor, without gradients."""
        return _DATA.__get__(self)

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
        self._settled, self._local_tensor, self._spec = None, new._local_tensor, new._spec

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
            placements: how the parts make up the whole; replicated by default.
            run_check: compare shapes, dtype and placements over the ranks first; a disagreement is an error on all.
            shape: the global shape; needed where shards are uneven, otherwise worked out from the local one.
            stride: the global strides, with `shape`.
            grad_placements: how the gradient of the parts lies, where it is not what the placements imply.
            shard_order: which axis splits a dim first, where it is not the order of the mesh.

        Example:
            >>> import shardwise as sw
            >>> mesh = sw.init_device_mesh("cpu", (4,))
            >>> DTensor.from_local(torch.ones(2, 3), mesh, [sw.Shard(0)]).shape
            torch.Size([8, 3])
        """
        if is_dynamo_compiling():
            tell_compiler()
            return _from_local_in_graph(
                local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements, shard_order
            )
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
        if mesh.fabric == "virtual" and not isinstance(innermost(local_tensor), RankTensor):
            local_tensor = on_every_rank(local_tensor, mesh.grid_size)
        spec = spec_given(local_tensor, mesh, placements, run_check, shape, stride, shard_order)
        if fabric_of(mesh).is_outside(mesh):
            local_tensor = nothing_of(spec).requires_grad_(local_tensor.requires_grad)
        if wants_derivatives(local_tensor):
            made = apply_function(FromLocal, local_tensor, spec, gradient_spec_as(spec, grad_placements))
        else:
            made = with_version_of(given, dtensor_of(spec, local_tensor))
        if hooks.watcher is not None:
            hooks.entered(innermost(made))
        return made

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """This rank's part, as autograd sees it.

        Args:
            grad_placements: how the gradient that comes back to the part makes up the whole gradient, where it is not
                what the placements imply; for instance `Partial()` where replicas are put to different uses.

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
        """The same tensor laid out otherwise, by the cheapest route.

        Args:
            device_mesh: the mesh to go to; its own by default.
            placements: the layout to go to; replicated by default.
            async_op: return at once; the wait happens at first use.
            forward_dtype: convert to this dtype first, so that it is moved and comes out in it.
            backward_dtype: convert the gradient to this dtype before it is moved back.
            max_bytes: no state on the way may hold more than this on a rank.
            shard_order: which axis splits a dim first, where it is not the order of the mesh.

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
        meta = spec.tensor_meta
        if forward_dtype is not None and forward_dtype is not meta.dtype:
            meta = TensorMeta(meta.shape, meta.stride, forward_dtype)
        key = (mesh, tuple(placements), meta) if shard_order is None else None
        target = _targets.get(key) if key is not None else None
        if target is None:
            target = DTensorSpec(mesh, placements, meta, shard_order)
            if key is not None and not meta.is_symbolic:
                _targets.keep(key, target)
        if target is spec and backward_dtype is None:
            return self
        if wants_derivatives(self):
            return apply_function(Redistribute, self, spec, target, async_op, backward_dtype, max_bytes)
        return moved_to(self, target, async_op, max_bytes)

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank, in memory of its own. On a virtual mesh, where all ranks are here, one.

        Args:
            grad_placements: as in `to_local`.

        Example:
            >>> import shardwise as sw
            >>> sw.ones(3, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).full_tensor()
            tensor([1., 1., 1.])
        """
        mesh = self._spec.mesh
        whole = self if self._spec.is_replicated else self.redistribute(placements=(Replicate(),) * mesh.ndim)
        local = whole.to_local(grad_placements=grad_placements)
        if isinstance(innermost(local), RankTensor) and mesh.size() == mesh.grid_size:
            check_replicas(innermost(local))
            return first_rank(local)
        return local.clone() if whole is self else local  # never the memory of this tensor, on any fabric

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `torch.Tensor.backward`. A plain gradient is taken as plain operands are: as replicated."""
        if gradient is not None and not isinstance(gradient, DTensor):
            if modes.plain_policy() == "refuse" and gradient.numel() != 1:
                raise PlainTensorError(
                    f"backward at {modes.user_line()}: the gradient is a plain torch.Tensor of shape "
                    f"{tuple(gradient.shape)}, and plain tensors are refused here",
                    hint="distribute_tensor(gradient, mesh, placements) first",
                )
            gradient = replicated_operand(DTensor, gradient, self._spec.mesh, "backward", "gradient")
        elif gradient is None and self.__class__ is DTensor and not hooks.is_observed():
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
        """The whole tensor as nested lists of numbers, on every rank."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array of numpy, on every rank."""
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

    # ---------------------------------------------------------------- protocols

    # What compilers ask for. The sizes are not part of the context: they are guarded, and given back, by themselves.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        flattened, changed = self._spec.flattened, modes.changed_modes()
        if changed is None and flattened[1].__class__ is tuple:
            return flattened
        names, context = flattened
        by_rank = context.__class__ is ByRank
        if by_rank:
            _name_ranks(len(names))
        return names, context if changed is None else UnderModes(context, changed, by_rank)

    @classmethod
    def __metadata_guard__(cls, compiled: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
        """Whether code that was compiled for one context may run for another: the same layout, in the same modes."""
        return compiled == given and _guarded(compiled) == _guarded(given)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        local = inner.get("_local_tensor")
        if local is None:  # what is uneven on virtual ranks has no symbolic sizes
            outer_size, outer_stride = specialized(outer_size), specialized(outer_stride)
            local = RankTensor(list(inner.values()))
        try:
            spec = _unflattened.get(key := (context, outer_size, outer_stride, local.dtype))
        except TypeError:  # symbolic sizes have no hash
            key = spec = None
        if spec is None:
            refuse_dry(context[0])
            if key is not None and not is_tracing() and mixes_strides():
                key, outer_stride = None, _stride_as_local(context, outer_size, outer_stride, local)
            spec = DTensorSpec.from_context(context, TensorMeta(outer_size, outer_stride, local.dtype))
            if _fix_sizes(spec):
                spec = DTensorSpec.from_context(context, TensorMeta(outer_size, outer_stride, local.dtype))
            _relate_sizes(spec, local)
            if key is not None:
                _unflattened.keep(key, spec)
        made = dtensor_of(spec, local)
        if spec.is_lazy and is_tracing():  # a write would replace its local, which no compiler sees
            made._copied_view = OUTSIDE
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """What compilers ask for to know which inputs share memory; a DTensor's own has no values."""
        is_fake = dispatch_mode_count() and isinstance(parts_of(self._held)[0], FakeTensor)
        return torch.Tensor.untyped_storage(first_sharing(self, DTensor) if is_fake else self)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code for this tensor depends on, for caches on disk. Graphs differ from rank to rank.

        Code that comes from disk was not traced here, so nobody has met the groups of its backward: they are made now,
        on every rank, whether it finds code or not.
        """
        spec = self._spec
        here = fabric_of(spec.mesh).names_in_graphs(spec.mesh)
        facts = repr((spec.__fx_repr__()[0], self.requires_grad, here, modes.in_force(), decided_by()))
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __coerce_tangent_metadata__(self) -> DTensor:
        """What a compiler should expect as the gradient of this output: laid out as gradients of it are."""
        accept_plain_tangents()
        expected = redistributed(self, gradient_spec(self._spec))
        return expected if expected.__class__ is DTensor else dtensor_of(expected._spec, expected._local_tensor)

    def __coerce_same_metadata_as_tangent__(
        self, expected: tuple[Any, ...], expected_type: type | None = None
    ) -> torch.Tensor | None:
        """A gradient that came in another layout than the compiled code expects, brought there."""
        if expected_type not in (None, DTensor):
            return None
        return redistributed(self, DTensorSpec.from_context(expected, self._spec.tensor_meta))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        here = fabric_of(self._spec.mesh).held_by()
        if here is not None and not self._spec.is_replicated:
            warnings.warn(
                f"what is pickled of {self._spec} is the part of rank {here} alone: every rank must save and load "
                "a file of its own; shardwise.checkpoint.save makes one checkpoint of all, and get_model_state_dict of "
                "shardwise.checkpoint.state_dict plain tensors, with full_state_dict=True",
                stacklevel=2,
            )
        return _rebuild, (self._local_tensor, self._spec, self.requires_grad, self._kept_attributes(), here)

    def _kept_attributes(self) -> dict[str, Any]:
        """What users and nn.Parameter have set on it; what was only remembered does not outlive the process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_copied_view", "_settled")}

    def __copy__(self) -> DTensor:
        return _rebuild(self._local_tensor, self._spec, self.requires_grad, self._kept_attributes())

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
else:  # inside a function that torch.func transforms, what stands for a DTensor is of this class
    AnyDTensor = torch.Tensor


def dtensor_of(spec: DTensorSpec, local: torch.Tensor) -> DTensor:
    """A DTensor of this local, fast."""
    meta = spec.tensor_meta
    if meta.is_symbolic:
        introduce_sizes()
    made = _make_wrapper(  # pyright: ignore[reportCallIssue]
        DTensor, meta.shape, meta.stride, None, None, meta.dtype, _STRIDED, local.device
    )
    made._local_tensor = local
    made._spec = spec
    return made


def _wrapper(spec: DTensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that makes a DTensor of a local with this spec."""
    meta = spec.tensor_meta
    if meta.is_symbolic:
        return functools.partial(dtensor_of, spec)
    shape, stride, dtype = meta.shape, meta.stride, meta.dtype

    def wrap(local: torch.Tensor) -> torch.Tensor:
        made = _make_wrapper(DTensor, shape, stride, None, None, dtype, _STRIDED, local.device)  # pyright: ignore[reportCallIssue]
        made._local_tensor = local
        made._spec = spec
        return made

    return wrap


def _gradient_of_loss(loss: DTensor) -> DTensor | None:
    """The gradient that `backward` begins with: `ones_like`, without dispatch. None where torch is to make it."""
    spec = loss._spec
    is_number = spec.tensor_meta.dtype.is_floating_point and not spec.is_lazy and loss.numel() == 1
    if not is_number or spec.mesh.fabric != "c10d" or not loss.requires_grad or dispatch_mode_count():
        return None
    return dtensor_of(gradient_spec(spec), torch.ones_like(loss._local_tensor))


_LOCAL = DTensor.__dict__["_local_tensor"]  # which the property of a subclass may hide
_SPEC = DTensor.__dict__["_spec"]
_DATA: Any = torch.Tensor.data
_make_wrapper, _STRIDED = make_wrapper_subclass, torch.strided
_NO_KWARGS: Mapping[str, Any] = {}
dispatcher = OpDispatcher(DTensor, _wrapper)
_cache = dispatcher.cache
hooks.watchable(DTensor, dispatcher.dispatch)
plain_refusals.refusable(DTensor)
replace_composites(DTensor)

MAX_SPECS = 4096
_targets: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # of what `redistribute` was asked for
_unflattened: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # of what compiled code gives back


def cache_info() -> CacheInfo:
    """How many signatures and routes are kept, and how often a new one had to be worked out.

    Example:
        >>> cache_info().entries <= cache_info().limit
        True
    """
    return dispatcher.info()


def forget_operators() -> None:
    """Drop what is known about operators: a rule has changed."""
    dispatcher.forget()


def _without_memory(what: str) -> CheckpointError:
    """The error for those who ask for the memory of a DTensor, as a rule to write or send its values."""
    return CheckpointError(
        f"{what}: a DTensor has no memory of its own, its values are in its locals",
        hint="take full_tensor() or to_local(); to write a model use shardwise.checkpoint.save or export_safetensors, "
        "or write the plain tensors that get_model_state_dict of shardwise.checkpoint.state_dict gives",
    )


def _rebuild(
    local: torch.Tensor,
    spec: DTensorSpec,
    requires_grad: bool,
    attributes: Mapping[str, Any],
    held_by: int | None = None,
) -> DTensor:
    """What pickle calls. `held_by` is the rank whose local it is, where each process has its own."""
    if held_by is not None:
        _check_holder(spec, held_by)
    made = DTensor(local, spec, requires_grad=requires_grad)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _check_holder(spec: DTensorSpec, held_by: int) -> None:
    """Refuse a local that was pickled by another rank than this one, where that rank holds something else."""
    mesh, here = spec.mesh, fabric_of(spec.mesh).held_by()
    if here is None or here == held_by:  # a process without a rank may look at what it was given
        return
    blocks = [None if at is None else spec.block(at) for at in map(mesh.coordinate_of, (held_by, here))]
    if blocks[0] != blocks[1] or spec.partial_axes:
        raise CheckpointError(
            f"the file or message holds the part of {spec} that rank {held_by} has, and this is rank {here}",
            hint="let every rank save and load a file of its own, or use shardwise.checkpoint.save and load, or save "
            "what get_model_state_dict of shardwise.checkpoint.state_dict gives with full_state_dict=True",
        )


# What torch.load(weights_only=True) may call to rebuild a DTensor: data, nothing that runs code of its own.
torch.serialization.add_safe_globals(
    [_rebuild, rebuild_mesh, DTensorSpec, TensorMeta, RankTensor, Shard, StridedShard, Replicate, Partial, MaskPartial]
)


@taken_whole
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
            hint="leave run_check out, or call from_local outside of what is compiled",
        )
    return DTensor.from_local(
        local, mesh, placements, shape=shape, stride=stride, grad_placements=grad_placements, shard_order=shard_order
    )


# ---------------------------------------------------------------- moving


def moved_to(tensor: DTensor, target: DTensorSpec, async_op: bool, max_bytes: int | None) -> DTensor:
    """`tensor` laid out as `target`, converted to its dtype first. Knows nothing of gradients."""
    source = tensor._spec
    if source.tensor_meta is not target.tensor_meta:
        tensor = cast(tensor, target.tensor_meta.dtype)
        source = tensor._spec
        target = target.with_meta(source.tensor_meta)
    if source is target:
        return tensor
    bound = bound_route(source, target, max_bytes)
    if bound.communicates:
        modes.check_decomposing(bound.route)
    if dispatch_mode_count() and is_tracing():
        refuse_named(tensor, source)
    meta = source.tensor_meta
    meta = meta.dense() if meta.is_symbolic else known_dense(meta)
    if meta is not target.tensor_meta:  # a view with gaps or overlaps: what is moved is a tensor of its own
        made = dtensor_of(target.with_meta(meta), laid_out_like(bound.run(tensor._local_tensor), meta.stride))
    elif (
        async_op
        and bound.communicates
        and fabric_of(source.mesh).asynchronous
        and hooks.watcher is None
        and not is_tracing()
    ):
        return _pending(tensor._local_tensor, bound, target)
    else:
        local = bound.run(tensor._local_tensor)
        made = dtensor_of(target, in_order_of(local, meta.stride) if bound.reorder else local)
    if hooks.watcher is not None:
        hooks.watcher.moved(tensor, made)
    return made


def cast(tensor: AnyDTensor, dtype: torch.dtype) -> AnyDTensor:
    """`tensor.to(dtype)`, which is a DTensor."""
    return tensor.to(dtype)  # pyright: ignore[reportReturnType]


def redistributed(tensor: DTensor, target: DTensorSpec) -> DTensor:
    """`tensor` in the layout `target`, whatever its own; its dtype is kept."""
    if tensor._spec.tensor_meta is not target.tensor_meta:
        target = target.with_meta(tensor._spec.tensor_meta)
    return moved_to(tensor, target, False, None)


# ---------------------------------------------------------------- locals that are not there yet


class PendingDTensor(DTensor):
    """A DTensor whose last collective is still in flight. The first use waits, and it is an ordinary DTensor then."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _settle(self)._local_tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingDTensor):
                _settle(leaf)
        return DTensor.__torch_dispatch__(func, types, args, kwargs)


def _pending(local: torch.Tensor, bound: BoundRoute, target: DTensorSpec) -> DTensor:
    """A DTensor of this spec whose local the route brings, which is begun."""
    meta = target.tensor_meta
    made = make_wrapper_subclass(PendingDTensor, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device)
    made._spec = target
    wait = bound.start(local)
    # until it is settled the slot holds the function that waits
    _LOCAL.__set__(made, (lambda: in_order_of(wait(), meta.stride)) if bound.reorder else wait)
    return made


def _settle(tensor: DTensor) -> DTensor:
    if tensor.__class__ is PendingDTensor:
        finish = _LOCAL.__get__(tensor)
        tensor.__class__ = DTensor
        _LOCAL.__set__(tensor, finish())
    return tensor


def _reshape(tensor: DTensor, in_place: Callable[..., Any], functional: Callable[..., Any], *dims: Any) -> DTensor:
    """Give a tensor another shape in place.

    For a view, autograd writes to the base through the function that made the view, which would not know of the new
    shape. So a view becomes, as the same object, a view of itself.
    """
    if is_dynamo_compiling() or not tensor._is_view() or not torch.is_grad_enabled():
        return in_place(tensor, *dims)
    try:
        base: Any = tensor._base
        again: Any = tensor._view_func_unsafe(base)  # another object: the new view refers to what it is made from
        torch.utils.swap_tensors(tensor, functional(again, *dims))
    except RuntimeError as error:
        raise UnsupportedError(
            f"{in_place.__name__} of a view of {tensor._spec} that something else refers to: {error}",
            hint=f"write y = y.{functional.__name__}(...), which makes a view of it",
        ) from None
    return tensor


class CopiedDTensor(DTensor):
    """A view that shares no memory with its base. What it holds is made anew where the base was written to since."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._copied_view.is_stale:
            self._make_again()
        return _LOCAL.__get__(self)

    @property
    def _spec(self) -> DTensorSpec:  # pyright: ignore[reportIncompatibleVariableOverride]
        # who reads the layout reads the local next, and a write to the base may have ended that it is constant
        if _SPEC.__get__(self).broadcast and self._copied_view.is_stale:
            self._make_again()
        return _SPEC.__get__(self)

    @_spec.setter
    def _spec(self, spec: DTensorSpec) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _SPEC.__set__(self, spec)

    def _make_again(self) -> None:
        """Take the view of its base again."""
        with recording(self._held):
            again = self._copied_view.again()
            local, spec = again._held, _SPEC.__get__(self)
            if spec.broadcast and again._spec is not spec:  # what was constant need not be so now
                spec = spec.materialized()
                _SPEC.__set__(self, spec)
            _LOCAL.__set__(self, local if again._spec is spec else bound_route(again._spec, spec).run(local))

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        made = DTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        if is_tracing():
            made._mark_copied(OUTSIDE)
        return made

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, local)


# how a DTensor came about is no matter of its type
CopiedDTensor.__name__ = CopiedDTensor.__qualname__ = PendingDTensor.__name__ = PendingDTensor.__qualname__ = "DTensor"


def _stride_as_local(context: tuple[Any, ...], size: Any, stride: Any, local: torch.Tensor) -> Any:
    """The stride of a result of compiled code, in the memory order of its local. Only where that is dense."""
    part = parts_of(local)[0]
    order = part.stride()
    is_dense = not context[3] and order == dense_strides(part.shape, like=order)
    return dense_strides(size, like=order) if is_dense else stride


def _name_ranks(count: int) -> None:
    """Give the class an attribute for each virtual rank's tensor: compilers ask for them by these names."""
    for rank in range(count - 1, -1, -1):
        if hasattr(DTensor, f"_t{rank}"):
            return
        setattr(
            DTensor, f"_t{rank}", property(functools.partial(_part, rank=rank), functools.partial(_put_part, rank=rank))
        )


def _part(tensor: DTensor, rank: int) -> torch.Tensor | None:
    parts = parts_of(tensor._local_tensor)
    return parts[rank] if rank < len(parts) else None


def _put_part(tensor: DTensor, part: torch.Tensor, rank: int) -> None:
    parts = parts_of(tensor._local_tensor)
    tensor._local_tensor = RankTensor([*parts[:rank], part, *parts[rank + 1 :]])


def _fix_sizes(spec: DTensorSpec) -> bool:
    """Fix the symbolic sizes of a compiler that it will not keep; whether there are.

    Those that do not divide evenly over the axes that shard them, and those of which ranks would hold one row each in
    some layout: a size of one is always fixed. It is done before anything is traced. A compiler traces forward alone
    first, and counts the symbolic sizes of its results; only backward may need the parts of the ranks, which fixes
    them.
    """
    fixed, mesh = False, spec.mesh.shape
    if spec.tensor_meta.is_symbolic:
        shares = {math.prod(some) for count in range(1, len(mesh) + 1) for some in itertools.combinations(mesh, count)}
        for size, axes in zip(spec.shape, spec.dim_axes, strict=True):
            if isinstance(size, torch.SymInt):
                (hint,) = hinted([size])
                if hint in shares or hint % math.prod(mesh[a] for a in axes):
                    specialized([size])
                    fixed = True
    return fixed


def _relate_sizes(spec: DTensorSpec, local: torch.Tensor) -> None:
    """Tell a compiler what the symbolic sizes of locals are, in terms of the global ones.

    It knows them as numbers of their own, which happen to be equal. Compared in backward, they would be fixed there.
    """
    if spec.is_lazy:
        return
    for coordinate, part in fabric_of(spec.mesh).parts(spec.mesh, local):
        if has_symbols(part.shape):
            for size, held in zip(spec.local_shape(coordinate), part.shape, strict=True):
                bool(size == held)  # which the compiler remembers


# ---------------------------------------------------------------- derivatives

# Each function is differentiated by the other ones, so that derivatives of any order are functions of DTensors too.
# `source`, `spec`, `gradient` and `target` are layouts as a transformed function sees them: without the dims of vmap.
# In forward mode a result shares the memory of an operand's tangent where it shares that of the operand, as for views
# of plain tensors: a write in place then changes both or neither.


def moved(
    tensor: AnyDTensor,
    target: DTensorSpec,
    async_op: bool = False,
    backward_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> AnyDTensor:
    """`tensor` in the layout `target`, whatever its own, with derivatives; its dtype is kept."""
    spec = tensor._spec
    if spec.tensor_meta is not target.tensor_meta:
        target = target.with_meta(spec.tensor_meta)
    if wants_derivatives(tensor):
        if spec is target and backward_dtype is None:
            return tensor
        return apply_function(Redistribute, tensor, spec, target, async_op, backward_dtype, max_bytes)
    return moved_to(tensor, target, async_op, max_bytes)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> AnyDTensor:
    """The DTensor of a local, with derivatives; the gradient of the local is what lies here of `gradient`."""
    if wants_derivatives(local):
        return apply_function(FromLocal, local, spec, gradient)
    return dtensor_of(spec, local)


def as_local(tensor: AnyDTensor, gradient: DTensorSpec) -> torch.Tensor:
    """The local of a DTensor, with derivatives; the ranks' gradients of it lie together as `gradient`."""
    if wants_derivatives(tensor):
        return apply_function(ToLocal, tensor, tensor._spec, gradient)
    return tensor._local_tensor


def writable_local(tensor: DTensor) -> torch.Tensor:
    """The local of a tensor, for users who may write to it."""
    if tensor._spec.is_lazy:
        materialize(tensor)
    return tensor._local_tensor


def _gradient(grad: torch.Tensor, spec: DTensorSpec) -> AnyDTensor:
    """The gradient or tangent that a tensor of this spec has got. Some formulas of torch make plain zeros."""
    if is_dtensor(grad):
        return grad
    if not is_traced(grad) and not is_wrapped(grad) and bool(grad.any()):
        raise PlainTensorError(
            f"the gradient of {spec} is a plain torch.Tensor of shape {tuple(grad.shape)}",
            hint="distribute_tensor(gradient, mesh, placements) before you give it to backward()",
        )
    whole = replicated_spec(spec.mesh, TensorMeta.of(grad))
    if is_wrapped(grad):
        is_virtual = spec.mesh.fabric == "virtual"
        return as_dtensor(on_every_rank(grad, spec.mesh.grid_size) if is_virtual else grad, whole, whole)
    zeros = stored_zeros(grad)
    return dtensor_of(whole, fabric_of(spec.mesh).build(spec.mesh, lambda coordinate: zeros.clone()))


def _with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    return spec if spec.tensor_meta.dtype is dtype else spec.with_dtype(dtype)


def _reduced_local(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """What the parts of the ranks are reduced to, on each of them, with derivatives."""
    whole = moved(as_dtensor(part, spec, gradient_spec(spec)), spec.reduced())
    return as_local(whole, addends_spec(spec))


class FromLocal(torch.autograd.Function):
    """A local as a DTensor. Where the parts are reduced otherwise than by a sum, each has a weight in derivatives."""

    @staticmethod
    def forward(local: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> AnyDTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return with_version_of(local, dtensor_of(spec, stored_zeros(local).detach()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        local, ctx.spec, ctx.gradient = inputs
        ctx.set_materialize_grads(False)
        if needs_parts(ctx.spec):
            ctx.save_for_backward(local)
            ctx.save_for_forward(local)

    @staticmethod
    def backward(ctx: Any, grad: AnyDTensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        grad = _gradient(grad, ctx.spec)
        addends = addends_spec(ctx.spec, ctx.gradient)
        own = as_local(moved(grad, ctx.gradient), _with_dtype(addends, grad.dtype))
        return _weighted(ctx, own, addends), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        addends = addends_spec(ctx.spec, ctx.spec)  # the tangent of an average is the average of the tangents
        return as_dtensor(_weighted(ctx, tangent, addends), addends, ctx.gradient)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], local: Any, spec: DTensorSpec, gradient: DTensorSpec) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim = in_dims[0]
        shape = list(spec.shape)
        shape.insert(dim, info.batch_size)
        meta = TensorMeta(shape, dense_strides(shape, like=local.stride()), local.dtype)
        return as_dtensor(local, with_batch_dim(spec, dim, meta), with_batch_dim(gradient, dim, meta)), dim


def _weighted(ctx: Any, own: torch.Tensor, addends: DTensorSpec) -> torch.Tensor:
    """This rank's share of a gradient, or its addend to a tangent."""
    part = alive(ctx.saved_tensors[0]) if needs_parts(ctx.spec) else None
    return share_of_gradient(part, ctx.spec, addends, own, _reduced_local)


class ToLocal(torch.autograd.Function):
    """The local of a DTensor."""

    @staticmethod
    def forward(tensor: DTensor, spec: DTensorSpec, gradient: DTensorSpec) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return with_version_of(tensor, writable_local(tensor).detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.spec, ctx.gradient = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None
        refuse_parts(ctx.spec)
        own: Any = grad
        if ctx.spec.mesh.fabric == "virtual" and not isinstance(innermost(own), RankTensor):
            own = on_every_rank(own, ctx.spec.mesh.grid_size)  # of a plain tensor that the ranks' values were added to
        for axis in ctx.spec.partial_axes:
            if ctx.spec.placements[axis].is_partial("avg") and not ctx.gradient.placements[axis].is_partial("avg"):
                own = torch.ops.aten.mul.Scalar(own, ctx.spec.mesh.shape[axis])
        spec, gradient = (_with_dtype(s, own.dtype) for s in (ctx.gradient, transposed_spec(ctx.spec, ctx.gradient)))
        return as_dtensor(own, spec, gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: AnyDTensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_parts(ctx.spec)
        tangent = _gradient(tangent, ctx.spec)
        if ctx.spec is (spec := tangent._spec):
            return as_local(tangent, ctx.gradient)
        own = as_local(moved(tangent, tangent_spec(ctx.spec)), ctx.gradient)
        constant = [dim for dim in ctx.spec.broadcast if dim in spec.broadcast]
        return _stored_once(own, constant) if constant else own

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: Any, spec: DTensorSpec, gradient: DTensorSpec) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim, meta = in_dims[0], tensor._spec.tensor_meta
        tensor = moved(tensor, with_batch_dim(spec, dim, meta))
        return as_local(tensor, with_batch_dim(gradient, dim, tensor._spec.tensor_meta)), dim


def _stored_once(local: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A local that is constant along `dims`, with broadcast dims: torch wants the strides of a value in its tangent."""
    one = local
    for dim in dims:
        one = one.narrow(dim, 0, 1)
    return one.clone().expand_as(local)


class Redistribute(torch.autograd.Function):
    """A DTensor in another layout, of the same value: so its gradient is moved back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        tensor: AnyDTensor,
        source: DTensorSpec,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        max_bytes: int | None,
    ) -> AnyDTensor:
        found = moved_to(tensor, target, async_op, max_bytes)
        if (
            target.tensor_meta.is_symbolic
        ):  # what the way back needs as numbers is fixed now: a compiler counts sizes here
            bound_route(gradient_spec(target), gradient_spec(source), max_bytes)
        return tensor.view_as(tensor) if found is tensor else found  # pyright: ignore[reportReturnType]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.source, ctx.target, ctx.async_op, ctx.backward_dtype, ctx.max_bytes = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: AnyDTensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, None, None, None
        source = gradient_spec(ctx.source)
        if not isinstance(grad, DTensor):
            grad = _gradient(grad, ctx.target)
        if ctx.backward_dtype is not None and grad.dtype is not ctx.backward_dtype:
            grad = cast(grad, ctx.backward_dtype)
        found = moved(grad, source, ctx.async_op, None, ctx.max_bytes)
        if found.dtype is not source.tensor_meta.dtype:
            found = cast(found, source.tensor_meta.dtype)
        return found, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: AnyDTensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tangent, dtype = _gradient(tangent, ctx.source), ctx.target.tensor_meta.dtype
        if ctx.source is ctx.target:  # the value is a view of the operand
            return tangent.view_as(tangent)
        tangent = tangent if tangent.dtype is dtype else cast(tangent, dtype)
        found = moved(tangent, tangent_spec(ctx.target), ctx.async_op, None, ctx.max_bytes)
        return tangent.clone() if found is tangent else found

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any,
        in_dims: tuple[Any, ...],
        tensor: Any,
        source: DTensorSpec,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        max_bytes: int | None,
    ) -> Any:
        dim, spec = in_dims[0], tensor._spec
        meta = spec.tensor_meta
        if meta.dtype is not target.tensor_meta.dtype:
            meta = TensorMeta(meta.shape, meta.stride, target.tensor_meta.dtype)
        target = with_batch_dim(target, dim, meta, spec)
        return apply_function(Redistribute, tensor, spec, target, async_op, backward_dtype, max_bytes), dim


# ---------------------------------------------------------------- inside torch.func


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a DTensor, or stands for one inside a function that torch.func transforms."""
    if isinstance(value, DTensor):
        return True
    if value.__class__ is not torch.Tensor or is_dynamo_compiling():  # which does not see what a tensor stands for
        return False
    return is_wrapped(value) and isinstance(innermost(value), DTensor)


class _OfTransformed:
    """A method or property of DTensor on torch.Tensor, found only on tensors that stand for a DTensor.

    Inside a function that torch.func transforms, tensors are of the class torch.Tensor. On any other tensor the
    attribute does not exist.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, tensor: Any, owner: type) -> Any:
        if tensor is None:  # torch looks at all that the class has, and passes over what is None
            return None
        if is_wrapped(tensor) and isinstance(inner := innermost(tensor), DTensor):
            tensor = alive(tensor)
            if tensor is inner:
                return getattr(inner, self.name)
            if self.name == "_spec":
                return visible_spec(inner._spec, visible_dims(tensor))
            return DTensor.__dict__[self.name].__get__(tensor)
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}", name=self.name, obj=tensor)


for _name in ("_spec", "spec", "device_mesh", "placements", "redistribute", "to_local", "full_tensor"):
    setattr(torch.Tensor, _name, _OfTransformed(_name))


def _plain_tangent(tangent: torch.Tensor, expected: tuple[Any, ...]) -> torch.Tensor:
    """A whole gradient, alike on every rank, as compiled code expects it."""
    meta = TensorMeta.of(tangent)
    local = fabric_of(expected[0]).build(expected[0], lambda coordinate: tangent)
    return redistributed(
        dtensor_of(replicated_spec(expected[0], meta), local), DTensorSpec.from_context(expected, meta)
    )


made_from_plain(DTensor, _plain_tangent)
never_traced(
    _gradient_of_loss,
    DTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    PendingDTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    *(
        getattr(function, name)
        for function in (FromLocal, ToLocal, Redistribute)
        for name in ("forward", "setup_context", "backward", "jvp")
    ),
    DTensor.to_local,
    DTensor.redistribute,
    DTensor.full_tensor,
    DTensor.__tensor_unflatten__,
    DTensor.__metadata_guard__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    DTensor.__coerce_same_metadata_as_tangent__,
    plain_tangent,
)
