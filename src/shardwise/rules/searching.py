"""Sorting, searching and counting along a dim, which is not sharded or sorted by owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.layout import Run
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules import sample_sort
from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.engine import Dim, Factors, OwnerRow, Row
from shardwise.rules.pointwise import pointwise
from shardwise.rules.reduction import highest, lowest
from shardwise.rules.registry import Call, declare_rule, rule

aten = torch.ops.aten


def along_dim(call: Call) -> Factors:
    """The factors of an operator along one dim of its only operand; results may lack that dim."""
    ndim = len(call.operands[0].shape)
    at = wrapped(call["dim"], ndim)
    own = tuple(kept(ndim, [at]))
    left = own if len(call.results[0].shape) == ndim else own[:at] + own[at + 1 :]
    return Factors((own,), (left,) * len(call.results))


rule(aten.argsort.default, aten.topk.default)(along_dim)


@rule(aten.sort.default, aten.sort.stable, program=sample_sort.sort)
def sorting(call: Call) -> Factors:
    """Along a sharded dim the elements are exchanged by their positions in the result."""
    factors, of = along_dim(call), call["self"]
    if not of.shape or 0 in of.shape or of.dtype not in sample_sort.SORTED_BY_OWNER:
        return factors
    split = Shard(wrapped(call["dim"], len(of.shape)))
    # values and indices go to the ranks that sort them, and from there to their positions
    owned = OwnerRow(Row((split,), (split, split)), sent=(), received=(0, 1, 0, 1), rounds=4)
    return replace(factors, owned=(owned,))


# ---------------------------------------------------------------- positions along a dim

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("positions(Tensor self, int dim) -> Tensor")


def positions(local: torch.Tensor, dim: int, *, runs: Sequence[Run] | None = None) -> torch.Tensor:
    """The indices of a dim, of size one in all others; of a shard the global ones."""
    own = (Run(0, local.shape[dim]),) if runs is None else runs
    found = [torch.arange(start, start + length, device=local.device) for start, length in own]
    joined = (
        found[0] if len(found) == 1 else torch.cat([*found, found[0][:0]] if found else [local.new_empty(0).long()])
    )
    return joined.view([-1 if d == dim else 1 for d in range(local.dim())])


_library.impl("positions", positions, "CompositeExplicitAutograd")


def local_runs(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local runs of the dim."""
    return {"runs": inputs[0].block(coordinate).runs[call["dim"]]} if inputs[0].dim_axes[call["dim"]] else {}


@rule(torch.ops.shardwise.positions.default, localize=local_runs, local_op=positions)
def by_position(call: Call) -> Factors:
    """Each rank makes the indices of its local part."""
    own = names(len(call["self"].shape))
    result = tuple(name if d == call["dim"] else None for d, name in enumerate(own))
    untouched = frozenset((name, 0) for d, name in enumerate(own) if d != call["dim"])
    return Factors((tuple(own),), (result,), untouched=untouched, moves=False)


# ---------------------------------------------------------------- the largest of a sharded dim

_library.define("topk_part(Tensor self, int k, int dim, bool largest, int parts) -> (Tensor, Tensor)")


def _topk_shape(tensor: torch.Tensor, k: int, dim: int, largest: bool, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [k * parts if d == dim else size for d, size in enumerate(tensor.shape)]
    return tensor.new_empty(shape), tensor.new_empty(shape, dtype=torch.int64)


_library.impl("topk_part", _topk_shape, "CompositeExplicitAutograd")


def where_part_begins(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The first local index of the sharded dim."""
    return {"start": inputs[0].block(coordinate).runs[call["dim"]][0].start}


def topk_part(
    local: torch.Tensor, k: int, dim: int, largest: bool, parts: int, *, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest local elements and their global indices, padded with values that sort last."""
    found = local.topk(min(k, local.shape[dim]), dim, largest)
    lacking = [k - found.values.shape[dim] if d == dim else size for d, size in enumerate(local.shape)]
    if not lacking[dim]:
        return found.values, found.indices + start
    last = lowest(local.dtype) if largest else math.nan if local.is_floating_point() else highest(local.dtype)
    values = torch.cat([found.values, local.new_full(lacking, last)], dim)
    return values, torch.cat([found.indices + start, found.indices.new_zeros(lacking)], dim)


@rule(torch.ops.shardwise.topk_part.default, localize=where_part_begins, local_op=topk_part)
def of_each_part(call: Call) -> Factors:
    """The factors of operators on parts: the split of the tensor."""
    own = tuple(names(len(call["self"].shape)))
    return Factors((own,), (own, own))


# ---------------------------------------------------------------- searching in a sorted sequence


def search(values: str, boundaries: str) -> Callable[[Call], Factors | None]:
    """The rule of a search: the number of boundaries before a value is the sum of the numbers in all parts."""

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
        owned: tuple[OwnerRow, ...] = ()
        if len(sequence) == 1 and 0 not in sequence and sorter is None and shape and values in given:
            at = given.index(boundaries)
            splits = [tuple(Shard(0) if i == at else Shard(d) for i in range(2)) for d in range(len(shape))]
            owned = tuple(
                OwnerRow(Row(split, (Shard(d),)), sent=(1 - at,), received=(0,), rounds=3, table=at)
                for d, split in enumerate(splits)
            )
        return Factors(tuple(parts[name] for name in given), (places,), owned=owned)

    return factors


for overloads, name in ((aten.searchsorted, "sorted_sequence"), (aten.bucketize, "boundaries")):
    rule(overloads.Tensor, overloads.Scalar, program=sample_sort.search("self", name))(search("self", name))


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Factors:
    """Each element is compared with all test elements."""
    own = tuple(names(len(call["elements"].shape)))
    return Factors((own, (None,) * len(call["test_elements"].shape)), (own,))


declare_rule(pointwise(), aten.isin.Tensor_Scalar)


@rule(aten.histc.default, reads=("min", "max"))
def histc(call: Call) -> Factors | None:
    """Counts in bins, summed over shards. Without bounds the bins depend on all values: no rule."""
    if call["min"] == call["max"]:
        return None
    return Factors((tuple(names(len(call["self"].shape))),), ((None,),))
