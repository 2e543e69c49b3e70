"""Sorting, searching and counting: the dim that is sorted is whole; what is counted in parts is added up. Pure.

Of the largest elements of a sharded dim, ranks exchange their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.notation import Dim, Factors
from shardwise.rules.on_the_way import moved_to, settled, split_axes
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


rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.topk.default)(along_dim)


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
    if len(axes) != 1 or isinstance(x.placements[axes[0]], StridedShard) or not x.dim():
        return NotImplemented
    parts = x.device_mesh.shape[axes[0]]
    if k >= -(-x.shape[dim] // parts):
        return NotImplemented
    found = torch.ops.shardwise.topk_part.default(x, k, dim, largest, parts)
    free = [d for d, split in enumerate(x.spec.dim_axes) if d != dim and not split and x.shape[d] > 1]
    to = Shard(max(free, key=lambda d: x.shape[d])) if free else Replicate()
    values, indices = (moved_to(t, [to if a in axes else p for a, p in enumerate(t.placements)]) for t in found)
    ordered = values.sort(dim=dim, descending=largest, stable=True)
    order = ordered.indices.narrow(dim, 0, k)
    return ordered.values.narrow(dim, 0, k).contiguous(), indices.gather(dim, order)


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
        operands = tuple(parts[name] for name in order if name in parts and isinstance(call[name], TensorMeta))
        return Factors(operands, (places,))

    return factors


rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)(search("self", "sorted_sequence"))
rule(aten.bucketize.Tensor, aten.bucketize.Scalar)(search("self", "boundaries"))


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
