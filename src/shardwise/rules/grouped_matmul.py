"""Products of groups of rows with a matrix each: tokens, experts and the dims of the matrices may be sharded.

`offs` is the end of each group along the jagged dim ("t"), and is replicated. If the jagged dim is sharded, a rank
shifts and clamps the ends. If the matrices are sharded, a rank moves the rows of its matrices to the front, because the
operator starts with row 0. Neither reads a value of `offs` on the host, except on a CPU.

Dispatched tokens (`shardwise.moe`) and their `offs` are `Ragged`: each rank has exactly the rows of its matrices. This
is asserted on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import MaskPartial, Partial, Ragged, Replicate, Shard
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError
from shardwise.rules.engine import EACH_ALONE, Factors, Row
from shardwise.rules.registry import Call, rule
from shardwise.torch_private import dispatch_mode_count

aten = torch.ops.aten
OP = aten._grouped_mm.default
ALIGNMENT = 16  # bytes that rows must be a multiple of
TAKEN = (torch.bfloat16, torch.float16, torch.float32)
MISMATCH = "grouped_mm: offs, sharded as Ragged, do not match the rows of the rank"
OFFS_HINT = "pass the offs of moe.dispatch"
R = Replicate()

# by the number of dims of the two matrices: the factors of their dims and of the result's
FORMS: dict[tuple[int, int], tuple[str, str, str]] = {
    (2, 3): ("tk", "gkn", "tn"),
    (3, 2): ("gmk", "kt", "mt"),
    (2, 2): ("mt", "tn", "gmn"),
    (3, 3): ("gmk", "gkn", "gmn"),
}


def form_of(first: Any, second: Any) -> tuple[str, str, str]:
    """The factors of a product, by the dims of the two matrices."""
    return FORMS[len(first.shape), len(second.shape)]


def local_groups(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The start of the local jagged dim, and the groups that the rank computes."""
    forms = form_of(call["self"], call["mat2"])
    if call.get("offs") is None:
        return {}
    here: dict[str, Any] = {}
    sharded = inputs[2].dim_axes[0]
    for spec, dims in zip((*inputs[:2], outputs[0]), forms, strict=True):
        if "t" in dims and spec.dim_axes[dims.index("t")]:
            here["begin"] = spec.global_offset(coordinate)[dims.index("t")]
            if sharded:
                here["rows_of_groups"] = _rows_of_groups(spec, dims.index("t"), sharded[0], coordinate)
        if sharded:
            continue
        if "g" in dims and spec.dim_axes[0]:
            here["first"], here["count"] = spec.global_offset(coordinate)[0], spec.local_shape(coordinate)[0]
    return here


def _rows_of_groups(spec: DTensorSpec, dim: int, axis: int, coordinate: Coordinate) -> tuple[int, int]:
    """The first and last row of this rank's groups along one axis; other axes may split them further."""
    placement = spec.placements[axis]
    assert isinstance(placement, Ragged), f"{spec}: the ends of groups are Ragged, the rows are not"
    start = sum(placement.sizes[: coordinate[axis]])
    return start, start + placement.sizes[coordinate[axis]]


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    begin: int | None = None,
    first: int = 0,
    count: int | None = None,
    rows_of_groups: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The part of a grouped product that one rank computes.

    Args:
        mat_a: the first matrices.
        mat_b: the second matrices.
        offs: the ends of all groups in the global jagged dim.
        bias: refused by torch.
        out_dtype: the dtype of the result.
        begin: the first global index of the local jagged dim, if it is sharded.
        first: the first group of this rank.
        count: how many groups it has; None for all.
        rows_of_groups: begin and end of the rows of this rank's groups in the global jagged dim, if `offs` has only
            the ends of these groups.
    """
    forms = form_of(mat_a, mat_b)
    if offs is None or "t" not in forms[0] + forms[1]:
        return _multiplied(mat_a, mat_b, offs, bias, out_dtype)
    length = (mat_a.shape[forms[0].index("t")]) if "t" in forms[0] else mat_b.shape[forms[1].index("t")]
    if begin is not None:
        offs = _local_ends(offs, begin, length, rows_of_groups)
    if count is None:
        return _multiplied(mat_a, mat_b, offs, bias, out_dtype)
    start = offs[first - 1] if first else offs.new_zeros(())
    ends = offs[first : first + count]
    if not count or not length:
        return _multiplied(mat_a, mat_b, ends, bias, out_dtype)
    positions = torch.arange(length, device=offs.device)
    if first:
        order = (positions + start) % length
        mat_a, mat_b = (
            _taken(matrix, dims.index("t"), order) if "t" in dims else matrix
            for matrix, dims in zip((mat_a, mat_b), forms[:2], strict=True)
        )
    product = _multiplied(mat_a, mat_b, ends - start, bias, out_dtype)
    if "t" not in forms[2]:
        return product
    if first:
        product = _taken(product, forms[2].index("t"), (positions - start) % length)
    missing = (positions < start) | (positions >= ends[-1])
    return product.masked_fill(missing.unsqueeze(1 - forms[2].index("t")), 0)


def _local_ends(offs: torch.Tensor, begin: int, length: int, rows: tuple[int, int] | None) -> torch.Tensor:
    """The ends of groups in the local jagged dim. If they are sharded, they must match the rows of this rank.

    Ends in the memory of the host are read: operators on so few numbers would take longer. A GPU asserts that
    they match, and the host does not wait for it.
    """
    if offs.__class__ is torch.Tensor and offs.is_cpu and not dispatch_mode_count():
        ends = offs.numpy().tolist()
        if rows is not None and (rows[0] != rows[1] if not ends else ends[0] < rows[0] or ends[-1] != rows[1]):
            raise LayoutError(MISMATCH, hint=OFFS_HINT)
        if ends and min(ends) >= begin and max(ends) <= begin + length:
            return offs - begin if begin else offs
    elif rows is not None and not offs.is_meta:
        equal = rows[0] == rows[1]
        fits = (offs[0] >= rows[0]) & (offs[-1] == rows[1]) if len(offs) else offs.new_full((), equal, dtype=torch.bool)
        torch.ops.aten._assert_async.msg(fits, f"{MISMATCH}; {OFFS_HINT}")
    return (offs - begin).clamp_(0, length)


def _taken(matrix: torch.Tensor, dim: int, order: torch.Tensor) -> torch.Tensor:
    """A matrix with its rows (columns) in another order, contiguous in memory."""
    return matrix.movedim(dim, 0).index_select(0, order).movedim(0, dim)


def _multiplied(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None, bias: Any, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """torch's product of locals that may be empty or have unaligned rows."""
    if mat_a.is_meta:
        return on_meta(mat_a, mat_b, offs, bias, out_dtype)
    if not mat_a.numel() or not mat_b.numel() or (offs is not None and not offs.numel()):
        forms = form_of(mat_a, mat_b)
        sizes = {**dict(zip(forms[0], mat_a.shape, strict=True)), **dict(zip(forms[1], mat_b.shape, strict=True))}
        if offs is not None:
            sizes["g"] = offs.shape[0]
        return mat_a.new_zeros([sizes[name] for name in forms[2]], dtype=out_dtype)
    return OP(_aligned(mat_a), _aligned(mat_b), offs, bias, out_dtype)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with rows (or columns) at aligned addresses; a shard of an aligned matrix may be unaligned."""
    unit = ALIGNMENT // matrix.element_size()
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    fits = (across == 1 and down >= columns and down % unit == 0) or (
        down == 1 and across >= rows and across % unit == 0
    )
    if fits and matrix.storage_offset() % unit == 0:
        return matrix
    padded = -(-columns // unit) * unit
    return matrix.new_empty([*matrix.shape[:-1], padded])[..., :columns].copy_(matrix)


def on_meta(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's checks and result on meta tensors. They take only aligned bfloat16: stand-ins replace the matrices."""
    dtype = mat_a.dtype
    if mat_b.dtype is not dtype or dtype not in TAKEN or out_dtype not in (None, dtype):
        return OP(mat_a, mat_b, offs, bias, out_dtype)
    stand_ins = [_aligned(torch.empty(matrix.shape, dtype=torch.bfloat16, device="meta")) for matrix in (mat_a, mat_b)]
    return torch.empty_like(OP(*stand_ins, offs, bias), dtype=dtype)


@rule(OP, localize=local_groups, local_op=grouped_mm, meta_op=on_meta, by_groups=True)
def grouped_product(call: Call) -> Factors:
    """Each group of rows times its matrix."""
    first, second, result = form_of(call["self"], call["mat2"])
    if call.get("offs") is None:
        return Factors((tuple(first), tuple(second)), (tuple(result),), linear=EACH_ALONE)
    operands = (first, second, "g")
    rows = [_row(operands, result, "t")]
    if result != "gmn":
        rows.append(_row(operands, result, "g"))
    named = tuple(tuple(dims) for dims in (first, second))
    return Factors(
        (*named, (None,)), (tuple(result),), unsharded=frozenset("tg"), linear=EACH_ALONE, grouped=("t", "g", 2),
        rows=tuple(rows),
    )  # fmt: skip


def _row(operands: Sequence[str], result: str, name: str) -> Row:
    """The jagged dim or the groups sharded, and the ends of the groups replicated."""
    shards = [Shard(dims.index(name)) if name in dims else R for dims in operands[:2]]
    if name in result:
        return Row((*shards, R), (Shard(result.index(name)),))
    # rows of other ranks' groups are zero; a sum over the jagged dim is Partial
    return Row((*shards, R), (MaskPartial() if name == "g" else Partial(),))
