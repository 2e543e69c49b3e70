"""Views that share no memory with their base, because something had to be moved; and how writes get across.

A copied view remembers how it came about. A write to it is repeated on the base; after a write to the base it is made
anew when it is next used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.placement import norm_order
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.signature import Executor, Wrapping, whole_of
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.local import laid_out_like
from shardwise.plan.propagate import replicated
from shardwise.schema import OpInfo
from shardwise.torch_private import OpOverload

__all__ = [
    "COPYING_VIEWS",
    "OUTSIDE",
    "PHYSICAL",
    "CopiedView",
    "copied_view",
    "counted_as_base",
    "is_norm",
    "mark_views",
    "materialize",
    "push_back",
    "replace_local",
    "watched",
    "write",
]

# Inside __torch_dispatch__ torch does not see the conjugate and negative bits of a tensor: locals never carry them.
PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
OVERLAPPING = {torch.ops.aten.unfold.default}  # views that may show an element several times
SLICE = torch.ops.aten.slice.Tensor
STALE = -1  # a version that no tensor has
# Views whose local is made anew even where nothing is moved.
COPYING_VIEWS = {*PHYSICAL, torch.ops.aten.as_strided.default}


@dataclass(eq=False, slots=True)
class CopiedView:
    """How a view came about that shares no memory with its base: the operator, its arguments, which of its results.

    `version` is that of the base when the view was made: a later one means that the base has been written to since.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None
    version: int | None

    @property
    def is_stale(self) -> bool:
        """Whether the base may have changed."""
        version = version_of(self.args[0])
        return version is None or version != self.version

    def again(self) -> Any:
        """The view, made anew from its base."""
        self.version = version_of(self.args[0])
        with torch.no_grad():
            views = self.op(*self.args, **self.kwargs)
        return views if self.item is None else views[self.item]


class _Outside:
    """How an input of a compiled program came about that is a copied view: its base is not known inside."""

    is_stale = False


OUTSIDE = _Outside()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor, or what it shares memory with, has been written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def mark_views(info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any], views: Any) -> None:
    """Mark views that had to be copied, so that a write to them is not lost, nor one to their base."""
    version = version_of(args[0])
    if isinstance(views, tuple | list):
        for item, view in enumerate(views):
            view._mark_copied(CopiedView(info.op, args, kwargs, item, version))
    elif views is not args[0]:  # which a decomposition may give back
        views._mark_copied(CopiedView(info.op, args, kwargs, None, version))


def copied_view(info: OpInfo, run: Executor) -> Executor:
    """`run`, whose results are views that share no memory with the first argument."""

    def run_and_mark(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        views = run(args, kwargs)
        mark_views(info, args, kwargs, views)
        return views

    return run_and_mark


def counted_as_base(run: Executor) -> Executor:
    """`run`, whose views are inference tensors only where the base is one: torch counts writes to both together."""

    def view(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return run(args, kwargs)
        return run(args, kwargs)

    return view


def watched(wrapping: Wrapping, info: OpInfo, run: Executor) -> Executor:
    """`run`, with views of copied views marked, and writes to such carried over to their bases."""
    return _views_marked(run, info) if info.is_view else _pushed_back(wrapping, run, info) if info.writes else run


def _views_marked(run: Executor, info: OpInfo) -> Executor:
    """A view of a copied view is one too."""

    def run_and_mark(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        views = run(args, kwargs)
        if args and args[0]._copied_view is not None:
            mark_views(info, args, kwargs, views)
        return views

    return run_and_mark


def _pushed_back(wrapping: Wrapping, run: Executor, info: OpInfo) -> Executor:
    """A write to a view that had to be copied is carried over to the tensor it is a view of."""

    def run_and_push(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
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


def _refuse_overlapping_base(info: OpInfo, view: Any) -> None:
    """The base is written as a whole. Where it shows an element several times, old values would overwrite the new.

    The view is made again from its base when it is next used.
    """
    made = view._copied_view
    while made is not OUTSIDE:
        base = made.args[0]
        if base._copied_view is not None:
            made = base._copied_view
            continue
        if _overlaps(base._spec.tensor_meta):
            view._copied_view.version = STALE
            raise UnsupportedError(
                f"{info.op} writes to {view._spec}, a part of a view with overlapping windows, {base._spec}: along a "
                "sharded dim that part is a copy, and its values cannot be brought back one by one",
                hint="write to the tensor that `unfold` was called on, or to all indices of the sharded dim",
            )
        return


def _overlaps(meta: TensorMeta) -> bool:
    """Whether several indices mean one element, dims of stride zero aside."""
    if meta.is_symbolic or meta.stride is None:
        return False
    reach = 0
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _count_writes(wrapping: Wrapping, written: Sequence[Any]) -> None:
    """Count up the versions of what an operator on lists has written to, which torch does for plain tensors alone."""
    ours = [t for t in written if isinstance(t, wrapping.tensor_class) and not t.is_inference()]
    torch.autograd.graph.increment_version(ours)


def push_back(wrapping: Wrapping, info: OpInfo, view: Any) -> None:
    """Repeat the view on a whole copy of its base, write there, and bring the copy back to where the base lies."""
    _refuse_overlapping_base(info, view)
    made: Any = view._copied_view
    if made is not OUTSIDE and made.op is SLICE and made.args[0]._spec.is_lazy and made.args[0]._copied_view is None:
        base = made.args[0]  # which is stored once along other dims, and stays so
        replace_local(base, torch.ops.aten.slice_scatter.default(base, view, *made.args[1:], **made.kwargs))
        _count_writes(wrapping, [base])
        made.version = version_of(base)
        return
    written = whole_of(view._held, view._spec)
    while made is not None:
        if made is OUTSIDE:
            raise UnsupportedError(
                f"{info.op} in a compiled program writes to {view._spec}, or to what it is a view of: an input that is "
                "itself a view and, as its base is sharded, shares no memory with it; or that is stored once along a "
                "dim, as what `expand` gives",
                hint="give the program the base and take the view inside, or write outside of what is compiled; "
                "x.redistribute(placements=x.placements) stores every element",
            )
        base = made.args[0]
        local = base._local_tensor
        copy = whole_of(local, base._spec)
        if copy is local:
            copy = copy.clone(memory_format=torch.contiguous_format)
        if made.op in PHYSICAL:
            copy.copy_(PHYSICAL[made.op](written))
        elif made.op in OVERLAPPING:
            _put_changed(copy, written, made)
            made.version = STALE
        else:
            again = made.op(copy, *made.args[1:], **made.kwargs)  # on plain tensors: shares memory with the copy
            (again if made.item is None else again[made.item]).copy_(written)
        above: Any = base._copied_view
        # an overlapping one is made anew instead: its elements are old, but these
        if above in (None, OUTSIDE) or above.op not in OVERLAPPING:
            write(wrapping, info, base, wrapping.wrapper(replicated(base._spec))(copy))
        base._settled = None
        _count_writes(wrapping, [base])
        if made.version != STALE:
            made.version = version_of(base)
        made, written = above, copy


def _put_changed(copy: torch.Tensor, written: torch.Tensor, made: CopiedView) -> None:
    """Write to a tensor what has changed in a view that shows elements of it several times; the others are old."""
    before = made.op(copy, *made.args[1:], **made.kwargs)
    changed = (written != before) & ~(written.isnan() & before.isnan())
    positions = torch.arange(copy.numel(), device=copy.device).reshape(copy.shape)
    places = made.op(positions, *made.args[1:], **made.kwargs)
    copy.put_(places[changed], written[changed])


def is_norm(spec: DTensorSpec) -> bool:
    """Whether a tensor is a norm that waits. Not every value can lie so: one that is written to becomes whole."""
    return any(norm_order(spec.placements[axis].reduce_op) is not None for axis in spec.partial_axes)  # pyright: ignore[reportAttributeAccessIssue]


def materialize(tensor: Any) -> None:
    """Give every element of a tensor with broadcast dims memory of its own, in the layout that it has."""
    spec = tensor._spec.materialized()
    local = bound_route(tensor._spec, spec).run(tensor._local_tensor)
    tensor._local_tensor, tensor._spec = local, spec


def replace_local(target: Any, value: Any) -> None:
    """Let a tensor have the value and the layout of another of its shape, which nobody else holds."""
    if value.shape != target.shape:
        raise LayoutError(
            f"a tensor of shape {tuple(target.shape)} cannot be given values of shape {tuple(value.shape)}",
            hint="an operator that writes does not change the shape of what it writes to",
        )
    meta = target._spec.tensor_meta
    if value.dtype is not meta.dtype:
        value = value.to(meta.dtype)
    spec = value._spec
    if spec.partial_axes:  # what was whole stays whole
        goal = spec.reduced()
        value_local = bound_route(spec, goal).run(value._local_tensor)
        spec = goal
    else:
        value_local = value._local_tensor
    if spec.tensor_meta is not meta:  # in memory as the tensor itself
        if not spec.broadcast:
            value_local = laid_out_like(value_local, meta.stride)
        spec = DTensorSpec.from_context(spec.context, meta)
    target._local_tensor, target._spec, target._settled = value_local, spec, None


def write(wrapping: Wrapping, info: OpInfo, target: Any, value: Any) -> None:
    """Copy a DTensor's value into another, keeping the other's layout; into a plain tensor, the whole of it."""
    if not isinstance(target, wrapping.tensor_class):
        target.copy_(
            fabric_of(value._spec.mesh).parts(value._spec.mesh, whole_of(value._local_tensor, value._spec))[0][1]
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
        if goal.partial_axes:  # through the whole: nothing but R becomes Partial
            local = bound_route(have, replicated(have)).run(local)
            have = replicated(have)
        local = bound_route(have, goal).run(local)
    target._held.copy_(local)
