"""The protocol of compilers for a DTensor: flattening, unflattening, and guards of compiled code."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from shardwise import modes
from shardwise.compilers import decided_by, mixes_strides, refuse_dry
from shardwise.core.cache import BoundedCache
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import ByRank, DTensorSpec, TensorMeta
from shardwise.core.symbolic import has_symbols, hinted, known_value, specialized
from shardwise.core.tangents import accept_plain_tangents
from shardwise.core.tracing import is_tracing, proxy_mode
from shardwise.dispatch.views import OUTSIDE
from shardwise.fabric.base import fabric_of, fabrics
from shardwise.fabric.rank_tensor import RankTensor, parts_of
from shardwise.plan.propagate import replicated_spec
from shardwise.tensor.gradient_layouts import gradient_spec
from shardwise.tensor.laid_out import LaidOutTensor, classes, dtensor_of
from shardwise.tensor.moves import redistributed
from shardwise.torch_private import FakeTensor, TracingContext, dispatch_mode_count

__all__ = ["CompileProtocol", "plain_tangent_of"]

MAX_SPECS = 4096
_unflattened: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(MAX_SPECS)  # results of compiled code


class UnderModes(tuple[Any, ...]):
    """The context of a flattened DTensor in non-default modes or a later world. Equal to the context without them."""

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
    """What compiled code depends on besides the layout: the modes, and how the tensor is flattened."""
    if isinstance(context, UnderModes):
        return context.modes, context.by_rank
    return None, context.__class__ is ByRank


class CompileProtocol(LaidOutTensor):
    """The methods that compilers call. Sizes are not part of the context: they are guarded and passed separately."""

    __slots__ = ()

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        spec = self._spec
        flattened, changed = spec.flattened, modes.changed_modes()
        if later := fabrics[spec.mesh.fabric].later_world():  # graphs name groups, and depend on the rank
            changed = (modes.in_force(), later)
        if spec.tensor_meta.is_symbolic:
            _trace_again_where_fixed(spec)
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
        if compiled.__class__ is tuple is given.__class__:  # default modes, one local: nothing beside the layout
            return compiled == given
        return compiled == given and _guarded(compiled) == _guarded(given)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> Any:
        local = inner.get("_local_tensor")
        if local is None:  # uneven tensors of virtual ranks have no symbolic sizes
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
            if key is not None:
                _unflattened.keep(key, spec)
        if is_tracing() and has_symbols(parts_of(local)[0].shape):
            _fix_local_sizes(spec, local)
        made = dtensor_of(spec, local)
        if spec.is_lazy and is_tracing():  # a write would replace its local, which no compiler sees
            made._copied_view = OUTSIDE
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage by which compilers detect inputs that share memory; that of a DTensor has no values."""
        is_fake = dispatch_mode_count() and isinstance(parts_of(self._held)[0], FakeTensor)
        return torch.Tensor.untyped_storage(first_sharing(self, LaidOutTensor) if is_fake else self)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code for this tensor depends on, for caches on disk. Graphs differ between ranks.

        Code from disk was not traced here, so the groups of its backward may not exist yet: they are made now,
        on every rank, whether it finds code or not.
        """
        spec = self._spec
        here = fabric_of(spec.mesh).names_in_graphs(spec.mesh)
        facts = repr((spec.__fx_repr__()[0], self.requires_grad, here, modes.in_force(), decided_by()))
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __coerce_tangent_metadata__(self) -> Any:
        """The layout that a compiler should expect for the gradient of this output."""
        accept_plain_tangents()
        expected = redistributed(self, gradient_spec(self._spec))
        return (
            expected if expected.__class__ is classes.ordinary else dtensor_of(expected._spec, expected._local_tensor)
        )

    def __coerce_same_metadata_as_tangent__(
        self, expected: tuple[Any, ...], expected_type: type | None = None
    ) -> torch.Tensor | None:
        """A gradient in another layout than compiled code expects, redistributed."""
        if expected_type not in (None, classes.ordinary):
            return None
        return redistributed(self, DTensorSpec.from_context(expected, self._spec.tensor_meta))


def _stride_as_local(context: tuple[Any, ...], size: Any, stride: Any, local: torch.Tensor) -> Any:
    """The stride of a result of compiled code, in the memory order of its local. Only where that is dense."""
    part = parts_of(local)[0]
    order = part.stride()
    is_dense = not context[3] and order == dense_strides(part.shape, like=order)
    return dense_strides(size, like=order) if is_dense else stride


def _name_ranks(count: int) -> None:
    """Add an attribute for each virtual rank's tensor to the class: compilers use these names."""
    for rank in range(count - 1, -1, -1):
        if hasattr(CompileProtocol, f"_t{rank}"):
            return
        setattr(
            CompileProtocol,
            f"_t{rank}",
            property(functools.partial(_part, rank=rank), functools.partial(_put_part, rank=rank)),
        )


def _part(tensor: LaidOutTensor, rank: int) -> torch.Tensor | None:
    parts = parts_of(tensor._local_tensor)
    return parts[rank] if rank < len(parts) else None


def _put_part(tensor: LaidOutTensor, part: torch.Tensor, rank: int) -> None:
    parts = parts_of(tensor._local_tensor)
    tensor._local_tensor = RankTensor([*parts[:rank], part, *parts[rank + 1 :]])


def _fix_sizes(spec: DTensorSpec) -> bool:
    """Specialize the symbolic sizes that a compiler would not keep; returns whether there are any.

    It is done before anything is traced. A compiler traces forward alone first, and counts the symbolic sizes of its
    results. Fixed are sizes that do not divide evenly over the axes that shard them, and those that backward has fixed
    before.
    """
    fixed = False
    if spec.tensor_meta.is_symbolic:
        for size, axes in zip(spec.shape, spec.dim_axes, strict=True):
            if isinstance(size, torch.SymInt):
                (hint,) = hinted([size])
                if hint % math.prod(spec.mesh.shape[a] for a in axes) or (spec.mesh, hint) in _fixed_by_backward:
                    specialized([size])
                    fixed = True
    return fixed


def _fix_local_sizes(spec: DTensorSpec, local: torch.Tensor) -> None:
    """Specialize symbolic sizes of a local where the global size is a number: the layout determines them.

    Dynamo makes a size of a local symbolic that has changed with the layout alone. A RankTensor would pass it on to
    results, and a later operator fixes it after the compiler has counted the sizes of results.
    """
    for part in parts_of(local):
        specialized([n for size, n in zip(spec.shape, part.shape, strict=True) if not isinstance(size, torch.SymInt)])


MAX_FIXED = 1024
_fixed_by_backward: BoundedCache[tuple[DeviceMesh, int], None] = BoundedCache(MAX_FIXED)


def _trace_again_where_fixed(spec: DTensorSpec) -> None:
    """Make Dynamo trace again if a size was fixed after a tensor was made: by backward, in the graph of both.

    The compiler has counted the sizes of results by then, and would not find all of them. The second time the size is
    fixed from the start.
    """
    if proxy_mode() is None or TracingContext.try_get() is None:
        return
    sizes = [size for size in spec.shape if isinstance(size, torch.SymInt)]
    found = {(spec.mesh, value) for value in map(known_value, sizes) if not isinstance(value, torch.SymInt)}
    if found - _fixed_by_backward.keys():
        for fixed in sorted(found, key=lambda fixed: fixed[1]):  # in one order on all ranks
            _fixed_by_backward.keep(fixed, None)
        restart = importlib.import_module("torch._dynamo.exc").TensorifyScalarRestartAnalysis  # backends may raise it
        raise restart(restart_reason="backward fixes a symbolic size of a DTensor")


def plain_tangent_of(tangent: torch.Tensor, expected: tuple[Any, ...]) -> torch.Tensor:
    """A replicated plain gradient, as compiled code expects it."""
    meta = TensorMeta.of(tangent)
    local = fabric_of(expected[0]).build(expected[0], lambda coordinate: tangent)
    return redistributed(
        dtensor_of(replicated_spec(expected[0], meta), local), DTensorSpec.from_context(expected, meta)
    )


# ---------------------------------------------------------------- inputs that share memory


Span = tuple[int, int, int]  # a storage, and the first and the last element in it


def first_sharing(tensor: Any, kind: type) -> Any:
    """The first input of this class whose memory overlaps, directly or through other inputs, with that of `tensor`.

    The compiler sees by the storage which inputs share memory. Where one of those is written to it has no code for
    tensors like ours, and the error says so.
    """
    context: Any = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return tensor
    inputs = [t for t in context.tensor_to_context if isinstance(t, kind)]
    traced = [context.fake_mode.fake_tensor_converter._get_memo(t) for t in inputs]
    reached = [at for at, fake in enumerate(traced) if fake is tensor]
    memory = [_spans(t) for t in inputs]
    for at in reached:  # which grows
        near = [i for i, spans in enumerate(memory) if i not in reached and _overlap(spans, memory[at])]
        reached.extend(near)
    return traced[min(reached)] if reached else tensor


def _spans(tensor: Any) -> list[Span]:
    """The local memory of a DTensor, or of the base of a copied view."""
    while tensor._copied_view not in (None, OUTSIDE):
        tensor = tensor._copied_view.args[0]
    spans = []
    for part in parts_of(tensor._local_tensor):
        first = part.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        spans.append((part.untyped_storage()._cdata, first, last if part.numel() else -1))
    return spans


def _overlap(one: list[Span], other: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2] for a, b in itertools.product(one, other))
