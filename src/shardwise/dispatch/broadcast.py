"""Broadcast dims: results that are constant along a dim are computed once and need no memory along it.

An operator that treats the indices of a dim alike gives equal results for equal operands. So it runs on one index, and
the result is expanded. Views keep a broadcast dim because the local has stride 0 there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import unrecorded
from shardwise.dispatch.origins import origin_of
from shardwise.dispatch.signature import Executor, Signature
from shardwise.dispatch.views import PHYSICAL
from shardwise.fabric.base import fabric_of
from shardwise.fabric.block_copies import compacted, local_step
from shardwise.fabric.routes import bound_route
from shardwise.local import like
from shardwise.plan.propagate import OutputSharding
from shardwise.rules.dims import wrapped
from shardwise.rules.embedding import held_gradients
from shardwise.rules.engine import Factors
from shardwise.rules.interpolation_names import INTERPOLATIONS
from shardwise.rules.joining import where_replaced
from shardwise.rules.movement import where_triangle
from shardwise.rules.reduction import local_share
from shardwise.rules.registry import RULES
from shardwise.rules.slicing import local_input_sizes, where_put_back
from shardwise.rules.view import NOT_A_VIEW, groups_of, viewed_freely
from shardwise.rules.windows import local_image
from shardwise.schema import Slot
from shardwise.torch_private import current_autograd_node

__all__ = [
    "FILLED", "INTO_LEAVES", "REGROUPING", "SPREADING", "filled_once", "into_leaf", "keeping_broadcast",
    "spread_as_origin", "spread_regrouped",
]  # fmt: skip

aten = torch.ops.aten
VIEWS_OF_COPIES = {aten._unsafe_view.default, aten.reshape.default}  # views, but not by their schema
REGROUPING = {aten.view.default, *VIEWS_OF_COPIES}
# Functions that give arguments for each rank, of rules that treat the indices of a factor alike, but for so many of the
# last dims: a triangle depends on rows and columns.
UNIFORM: dict[Any, int] = {
    None: 0,
    local_share: 0,
    local_input_sizes: 0,
    where_put_back: 0,
    local_image: 0,
    held_gradients: 0,
    where_triangle: 2,
    where_replaced: 0,
}
# Look-ups get the indices of a dim that a rank has, but no result has that dim.
LOOKING_UP = {aten.index_select.default, aten.gather.default, aten.index.Tensor, aten._unsafe_index.Tensor}


# Operators beside the pointwise ones that read operands of stride 0 as any others. Some of torch's do not: the median
# of an expanded tensor is not computed. They get the operands of one device.
ANY_STRIDES = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims, aten.mm.default,
    aten.bmm.default, aten.clone.default, aten._to_copy.default, aten.copy_.default, aten.copy.default,
    aten.cat.default, aten.linalg_vector_norm.default, aten.slice_backward.default, aten.select_backward.default,
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.gather.default, aten.index_select.default,
    # these read nothing of their operand
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip


class Constant(NamedTuple):
    """A factor along which all operands are constant: (operand, dim) and (result, dim) of each place it has."""

    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]


class BroadcastCall(NamedTuple):
    """A call that keeps broadcast dims.

    Args:
        sharding: the call, with broadcast dims of its results marked.
        op: the operator that runs on locals.
        runs_as: the call as it runs: dims that are computed once have size one.
    """

    sharding: OutputSharding
    op: Callable[..., Any]
    runs_as: OutputSharding


def keeping_broadcast(signature: Signature, sharding: OutputSharding, op: Callable[..., Any]) -> BroadcastCall:
    """The call with broadcast dims of its results marked, and the operator to run on locals in place of `op`."""
    info = signature.info
    if info.is_view or info.op in VIEWS_OF_COPIES:
        dims = _broadcast_in_views(signature, sharding.inputs[0])
        if dims is None and info.op is aten.view_as_complex.default:
            dims, op = _broadcast_as_complex(sharding)
        elif dims is None:
            base, regroups = sharding.inputs[0], info.op in REGROUPING
            if regroups and 0 not in base.shape and not base.tensor_meta.is_symbolic:
                dims, op = _broadcast_in_copies(sharding)
            else:
                dims = [[] for _ in sharding.outputs]
        if info.op in PHYSICAL and dims[0]:
            op = _physical_once(op, dims[0])
        sharding = _with_broadcast(sharding, dims)
        return BroadcastCall(sharding, _apart(op, sharding.outputs) if sharding.inputs[0].is_lazy else op, sharding)
    if not info.pointwise and info.op not in ANY_STRIDES:
        op = _on_dense(op, [slot for slot, spec in zip(signature.slots, signature.specs, strict=True) if spec.is_lazy])
    last = 0 if info.op in LOOKING_UP else UNIFORM.get(sharding.rule.localize)
    if info.writes or info.draws or sharding.rule.layouts is not None or last is None:
        return BroadcastCall(sharding, op, sharding)
    factors = sharding.factors
    constant = [] if factors is None else list(_constant_factors(factors, sharding, last))
    if not constant:
        return BroadcastCall(sharding, op, sharding)
    operands = _dims_of_each([found.operands for found in constant], len(sharding.inputs))
    results = _dims_of_each([found.results for found in constant], len(sharding.outputs))
    runs_as = replace(
        sharding,
        inputs=tuple(map(_of_size_one, sharding.inputs, operands)),
        outputs=tuple(map(_of_size_one, sharding.outputs, results)),
    )
    run = _run_once(op, signature, constant, operands, sharding.outputs[0])
    return BroadcastCall(_with_broadcast(sharding, results), run, runs_as)


def _dims_of_each(places: Sequence[Sequence[tuple[int, int]]], count: int) -> list[list[int]]:
    """For each of so many tensors the dims at these places."""
    dims: list[list[int]] = [[] for _ in range(count)]
    for found in places:
        for at, dim in found:
            dims[at].append(dim)
    return dims


def _of_size_one(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """The spec of one index of each of these dims, which are not sharded."""
    if not dims:
        return spec
    return DTensorSpec.from_dim_axes(spec.mesh, spec.placements, spec.tensor_meta, spec.dim_axes, dims).compact()


def _with_broadcast(sharding: OutputSharding, dims: Sequence[Sequence[int]]) -> OutputSharding:
    outputs = tuple(
        DTensorSpec.from_dim_axes(out.mesh, out.placements, out.tensor_meta, out.dim_axes, kept)
        for out, kept in zip(sharding.outputs, dims, strict=True)
    )
    return replace(sharding, outputs=outputs)


# ---------------------------------------------------------------- operators that compute


def _constant_factors(factors: Factors, sharding: OutputSharding, last: int) -> Iterator[Constant]:
    """The factors but the `last` along which every operand that has them is broadcast, and that some result has."""
    differ = factors.whole | factors.even | factors.summed | factors.barred | {name for name, _ in factors.untouched}
    differ |= {name for name in factors.exchanged if not _permutes(factors, sharding, name)}
    by_place = {name for dims in factors.operands for name in dims[len(dims) - last :]} if last else set()
    if sharding.rule.localize is where_replaced:
        by_place.add(factors.operands[0][wrapped(sharding.call["dim"], len(factors.operands[0]))])
    for name in factors.names:
        if name in differ or name in by_place:
            continue
        operands, results = _places(factors.operands, name), _places(factors.results, name)
        if operands and results and all(dim in sharding.inputs[i].broadcast for i, dim in operands):
            yield Constant(operands, results)


def _permutes(factors: Factors, sharding: OutputSharding, name: str) -> bool:
    """Whether all rows of one operand, and no others, are the rows of a result: constant rows stay constant."""
    call, rows = sharding.call, sharding.rule.rows
    if rows is None or sharding.rule.localize is not None:  # the local operator gets the rows of its rank
        return False
    if (len(call.operands), len(call.results)) != (1, 1) or call.results[0].is_symbolic:
        return False
    dim = factors.results[0].index(name)
    size = call.results[0].shape[dim]
    return size == call.operands[0].shape[dim] == sum(segment.length for segment in rows(call, dim).segments)


def _places(tensors: Sequence[Sequence[str | None]], name: str) -> tuple[tuple[int, int], ...]:
    return tuple([(i, dim) for i, dims in enumerate(tensors) for dim, own in enumerate(dims) if own == name])


def _run_once(
    op: Callable[..., Any],
    signature: Signature,
    constant: Sequence[Constant],
    operands: Sequence[Sequence[int]],
    result: DTensorSpec,
) -> Callable[..., Any]:
    """`op` on one index of each constant factor; results get their sizes back by `expand`."""
    slots = signature.slots
    given = [(slot, dims) for slot, dims in zip(slots, operands, strict=True) if dims]
    # for each result its broadcast dims, and of which operand and dim the size is read
    sources: list[list[tuple[int, Slot, int]]] = [[] for _ in range(1 + max(i for c in constant for i, _ in c.results))]
    for found in constant:
        operand, of = found.operands[0]
        for i, dim in found.results:
            sources[i].append((dim, slots[operand], of))

    if len(sources) == 1 and all(slot.item is None and slot.index is not None for slot in slots):
        kept = [dim for dim, _, _ in sources[0]]  # which are not sharded, so that their local size is the global one
        shape = [size if dim in kept else -1 for dim, size in enumerate(result.shape)]
        alone = len(slots) == 1 and slots[0].index == 0 and signature.info.returns == ("Tensor",)
        if alone and not result.tensor_meta.is_symbolic:
            return _run_once_alone(op, operands[0], shape)
        return _run_once_in_front(op, given, sources[0], None if result.tensor_meta.is_symbolic else shape)

    def run_once(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, dims in given:
            slot.put(new_args, new_kwargs, compacted(slot.get(args, kwargs), dims))
        made = op(*new_args, **new_kwargs)
        if isinstance(made, tuple | list):
            pairs = itertools.zip_longest(made, sources[: len(made)], fillvalue=())
            return like(made, (_expanded(one, found, args, kwargs) for one, found in pairs))
        return _expanded(made, sources[0], args, kwargs)

    return run_once


def _run_once_alone(op: Callable[..., Any], dims: Sequence[int], shape: list[int]) -> Callable[..., Any]:
    """The same for one operand and one result, as in gradients of means."""

    def run_once_alone(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(compacted(local, dims), *args, **kwargs).expand(shape)

    return run_once_alone


def _run_once_in_front(
    op: Callable[..., Any],
    given: Sequence[tuple[Slot, Sequence[int]]],
    sources: Sequence[tuple[int, Slot, int]],
    shape: list[int] | None,
) -> Callable[..., Any]:
    """The same for leading operands of a call with one result, as in gradients of reductions.

    `shape`: the shape that the result is expanded to; None if sizes are symbolic.
    """
    compact: list[tuple[Any, Sequence[int]]] = [(slot.index, dims) for slot, dims in given]

    def run_once_in_front(*args: Any, **kwargs: Any) -> Any:
        new_args = list(args)
        for index, dims in compact:
            new_args[index] = compacted(args[index], dims)
        made = op(*new_args, **kwargs)
        if isinstance(made, tuple | list):
            return like(made, iter([_expanded(made[0], sources, args, kwargs), *made[1:]]))
        return _expanded(made, sources, args, kwargs) if shape is None else made.expand(shape)

    return run_once_in_front


def _on_dense(op: Callable[..., Any], slots: Sequence[Slot]) -> Callable[..., Any]:
    """`op` on operands each of whose elements has memory of its own."""
    if not slots:
        return op

    def run_on_dense(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot in slots:
            slot.put(new_args, new_kwargs, slot.get(args, kwargs).contiguous())
        return op(*new_args, **new_kwargs)

    return run_on_dense


def _expanded(made: Any, dims: Sequence[tuple[int, Slot, int]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not dims or not isinstance(made, torch.Tensor):
        return made
    shape: list[Any] = [-1] * made.dim()
    for dim, slot, at in dims:
        shape[dim] = slot.get(args, kwargs).shape[at]
    return made.expand(shape)


# ---------------------------------------------------------------- views


def _broadcast_in_views(signature: Signature, base: DTensorSpec) -> list[list[int]] | None:
    """The dims that have stride 0 in views of a tensor that is stored once along its broadcast dims.

    None if there is no such view: broadcast dims and others would be merged.
    """
    stored = [1 if dim in base.broadcast else size for dim, size in enumerate(base.shape)]
    strides = dense_strides(stored, like=base.tensor_meta.stride)
    held = [0 if dim in base.broadcast else stride for dim, stride in enumerate(strides)]
    _, *others = signature.info.names
    try:
        with unrecorded():
            whole = torch.empty_strided(base.shape, held, device="meta", dtype=base.tensor_meta.dtype)
            if signature.info.op in VIEWS_OF_COPIES:
                made = aten.view.default(whole, signature.arguments[others[0]])
            else:
                made = signature.info.op(whole, **{name: signature.arguments[name] for name in others})
    except NOT_A_VIEW:
        return None
    views = made if isinstance(made, tuple | list) else (made,)
    return [[dim for dim, stride in enumerate(view.stride()) if _is_zero(stride)] for view in views]


def _broadcast_in_copies(sharding: OutputSharding) -> tuple[list[list[int]], Callable[..., Any]]:
    """For a view that must be copied: the dims that stay broadcast, and the function that copies the others.

    Dims that are regrouped hold the same elements. Where so many values of the leading dims before are constant, the
    leading dims after are, as long as their sizes divide it.
    """
    base, out = sharding.inputs[0], sharding.outputs[0]
    repeated = [1] * base.ndim  # how often each broadcast dim is stored in the copy
    kept: list[int] = []
    for group in groups_of(base.shape, out.shape):
        leading = list(itertools.takewhile(lambda dim: dim in base.broadcast, group.inputs))
        values = math.prod([base.shape[dim] for dim in leading])
        for dim in group.outputs:
            if values % out.shape[dim]:
                break
            kept.append(dim)
            values //= out.shape[dim]
        for dim in group.inputs:
            repeated[dim] = base.shape[dim] if dim in base.broadcast and dim not in leading else 1
        if leading:
            repeated[leading[-1]] = values
    kept = [dim for dim in kept if not out.dim_axes[dim]]
    dims = base.broadcast

    def copy(local: torch.Tensor, size: Sequence[int] = (), *, shape: Sequence[int] | None = None) -> torch.Tensor:
        wanted = list(size if shape is None else shape)
        sizes = [repeated[dim] if dim in dims else -1 for dim in range(local.dim())]
        once = [1 if dim in kept else n for dim, n in enumerate(wanted)]
        return compacted(local, dims).expand(sizes).reshape(once).expand(wanted)

    return [kept], copy


def _broadcast_as_complex(sharding: OutputSharding) -> tuple[list[list[int]], Callable[..., Any]]:
    """For real numbers viewed as complex: the dims that stay broadcast, and the function that stores the pairs."""
    base = sharding.inputs[0]
    kept = [dim for dim in base.broadcast if dim < base.ndim - 1]

    def store_pairs(local: torch.Tensor) -> torch.Tensor:
        pairs = compacted(local, kept).contiguous()
        sizes = [n if dim in kept else -1 for dim, n in enumerate(local.shape[:-1])]
        return aten.view_as_complex.default(pairs).expand(sizes)

    return [kept], store_pairs


def _physical_once(op: Callable[..., Any], dims: Sequence[int]) -> Callable[..., Any]:
    """A view that is computed, such as the conjugate: on one index of each broadcast dim."""

    def compute_once(local: torch.Tensor) -> torch.Tensor:
        return op(compacted(local, dims)).expand([n if dim in dims else -1 for dim, n in enumerate(local.shape)])

    return compute_once


def _apart(op: Callable[..., Any], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """A view of values that are stored once for several indices: a write must not reach all of these.

    A view that is itself stored so is given another local when it is written to. Any other gets memory of its own.
    """

    def run_apart(*args: Any, **kwargs: Any) -> Any:
        views = op(*args, **kwargs)
        if not isinstance(views, tuple | list):
            return views if outputs[0].is_lazy else views.clone()
        pairs = zip(views, outputs, strict=True)
        return like(views, (view if spec.is_lazy else view.clone() for view, spec in pairs))

    return run_apart


def _is_zero(stride: Any) -> bool:
    return stride.__class__ is int and stride == 0


# ---------------------------------------------------------------- constants of a shape

# Operators that make a tensor of one number.
FILLED = {
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zeros_like.default,
    aten.ones_like.default, aten.full_like.default,
}  # fmt: skip


def filled_once(signature: Signature, result: DTensorSpec, run: Executor) -> Executor:
    """`run`, but constants of autograd's formulas are stored once: the formulas add something to them.

    If the layout of the tensor whose gradient it becomes is known, it gets that; next to an operand of its size that
    is replicated, it is replicated too. Outside of autograd such a tensor is most often a buffer,
    about to be written to.
    """
    info, spec = signature.info, signature.specs[0]
    dims = [dim for dim, axes in enumerate(result.dim_axes) if not axes]
    made = DTensorSpec.from_dim_axes(result.mesh, result.placements, result.tensor_meta, result.dim_axes, dims)
    wrapping, mesh, dtype = signature.wrapping, result.mesh, result.tensor_meta.dtype
    dense = spec.is_replicated and not spec.broadcast and not spec.tensor_meta.is_symbolic
    beside_a_replica = dense and not result.tensor_meta.is_symbolic and _numel(result) <= 2 * _numel(spec)

    def run_or_fill(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if current_autograd_node() is None:
            return run(args, kwargs)
        bound = info.bind(args, kwargs)
        value = bound["fill_value"] if "fill_value" in bound else 1 if "ones" in info.op.name() else 0
        goal = made if beside_a_replica else _as_origin(made, origin_of(wrapping.tensor_class))

        def fill(at: Any, local: torch.Tensor) -> torch.Tensor:
            shape = goal.local_shape(at)
            stored = [1 if dim in goal.broadcast else size for dim, size in enumerate(shape)]
            return local.new_full(stored, value, dtype=dtype).expand(shape)

        return wrapping.wrapper(goal)(fabric_of(mesh).map(mesh, fill, args[0]._local_tensor))

    # a sharded one needs as much memory on a rank as its tensor
    return run_or_fill if made.is_lazy and not any(made.dim_axes) and spec.mesh is mesh else run


def _numel(spec: DTensorSpec) -> int:
    return math.prod(spec.shape)


def _as_origin(made: DTensorSpec, origin: DTensorSpec | None) -> DTensorSpec:
    """A replicated constant in the layout of the tensor whose gradient it becomes, if that one is sharded."""
    if origin is None or origin.mesh is not made.mesh or origin.shape != made.shape or not any(origin.dim_axes):
        return made
    return origin.reduced().with_meta(made.tensor_meta)


# ---------------------------------------------------------------- operators that end a constant


def _along_one(signature: Signature) -> list[int]:
    return [signature.arguments["dim"] % max(signature.specs[0].ndim, 1)]


def _along_planes(signature: Signature) -> list[int]:
    ndim = signature.specs[0].ndim
    return [ndim - 2, ndim - 1]


def _along_pixels(signature: Signature) -> list[int]:
    return [signature.specs[0].ndim - 3, *_along_planes(signature)]


def _along_images(signature: Signature) -> list[int]:
    return list(range(2, signature.specs[0].ndim))


def _along_pads(signature: Signature) -> list[int]:
    pad, last = signature.arguments["pad"], signature.specs[0].ndim - 1
    return [last - i // 2 for i, count in enumerate(pad) if count]


def _along_all(signature: Signature) -> list[int]:
    return list(range(signature.specs[0].ndim))


# Operators whose result is not constant along some dims although the operands are, and these dims.
SPREADING: dict[Any, Callable[[Signature], list[int]]] = {
    aten.cumsum.default: _along_one,
    aten.cat.default: _along_one,
    aten.slice_scatter.default: _along_one,
    aten.select_scatter.default: _along_one,
    aten.index_put.default: _along_all,
    aten.index_fill.int_Scalar: _along_all,
    aten.index_fill.int_Tensor: _along_all,
    aten.scatter.value: _along_all,
    aten.unfold_backward.default: lambda signature: [signature.arguments["dim"]],
    aten.tril.default: _along_planes,
    aten.triu.default: _along_planes,
    aten.pixel_shuffle.default: _along_pixels,
    aten.pixel_unshuffle.default: _along_pixels,
    aten.constant_pad_nd.default: _along_pads,
    aten.channel_shuffle.default: lambda signature: [1],
    **{getattr(aten, f"{name}_backward").default: _along_images for name in INTERPOLATIONS},
}
JOINED = {aten.cat.default, aten.slice_scatter.default}  # of these all operands are laid out alike, else the first
SMALL = 4  # a tensor is small if the local part of the other is this many times larger


@functools.cache
def _gathering_nodes() -> frozenset[str]:
    """Nodes of autograd that need all of a dim next, by their rules."""
    return frozenset(rule.gathering_node for rule in RULES.values() if rule.gathering_node)


def _laid_out_as(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout of another tensor on its first dims; further dims are not sharded."""
    axes = (*spec.dim_axes, *((),) * (len(meta.shape) - spec.ndim))
    return DTensorSpec.from_dim_axes(spec.mesh, spec.placements, meta, axes)


def spread_as_origin(signature: Signature, run: Executor) -> Executor:
    """`run`, but a gradient of a sharded tensor is sharded as that tensor is, not made of constants.

    The gradient of `x.cumsum(0).mean()` is the scan of a constant, that of `x.chunk(2)` joins two. On every rank it
    would have the global size of the dim. It stays so while that is small, because then nothing is moved.
    """
    info, specs, wrapping = signature.info, signature.specs, signature.wrapping
    if not any(spec.broadcast for spec in specs):
        return run
    spec, dims = specs[0], SPREADING[info.op](signature)
    laid_out = len(specs) if info.op in JOINED else 1
    if any(not s.is_replicated or s.tensor_meta.is_symbolic for s in specs):
        return run
    if any(s.ndim != spec.ndim for s in specs[:laid_out]) or not any(dim in spec.broadcast for dim in dims):
        return run
    once = set(spec.broadcast).intersection(*(s.broadcast for s in specs[1:laid_out])).difference(dims)

    def run_or_spread(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = origin_of(wrapping.tensor_class)
        if origin is None or origin.mesh is not spec.mesh or origin.ndim > spec.ndim or origin.is_strided:
            return run(args, kwargs)
        if type(current_autograd_node()).__name__ in _gathering_nodes():
            return run(args, kwargs)
        stored = math.prod([size for dim, size in enumerate(origin.shape) if dim not in once])
        is_split = any(origin.dim_axes[dim] for dim in dims if dim < origin.ndim)
        if not is_split or SMALL * stored <= math.prod(origin.largest_local_shape):
            return run(args, kwargs)
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, given in list(zip(signature.slots, specs, strict=True))[:laid_out]:
            goal = _laid_out_as(origin.reduced(), given.tensor_meta)
            local = bound_route(given, goal).run(slot.get(args, kwargs)._local_tensor)
            slot.put(new_args, new_kwargs, wrapping.wrapper(goal)(local))
        return info.op(*new_args, **new_kwargs)

    return run_or_spread


def spread_regrouped(signature: Signature, run: Executor) -> Executor:
    """`run`, a view of a gradient that joins a broadcast dim and others: each rank copies only what it needs.

    The gradient of attention is constant along the batch and not along the heads; the view joins both. The copy is
    sharded as the tensor is whose gradient it becomes.
    """
    info, spec, wrapping = signature.info, signature.specs[0], signature.wrapping
    if not spec.broadcast or not spec.is_replicated or spec.tensor_meta.is_symbolic or 0 in spec.shape:
        return run
    if _broadcast_in_views(signature, spec) is not None:
        return run

    def run_or_spread_view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = origin_of(wrapping.tensor_class)
        if origin is None or origin.mesh is not spec.mesh or origin.is_strided or _numel(origin) != _numel(spec):
            return run(args, kwargs)
        goal = viewed_freely(origin.reduced(), spec.tensor_meta)
        if goal is None or not any(goal.dim_axes):
            return run(args, kwargs)
        kept = [dim for dim in spec.broadcast if not goal.dim_axes[dim]]
        goal = DTensorSpec.from_dim_axes(goal.mesh, goal.placements, spec.tensor_meta, goal.dim_axes, kept)
        local = bound_route(spec, goal).run(args[0]._local_tensor)
        return info.op(wrapping.wrapper(goal)(local), *args[1:], **kwargs)

    return run_or_spread_view


# ---------------------------------------------------------------- gradients on their way into `.grad`


INTO_LEAVES = {aten.detach.default, aten.new_empty_strided.default}
WRITES_TO_VIEWS = "CopySlices"  # autograd's node of a tensor after a write to one of its views


def into_leaf(signature: Signature, run: Executor) -> Executor:
    """`run`, but a gradient that autograd is putting into the `.grad` of a leaf gets the layout of the leaf.

    Only where that needs no communication: a sum over ranks stays `Partial`, so that those of several backward passes
    are reduced once. Autograd detaches a gradient without other references; of any other it makes an empty tensor and
    copies. It does the same with the gradient of a tensor to a view of which something was written: that one gets the
    layout of the tensor.
    """
    tensor_class, spec = signature.wrapping.tensor_class, signature.specs[0]
    if not spec.broadcast:
        return run
    known: dict[DTensorSpec, Executor] = {}  # by the layout of the leaf

    def run_or_lay_out(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        node: Any = current_autograd_node()
        leaf: Any = getattr(node, "variable", None)
        if isinstance(leaf, tensor_class):
            target = leaf._spec
        elif type(node).__name__ == WRITES_TO_VIEWS:
            target = origin_of(tensor_class)
        else:  # autograd is doing something else
            target = None
        if target is None:
            return run(args, kwargs)
        found = known.get(target)
        if found is None:
            here = target.mesh is spec.mesh and target.shape == spec.shape
            found = known[target] = (_as_leaf(signature, target) if here else None) or run
        return found(args, kwargs)

    return run_or_lay_out


def _as_leaf(signature: Signature, leaf: DTensorSpec) -> Executor | None:
    """Detach a gradient, or make an empty one, in the layout of a leaf; None if that would communicate."""
    spec, mesh = signature.specs[0], leaf.mesh
    target = leaf.reduced().materialized().with_dtype(spec.tensor_meta.dtype)
    route = bound_route(spec, target)
    if route.communicates:
        return None
    wrap, fabric = signature.wrapping.wrapper(target), fabric_of(mesh)
    here = fabric.coordinates(mesh)
    is_alone = len(here) == 1 and fabric_of(mesh).one_rank
    if signature.info.op is aten.detach.default:
        steps = route.route.steps
        move = (local_step(steps[0], here[0]) if is_alone and len(steps) == 1 else None) or route.run
        return lambda args, kwargs: wrap(move(args[0]._local_tensor))
    blocks = {at: (target.local_shape(at), target.local_stride(at)) for at in here}
    if is_alone:
        ((shape, stride),) = blocks.values()
        return lambda args, kwargs: wrap(args[0]._local_tensor.new_empty_strided(shape, stride))

    def empty(at: Any, part: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(*blocks[at], dtype=part.dtype, device=part.device)

    return lambda args, kwargs: wrap(fabric.map(mesh, empty, args[0]._local_tensor))
