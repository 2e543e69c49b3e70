"""Sorting, searching and counting: the dim that is sorted is whole; what is counted in parts is added up. Pure.

Of the largest elements of a sharded dim, ranks exchange their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules import sample_sort
from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.engine import Dim, Factors, Owned, Row
from shardwise.rules.layout_helpers import moved_to, reduced, settled, split_axes
from shardwise.rules.pointwise import pointwise
from shardwise.rules.registry import Call, declare_rule, decomposition, rule
from shardwise.rules.scans import highest, lowest

aten = torch.ops.aten


def along_dim(call: Call) -> Factors:
    """The factors of an operator that works along one dim of its only operand and may leave that dim out."""
    ndim = len(call.operands[0].shape)
    at = wrapped(call["dim"], ndim)
    own = tuple(kept(ndim, [at]))
    left = own if len(call.results[0].shape) == ndim else own[:at] + own[at + 1 :]
    return Factors((own,), (left,) * len(call.results))


rule(aten.argsort.default, aten.topk.default)(along_dim)


@rule(aten.sort.default, aten.sort.stable, program=sample_sort.sort)
def sorting(call: Call) -> Factors:
    """Along a sharded dim the elements are exchanged by their places in the result."""
    factors, of = along_dim(call), call["self"]
    if not of.shape or 0 in of.shape or of.dtype not in sample_sort.SORTED_BY_OWNER:
        return factors
    split = Shard(wrapped(call["dim"], len(of.shape)))
    # values and indices go to the ranks that sort them, and from there to their places
    owned = Owned(Row((split,), (split, split)), sent=(), received=(0, 1, 0, 1), rounds=4)
    return replace(factors, owned=(owned,))


# ---------------------------------------------------------------- the largest of a sharded dim

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("topk_part(Tensor self, int k, int dim, bool largest, int parts) -> (Tensor, Tensor)")


def _topk_shape(whole: torch.Tensor, k: int, dim: int, largest: bool, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [k * parts if d == dim else size for d, size in enumerate(whole.shape)]
    return whole.new_empty(shape), whole.new_empty(shape, dtype=torch.int64)


_library.impl("topk_part", _topk_shape, "CompositeExplicitAutograd")


def where_part_begins(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The first index of the sharded dim that a rank holds."""
    return {"start": inputs[0].block(coordinate).runs[call["dim"]][0].start}


def topk_part(
    local: torch.Tensor, k: int, dim: int, largest: bool, parts: int, *, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest of what a rank holds and their global indices, filled up with what any element comes before."""
    found = local.topk(min(k, local.shape[dim]), dim, largest)
    lacking = [k - found.values.shape[dim] if d == dim else size for d, size in enumerate(local.shape)]
    if not lacking[dim]:
        return found.values, found.indices + start
    last = lowest(local.dtype) if largest else math.nan if local.is_floating_point() else highest(local.dtype)
    values = torch.cat([found.values, local.new_full(lacking, last)], dim)
    return values, torch.cat([found.indices + start, found.indices.new_zeros(lacking)], dim)


@rule(torch.ops.shardwise.topk_part.default, localize=where_part_begins, local_op=topk_part)
def of_each_part(call: Call) -> Factors:
    """What is done part by part, as the tensor is split."""
    own = tuple(names(len(call["self"].shape)))
    return Factors((own,), (own, own))


@decomposition(aten.topk.default, reductions=2)
def topk_of_shards(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """The largest along a dim that one axis shards: the largest of each part are exchanged by columns, and sorted.

    Sorting is stable, and only the last parts are filled up, so an element comes before what it ties with there.
    """
    dim = wrapped(dim, x.dim())
    x = settled(x, (dim,))
    axes = split_axes(x, (dim,))
    if not axes or x.spec.is_strided:
        return NotImplemented
    parts = math.prod(x.device_mesh.shape[a] for a in axes)
    if k >= -(-x.shape[dim] // parts) and sorts_by_owner(x, dim):
        ordered = x.sort(dim=dim, descending=largest, stable=True)
        return tuple(t.narrow(dim, 0, k).contiguous() for t in ordered)
    if len(axes) != 1 or k >= -(-x.shape[dim] // parts):
        return NotImplemented
    found = torch.ops.shardwise.topk_part.default(x, k, dim, largest, parts)
    free = [d for d, split in enumerate(x.spec.dim_axes) if d != dim and not split and x.shape[d] > 1]
    to = Shard(max(free, key=lambda d: x.shape[d])) if free else Replicate()
    values, indices = (moved_to(t, [to if a in axes else p for a, p in enumerate(t.placements)]) for t in found)
    ordered = values.sort(dim=dim, descending=largest, stable=True)
    order = ordered.indices.narrow(dim, 0, k)
    return ordered.values.narrow(dim, 0, k).contiguous(), indices.gather(dim, order)


# ---------------------------------------------------------------- one of what is sorted

MANY = 8  # ranks: sorting moves values and indices twice, six times a rank's part of float32; gathering moves all parts


def sorts_by_owner(x: Any, dim: int) -> bool:
    """Whether a sharded dim is to be sorted where it is: no other can be split instead, and there are many parts."""
    axes = split_axes(x, (dim,))
    parts = math.prod(x.device_mesh.shape[a] for a in axes)
    if parts < MANY or not x.numel() or x.dtype not in sample_sort.SORTED_BY_OWNER or x.spec.is_strided:
        return False
    return not any(size >= parts and not x.spec.dim_axes[d] for d, size in enumerate(x.shape) if d != dim)


def from_sorted(choose: Callable[..., tuple[Any, Any]], x: Any, dim: int, keepdim: bool, *more: Any) -> Any:
    """What `choose` takes of the sorted values and indices, with `dim` of size one: (values, indices)."""
    if not x.dim():
        return NotImplemented
    dim = wrapped(dim, x.dim())
    x = settled(x, (dim,))
    if not sorts_by_owner(x, dim):
        return NotImplemented
    found = choose(x, x.sort(dim=dim, stable=True), dim, *more)
    return tuple(t if keepdim else t.squeeze(dim) for t in found)


def _taken(ordered: Any, dim: int, at: Any) -> tuple[Any, Any]:
    return ordered.values.gather(dim, at), ordered.indices.gather(dim, at)


def _kth(x: Any, ordered: Any, dim: int, k: int) -> tuple[Any, Any]:
    return ordered.values.narrow(dim, k - 1, 1).clone(), ordered.indices.narrow(dim, k - 1, 1).clone()


def _median(x: Any, ordered: Any, dim: int, ignores_nan: bool) -> tuple[Any, Any]:
    """The lower of the two in the middle. NaNs come last; the first of them is the median, or they do not count."""
    size = x.shape[dim]
    if not x.is_floating_point():
        return _kth(x, ordered, dim, (size - 1) // 2 + 1)
    nans = reduced(x.isnan().sum(dim, keepdim=True))
    numbers = size - nans
    if ignores_nan:
        return _taken(ordered, dim, (numbers - 1).clamp(min=0) // 2)
    return _taken(ordered, dim, torch.where(nans > 0, numbers, (size - 1) // 2))


def _mode(x: Any, ordered: Any, dim: int) -> tuple[Any, Any]:
    """The end of the first run of equal values that is as long as any."""
    values = ordered.values
    place = torch.ops.shardwise.positions.default(values, dim)
    begins = (values != values.roll(1, dim)) | (place == 0)
    since = torch.where(begins, place, 0).cummax(dim).values
    return _taken(ordered, dim, (place - since).max(dim, keepdim=True).indices)


@decomposition(aten.kthvalue.default, reductions=6)
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest along a sharded dim, which is sorted."""
    return from_sorted(_kth, x, dim, keepdim, k) if 0 < k <= (x.shape[dim] if x.dim() else 0) else NotImplemented


decomposition(aten.median.dim, reductions=6)(lambda x, dim, keepdim=False: from_sorted(_median, x, dim, keepdim, False))
decomposition(aten.nanmedian.dim, reductions=6)(
    lambda x, dim, keepdim=False: from_sorted(_median, x, dim, keepdim, True)
)
decomposition(aten.mode.default, reductions=8)(lambda x, dim=-1, keepdim=False: from_sorted(_mode, x, dim, keepdim))


def median_of_all(x: Any, ignores_nan: bool) -> Any:
    """The median of all elements, as one dim that stays sharded."""
    x = settled(x, tuple(range(x.dim())))
    if not x.dim() or not split_axes(x, (0,)) or len(split_axes(x, range(x.dim()))) != len(split_axes(x, (0,))):
        return NotImplemented
    found = from_sorted(_median, x.reshape(-1), 0, False, ignores_nan)
    return found if found is NotImplemented else found[0]


decomposition(aten.median.default, reductions=6)(lambda x: median_of_all(x, False))
decomposition(aten.nanmedian.default, reductions=6)(lambda x: median_of_all(x, True))


# ---------------------------------------------------------------- searching in what is sorted


def search(values: str, boundaries: str) -> Callable[[Call], Factors | None]:
    """The rule of a search: how many boundaries lie before a value is how many lie there in each part, added up."""

    def factors(call: Call) -> Factors | None:
        sequence, wanted = call[boundaries].shape, call[values]
        shape = wanted.shape if isinstance(wanted, TensorMeta) else ()
        places = tuple(f"v{d}" for d in range(len(shape)))
        shared: tuple[Dim, ...] = places[: len(sequence) - 1] if len(sequence) > 1 else ()
        sorter = call.get("sorter")
        if sorter is not None:
            parts = {values: places, boundaries: (*shared, None), "sorter": (*shared, None)}
        else:
            parts = {values: places, boundaries: (*shared, "k")}
        order = (a.name for a in call.op._schema.arguments)
        given = [name for name in order if name in parts and isinstance(call[name], TensorMeta)]
        owned: tuple[Owned, ...] = ()
        if len(sequence) == 1 and 0 not in sequence and sorter is None and shape and values in given:
            at = given.index(boundaries)
            splits = [tuple(Shard(0) if i == at else Shard(d) for i in range(2)) for d in range(len(shape))]
            owned = tuple(
                Owned(Row(split, (Shard(d),)), sent=(1 - at,), received=(0,), rounds=3, table=at)
                for d, split in enumerate(splits)
            )
        return Factors(tuple(parts[name] for name in given), (places,), owned=owned)

    return factors


for overloads, name in ((aten.searchsorted, "sorted_sequence"), (aten.bucketize, "boundaries")):
    rule(overloads.Tensor, overloads.Scalar, program=sample_sort.search("self", name))(search("self", name))


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Factors:
    """Each element against all of the others."""
    own = tuple(names(len(call["elements"].shape)))
    return Factors((own, (None,) * len(call["test_elements"].shape)), (own,))


declare_rule(pointwise(), aten.isin.Tensor_Scalar)


@rule(aten.histc.default, reads=("min", "max"))
def histc(call: Call) -> Factors | None:
    """Counts in bins, added up over the parts; without bounds they come from all of the values."""
    if call["min"] == call["max"]:
        return None
    return Factors((tuple(names(len(call["self"].shape))),), ((None,),))
