"""Gradients whose operator would be as cheap in every layout take the layout of the forward's operand.

The gradient of `x[0]` is zero except in one row, and the gradient of experts is a product of replicated rows for each
of them. The operator receives the shape of `x`, not its layout; each rank can compute just its own part. So forward
stores the layout in the metadata of the autograd node that created `x`, and backward looks it up at the next node.
Without a stored layout the gradient is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.placement import Partial, Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.signature import Executor, Signature
from shardwise.plan.cost import current_cost_model
from shardwise.plan.propagate import OutputSharding
from shardwise.plan.step import OwnerExchange
from shardwise.rules.dims import wrapped
from shardwise.rules.interpolation_names import INTERPOLATIONS
from shardwise.rules.view import groups_of
from shardwise.schema import OpInfo, Slot
from shardwise.torch_private import current_autograd_node

__all__ = [
    "JOINING", "PUTTING_BACK", "TABLE_BACKWARD", "TAKING", "noting_base", "noting_experts",
    "noting_origin", "noting_split_dims", "origin_of", "putting_back", "sent_to_owners", "with_constants_stored_once",
]  # fmt: skip

aten = torch.ops.aten
TAKING = {
    aten.select.int, aten.slice.Tensor, aten.gather.default, aten.index_select.default, aten.index.Tensor,
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim,
    aten.mode.default, aten.cummax.default, aten.cummin.default, aten.embedding.default, aten.trace.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.constant_pad_nd.default,
    aten.select_scatter.default, aten.slice_scatter.default, aten.index_put.default, aten.channel_shuffle.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_copy.default, aten.scatter.src,
    aten.scatter.value, aten.cumsum.default, aten.unfold.default, aten.tril.default, aten.triu.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
    *(getattr(aten, name).default for name in INTERPOLATIONS),
}  # fmt: skip
JOINING = {
    aten.cat.default, aten.stack.default, aten.select_scatter.default, aten.slice_scatter.default,
    aten.index_put.default,
}  # fmt: skip
# Autograd nodes that concatenate gradients with plain constants, and the value of these constants.
FILLING = {
    "SplitBackward0": 0, "SplitWithSizesBackward0": 0, "UnbindBackward0": 0, "SelectScatterBackward0": 0,
    "SliceScatterBackward0": 0, "IndexPutBackward0": 0, "ProdBackward0": 1, "ProdBackward1": 1,
}  # fmt: skip
TABLE_BACKWARD = aten.embedding_dense_backward.default
PUTTING_BACK = {aten.select_backward.default, aten.slice_backward.default}
ACCUMULATING = "AccumulateGrad"  # the node of a leaf
NOTED = "shardwise: layouts of outputs"  # in the metadata of a node


def noting_origin(signature: Signature, run: Executor) -> Executor:
    """`run`; if it selects from a sharded dim, the layout is stored for the gradient."""
    spec = signature.specs[0]
    dim = None if signature.info.op is aten.gather.default else signature.arguments.get("dim")
    axes = spec.dim_axes if dim is None or not spec.ndim else spec.dim_axes[wrapped(dim, spec.ndim)]
    if spec.is_strided or not any(axes if dim is None else [axes]):
        return run

    return _noting(0, spec, run)


def noting_split_dims(signature: Signature, run: Executor) -> Executor:
    """`run`, a view; if it splits a sharded dim into several, the layout is stored for the gradient."""
    spec, size = signature.specs[0], signature.arguments.get("size", signature.arguments.get("shape"))
    sharded = {dim for dim, axes in enumerate(spec.dim_axes) if axes}
    if not sharded or spec.is_strided or spec.tensor_meta.is_symbolic or not size or 0 in spec.shape:
        return run
    after = torch.empty(spec.shape, device="meta").view(size).shape
    if not any(len(group.outputs) > 1 and sharded.intersection(group.inputs) for group in groups_of(spec.shape, after)):
        return run

    return _noting(0, spec, run)


def _noting(at: int, spec: DTensorSpec, run: Executor) -> Executor:
    """`run`, after storing the layout of the operand at this position."""

    def note_and_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        _note(args[at], spec)
        return run(args, kwargs)

    return note_and_run


def _node_of(tensor: torch.Tensor) -> Any:
    """The node of autograd that made a tensor; None if there is none, or torch does not report it."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that was made in inference mode, and whose base has been written to since
        return None


def noting_experts(signature: Signature, run: Executor) -> Executor:
    """`run`, a grouped product; if the groups of one operand are sharded, its layout is stored for the gradient."""
    groups = [i for i in (0, 1) if signature.specs[i].ndim == 3]
    noted = [i for i in groups if signature.specs[i].dim_axes[0]]
    if len(groups) != 1 or not noted or signature.specs[noted[0]].is_strided:
        return run
    return _noting(noted[0], signature.specs[noted[0]], run)


def noting_base(signature: Signature, run: Executor) -> Executor:
    """`run`, a write to a tensor; if that is a view, the layout of its base is stored for the gradient."""
    tensor_class, slot = signature.wrapping.tensor_class, signature.slots[0]
    if slot.name != "self" or slot.item is not None or not any(signature.specs[0].dim_axes):
        return run

    def note_and_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        base = args[0]._base
        if isinstance(base, tensor_class):
            _note(base, base._spec)
        return run(args, kwargs)

    return note_and_run


def _note(tensor: Any, spec: DTensorSpec) -> None:
    node = _node_of(tensor)
    if node is not None:  # of a leaf the layout is known anyway
        node.metadata.setdefault(NOTED, {})[tensor.output_nr] = spec


def origin_of(tensor_class: Any, operand: int = 0) -> DTensorSpec | None:
    """The layout of the forward operand whose gradient is being computed, if known."""
    node: Any = current_autograd_node()
    follows = node.next_functions if node is not None else ()
    if operand >= len(follows) or follows[operand][0] is None:
        return None
    maker, output = follows[operand]
    leaf: Any = maker.variable if type(maker).__name__ == ACCUMULATING else None
    return leaf._spec if isinstance(leaf, tensor_class) else maker.metadata.get(NOTED, {}).get(output)


def with_constants_stored_once(tensor_class: Any, info: OpInfo, slots: Sequence[Slot], run: Executor) -> Executor:
    """`run`, which concatenates gradients; plain zeros or ones that autograd adds are stored once.

    Zeros replace parts that were unused or overwritten. A user's hook runs in the same node and may concatenate other
    tensors, so the values are checked.
    """

    def run_or_replace(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = FILLING.get(type(current_autograd_node()).__name__)
        if value is None:
            return run(args, kwargs)
        plain = [slot for slot in slots if not isinstance(slot.get(args, kwargs), tensor_class)]
        if any(not _is_filled(slot.get(args, kwargs), value) for slot in plain):
            return run(args, kwargs)
        given = next(t for t in (slot.get(args, kwargs) for slot in slots) if isinstance(t, tensor_class))
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot in plain:
            part = slot.get(args, kwargs)
            slot.put(new_args, new_kwargs, given.new_full(part.shape, value, dtype=part.dtype))
        return info.op(*new_args, **new_kwargs)

    return run_or_replace


def _is_filled(plain: torch.Tensor, value: int) -> bool:
    """Whether a plain tensor has one value everywhere; a tensor without values is assumed to be autograd's."""
    if plain.is_meta or is_tracing():
        return True
    return plain.__class__ is torch.Tensor and bool((plain == value).all().item())


def putting_back(
    signature: Signature, sharding: OutputSharding, make: Callable[[OutputSharding], Executor]
) -> Executor:
    """The executor of a call that computes a gradient: in the layout stored for it, if any."""
    tensor_class, spec = signature.wrapping.tensor_class, sharding.outputs[0]
    runs: dict[DTensorSpec | None, Executor] = {None: make(sharding)}
    grouped = sharding.rule.by_groups
    if spec.tensor_meta.is_symbolic or sharding.exchange is not None:
        return runs[None]
    if grouped and any(operand.ndim != 2 for operand in signature.specs[:2]):
        return runs[None]
    dim = 0 if grouped else wrapped(signature.arguments["dim"], spec.ndim)
    find = _experts_of if grouped else origin_of
    kinds = Replicate | Partial if len(sharding.inputs) == 1 else Replicate
    compared = 1 if grouped else None  # matrices of experts may be transposed

    def put_back(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = find(tensor_class)
        if origin is not None and (
            origin.mesh is not spec.mesh or origin.shape[:compared] != spec.shape[:compared] or origin.is_strided
        ):
            origin = None
        found = runs.get(origin)
        if found is None:
            found = runs[origin] = make(_spread(sharding, origin, dim, kinds))
        return found(args, kwargs)

    return put_back


def sent_to_owners(
    signature: Signature, sharding: OutputSharding, make: Callable[[OutputSharding], Executor]
) -> Executor:
    """The executor of the gradient of a table with sharded rows: each rank computes the rows that it owns.

    Replicated gradients are added to these rows only. If indices are sharded like the rows, each rank receives those it
    owns. The alternative is a Partial of the size of the global table, to be reduced later; it is used if that takes
    less time, and if the table is replicated.
    """
    tensor_class, out, mesh = signature.wrapping.tensor_class, sharding.outputs[0], signature.mesh
    runs: dict[DTensorSpec | None, Executor] = {None: make(sharding)}
    if out.tensor_meta.is_symbolic or sharding.exchange is not None:
        return runs[None]

    def owned(origin: DTensorSpec) -> Executor:
        axes = origin.dim_axes[0]
        if not axes or origin.is_strided:
            return runs[None]
        gradient, indices = sharding.inputs
        known = all(isinstance(indices.placements[axis], Replicate) for axis in axes)
        if (
            known and gradient.local_bytes <= out.local_bytes
        ):  # gradients of the rows are reduced, not those of the table
            return make(_spread(sharding, origin, 0, Replicate | Partial))
        if any(isinstance(out.placements[axis], Replicate) for axis in axes):
            return make(_spread(sharding, origin, 0))
        alike = all(spec.dim_axes[0] == axes and not spec.is_strided for spec in sharding.inputs if spec.ndim)
        if not alike or set(out.partial_axes) != set(axes):
            return runs[None]
        placements = [Shard(0) if axis in axes else p for axis, p in enumerate(out.placements)]
        made = DTensorSpec.from_dim_axes(mesh, tuple(placements), out.tensor_meta, (axes, *out.dim_axes[1:]))
        model, sent = current_cost_model(), sum(spec.local_bytes for spec in sharding.inputs)
        if model.seconds(mesh, axes, 0) + model.seconds(mesh, axes, sent) > model.seconds(mesh, axes, out.local_bytes):
            return runs[None]
        return make(replace(sharding, outputs=(made,), exchange=OwnerExchange(made, made, 0, axes)))

    def send_to_owners(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = origin_of(tensor_class)
        if origin is not None and (origin.mesh is not mesh or origin.shape != out.shape):
            origin = None
        found = runs.get(origin)
        if found is None:
            assert origin is not None
            found = runs[origin] = owned(origin)
        return found(args, kwargs)

    return send_to_owners


def _experts_of(tensor_class: Any) -> DTensorSpec | None:
    """The layout of the operand of a grouped product that has a matrix for each group."""
    found = [origin_of(tensor_class, operand) for operand in (0, 1)]
    return next((spec for spec in found if spec is not None and spec.ndim == 3), None)


def _spread(sharding: OutputSharding, origin: DTensorSpec | None, dim: int, kinds: Any = Replicate) -> OutputSharding:
    """`sharding`, with operands that would be replicated along `dim` split like the origin.

    Args:
        sharding: the call.
        origin: the layout of the tensor whose gradient is made.
        dim: the dim to split.
        kinds: placements of the result that are replaced. With Partial among them, a Partial operand, small compared to
        the result, is reduced before, and each rank writes it into its part.
    """
    out, split = sharding.outputs[0], Shard(dim)
    assert origin is not None
    if any(out.placements[axis] is not split for axis in out.dim_axes[dim]):  # already split differently
        return sharding
    spread = [
        axis
        for axis, placement in enumerate(out.placements)
        if origin.placements[axis] is split and isinstance(placement, kinds)
    ]
    placements: list[Placement] = [split if axis in spread else p for axis, p in enumerate(out.placements)]
    axes = list(out.dim_axes)
    axes[dim] = tuple(axis for axis in origin.dim_axes[dim] if placements[axis] is split)
    made = DTensorSpec.from_dim_axes(out.mesh, tuple(placements), out.tensor_meta, axes)
    return replace(sharding, inputs=tuple(_reduced_on(spread, spec) for spec in sharding.inputs), outputs=(made,))


def _reduced_on(axes: Sequence[int], spec: DTensorSpec) -> DTensorSpec:
    """The spec without Partial on these axes."""
    if not any(isinstance(spec.placements[axis], Partial) for axis in axes):
        return spec
    placements = [Replicate() if a in axes and isinstance(p, Partial) else p for a, p in enumerate(spec.placements)]
    return DTensorSpec.from_dim_axes(spec.mesh, tuple(placements), spec.tensor_meta, spec.dim_axes, spec.broadcast)
