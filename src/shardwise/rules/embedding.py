"""Look-up in a table: its rows, its columns and the indices may be sharded.

If the rows are sharded, each rank looks up its local rows and gives zeros for others: a `MaskPartial`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import MaskPartial, Replicate, Shard
from shardwise.core.spec import DTensorSpec
from shardwise.rules import owner_programs
from shardwise.rules.engine import Dim, Factors, OwnerRow, Row
from shardwise.rules.indexing import looked_up
from shardwise.rules.registry import Call, rule
from shardwise.torch_private import assert_async

aten = torch.ops.aten
Specs = Sequence[DTensorSpec]


def index_dims(call: Call) -> tuple[Dim, ...]:
    """A factor for each dim of the indices."""
    return tuple(f"i{d}" for d in range(len(call["indices"].shape)))


def local_table_rows(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The global index of the first local row, and the global number of rows."""
    table = inputs[0]
    return {"begin": table.global_offset(coordinate)[0], "rows": table.shape[0]} if table.dim_axes[0] else {}


def look_up(
    weight: torch.Tensor,
    indices: torch.Tensor,
    *flags: Any,
    begin: int | None = None,
    rows: int = 0,
    **more: Any,
) -> torch.Tensor:
    """Look-up in the local rows of a table, with zeros for rows of other ranks."""
    if begin is None:
        return aten.embedding.default(weight, indices, *flags, **more)
    missing = missing_rows(indices, begin, weight.shape[0], rows)
    if not weight.shape[0]:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    return zero_missing(aten.embedding.default(weight, local_rows(indices, missing, begin)), missing)


def missing_rows(indices: torch.Tensor, begin: int, count: int, rows: int) -> torch.Tensor:
    """For each index whether its row is on another rank.

    Args:
        indices: global row numbers.
        begin: the first local row.
        count: the number of local rows.
        rows: the number of rows of the table.
    """
    assert_async(((indices >= 0) & (indices < rows)).all(), f"an index is not in the table of {rows} rows")
    return (indices < begin) | (indices >= begin + count)


def local_rows(indices: torch.Tensor, missing: torch.Tensor, begin: int) -> torch.Tensor:
    """Local row numbers; row zero in place of a missing one."""
    return (indices - begin).masked_fill_(missing, 0)


def zero_missing(found: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Zeros in place of missing rows. Their gradients are not used."""
    return found.masked_fill_(missing.unsqueeze(-1), 0)


@rule(aten.embedding.default, localize=local_table_rows, local_op=look_up, program=owner_programs.embedding)
def embedding(call: Call) -> Factors:
    """Rows of a table, a row for each index."""
    own = index_dims(call)
    masked = Row((Shard(0), Replicate()), (MaskPartial(),))
    operands, result = (("v", "d"), own), (*own, "d")
    asked = looked_up(operands, result, [0])
    return Factors(operands, (result,), unsharded=frozenset("v"), linear=((0,),), rows=(masked,), owned=asked)


def local_gradient_rows(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The global index of the first local row of the gradient, and the number of local rows."""
    table = outputs[0]
    return (
        {"begin": table.global_offset(coordinate)[0], "length": table.local_shape(coordinate)[0]}
        if table.dim_axes[0]
        else {}
    )


def add_rows(
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    *,
    begin: int | None = None,
    length: int = 0,
) -> torch.Tensor:
    """Add gradients to the local rows of a table; gradients of other ranks' rows go to a spare row."""
    if begin is None:
        return aten.embedding_dense_backward.default(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    here = indices - begin
    missing = (here < 0) | (here >= length) | (indices == padding_idx)
    at = here.masked_fill_(missing, length)
    return aten.embedding_dense_backward.default(grad_output, at, length + 1, -1, scale_grad_by_freq)[:length]


@rule(
    aten.embedding_dense_backward.default,
    localize=local_gradient_rows,
    local_op=add_rows,
    program=owner_programs.embedding_dense_backward,
)
def embedding_dense_backward(call: Call) -> Factors:
    """Add the gradients of each index to its row."""
    own = index_dims(call)
    # frequencies are counted over all indices
    unsharded = frozenset(name for name in own if name is not None and call["scale_grad_by_freq"])
    sent = OwnerRow(Row((Shard(0), Shard(0)), (Shard(0),)), sent=(0, 1), table=2)
    return Factors(
        ((*own, "d"), own), (("v", "d"),), unsharded=unsharded | {"v"}, linear=((0,),), owned=(sent,) if own else ()
    )


# ---------------------------------------------------------------- bags


MAX = 2  # the mode that chooses a row for each column


def bag_dims(call: Call) -> dict[str, tuple[Dim, ...]]:
    """The factors of the tensors of a bag operator: only columns are sharded."""
    columns = {"weight", "grad"} | ({"maximum_indices"} if call["mode"] == MAX else set())
    return {name: (None, "d") if name in columns else (None,) * len(meta.shape) for name, meta in call.tensors.items()}


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(call: Call) -> Factors:
    """Rows of a table summed by bags; and which index belongs to which bag."""
    chosen = (None, "d") if call["mode"] == MAX else (None,) * len(call.results[3].shape)
    results = ((None, "d"), *((None,) * len(meta.shape) for meta in call.results[1:3]), chosen)
    untouched = frozenset(("d", i) for i, dims in enumerate(results) if "d" not in dims)
    return Factors(tuple(bag_dims(call).values()), results, untouched=untouched, nonempty=frozenset("d"))


@rule(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(call: Call) -> Factors:
    """Add the gradients of each index to its row."""
    return Factors(tuple(bag_dims(call).values()), ((None, "d"),), linear=((0,),), nonempty=frozenset("d"))


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_backward(call: Call) -> Factors:
    """The gradient of the weight of each index: products of rows, summed over the columns."""
    return Factors(tuple(bag_dims(call).values()), ((None,),), linear=((0,), (1,)), nonempty=frozenset("d"))
