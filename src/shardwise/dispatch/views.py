"""Copied views: they share no memory with their base, because data had to be moved; and how writes are propagated.

A copied view stores how it was computed. A write to it is repeated on the base; after a write to the base it is
recomputed at its next use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.placement import norm_order
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import has_symbols
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.signature import Executor, Wrapping, gathered_local
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.rank_tensor import part_at, parts_of, writes_as_data
from shardwise.fabric.routes import bound_route
from shardwise.local import laid_out_like
from shardwise.plan.propagate import replicated
from shardwise.schema import OpInfo
from shardwise.torch_private import OpOverload

__all__ = [
    "COPYING_VIEWS",
    "DETACH",
    "OUTSIDE",
    "OVERLAPPING",
    "PHYSICAL",
    "CopiedView",
    "copied_view",
    "counted_as_base",
    "is_norm",
    "mark_views",
    "materialize",
    "memory_of",
    "push_back",
    "replace_local",
    "version_of",
    "with_copied_views",
    "write",
]

# Inside __torch_dispatch__ torch does not see the conjugate and negative bits of a tensor: locals never carry them.
PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
DETACH = torch.ops.aten.detach.default
RESHAPE = torch.ops.aten.reshape.default
OVERLAPPING = {torch.ops.aten.unfold.default}  # views that may show an element several times
# Views of some rows of a dim, and the operators that put rows back into a tensor.
PUTTING_ROWS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
STALE = -1  # a version that no tensor has
# Views whose local is computed again even if nothing is moved.
COPYING_VIEWS = {*PHYSICAL, torch.ops.aten.as_strided.default}


@dataclass(eq=False, slots=True)
class CopiedView:
    """How a copied view was computed: the operator, its arguments, and the index of the result.

    `version` is that of the base when the view was made: a later one means that the base has been written to since.
    `memory` identifies what the base was then: `x.data = y`, `set_`, `t_` and `swap_tensors` make another tensor of it.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None
    version: int | None
    memory: object

    @property
    def is_stale(self) -> bool:
        """Whether the base may have changed."""
        version = version_of(self.args[0])
        return version is None or version != self.version

    def again(self) -> Any:
        """The view, computed again from its base."""
        self.check_base()
        self.version = version_of(self.args[0])
        with torch.no_grad():
            views = self.op(*self.args, **self.kwargs)
        return views if self.item is None else views[self.item]

    def check_base(self) -> None:
        """Refuse to use a base that has other memory or another shape than when the view was made."""
        base = self.args[0]
        if base._memory is not self.memory:
            raise UnsupportedError(
                f"a view by {self.op.name()} is used after a write, but its base has been given other memory or "
                f"another shape since: it is {base._spec} now. The view is a copy, because its base is sharded",
                hint="take the view again, or clone() it before `base.data = ...`, `set_`, `swap_tensors` or `t_`",
            )


class _Outside:
    """Marks an input of a compiled program that is a copied view: its base is not known inside."""

    is_stale = False


OUTSIDE = _Outside()


def version_of(tensor: torch.Tensor) -> int | None:
    """The version of a tensor and its storage; None if torch does not count."""
    if tensor.is_inference():
        return None
    return tensor._version + _writes_as_data(tensor)


def _writes_as_data(tensor: Any) -> int:
    """How many writes to the memory that a tensor shows are not counted by its version."""
    while isinstance(made := getattr(tensor, "_copied_view", None), CopiedView):
        tensor = made.args[0]
    local = getattr(tensor, "_held", None)
    return 0 if local is None else writes_as_data(local)


def memory_of(base: Any) -> object:
    """Identifies the memory and shape of a tensor, of which views are copies."""
    if base._memory is None:
        base._memory = object()
    return base._memory


def mark_views(info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any], views: Any) -> None:
    """Mark views that had to be copied, so that writes to them or to their base are not lost."""
    base = args[0]
    if info.op is DETACH and isinstance(base._copied_view, CopiedView):  # of the same base: torch detaches some views
        views._mark_copied(replace(base._copied_view))
        return
    if info.op is RESHAPE and not _reshaped_by_view(base._spec.tensor_meta, views._spec.tensor_meta):
        return
    version, memory = version_of(base), memory_of(base)
    if isinstance(views, tuple | list):
        for item, view in enumerate(views):
            view._mark_copied(CopiedView(info.op, args, kwargs, item, version, memory))
    elif views is not base:  # which a decomposition may give back
        views._mark_copied(CopiedView(info.op, args, kwargs, None, version, memory))


def _reshaped_by_view(before: TensorMeta, after: TensorMeta) -> bool:
    """Whether `reshape` gives a view on one device, and not a copy."""
    if before.is_symbolic or after.is_symbolic:
        return True
    base = torch.empty_strided(before.shape, before.stride, device="meta")
    return base.reshape(after.shape).untyped_storage()._cdata == base.untyped_storage()._cdata


def copied_view(info: OpInfo, run: Executor) -> Executor:
    """`run`, whose results are views that share no memory with the first argument."""

    def run_and_mark(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        views = run(args, kwargs)
        mark_views(info, args, kwargs, views)
        return views

    return run_and_mark


def counted_as_base(run: Executor) -> Executor:
    """`run`, whose views are inference tensors only if the base is: torch counts writes to both with one counter."""

    def view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return run(args, kwargs)
        return run(args, kwargs)

    return view


def with_copied_views(wrapping: Wrapping, info: OpInfo, run: Executor) -> Executor:
    """`run`, with views of copied views marked, and writes to them propagated to their bases."""
    return _views_marked(run, info) if info.is_view else _pushed_back(wrapping, run, info) if info.writes else run


def _views_marked(run: Executor, info: OpInfo) -> Executor:
    """Mark a view of a copied view as a copied view."""

    def run_and_mark(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        views = run(args, kwargs)
        if args and args[0]._copied_view is not None:
            mark_views(info, args, kwargs, views)
        return views

    return run_and_mark


def _pushed_back(wrapping: Wrapping, run: Executor, info: OpInfo) -> Executor:
    """Propagate a write to a copied view to its base."""

    def run_and_push(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for tensor in _written(info, args, kwargs):
            if isinstance(made := getattr(tensor, "_copied_view", None), CopiedView):
                made.check_base()
        if (several := _count_in_lists(info, args, kwargs)) > 1:
            for item in range(several):
                info.op(*[_only(value, item, several) for value in args],
                        **{name: _only(value, item, several) for name, value in kwargs.items()})  # fmt: skip
            return None
        result = run(args, kwargs)
        for name in info.writes:
            index = info.names.index(name)
            written = args[index] if index < len(args) else kwargs.get(name)
            if isinstance(written, list | tuple):
                _count_writes(wrapping, written)
            for tensor in written if isinstance(written, list | tuple) else (written,):
                if getattr(tensor, "_copied_view", None) is not None:
                    push_back(wrapping, info, tensor)
        return result

    return run_and_push


def _written(info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a call writes to, those of lists too."""
    found: list[Any] = []
    for name in info.writes:
        index = info.names.index(name)
        value = args[index] if index < len(args) else kwargs.get(name)
        found += value if isinstance(value, list | tuple) else [value]
    return found


def _count_in_lists(info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many tensors a call on lists writes to, if one is a copied view: the others may show the same elements."""
    if not isinstance(args[0], list | tuple) or info.names[0] not in info.writes:
        return 0
    return len(args[0]) if any(getattr(t, "_copied_view", None) is not None for t in args[0]) else 0


def _only(value: Any, item: int, several: int) -> Any:
    return [value[item]] if isinstance(value, list | tuple) and len(value) == several else value


def _count_writes(wrapping: Wrapping, written: Sequence[Any]) -> None:
    """Increase the versions of tensors that an operator on lists has written; torch does so only for plain ones."""
    ours = [t for t in written if isinstance(t, wrapping.tensor_class) and not t.is_inference()]
    torch.autograd.graph.increment_version(ours)


def push_back(wrapping: Wrapping, info: OpInfo, view: Any) -> None:
    """Write the values of a copied view to its base, and to the bases above it."""
    made: Any = view._copied_view
    # a DTensor with the values of the view, read as they were written: a stale view would be computed again
    written: Any = wrapping.wrapper(view._held_spec)(view._held)
    while made is not None:
        if made is OUTSIDE:
            raise UnsupportedError(
                f"{info.op} in a compiled program writes to {view._spec}, or to its base: an input that is "
                "itself a view and, as its base is sharded, shares no memory with it; or that is stored once along a "
                "dim, as `expand` makes",
                hint="give the program the base and take the view inside, or write outside of compiled code; "
                "x.redistribute(placements=x.placements) stores every element",
            )
        base = made.args[0]
        above: Any = base._copied_view
        # the elements of an overlapping base are old, except the written ones: it is computed from its own base again
        refreshed = above not in (None, OUTSIDE) and above.op in OVERLAPPING
        if made.op in PUTTING_ROWS and not refreshed and not _overlaps(parts_of(base._held)[0]):
            written = PUTTING_ROWS[made.op](base, written, *made.args[1:], **made.kwargs)
            if base._spec.is_lazy and above is None:  # it is stored once along other dims, and remains so
                replace_local(base, written)
            else:
                write(wrapping, info, base, written)
        else:
            written = wrapping.wrapper(replicated(base._spec))(_written_copy(made, base, written))
            if not refreshed:
                write(wrapping, info, base, written, changed=True)
        base._reduction = None
        _count_writes(wrapping, [base])
        # views that show an element several times are computed again: only the written elements are new
        is_old = made.op in OVERLAPPING or _overlaps(parts_of(base._held)[0])
        made.version = STALE if is_old else version_of(base)
        made = above


def _written_copy(made: CopiedView, base: Any, written: Any) -> torch.Tensor:
    """The local of a replicated copy of a base, to which the values of a view of it have been written."""
    local, values = base._local_tensor, gathered_local(written._local_tensor, written._spec)
    copy = gathered_local(local, base._spec)
    if copy is local:
        copy = copy.clone(memory_format=torch.contiguous_format)
    if made.op in PHYSICAL:
        copy.copy_(PHYSICAL[made.op](values))
    else:
        again = made.op(copy, *made.args[1:], **made.kwargs)  # on plain tensors: shares memory with the copy
        _copy_changed(again if made.item is None else again[made.item], values)
    return copy


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several indices refer to one element, apart from dims of stride zero."""
    if has_symbols(tensor.shape) or has_symbols(tensor.stride()):
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _copy_changed(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target.copy_(value)`; if a local repeats elements, only those that differ: the others are old."""
    if not any(map(_overlaps, parts_of(target))):
        target.copy_(value)
        return
    if is_tracing():
        raise UnsupportedError(
            "a compiled program writes to a part of overlapping windows, of which a sharded dim makes a copy",
            hint="write to the tensor that `unfold` was called on, to all indices of the sharded dim, or outside of "
            "compiled code",
        )
    for rank, own in enumerate(parts_of(target)):
        if own.numel():
            _put_changed(own, part_at(value, rank))


def _put_changed(target: torch.Tensor, value: torch.Tensor) -> None:
    reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True)) + 1
    memory = target.as_strided((reach,), (1,))
    places = torch.arange(reach, device=target.device).as_strided(target.shape, target.stride())
    changed = (value != target) & ~(value.isnan() & target.isnan())
    memory.put_(places[changed], value[changed])


def is_norm(spec: DTensorSpec) -> bool:
    """Whether a tensor is a Partial norm. Not every value can have this layout: a write reduces it first."""
    return any(norm_order(spec.placements[axis].reduce_op) is not None for axis in spec.partial_axes)  # pyright: ignore[reportAttributeAccessIssue]


def materialize(tensor: Any) -> None:
    """Store every element of a tensor with broadcast dims, in its current layout."""
    spec = tensor._spec.materialized()
    local = bound_route(tensor._spec, spec).run(tensor._local_tensor)
    tensor._local_tensor, tensor._spec = local, spec


def replace_local(target: Any, value: Any) -> None:
    """Give a tensor the value and the layout of another of its shape, which has no other references."""
    if value.shape != target.shape:
        raise LayoutError(
            f"a tensor of shape {tuple(target.shape)} cannot take values of shape {tuple(value.shape)}",
            hint="an operator that writes does not change the shape of its target",
        )
    meta = target._spec.tensor_meta
    if value.dtype is not meta.dtype:
        value = value.to(meta.dtype)
    spec = value._spec
    if spec.partial_axes:  # a replicated tensor stays replicated
        goal = spec.reduced()
        value_local = bound_route(spec, goal).run(value._local_tensor)
        spec = goal
    else:
        value_local = value._local_tensor
    if spec.tensor_meta is not meta:  # in memory as the tensor itself
        if not spec.broadcast:
            value_local = laid_out_like(value_local, meta.stride)
        spec = DTensorSpec.from_context(spec.context, meta)
    target._local_tensor, target._spec, target._reduction = value_local, spec, None


def write(wrapping: Wrapping, info: OpInfo, target: Any, value: Any, changed: bool = False) -> None:
    """Copy a DTensor's value into another, keeping the other's layout; into a plain tensor, the full tensor.

    `changed`: only some elements are new. Only these are written if the target shows an element several times.
    """
    if not isinstance(target, wrapping.tensor_class):
        target.copy_(
            fabric_of(value._spec.mesh).parts(value._spec.mesh, gathered_local(value._local_tensor, value._spec))[0][1]
        )
        return
    have, want = value._spec, target._spec
    if have.shape != want.shape:
        raise LayoutError(
            f"{info.op} gives {have.tensor_meta}, which cannot be written into {want}",
            hint="give it a tensor of the result's shape",
        )
    local = value._local_tensor
    if want.is_lazy:  # it gets a local of its own
        materialize(target)
        want = target._spec
    goal = want.with_meta(have.tensor_meta)
    if is_norm(want):
        local = bound_route(have, goal.reduced()).run(local)
        target._local_tensor = local.to(want.tensor_meta.dtype, copy=True)
        target._spec = want.reduced()
        return
    if goal is not have:
        if goal.partial_axes:  # through Replicate: only R becomes Partial
            local = bound_route(have, replicated(have)).run(local)
            have = replicated(have)
        local = bound_route(have, goal).run(local)
    if changed:
        _copy_changed(target._held, local)
    else:
        target._held.copy_(local)
