"""DTensor: one global tensor that lies over a mesh; from_local, to_local, redistribute, and their gradients.

What a move does to gradients is the table `GRADIENT_OF`. Operators are the dispatcher's business.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from shardwise import modes
from shardwise.compilers import decided_by, never_traced, refuse_dry, taken_whole, tell_compiler
from shardwise.core.cache import BoundedCache
from shardwise.core.html import spec_html
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh, rebuild_mesh
from shardwise.core.placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard, norm_order
from shardwise.core.spec import DTensorSpec, TensorMeta, checked_placements, known_dense
from shardwise.core.symbolic import anew, is_tracing
from shardwise.dispatch import CacheInfo, OpDispatcher
from shardwise.errors import AgreementError, LayoutError, ShardwiseError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.fabric.virtual import RankTensor
from shardwise.fabric.world import as_mesh
from shardwise.local import laid_out_like
from shardwise.plan.propagate import replicated_spec

__all__ = ["DTensor", "cache_info"]

# How the gradient of a tensor lies, for each way that the tensor itself may lie on an axis. The gradient of a value is
# one value: where the tensor is a sum of what the ranks hold, each of them gets the same gradient.
GRADIENT_OF: dict[type[Placement], Callable[[Any], Placement]] = {
    Shard: lambda placement: placement,
    StridedShard: lambda placement: placement,
    Replicate: lambda placement: placement,
    Partial: lambda placement: Replicate(),
    MaskPartial: lambda placement: Replicate(),
}


@functools.lru_cache(maxsize=4096)
def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """How the gradient of a tensor of this spec lies."""
    if not spec.partial_axes:
        return spec
    placements = tuple(GRADIENT_OF[type(p)](p) for p in spec.placements)
    return DTensorSpec.from_dim_axes(spec.mesh, placements, spec.tensor_meta, spec.dim_axes)


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
    _copied_view: Any = None  # how it came about, where it is a view that shares no memory with its base
    _settled: Any = None  # what it came to, where it is Partial and has been reduced

    @staticmethod
    def __new__(cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
        meta = spec.tensor_meta
        self = torch.Tensor._make_wrapper_subclass(
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

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not kwargs:
            kwargs = _NO_KWARGS
            # the most frequent signatures, without building the key argument by argument
            if len(args) == 2 and args[0].__class__ is DTensor:
                kind = args[1].__class__  # no variable for the argument itself: who holds it tells whose it is
                if kind is DTensor:
                    run = _cache.get((id(func), args[0]._spec, args[1]._spec))
                    if run is not None:
                        return run(args, kwargs)
                elif kind is float:  # by its type alone: where a rule reads the number, there is no such key
                    run = _cache.get((id(func), args[0]._spec, float))
                    if run is not None:
                        return run(args, kwargs)
                elif kind is list and args[1] and args[1][0].__class__ is int:  # sizes, dims
                    try:
                        run = _cache.get((id(func), args[0]._spec, tuple(args[1])))
                    except TypeError:  # a symbolic size has no hash
                        run = None
                    if run is not None:
                        return run(args, kwargs)
            elif len(args) == 3 and args[0].__class__ is DTensor and args[1].__class__ is int:
                kind = args[2].__class__
                if kind is bool or kind is int:  # a dim, and a flag or another dim
                    run = _cache.get((id(func), args[0]._spec, (int, args[1]), (kind, args[2])))
                    if run is not None:
                        return run(args, kwargs)
            elif len(args) == 1 and args[0].__class__ is DTensor:
                run = _cache.get((id(func), args[0]._spec))
                if run is not None:
                    return run(args, kwargs)
        return _dispatcher.dispatch(func, args, kwargs)

    @property
    def _held(self) -> torch.Tensor:
        """The local as it is, even where it is a copied view whose base may have been written to since."""
        return _LOCAL.__get__(self)

    def _mark_copied(self, made: Any) -> None:
        """Remember how it came about: it is a view that shares no memory with its base, or with None no longer one."""
        self._copied_view = made
        self.__class__ = DTensor if made is None else _CopiedDTensor  # pyright: ignore[reportAttributeAccessIssue]

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

    def _repr_html_(self) -> str:
        """What a notebook shows. Like `repr`, it never communicates."""
        return spec_html(self._spec, repr(self))

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
    ) -> DTensor:
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
        mesh = device_mesh if device_mesh.__class__ is DeviceMesh else as_mesh(device_mesh)
        if local_tensor.is_complex():  # locals never carry the conjugate bit: dispatch does not see it
            local_tensor = _resolved(local_tensor)
        if mesh.fabric == "virtual" and not isinstance(local_tensor, RankTensor):
            local_tensor = _OnEveryRank.apply(local_tensor, mesh)
        key = (
            mesh, None if placements is None else tuple(placements), local_tensor.shape, local_tensor.stride(),
            local_tensor.dtype,
        )  # fmt: skip
        try:
            spec = _local_specs.get(key) if shape is None and shard_order is None else None
        except TypeError:  # symbolic sizes have no hash
            spec = None
        if run_check:
            spec = _agreed_spec(local_tensor, mesh, placements, shape, stride, shard_order)
        elif spec is None:
            spec = _spec_from_local(local_tensor, mesh, placements, shape, stride, shard_order)
            sizes_known = not spec.tensor_meta.is_symbolic
            if shape is None and shard_order is None and mesh.fabric != "virtual" and sizes_known:
                _local_specs.keep(key, spec)
        if torch.is_grad_enabled() and local_tensor.requires_grad:
            return entered(_FromLocal.apply(local_tensor, spec, _gradient_placements(spec, grad_placements)))
        return entered(_make_in_graph(spec, local_tensor))

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
        if torch.is_grad_enabled() and self.requires_grad:
            return _ToLocal.apply(self, _gradient_placements(self._spec, grad_placements))
        return self._local_tensor

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
    ) -> DTensor:
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
        if torch.is_grad_enabled() and self.requires_grad:
            return _Redistribute.apply(self, target, async_op, backward_dtype, max_bytes)
        return _moved(self, target, async_op, max_bytes)

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank. On a virtual mesh, where all ranks are here, one plain tensor.

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
        if isinstance(local, RankTensor) and mesh.size() == mesh.grid_size:
            return _FirstRank.apply(local) if local.requires_grad else local.tensors[0].clone()
        return local

    def tolist(self) -> Any:
        """The whole tensor as nested lists of numbers, on every rank."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array of numpy, on every rank."""
        return self.full_tensor().numpy(force=force)

    # ---------------------------------------------------------------- protocols

    # What compilers ask for. The sizes are not part of the context: they are guarded, and given back, by themselves.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return self._spec.flattened

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        local = inner["_local_tensor"]
        try:
            spec = _unflattened.get(key := (context, outer_size, outer_stride, local.dtype))
        except TypeError:  # symbolic sizes have no hash
            key = spec = None
        if spec is None:
            refuse_dry(context[0])
            spec = DTensorSpec.from_context(context, TensorMeta(outer_size, outer_stride, local.dtype))
            if key is None:
                return _make_in_graph(spec, local)
            _unflattened.keep(key, spec)
        return _make(spec, local)

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
        _accept_plain_tangents()
        return _redistributed(self, gradient_spec(self._spec))

    def __coerce_same_metadata_as_tangent__(
        self, expected: tuple[Any, ...], expected_type: type | None = None
    ) -> torch.Tensor | None:
        """A gradient that came in another layout than the compiled code expects, brought there."""
        if expected_type not in (None, DTensor):
            return None
        return _redistributed(self, DTensorSpec.from_context(expected, self._spec.tensor_meta))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self._local_tensor, self._spec, self.requires_grad, self._kept_attributes())

    def _kept_attributes(self) -> dict[str, Any]:
        """What users and nn.Parameter have set on it; what was only remembered does not outlive the process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_copied_view", "_settled")}

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise RuntimeError("only DTensors made by the user (graph leaves) can be deep-copied; detach() it first")
        with torch.no_grad():
            copied = DTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        for name, value in self._kept_attributes().items():
            setattr(copied, name, value)
        return copied


def _make(spec: DTensorSpec, local: torch.Tensor) -> DTensor:
    """A DTensor of this local, fast."""
    meta = spec.tensor_meta
    made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportCallIssue]
        DTensor, meta.shape, meta.stride, None, None, meta.dtype, torch.strided, local.device
    )
    made._local_tensor = local
    made._spec = spec
    return made


def _wrapper(spec: DTensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that makes a DTensor of a local with this spec."""
    return functools.partial(_make_in_graph if spec.tensor_meta.is_symbolic else _make, spec)


def _make_in_graph(spec: DTensorSpec, local: torch.Tensor) -> DTensor:
    """A DTensor whose sizes may be those of a compiler."""
    meta = spec.tensor_meta
    if not meta.is_symbolic:
        return _make(spec, local)
    made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportCallIssue]
        DTensor, anew(meta.shape), anew(meta.stride), None, None, meta.dtype, torch.strided, local.device
    )
    made._local_tensor = local
    made._spec = spec
    return made


_modes_active = torch._C._len_torch_dispatch_stack
_NO_KWARGS: Mapping[str, Any] = {}
_dispatcher = OpDispatcher(DTensor, _wrapper)
_cache = _dispatcher.cache

MAX_SPECS = 4096
_local_specs: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # of what `from_local` was given
_targets: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # of what `redistribute` was asked for
_unflattened: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # of what compiled code gives back


def cache_info() -> CacheInfo:
    """How many signatures and routes are kept, and how often a new one had to be worked out.

    Example:
        >>> cache_info().entries <= cache_info().limit
        True
    """
    return _dispatcher.info()


def forget_operators() -> None:
    """Drop what is known about operators: a rule has changed."""
    _dispatcher.forget()


def _rebuild(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool, attributes: Mapping[str, Any]) -> DTensor:
    made = DTensor(local, spec, requires_grad=requires_grad)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


# What torch.load(weights_only=True) may call to rebuild a DTensor: data, nothing that runs code of its own.
torch.serialization.add_safe_globals(
    [_rebuild, rebuild_mesh, DTensorSpec, TensorMeta, RankTensor, Shard, StridedShard, Replicate, Partial, MaskPartial]
)


# ---------------------------------------------------------------- watching


@runtime_checkable
class Watcher(Protocol):
    """Whoever looks at all that happens to DTensors."""

    def operator(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """An operator is called: `run(op, args, kwargs)` carries it out."""
        ...

    def moved(self, source: DTensor, result: DTensor) -> None:
        """A DTensor was laid out otherwise."""
        ...

    def entered(self, tensor: DTensor) -> None:
        """A DTensor was made of what is no DTensor."""
        ...


_watcher: Watcher | None = None
_ordinary = DTensor.__dict__["__torch_dispatch__"]


def _watched_dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    if _watcher is None:  # it has gone since, while another thread came here
        return _dispatcher.dispatch(func, args, kwargs or _NO_KWARGS)
    return _watcher.operator(func, args, kwargs or _NO_KWARGS, _dispatcher.dispatch)


def watch(watcher: Watcher | None) -> None:
    """From now on let `watcher` look, in every thread; None: nobody. Operators pay nothing while nobody does."""
    global _watcher
    if watcher is not None and _watcher is not None:
        raise UnsupportedError("DTensors are watched already", hint="leave the first parity() before a second one")
    _watcher = watcher
    _put_dispatch()


_recorder: Callable[..., Any] | None = None


def record(recorder: Callable[..., Any] | None) -> None:
    """From now on operators go to `recorder(cls, func, types, args, kwargs)`, in every thread; None: as they did.

    It stands before whoever watches, and runs them by `unrecorded`.
    """
    global _recorder
    _recorder = recorder
    _put_dispatch()


def unrecorded(func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """Run an operator as if nobody recorded."""
    below = _ordinary.__func__ if _watcher is None else _watched_dispatch
    return below(DTensor, func, types, args, kwargs)


def _put_dispatch() -> None:
    above = _recorder or (None if _watcher is None else _watched_dispatch)
    dispatch: Any = _ordinary if above is None else classmethod(above)
    DTensor.__torch_dispatch__ = dispatch


def entered(tensor: DTensor) -> DTensor:
    """`tensor`, of which whoever watches is told that it was made of what is no DTensor."""
    if _watcher is not None:
        _watcher.entered(tensor)
    return tensor


# ---------------------------------------------------------------- checks of from_local


def _spec_from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    shard_order: Sequence[Any] | None,
) -> DTensorSpec:
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    kept = checked_placements(placements, mesh, local.dim() if shape is None else len(shape))
    if shape is None:
        if stride is not None:
            raise LayoutError("from_local: stride= without shape=", hint="give the global shape beside its strides")
        sizes = list(local.shape)
        for axis, placement in enumerate(kept):
            if isinstance(placement, Shard | StridedShard):
                sizes[placement.dim] *= mesh.shape[axis]
        shape = sizes
    if stride is None:
        stride = dense_strides(shape, like=local.stride() if local.dim() == len(shape) else None)
    spec = DTensorSpec(mesh, kept, TensorMeta(shape, stride, local.dtype), shard_order)
    _check_local(local, spec)
    return spec


def _check_local(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Each part here must have the shape that the spec gives its rank."""
    for coordinate, tensor in fabric_of(spec.mesh).parts(spec.mesh, local):
        wanted = spec.local_shape(coordinate)
        if tuple(tensor.shape) != wanted:
            raise LayoutError(
                f"from_local: the rank at {coordinate} of {spec.mesh} gave a local of shape {tuple(tensor.shape)}, but "
                f"{spec} puts {wanted} there",
                hint="give the global shape with shape=(...) where shards are uneven",
            )


def _agreed_spec(local: torch.Tensor, mesh: DeviceMesh, *description: Any) -> DTensorSpec:
    """The spec that every rank means: same shape, dtype and placements, and equal values where it is replicated.

    A rank whose own arguments are wrong says so to the others, so that all of them raise and none waits.
    """
    spec, error = None, None
    try:
        spec = _spec_from_local(local, mesh, *description)
        facts = (repr(spec), tuple(spec.tensor_meta.stride), _fingerprints(local, spec))
    except ShardwiseError as own:
        error, facts = own, (f"error: {own}", (), [])
    said = fabric_of(mesh).agree(mesh, facts, local)
    if error is not None:
        raise error
    if len({fact[:2] for fact in said}) > 1:
        lines = "\n".join(f"    rank {rank}: {fact[0]}" for rank, fact in enumerate(said))
        raise AgreementError(
            f"from_local: the ranks of {mesh} do not mean the same tensor:\n{lines}",
            hint="give every rank the same global shape= and placements, and a local that fits them",
        )
    blocks: dict[Any, Any] = {}
    for _, _, prints in said:
        for block, fingerprint in prints:
            if blocks.setdefault(block, fingerprint) != fingerprint:
                raise AgreementError(
                    f"from_local: ranks of {mesh} hold different values of the block at {block} of {spec}",
                    hint="replicas must be equal: broadcast one of them, or distribute_tensor from one rank",
                )
    assert spec is not None
    return spec


def _fingerprints(local: torch.Tensor, spec: DTensorSpec) -> list[tuple[Any, str]]:
    """For each rank here which block it holds, and a digest of the bytes."""
    own = [axis for axis, placement in enumerate(spec.placements) if not isinstance(placement, Replicate)]
    return [
        (
            tuple(coordinate[axis] for axis in own),
            hashlib.sha1(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for coordinate, tensor in fabric_of(spec.mesh).parts(spec.mesh, local)
    ]


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


def _resolved(local: torch.Tensor) -> torch.Tensor:
    if isinstance(local, RankTensor) and any(t.is_conj() or t.is_neg() for t in local.tensors):
        return RankTensor([t.resolve_conj().resolve_neg() for t in local.tensors])
    return local.resolve_conj().resolve_neg()


def _gradient_placements(spec: DTensorSpec, given: Sequence[Any] | None) -> DTensorSpec:
    """The spec of a gradient: as the user says, or as the table has it."""
    if given is None:
        return gradient_spec(spec)
    chosen = DTensorSpec(spec.mesh, given, spec.tensor_meta)
    # dims that the same axes split are split in the same order
    order = [entry for entry in spec.shard_order if sorted(entry.axes) == sorted(chosen.dim_axes[entry.dim])]
    return chosen if not order else DTensorSpec(spec.mesh, given, spec.tensor_meta, order)


# ---------------------------------------------------------------- moving


def _moved(tensor: DTensor, target: DTensorSpec, async_op: bool, max_bytes: int | None) -> DTensor:
    source = tensor._spec
    if source.tensor_meta is not target.tensor_meta:
        tensor = _cast(tensor, target.tensor_meta.dtype)
        source = tensor._spec
        target = target.with_meta(source.tensor_meta)
    if source is target:
        return tensor
    bound = bound_route(source, target, max_bytes)
    if bound.communicates:
        modes.check_decomposing(bound.route)
    if _modes_active() and is_tracing():
        _refuse_named(tensor)
    meta = source.tensor_meta
    meta = meta.dense() if meta.is_symbolic else known_dense(meta)
    if meta is not target.tensor_meta:  # a view with gaps or overlaps: what is moved is a tensor of its own
        made = _make(target.with_meta(meta), laid_out_like(bound.run(tensor._local_tensor), meta.stride))
    elif (
        async_op
        and bound.communicates
        and fabric_of(source.mesh).asynchronous
        and _watcher is None
        and not is_tracing()
    ):
        return _pending(tensor._local_tensor, bound, target)
    else:
        made = _make_in_graph(target, bound.run(tensor._local_tensor))
    if _watcher is not None:
        _watcher.moved(tensor, made)
    return made


def _refuse_named(tensor: DTensor) -> None:
    """torch's make_fx names its inputs in the graph; what is inside of a DTensor among them it does not know."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is not None and tensor in mode.tracer.tensor_tracker:
        raise UnsupportedError(
            f"make_fx was given the DTensor {tensor._spec} as an input: its local would become a constant of the graph",
            hint="trace with shardwise.debug.make_fx, or make the DTensor inside, by from_local",
        )


def _cast(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    return tensor.to(dtype)  # pyright: ignore[reportReturnType]


def _redistributed(tensor: DTensor, target: DTensorSpec) -> DTensor:
    """`tensor` in the layout `target`, whatever its own; its dtype is kept."""
    if tensor._spec.tensor_meta is not target.tensor_meta:
        target = target.with_meta(tensor._spec.tensor_meta)
    return _moved(tensor, target, False, None)


def _accept_plain_tangents() -> None:
    """Let compiled code accept what autograd makes for an output that is not used: zeros, of the class torch.Tensor.

    The compiler asks the tensor itself to become what it expected, and a plain one has no such method unless it is
    given one. It speaks for DTensors alone: of anything else it says None, as if it were not there.
    """
    if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
        torch.Tensor.__coerce_same_metadata_as_tangent__ = _plain_tangent  # pyright: ignore[reportAttributeAccessIssue]


def _plain_tangent(tangent: torch.Tensor, expected: Any, expected_type: type | None = None) -> torch.Tensor | None:
    """A whole gradient, alike on every rank, as compiled code expects it."""
    if expected_type is not DTensor or tangent.__class__ is not torch.Tensor:
        return None
    meta = TensorMeta.of(tangent)
    local = fabric_of(expected[0]).build(expected[0], lambda coordinate: tangent)
    return _redistributed(_make(replicated_spec(expected[0], meta), local), DTensorSpec.from_context(expected, meta))


class _PendingDTensor(DTensor):
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
            if isinstance(leaf, _PendingDTensor):
                _settle(leaf)
        return DTensor.__torch_dispatch__(func, types, args, kwargs)


_LOCAL = DTensor.__dict__["_local_tensor"]  # the slot, which the property of a pending tensor hides


def _pending(local: torch.Tensor, bound: BoundRoute, target: DTensorSpec) -> DTensor:
    meta = target.tensor_meta
    made = torch.Tensor._make_wrapper_subclass(
        _PendingDTensor, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device
    )
    made._spec = target
    _LOCAL.__set__(made, bound.start(local))  # until it is settled the slot holds the function that waits
    return made


def _settle(tensor: DTensor) -> DTensor:
    if tensor.__class__ is _PendingDTensor:
        finish = _LOCAL.__get__(tensor)
        tensor.__class__ = DTensor
        _LOCAL.__set__(tensor, finish())
    return tensor


class _CopiedDTensor(DTensor):
    """A view that shares no memory with its base. What it holds is made anew where the base was written to since."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._copied_view.is_stale:
            again = self._copied_view.again()
            local = again._held
            _LOCAL.__set__(
                self, local if again._spec is self._spec else bound_route(again._spec, self._spec).run(local)
            )
        return _LOCAL.__get__(self)

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, local)


# ---------------------------------------------------------------- gradients


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.spec, ctx.gradient = spec, gradient
        if any(not p.is_partial("sum") for p in spec.placements if isinstance(p, Partial)):
            ctx.save_for_backward(local)
        return _make_in_graph(spec, local.view_as(local))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        local = _redistributed(grad, ctx.gradient)._local_tensor
        if ctx.saved_tensors:
            local = _share_of_gradient(ctx.saved_tensors[0], ctx.spec, local)
        return local, None, None


def _share_of_gradient(part: torch.Tensor, spec: DTensorSpec, gradient: torch.Tensor) -> torch.Tensor:
    """What of the gradient of a reduced value belongs to the part that this rank gave to the reduction."""
    for axis in spec.partial_axes:
        op = spec.placements[axis].reduce_op  # pyright: ignore[reportAttributeAccessIssue]
        if op == "avg":
            gradient = gradient / spec.mesh.shape[axis]
    ops = {spec.placements[axis].reduce_op for axis in spec.partial_axes}  # pyright: ignore[reportAttributeAccessIssue]
    if ops & {"min", "max"}:
        value = bound_route(spec, spec.reduced()).run(part)
        chosen = (part == value).to(gradient.dtype)
        return gradient * chosen / _summed(chosen, spec)
    if "product" in ops:
        return gradient * _product_of_others(part, spec)
    order = norm_order(next(iter(ops)))
    if order is not None:
        norm = bound_route(spec, spec.reduced()).run(part)
        return torch.where(norm == 0, torch.zeros_like(norm), gradient * (part / norm).pow(order - 1))
    return gradient


def _summed(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The sum of what the ranks hold, over the axes on which a tensor of this spec is Partial of any kind."""
    sums = tuple(Partial() if isinstance(p, Partial) else p for p in spec.placements)
    counted = DTensorSpec.from_dim_axes(spec.mesh, sums, spec.with_dtype(part.dtype).tensor_meta, spec.dim_axes)
    return bound_route(counted, counted.reduced()).run(part)


def _product_of_others(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The product of what the other ranks hold; right where some of it is zero."""
    zero = part == 0
    zeros = _summed(zero.to(torch.int64), spec)
    nonzero = torch.where(zero, torch.ones_like(part), part)
    product = bound_route(spec, spec.reduced()).run(nonzero)
    others = zeros - zero.to(torch.int64)
    return torch.where(others > 0, torch.zeros_like(part), product / nonzero)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: DTensorSpec) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.spec, ctx.gradient = tensor._spec, gradient
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for axis in ctx.spec.partial_axes:
            if ctx.spec.placements[axis].is_partial("avg"):
                grad = grad * ctx.spec.mesh.shape[axis]
        return _make_in_graph(ctx.gradient.with_dtype(grad.dtype), grad), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        tensor: DTensor,
        target: DTensorSpec,
        async_op: bool,
        backward_dtype: torch.dtype | None,
        max_bytes: int | None,
    ) -> DTensor:
        ctx.source, ctx.async_op, ctx.max_bytes = tensor._spec, async_op, max_bytes
        ctx.backward_dtype = backward_dtype
        moved = _moved(tensor, target, async_op, max_bytes)
        return tensor.view_as(tensor) if moved is tensor else moved  # pyright: ignore[reportReturnType]

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source = gradient_spec(ctx.source)
        if ctx.backward_dtype is not None and grad.dtype is not ctx.backward_dtype:
            grad = _cast(grad, ctx.backward_dtype)
        target = source.with_meta(grad._spec.tensor_meta)
        moved = _moved(grad, target, ctx.async_op, ctx.max_bytes)
        if moved.dtype is not source.tensor_meta.dtype:
            moved = moved.to(source.tensor_meta.dtype)
        return moved, None, None, None, None


class _OnEveryRank(torch.autograd.Function):
    """A plain tensor as the local of every virtual rank: the same program made it on each."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RankTensor([tensor.detach().clone() for _ in mesh.grid_ranks])

    @staticmethod
    def backward(ctx: Any, grad: RankTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = grad.tensors[0]
        if any(not torch.equal(first, other) for other in grad.tensors[1:]):
            raise AgreementError(
                "a plain tensor stands for the local of every virtual rank, but their gradients differ",
                hint="give from_local a RankTensor with one tensor for each rank",
            )
        return first, None


class _FirstRank(torch.autograd.Function):
    """The value that all virtual ranks agree on, as one plain tensor."""

    @staticmethod
    def forward(ctx: Any, local: RankTensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.count = len(local.tensors)
        return local.tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RankTensor([grad.clone() for _ in range(ctx.count)])


never_traced(
    DTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    _PendingDTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    *(
        getattr(function, name)
        for function in (_FromLocal, _ToLocal, _Redistribute, _OnEveryRank, _FirstRank)
        for name in ("forward", "backward")
    ),
    DTensor.to_local,
    DTensor.redistribute,
    DTensor.full_tensor,
    DTensor.__tensor_unflatten__,
    DTensor.__coerce_same_metadata_as_tangent__,
    _plain_tangent,
)
