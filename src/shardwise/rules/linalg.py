"""Linear algebra on batches of matrices: batch dims are factors and broadcast, matrices are not sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.engine import Dim, Factors, Row
from shardwise.rules.pointwise import broadcast
from shardwise.rules.registry import Call, rule
from shardwise.torch_private import OpOverload

aten = torch.ops.aten


def batch_sizes(metas: Sequence[TensorMeta], own: Sequence[int]) -> dict[int, int]:
    """The size of each batch dim, counted from the matrices, after broadcasting."""
    sizes: dict[int, int] = {}
    for meta, matrix in zip(metas, own, strict=True):
        for at, size in enumerate(reversed(meta.shape[: len(meta.shape) - matrix])):
            sizes[at] = size if sizes.get(at, 1) == 1 else sizes[at]
    return sizes


def batched(
    call: Call, operands: Sequence[int], results: Sequence[int], linear: tuple[tuple[int, ...], ...]
) -> Factors:
    """The factors of a call whose tensors end in matrices (2), vectors (1) or single numbers (0)."""
    sizes = batch_sizes(call.operands, operands)

    def dims(meta: TensorMeta, matrix: int) -> tuple[Dim, ...]:
        if len(meta.shape) < matrix or meta.shape == (0,):  # a result that was not requested
            return (None,) * len(meta.shape)
        batch = len(meta.shape) - matrix
        names = (f"b{at}" if meta.shape[batch - 1 - at] == sizes[at] else None for at in reversed(range(batch)))
        return (*names, *((None,) * matrix))

    given = tuple(dims(meta, matrix) for meta, matrix in zip(call.results, results, strict=True))
    # a result without a batch dim comes from operands without it
    untouched = frozenset((f"b{at}", i) for at in sizes for i, own in enumerate(given) if f"b{at}" not in own)
    named = tuple(dims(meta, matrix) for meta, matrix in zip(call.operands, operands, strict=True))
    return Factors(named, given, untouched=untouched, linear=linear)


def ends_in(operands: str, results: str, linear: tuple[tuple[int, ...], ...] = ()) -> Callable[[Call], Factors | None]:
    """The rule of an operator, by the number of matrix dims of each operand and result, one digit each."""

    def factors(call: Call) -> Factors | None:
        if call.get("check_errors"):  # an error must occur on every rank
            return None
        own = [int(n) for n in operands][: len(call.operands)]
        return batched(call, own, [int(n) for n in results], linear)

    return factors


for (operands, results, *linear), ops in {
    ("2", "2"): (aten.linalg_matrix_exp, aten.cholesky_inverse),
    ("2", "1"): (aten._linalg_eigvals,),
    ("2", "12"): (aten._linalg_eigh.default, aten.linalg_eig.default),
    ("2", "20"): (aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default),
    ("2", "21"): (aten.geqrf.default,),
    ("2", "22"): (aten.linalg_qr.default,),
    ("2", "212"): (aten._linalg_svd.default,),
    ("2", "210"): (aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default),
    ("2", "222"): (aten.linalg_lu.default,),
    ("21", "222"): (aten.lu_unpack.default,),
    ("21", "2"): (aten.linalg_householder_product.default,),
    ("200", "2"): (aten.linalg_pinv.atol_rtol_tensor,),
    ("212", "2", (2,)): (aten.ormqr.default, aten.linalg_ldl_solve.default, aten.linalg_lu_solve.default),
    ("22", "2", (1,)): (aten.linalg_solve_triangular.default,),
    ("22", "2", (0,)): (aten.cholesky_solve.default, aten._cholesky_solve_helper.default),
    ("22", "22"): (aten.triangular_solve.default,),
}.items():
    rule(*ops)(ends_in(operands, results, tuple(linear)))


# ---------------------------------------------------------------- factorizations that depend on the memory order


def order_of_memory(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """Whether the matrix is row-major on one device."""
    return {"row_by_row": call["A"].is_contiguous}


def factoring(op: OpOverload) -> Callable[..., Any]:
    """`op` on a local with the memory order of the matrix on one device.

    torch factors a row-major matrix as its transpose, and the gradient reads the order from the matrix.
    """

    def factor_first(local: torch.Tensor, *args: Any, row_by_row: bool, **kwargs: Any) -> Any:
        if local.is_contiguous() != row_by_row:
            local = local.contiguous() if row_by_row else local.mT.contiguous().mT
        return op(local, *args, **kwargs)

    return factor_first


for op, results in {aten._linalg_det.default: "021", aten._linalg_slogdet.default: "0021"}.items():
    rule(op, localize=order_of_memory, local_op=factoring(op))(ends_in("2", results))


def has_vectors(call: Call) -> bool:
    """Whether the right sides of a system are vectors, by their shape."""
    left, right = call["A"].shape, call["B"].shape
    return len(right) == 1 or right == left[:-1]


def kind_of_system(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """Properties of the system by its global shapes and strides; those of locals may differ."""
    return {"row_by_row": call["A"].is_contiguous, "vectors": has_vectors(call)}


def local_solve(matrix: torch.Tensor, right_side: torch.Tensor, *, vectors: bool, **kwargs: Any) -> Any:
    """Solve the systems of a rank. Batch dims are added so that a matrix is not mistaken for a batch of vectors."""
    if not vectors and right_side.dim() < matrix.dim():
        right_side = right_side[(None,) * (matrix.dim() - right_side.dim())]
    return factoring(aten._linalg_solve_ex.default)(matrix, right_side, **kwargs)


@rule(aten._linalg_solve_ex.default, localize=kind_of_system, local_op=local_solve)
def solve(call: Call) -> Factors | None:
    """One system of equations for each matrix; right sides are vectors or matrices, by their shape."""
    own = 1 if has_vectors(call) else 2
    if call["check_errors"]:
        return None
    sums = tuple(
        Row((Replicate(), Partial(kind)), (Partial(kind), *[Replicate()] * 3)) for kind in ("sum", "avg")
    )  # the solution is linear in the right side; the factors of the matrix do not depend on it
    return replace(batched(call, (2, own), (own, 2, 1, 0), ()), rows=sums)


@rule(aten.linalg_cross.default)
def cross(call: Call) -> Factors:
    """Products of vectors, which must not be sharded."""
    named, results = broadcast(call)
    at = call["dim"] % len(results[0])
    return Factors(named, results, unsharded=frozenset({f"d{len(results[0]) - at}"}), linear=((0,), (1,)))
