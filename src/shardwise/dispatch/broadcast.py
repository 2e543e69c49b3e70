"""Broadcast dims: results that are constant along a dim are computed once and need no memory along it.

If an operator treats all indices of a dim alike, equal operands give equal results. So it runs on one index, and the
result is expanded. Views keep a broadcast dim because the local has stride 0 there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.spec import DTensorSpec
from shardwise.core.symbolic import unrecorded
from shardwise.dispatch.origins import origin_of
from shardwise.dispatch.signature import Executor, Signature
from shardwise.dispatch.views import PHYSICAL
from shardwise.fabric.base import fabric_of
from shardwise.fabric.block_copies import compacted
from shardwise.local import like
from shardwise.plan.propagate import OutputSharding
from shardwise.rules.dims import wrapped
from shardwise.rules.embedding import local_gradient_rows
from shardwise.rules.engine import Factors
from shardwise.rules.joining import where_replaced
from shardwise.rules.movement import where_triangle
from shardwise.rules.reduction import local_share
from shardwise.rules.slicing import local_input_sizes, where_put_back
from shardwise.rules.view import NOT_A_VIEW, groups_of
from shardwise.rules.windows import local_image
from shardwise.schema import Slot
from shardwise.torch_private import current_autograd_node

__all__ = ["FILLED", "REGROUPING", "broadcast_in_views", "filled_once", "keeping_broadcast"]

aten = torch.ops.aten
VIEWS_OF_COPIES = {aten._unsafe_view.default}  # views, but not by their schema
REGROUPING = {aten.view.default, *VIEWS_OF_COPIES}
# Functions that compute per-rank arguments, for rules that treat the indices of a factor alike except in this many last
# dims: a triangle depends on rows and columns.
UNIFORM: dict[Any, int] = {
    None: 0,
    local_share: 0,
    local_input_sizes: 0,
    where_put_back: 0,
    local_image: 0,
    local_gradient_rows: 0,
    where_triangle: 2,
    where_replaced: 0,
}
# Look-ups use the indices of a dim on this rank, but no result has that dim.
LOOKING_UP = {aten.index_select.default, aten.gather.default, aten.index.Tensor, aten._unsafe_index.Tensor}


# Operators, besides pointwise ones, that accept operands of stride 0. Some of torch's do not: the median of an expanded
# tensor is not implemented. Those get operands with the strides of one device.
ANY_STRIDES = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims, aten.mm.default,
    aten.bmm.default, aten.clone.default, aten._to_copy.default, aten.copy_.default, aten.copy.default,
    aten.cat.default, aten.linalg_vector_norm.default, aten.slice_backward.default, aten.select_backward.default,
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.gather.default, aten.index_select.default,
    # these do not read the values of their operand
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip


class Constant(NamedTuple):
    """A factor along which all operands are constant, with each (operand, dim) and (result, dim) that has it."""

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
    """The call with broadcast dims of its results marked, and the operator to run on locals instead of `op`."""
    info = signature.info
    if info.is_view or info.op in VIEWS_OF_COPIES:
        dims = broadcast_in_views(signature, sharding.inputs[0])
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
    """For each of `count` tensors its dims among these (tensor, dim) pairs."""
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
    """The factors, except the `last`, that some result has and along which all their operands are broadcast."""
    differ = (
        factors.unsharded | factors.even | factors.summed | factors.barred | {name for name, _ in factors.untouched}
    )
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
    # for each result its broadcast dims, and the operand and dim that give the size
    sources: list[list[tuple[int, Slot, int]]] = [[] for _ in range(1 + max(i for c in constant for i, _ in c.results))]
    for found in constant:
        operand, of = found.operands[0]
        for i, dim in found.results:
            sources[i].append((dim, slots[operand], of))

    if len(sources) == 1 and all(slot.item is None and slot.index is not None for slot in slots):
        kept = [dim for dim, _, _ in sources[0]]  # not sharded, so that their local size is the global one
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
    """`op` on dense copies of operands with broadcast dims."""
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


def broadcast_in_views(signature: Signature, base: DTensorSpec) -> list[list[int]] | None:
    """The dims of stride 0 in views of a tensor that is stored once along its broadcast dims.

    None if there is no such view: broadcast dims and others would be merged.
    """
    stored = [1 if dim in base.broadcast else size for dim, size in enumerate(base.shape)]
    strides = dense_strides(stored, like=base.tensor_meta.stride)
    held = [0 if dim in base.broadcast else stride for dim, stride in enumerate(strides)]
    _, *others = signature.info.names
    try:
        with unrecorded():
            expanded = torch.empty_strided(base.shape, held, device="meta", dtype=base.tensor_meta.dtype)
            if signature.info.op in VIEWS_OF_COPIES:
                made = aten.view.default(expanded, signature.arguments[others[0]])
            else:
                made = signature.info.op(expanded, **{name: signature.arguments[name] for name in others})
    except NOT_A_VIEW:
        return None
    views = made if isinstance(made, tuple | list) else (made,)
    return [[dim for dim, stride in enumerate(view.stride()) if _is_zero(stride)] for view in views]


def _broadcast_in_copies(sharding: OutputSharding) -> tuple[list[list[int]], Callable[..., Any]]:
    """For a view that must be copied: the dims that stay broadcast, and the function that copies the others.

    Regrouped dims contain the same elements. If the old leading dims of some total size are constant, so are the new
    leading dims whose sizes divide that total.
    """
    base, out = sharding.inputs[0], sharding.outputs[0]
    repeated = [1] * base.ndim  # how many indices of each broadcast dim the copy stores
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
    """Compute a view such as the conjugate on one index of each broadcast dim."""

    def compute_once(local: torch.Tensor) -> torch.Tensor:
        return op(compacted(local, dims)).expand([n if dim in dims else -1 for dim, n in enumerate(local.shape)])

    return compute_once


def _apart(op: Callable[..., Any], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """A view of values stored once for several indices, protected so that a write does not reach all of them.

    A view with broadcast dims gets another local when it is written to. Any other view is copied.
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

# Operators that fill a tensor with one number.
FILLED = {
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zeros_like.default,
    aten.ones_like.default, aten.full_like.default,
}  # fmt: skip


def filled_once(signature: Signature, result: DTensorSpec, run: Executor) -> Executor:
    """`run`, with constants of autograd's formulas stored once: the formulas add something to them.

    A constant takes the layout of the tensor whose gradient it becomes, if known. Next to a replicated operand of its
    size it is replicated too. Outside autograd such a tensor is usually a buffer about to be written to.
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

    # a sharded constant needs as much memory on a rank as its tensor
    return run_or_fill if made.is_lazy and not any(made.dim_axes) and spec.mesh is mesh else run


def _numel(spec: DTensorSpec) -> int:
    return math.prod(spec.shape)


def _as_origin(made: DTensorSpec, origin: DTensorSpec | None) -> DTensorSpec:
    """A replicated constant in the layout of the tensor whose gradient it becomes, if that one is sharded."""
    if origin is None or origin.mesh is not made.mesh or origin.shape != made.shape or not any(origin.dim_axes):
        return made
    return origin.reduced().with_meta(made.tensor_meta)
